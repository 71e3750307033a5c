# --- half messages: what a producer has named, before its transaction has ended -----------------------


cdef struct HalfText:
    const uint8_t *at
    Py_ssize_t count  # 0: there is none


cdef struct HalfSays:  # what properties say of a half message; of two of a name, the last
    HalfText transaction  # __transactionId__
    HalfText key  # UNIQ_KEY
    HalfText group  # PGROUP
    HalfText topic  # REAL_TOPIC
    int64_t queue_id  # REAL_QID; -1: there is none, or it is no number
    bint is_copy  # of another half message
    Py_ssize_t up_begin, up_end  # the property that says since when it waits


cdef void read_half(const uint8_t *properties, Py_ssize_t count, HalfSays *found) noexcept nogil:
    """All of it in one walk, by `find_property`'s rules."""
    cdef Py_ssize_t at = 0, end
    cdef const uint8_t *mark
    memset(found, 0, sizeof(HalfSays))
    found.queue_id = -1
    while at < count:
        mark = <const uint8_t *>memchr(properties + at, 2, count - at)
        end = count if mark == NULL else mark - properties
        if end > at:
            note_half(properties + at, end - at, found)
            if value_bytes_of(properties + at, end - at, b"COMETMQ_UP", UPTIME_NAME_BYTES):
                found.up_begin, found.up_end = at, min(end + 1, count)
        at = end + 1


cdef inline void note_half(const uint8_t *entry, Py_ssize_t count, HalfSays *found) noexcept nogil:
    """What one entry says."""
    cdef Py_ssize_t size
    if entry[0] == 82:  # R
        if (size := value_bytes_of(entry, count, b"REAL_TOPIC", 10)):
            found.topic.at, found.topic.count = entry + 11, size
        elif (size := value_bytes_of(entry, count, b"REAL_QID", 8)):
            found.queue_id = number_of(entry + 9, size)
    elif entry[0] == 80:  # P
        if (size := value_bytes_of(entry, count, b"PGROUP", 6)):
            found.group.at, found.group.count = entry + 7, size
    elif entry[0] == 85:  # U
        if (size := value_bytes_of(entry, count, b"UNIQ_KEY", 8)):
            found.key.at, found.key.count = entry + 9, size
    elif entry[0] == 84:  # T
        if value_bytes_of(entry, count, b"TRAN_PREPARED_QUEUE_OFFSET", 26):
            found.is_copy = True
    elif entry[0] == 95:  # _
        if (size := value_bytes_of(entry, count, b"__transactionId__", 17)):
            found.transaction.at, found.transaction.count = entry + 18, size


cdef bint text_is(HalfText *value, str text) except -1:
    """One that is not there is an empty text."""
    cdef Py_ssize_t wanted = 0
    cdef const char *raw = PyUnicode_AsUTF8AndSize(text, &wanted)
    return value.count == wanted and (not wanted or memcmp(value.at, raw, wanted) == 0)


cdef bint half_is_named(const uint8_t *at, int64_t available, int64_t physical_offset,
                        int64_t queue_offset, str group, str transaction, str topic,
                        Record *record, HalfSays *says) except -1:
    """Whether there is the half message that its producer names so, and no copy of another; it is
    in `record` then.

    Args:
        topic: that it is meant for.
    """
    if available < RECORD_MIN or parse_record(at, available, True, record) != REC_OK:
        return False
    if (record.physical_offset != physical_offset or record.queue_offset != queue_offset
            or record.topic_length != len(HALF_TOPIC_NAME)
            or memcmp(record.topic, PyBytes_AS_STRING(HALF_TOPIC_NAME), record.topic_length) != 0):
        return False
    read_half(record.properties, record.properties_length, says)
    return (not says.is_copy and text_is(&says.group, group) and text_is(&says.topic, topic)
            and text_is(&says.transaction if says.transaction.count else &says.key, transaction))


cdef struct PlainEnd:  # of one half message that lies in the log, was never copied, and is pending
    Record record  # what its copy has, where it is committed
    Py_ssize_t cut_begin, cut_end  # of its properties, without which the copy goes
    int64_t number  # its queue offset
    Py_ssize_t queue  # that the copy is for, by its place; -1: it is rolled back


@cython.final
cdef class HalfEnds:
    """Ends of transactions by columns, as a producer's command has them. If each is of one pending
    half message that was never copied, one `EndsBatch` ends them all (`pick`).

    Args:
        counts: of half messages that each transaction has; they stand one after the other in the
            columns behind.
        topics: that they are meant for, each once; `topic_of` has their places.

    Raises ValueError for columns that do not fit together.
    """

    cdef str _group
    cdef list _transactions, _commits, _counts
    cdef list _topics, _topic_of, _queue_offsets, _physical_offsets
    cdef PlainEnd *_picked
    cdef const uint8_t[::1] _segment  # that these lie in
    cdef readonly Py_ssize_t count, committed  # of what was picked
    cdef readonly int64_t last  # the highest queue offset among that
    cdef readonly list queues  # (topic, queue id) that its copies are for

    def __init__(self, str group not None, list transactions not None, list commits not None,
                 list counts not None, list topics not None, list topic_of not None,
                 list queue_offsets not None, list physical_offsets not None):
        cdef Py_ssize_t rows = 0, count, place
        self._group, self._transactions, self._commits = group, transactions, commits
        self._counts, self._topics, self._topic_of = counts, topics, topic_of
        self._queue_offsets, self._physical_offsets = queue_offsets, physical_offsets
        if not len(transactions) == len(commits) == len(counts):
            raise ValueError(f"{len(transactions)} transactions, {len(commits)} ends, "
                             f"{len(counts)} counts")
        for count in counts:
            if not 0 <= count <= len(topic_of):
                raise ValueError(f"a transaction of {count} messages")
            rows += count
        if not rows == len(topic_of) == len(queue_offsets) == len(physical_offsets):
            raise ValueError(f"{rows} messages, of which {len(topic_of)} have topics, "
                             f"{len(queue_offsets)} numbers, {len(physical_offsets)} places")
        for place in topic_of:
            if not 0 <= place < len(topics):
                raise ValueError(f"topic {place} of {len(topics)}")

    def __dealloc__(self):
        PyMem_Free(self._picked)

    cdef bint _is_plain(self, Py_ssize_t index, const uint8_t[::1] segment, int64_t start,
                        int64_t limit, Record *record, HalfSays *says) except -1:
        """Whether this end is of one half message, which lies in the segment and was never copied;
        it is in `record` then."""
        cdef int64_t physical_offset = self._physical_offsets[index]
        cdef int64_t at = physical_offset - start if 0 <= start <= physical_offset else -1
        return 0 <= at < limit and half_is_named(
            &segment[at], limit - at, physical_offset, self._queue_offsets[index], self._group,
            self._transactions[index], self._topics[self._topic_of[index]], record, says)

    def pick(self, const uint8_t[::1] segment not None, int64_t start, int64_t limit,
             bytearray outcomes not None, int64_t base, Py_ssize_t bytes_max):
        """Whether all of them are as most are: each of one half message that lies in `segment`, was
        never copied, and is pending; and there is room in a write. Then an EndsBatch can be made.

        Args:
            start: of the segment in the log; `limit`: where the log ends in it.
            outcomes: of half messages from number `base` on, 0: pending; those behind are, too.
            bytes_max: of the write; one end alone may have more.
        """
        cdef Py_ssize_t index, count = len(self._transactions)
        cdef int64_t size = 0
        cdef HalfSays says
        cdef bint found = count > 0 and len(self._physical_offsets) == count
        self.count, self.committed, self.last = 0, 0, -1
        self.queues, self._segment = [], segment
        PyMem_Free(self._picked)
        self._picked = <PlainEnd *>PyMem_Malloc(count * sizeof(PlainEnd))
        if self._picked == NULL:
            raise MemoryError
        limit = min(limit, segment.shape[0])
        for index in range(count):
            found = (found and self._counts[index] == 1
                     and self._is_pending(index, outcomes, base)
                     and self._is_plain(index, segment, start, limit,
                                        &self._picked[index].record, &says)
                     and says.queue_id >= 0)
            if not found:
                break
            self._take(&self._picked[index], index, &says)
            size += self._picked[index].record.total_size
            found = not index or size <= bytes_max
        if not found:
            self.count = 0
        return found

    cdef bint _is_pending(self, Py_ssize_t index, bytearray outcomes, int64_t base) except -1:
        """And none of those that were picked."""
        cdef int64_t number = self._queue_offsets[index]
        cdef Py_ssize_t earlier
        if number < base or number - base < len(outcomes) and outcomes[number - base]:
            return False
        if number <= self.last:  # most come in their order
            for earlier in range(self.count):
                if self._picked[earlier].number == number:
                    return False
        return True

    cdef int _take(self, PlainEnd *end, Py_ssize_t index, HalfSays *says) except -1:
        """Make a copy's record of it, if it is committed."""
        cdef Record *record
        end.number, end.queue = self._queue_offsets[index], -1
        if self._commits[index]:
            end.queue = self._queue_of((self._topics[self._topic_of[index]], says.queue_id))
            record = &end.record
            record.properties_length = without_crc_property(
                record.properties, record.properties_length)
            record.sys_flag = (record.sys_flag & ~TRANSACTION_BITS) | TRANSACTION_COMMIT
            record.prepared_offset = record.physical_offset
            record.store_host_length = 0  # it is stored here
            end.cut_begin = says.up_begin
            end.cut_end = min(says.up_end, record.properties_length)
            self.committed += 1
        self.last = max(self.last, end.number)
        self.count += 1
        return 0

    cdef Py_ssize_t _queue_of(self, tuple key) except -1:
        cdef Py_ssize_t place
        for place in range(len(self.queues)):
            if self.queues[place] == key:
                return place
        self.queues.append(key)
        return len(self.queues) - 1

    def note(self, bytearray outcomes not None, int64_t base, int64_t span_max,
             tuple words not None):
        """Note the outcomes of what was picked, as `note_ended` does.

        Args:
            words: what there is for a rollback, for a commit.
        """
        cdef int64_t index, place, known
        cdef uint8_t rolled_back = words[0], committed = words[1]
        if base <= self.last < base + span_max:
            known = self.last - base + 1 - len(outcomes)
            if known > 0:
                outcomes.extend(bytes(known))
        for index in range(self.count):
            place = self._picked[index].number - base
            if 0 <= place < len(outcomes):
                outcomes[place] = rolled_back if self._picked[index].queue < 0 else committed


@cython.final
cdef class EndsBatch:
    """What picked ends lay into the log, in one piece: a mark, the copies of what is committed, and
    the op that says how halves have ended. Checked against the log.

    Args:
        queues: for `ends.queues`.
        op_head: properties of the op, behind which stand its letters.
        letters: for a rollback, for a commit.

    Raises RecordTooLarge for a record over the limits, or more than a segment holds.
    """

    cdef LogAppender _log
    cdef HalfEnds _ends
    cdef QueueCursor _mark_queue, _op_queue
    cdef list _queues
    cdef bytes _mark, _op, _op_properties
    cdef readonly int64_t size  # bytes of its records in the log

    def __init__(self, LogAppender log not None, HalfEnds ends not None, list queues not None,
                 QueueCursor mark_queue not None, bytes mark not None,
                 QueueCursor op_queue not None, bytes op_head not None, bytes letters not None):
        cdef Py_ssize_t index
        cdef Record record
        cdef QueueCursor queue
        cdef uint8_t text[PROPERTIES_MAX_BYTES]
        if len(queues) != len(ends.queues) or len(letters) != 2:
            raise ValueError(f"{len(queues)} queues for {len(ends.queues)}, {len(letters)} letters")
        self._log, self._ends, self._queues = log, ends, [queue for queue in queues]
        self._mark_queue, self._mark, self._op_queue = mark_queue, mark, op_queue
        self._write_op(op_head, letters)
        own_record(&record, mark, b"")
        self.size = check_inner(log, mark_queue, &record)
        for index in range(ends.count):
            if ends._picked[index].queue >= 0:
                read_copy(&ends._picked[index], text, &record)
                self.size += check_inner(
                    log, <QueueCursor>self._queues[ends._picked[index].queue], &record)
        own_record(&record, self._op, self._op_properties)
        self.size += check_inner(log, op_queue, &record)
        if self.size + BLANK_BYTES > log._segment_bytes:
            raise RecordTooLarge("batch", self.size, log._segment_bytes - BLANK_BYTES)

    cdef int _write_op(self, bytes head, bytes letters) except -1:
        cdef HalfEnds ends = self._ends
        cdef Py_ssize_t index, at = 0, count = ends.count
        cdef bytes body = PyBytes_FromStringAndSize(NULL, NUMBER_BYTES * count)
        cdef bytes text = PyBytes_FromStringAndSize(NULL, count)
        for index in range(count):
            PyBytes_AS_STRING(text)[index] = PyBytes_AS_STRING(letters)[
                ends._picked[index].queue >= 0]
            at += put_ended(PyBytes_AS_STRING(body) + at, ends._picked[index].number)
        self._op, self._op_properties = body[:at], head + text + b"\x02"
        return 0

    def append(self, int64_t store_timestamp=0):
        """Lay all of it into the log: the physical offset of the mark, and the queue offset of the
        op. None if it does not fit into what is left of the segment."""
        cdef LogAppender log = self._log
        cdef QueueCursor queue
        cdef Record record
        cdef PlainEnd *end
        cdef Py_ssize_t index
        cdef int64_t timestamp, place
        cdef uint8_t text[PROPERTIES_MAX_BYTES]
        if log._base == NULL:
            raise ValueError("no segment is attached")
        if not log._has_room(self.size):
            return None
        timestamp = log._timestamp(store_timestamp)
        for queue in (self._mark_queue, self._op_queue, *self._queues):
            log._note(queue)
        place = log.segment_start + log._at
        own_record(&record, self._mark, b"")
        lay_inner(log, self._mark_queue, &record, timestamp)
        for index in range(self._ends.count):
            end = &self._ends._picked[index]
            if end.queue >= 0:
                read_copy(end, text, &record)
                lay_inner(log, <QueueCursor>PyList_GET_ITEM(self._queues, end.queue), &record,
                          timestamp)
        own_record(&record, self._op, self._op_properties)
        lay_inner(log, self._op_queue, &record, timestamp)
        log.count += 2 + self._ends.committed
        return place, record.queue_offset


cdef void read_copy(PlainEnd *end, uint8_t *text, Record *record) noexcept:
    """The copy that is stored of it. `text` takes its properties, where one is cut out of them."""
    cdef Py_ssize_t rest
    record[0] = end.record
    if end.cut_end > end.cut_begin:
        rest = record.properties_length - end.cut_end
        memcpy(text, record.properties, end.cut_begin)
        memcpy(text + end.cut_begin, record.properties + end.cut_end, rest)
        record.properties = text
        record.properties_length = <int32_t>(end.cut_begin + rest)


cdef void own_record(Record *record, bytes body, bytes properties) noexcept:
    """One of the broker's own."""
    memset(record, 0, sizeof(Record))
    record.body = <const uint8_t *>PyBytes_AS_STRING(body)
    record.body_length = <int32_t>PyBytes_GET_SIZE(body)
    record.properties = <const uint8_t *>PyBytes_AS_STRING(properties)
    record.properties_length = <int32_t>PyBytes_GET_SIZE(properties)


cdef enum:
    NUMBER_BYTES = 20  # of a queue offset and the comma behind it


cdef inline Py_ssize_t put_ended(char *out, int64_t number) noexcept:
    """A queue offset and a comma, as an op names a half message; their bytes."""
    cdef Py_ssize_t digits = digits_in(number)
    put_digits(<uint8_t *>out, number, digits)
    out[digits] = 44
    return digits + 1


def op_text(list ended not None, bytes letters not None):
    """The body of the op that says that these halves have ended, and its letters.

    Args:
        ended: queue offset and outcome of each.
        letters: by outcome.
    """
    cdef Py_ssize_t index, at = 0, count = len(ended)
    cdef bytes body = PyBytes_FromStringAndSize(NULL, NUMBER_BYTES * count)
    cdef bytes text = PyBytes_FromStringAndSize(NULL, count)
    cdef int64_t number
    cdef int outcome
    for index, (queue_offset, how) in enumerate(ended):
        number, outcome = queue_offset, how
        if number < 0 or not 0 <= outcome < len(letters):
            raise ValueError(f"half message {number} has ended as {outcome}")
        PyBytes_AS_STRING(text)[index] = PyBytes_AS_STRING(letters)[outcome]
        at += put_ended(PyBytes_AS_STRING(body) + at, number)
    return body[:at], text


def note_ended(bytearray outcomes not None, int64_t base, int64_t span_max, ended):
    """Note the outcomes of half messages, a byte each from number `base` on, as far as `span_max`."""
    cdef int64_t index
    cdef Py_ssize_t known
    for number, outcome in ended:
        index = number - base
        if not 0 <= index < span_max:
            continue
        known = len(outcomes)
        if index >= known:
            outcomes.extend(bytes(index + 1 - known))
        outcomes[index] = outcome


cdef int32_t TRANSACTION_BITS = 0xC, TRANSACTION_COMMIT = 0x8  # of a record's flags
cdef bytes HALF_TOPIC_NAME = _names.HALF_TOPIC.encode()
