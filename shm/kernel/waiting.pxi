# --- clients' messages that wait elsewhere than in the queue that they are meant for -----------------

cdef enum:
    MORE_BYTES = 1024  # of properties that all get
    WAITING_ROOM = 512  # that a record may have more of later, with the longest name of a topic


@cython.final
cdef class WaitingBatch:
    """A client's batch body, checked against the log, that goes to a queue of what waits: each
    record has more properties there than its element, which say where it is meant for, and when.
    """

    cdef LogAppender _log
    cdef QueueCursor _queue
    cdef const uint8_t[::1] _batch
    cdef bytes _more, _born_host
    cdef int32_t _sys_flag
    cdef int64_t _born_timestamp
    cdef int64_t *_dues  # of each element; NULL: they say none
    cdef Py_ssize_t _up_at  # byte of _more; -1: it says nothing of that kind
    cdef bint _half
    cdef int64_t _up
    cdef readonly int64_t size  # bytes of its records in the log
    cdef readonly int64_t count
    cdef readonly int64_t earliest  # time of those that recall another; -1: none does
    cdef readonly list places  # physical offsets, once they are laid down, if they are halves

    def __init__(self, LogAppender log not None, QueueCursor queue not None,
                 const uint8_t[::1] batch not None, int64_t count, bytes more not None, *,
                 int64_t now=-1, int64_t latest=0, int32_t sys_flag=0, int64_t born_timestamp=0,
                 bytes born_host=b"", Py_ssize_t up_at=-1, bint half=False):
        """
        Args:
            more: properties that stand behind those of each element.
            up_at: UPTIME_DIGITS bytes of them say when they were stored, by CLOCK_BOOTTIME.
            now: each element says when it is to be delivered; a delay counts from this time, in ms
                since 1970. -1: none of them says anything of that kind.
            latest: time that is accepted.
            half: they are of transactions: each names its own, or begins one under its UNIQ_KEY.

        Raises BatchIllegal for a body that is not `count` whole elements of that kind,
        RecordTooLarge for a record over the limits, or more than a segment holds.
        """
        cdef bytes born = born_host or log.store_host
        if not 0 < len(more) <= MORE_BYTES or not more.endswith(b"\x02"):
            raise ValueError(f"{len(more)} bytes of properties: 1 to {MORE_BYTES}, the last a 2")
        if up_at >= 0 and up_at + UPTIME_DIGITS > len(more):
            raise ValueError(f"no room for a time at byte {up_at} of {len(more)}")
        if len(born) != 8 and len(born) != 20:
            raise ValueError(f"host of {len(born)} bytes, 8 or 20 wanted")
        if sys_flag & SYS_TRANSACTION_MASK:
            raise BatchIllegal("a batch that waits cannot be part of a transaction")
        if count <= 0 or count > batch.shape[0] // BATCH_ELEMENT_BYTES:
            raise BatchIllegal(f"a batch of {count} elements in {batch.shape[0]} bytes")
        self._log, self._queue, self._batch, self._more = log, queue, batch, more
        self._up_at, self._half, self.places = up_at, half, []
        self._sys_flag, self._born_timestamp, self._born_host = sys_flag, born_timestamp, born
        self.earliest = -1
        if now >= 0:
            self._dues = <int64_t *>PyMem_Malloc(count * sizeof(int64_t))
            if self._dues == NULL:
                raise MemoryError
        self._measure(count, now, latest)
        if self.size + WAITING_ROOM > log._segment_bytes:
            raise RecordTooLarge("batch", self.size, log._segment_bytes - WAITING_ROOM)

    def __dealloc__(self):
        PyMem_Free(self._dues)

    cdef int _measure(self, int64_t count, int64_t now, int64_t latest) except -1:
        """Every length is checked against the batch before it is followed."""
        cdef int64_t at = 0, size
        cdef Record record
        while at < self._batch.shape[0] and self.count < count:
            size = parse_element(&self._batch[at], self._batch.shape[0] - at, &record)
            if size < 0:
                raise BatchIllegal(f"element {self.count}, at byte {at}, is none")
            if self._dues == NULL:
                self._check_plain(&record)
            else:
                self._take_due(&record, now, latest)
            self._add_size(&record)
            at += size
            self.count += 1
        if self.count != count or at != self._batch.shape[0]:
            raise BatchIllegal(
                f"{self.count} elements in the first {at} bytes of {self._batch.shape[0]}, {count} "
                "announced")
        return 0

    cdef int _check_plain(self, Record *record) except -1:
        cdef int unkept = find_unkept(record.properties, record.properties_length)
        if unkept >= 0:
            refuse_unkept(self.count, unkept, record.properties, record.properties_length)
        return 0

    cdef int _take_due(self, Record *record, int64_t now, int64_t latest) except -1:
        cdef Timing timing
        cdef int64_t due
        read_timing(record.properties, record.properties_length, &timing)
        due = timed_due(&timing, now)
        check_timed(self.count, &timing, due, latest)
        if timing.recalls and (self.earliest < 0 or due < self.earliest):
            self.earliest = due
        # Below 0: it has the exact time among its own properties.
        self._dues[self.count] = due if timing.exact < 0 else -1 - due
        return 0

    cdef inline int _add_size(self, Record *record) except -1:
        cdef LogAppender log = self._log
        cdef int64_t properties_bytes = (
            record.properties_length + wants_separator(record) + len(self._more)
            + self._timing_bytes(self.count) + self._transaction(record, NULL))
        cdef int64_t size = log._record_size(
            self._queue, record.body_length, properties_bytes, False, len(self._born_host))
        log._check_sizes(record.body_length, properties_bytes + (
            CRC_PROPERTY_BYTES if log._crc_property else 0), size)
        if size + WAITING_ROOM > ELEMENT_MAX:  # or it could never be copied from there
            raise RecordTooLarge("record", size, ELEMENT_MAX - WAITING_ROOM)
        self.size += size
        return 0

    cdef inline Py_ssize_t _timing_bytes(self, int64_t index) noexcept:
        cdef int64_t due
        if self._dues == NULL:
            return 0
        due = self._dues[index]
        if due < 0:
            return number_bytes(b"TIMER_OUT_MS", timer_second(-1 - due))
        return (number_bytes(b"TIMER_DELIVER_MS", due)
                + number_bytes(b"TIMER_OUT_MS", timer_second(due)))

    cdef Py_ssize_t _transaction(self, Record *record, uint8_t *text) except -1:
        """Put down the property that a half message needs so that it names its transaction, if it
        has none, and this is no NULL; its bytes. Raises BatchIllegal for one that has no name."""
        cdef const uint8_t *value = NULL
        cdef Py_ssize_t count = 0
        if not self._half or find_property(
                record.properties, record.properties_length, b"__transactionId__", 17, &value,
                &count):
            return 0
        if not find_property(record.properties, record.properties_length, b"UNIQ_KEY", 8,
                             &value, &count):
            raise BatchIllegal("a message of a transaction has no UNIQ_KEY")
        if text != NULL:
            memcpy(text, b"__transactionId__\1", 18)
            memcpy(text + 18, value, count)
            text[18 + count] = 2
        return count + 19

    cdef inline Py_ssize_t _put_properties(self, uint8_t *text, Record *record,
                                           int64_t index) except -1:
        """All of a record; their bytes."""
        cdef Py_ssize_t count = record.properties_length, more = PyBytes_GET_SIZE(self._more)
        cdef int64_t due
        memcpy(text, record.properties, count)
        if wants_separator(record):
            text[count] = 2
            count += 1
        memcpy(text + count, PyBytes_AS_STRING(self._more), more)
        if self._up_at >= 0:
            put_digits(text + count + self._up_at, self._up, UPTIME_DIGITS)
        count += more
        if self._dues != NULL:
            due = self._dues[index]
            if due >= 0:
                count += put_number(text + count, b"TIMER_DELIVER_MS", due)
            count += put_number(text + count, b"TIMER_OUT_MS",
                                timer_second(due if due >= 0 else -1 - due))
        return count + self._transaction(record, text + count)

    def append(self, int64_t store_timestamp=0):
        """Lay all of it into the log; the physical offset of the first record, and its queue offset
        is `batch_queue_offset` of the log. None if there is no room: see `wanted`."""
        cdef LogAppender log = self._log
        cdef int64_t index, at = 0, place, size, timestamp, start = log._at
        cdef Record record
        cdef Record element
        cdef Py_ssize_t properties_bytes
        cdef uint8_t text[PROPERTIES_MAX_BYTES + 1]
        if log._base == NULL:
            raise ValueError("no segment is attached")
        if not log._has_room(self.size):
            return None
        log._note(self._queue)
        timestamp = log._timestamp(store_timestamp)
        self._up = up_ms()  # behind it: by either clock it was stored by then
        log._begin(&record, self._queue, timestamp,
                   self._born_timestamp if self._born_timestamp > 0 else timestamp,
                   <const uint8_t *>PyBytes_AS_STRING(self._born_host),
                   <int>len(self._born_host), self._sys_flag)
        place = start
        for index in range(self.count):
            at += parse_element(&self._batch[at], self._batch.shape[0] - at, &element)
            record.flag = element.flag
            properties_bytes = self._put_properties(text, &element, index)
            size = log._record_size(self._queue, element.body_length, properties_bytes, False,
                                    record.born_host_length)
            log._lay(&record, place, size, self._queue.next_offset + index, element.body,
                     element.body_length, text, properties_bytes, False)
            if self._half:
                self.places.append(log.segment_start + place)
            place += size
        log.batch_queue_offset = self._queue.next_offset
        self._queue.next_offset += self.count
        log._at = place
        log.count += self.count
        return log.segment_start + start


cdef inline bint wants_separator(Record *record) noexcept nogil:
    """Whether more properties need one in front."""
    return record.properties_length > 0 and record.properties[record.properties_length - 1] != 2


cdef inline int64_t timer_second(int64_t due) noexcept nogil:
    """The second that the wheel has it in, in ms: TIMER_OUT_MS."""
    return max(due - 1, 0) // 1000 * 1000

cdef int check_timed(int64_t element, Timing *timing, int64_t due, int64_t latest) except -1:
    """Raise BatchIllegal for an element that may not wait in the wheel."""
    if not 0 <= due <= latest:
        raise BatchIllegal(
            f"element {element}: one of TIMER_DELIVER_MS and TIMER_DELAY_MS is wanted, and a time "
            f"of at most {latest} ms since 1970")
    if timing.contradiction != NULL:
        raise BatchIllegal(f"element {element}: {timing.contradiction.decode()} contradicts its time")
    return 0
