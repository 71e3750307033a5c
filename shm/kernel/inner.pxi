# --- records of the broker's own actors, with every field that a record has -------------------------


@cython.final
cdef class InnerEncoder:
    """Builds the payload of AppendRecords: records for any queues, which have numbers here.

    Args:
        size_max: bytes; a record that comes alone may be larger.
        properties_max: bytes of a record's properties.
    """

    cdef uint8_t *_buffer
    cdef Py_ssize_t _capacity, _size_max
    cdef int32_t _properties_max
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t count

    def __cinit__(self, *, Py_ssize_t size_max=4194304,
                  int32_t properties_max=PROPERTIES_MAX_BYTES):
        self._size_max = size_max
        self._properties_max = min(properties_max, PROPERTIES_MAX_BYTES)
        self._capacity = 16384
        self._buffer = <uint8_t *>PyMem_Malloc(self._capacity)
        if self._buffer == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self._buffer)

    cdef uint8_t *_reserve(self, Py_ssize_t extra) except NULL:
        cdef Py_ssize_t wanted = self.size + extra
        cdef uint8_t *grown
        if self.count and wanted > self._size_max:
            raise BatchFull(self.count)
        if wanted > self._capacity:
            wanted = max(wanted, 2 * self._capacity)
            grown = <uint8_t *>PyMem_Realloc(self._buffer, wanted)
            if grown == NULL:
                raise MemoryError
            self._buffer, self._capacity = grown, wanted
        return self._buffer + self.size

    cdef int _add(self, int32_t queue, Record *record, const uint8_t *more=NULL,
                  Py_ssize_t more_count=0) except -1:
        """Of the record its flags, times, hosts, body and properties, with more of these behind."""
        cdef int32_t more_bytes = <int32_t>min(more_count, PROPERTIES_MAX_BYTES + 1)
        cdef int32_t own_bytes = record.properties_length
        cdef bint separator = (more_bytes > 0 and own_bytes > 0
                               and record.properties[own_bytes - 1] != 2)
        cdef int64_t properties_bytes = <int64_t>own_bytes + separator + more_bytes
        cdef int64_t total = (
            INNER_RECORD_BYTES + record.born_host_length + record.store_host_length
            + properties_bytes + record.body_length)
        cdef uint8_t *at
        if properties_bytes > self._properties_max:
            raise RecordTooLarge("properties", properties_bytes, self._properties_max)
        if total > ELEMENT_MAX:
            raise RecordTooLarge("record", total, ELEMENT_MAX)
        at = self._reserve(total)
        store_be32(at + INNER_RECORD_TOTAL_SIZE, <uint32_t>total)
        store_be32(at + INNER_RECORD_QUEUE, <uint32_t>queue)
        store_be32(at + INNER_RECORD_FLAG, <uint32_t>record.flag)
        store_be32(at + INNER_RECORD_SYS_FLAG, <uint32_t>record.sys_flag)
        store_be64(at + INNER_RECORD_BORN_TIMESTAMP, <uint64_t>record.born_timestamp)
        store_be32(at + INNER_RECORD_RECONSUME_TIMES, <uint32_t>record.reconsume_times)
        store_be64(at + INNER_RECORD_PREPARED_TRANSACTION_OFFSET,
                   <uint64_t>record.prepared_offset)
        store_be32(at + INNER_RECORD_BODY_LENGTH, <uint32_t>record.body_length)
        store_be16(at + INNER_RECORD_PROPERTIES_LENGTH, <uint16_t>properties_bytes)
        at[INNER_RECORD_BORN_HOST_LENGTH] = <uint8_t>record.born_host_length
        at[INNER_RECORD_STORE_HOST_LENGTH] = <uint8_t>record.store_host_length
        at += INNER_RECORD_BYTES
        memcpy(at, record.born_host, record.born_host_length)
        at += record.born_host_length
        memcpy(at, record.store_host, record.store_host_length)
        at += record.store_host_length
        memcpy(at, record.properties, own_bytes)
        if separator:
            at[own_bytes] = 2
        memcpy(at + own_bytes + separator, more, more_bytes)
        memcpy(at + properties_bytes, record.body, record.body_length)
        self.size += total
        self.count += 1
        return 0

    cdef int _add_delivered(self, int32_t queue, Record *record) except -1:
        """One that waits no more: without the property that says since when."""
        cdef Py_ssize_t begin = 0, end = 0, count = record.properties_length
        if not find_uptime(record, &begin, &end):
            return self._add(queue, record)
        record.properties_length = <int32_t>begin
        return self._add(queue, record, record.properties + end, count - end)

    cdef int _add_due(self, int32_t queue, Record *record) except -1:
        """A record as it lies in the log, for the queue that it was meant for."""
        record.properties_length = without_crc_property(
            record.properties, record.properties_length)
        record.store_host_length = 0  # it is stored here
        return self._add_delivered(queue, record)

    def add(self, int32_t queue, body, bytes properties=b"", *, int32_t flag=0, int32_t sys_flag=0,
            int64_t born_timestamp=0, bytes born_host=b"", bytes store_host=b"",
            int32_t reconsume_times=0, int64_t prepared_offset=0):
        """Add a record; its index. Raises BatchFull, and RecordTooLarge for one that can be none.

        Args:
            properties: as they shall stand.
            born_timestamp: in ms; 0 is the time when it is stored.
            born_host, store_host: 8 or 20 bytes; none are the broker's.
        """
        cdef Record record
        record.flag, record.sys_flag = flag, sys_flag
        record.born_timestamp, record.reconsume_times = born_timestamp, reconsume_times
        record.prepared_offset = prepared_offset
        set_hosts(&record, born_host, store_host)
        self._add_bodies(queue, (body,), 0, &record, properties)
        return self.count - 1

    def add_many(self, int32_t queue, bodies not None, Py_ssize_t start=0, bytes properties=b"", *,
                 int32_t flag=0, int32_t sys_flag=0, int64_t born_timestamp=0,
                 bytes born_host=b"", bytes store_host=b"", int32_t reconsume_times=0,
                 int64_t prepared_offset=0):
        """Add bodies[start:] as records that differ in nothing else, until it is full; the index of
        the first that was not added."""
        cdef Record record
        record.flag, record.sys_flag = flag, sys_flag
        record.born_timestamp, record.reconsume_times = born_timestamp, reconsume_times
        record.prepared_offset = prepared_offset
        set_hosts(&record, born_host, store_host)
        return start + self._add_bodies(queue, bodies, start, &record, properties)

    cdef Py_ssize_t _add_bodies(self, int32_t queue, bodies, Py_ssize_t start, Record *record,
                                bytes properties) except -1:
        cdef Py_ssize_t index, count = len(bodies)
        cdef Py_buffer view
        record.properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        record.properties_length = <int32_t>min(len(properties), 0x7FFFFFFF)
        for index in range(start, count):
            PyObject_GetBuffer(bodies[index], &view, PyBUF_SIMPLE)
            try:
                if view.len > ELEMENT_MAX:
                    raise RecordTooLarge("body", view.len, ELEMENT_MAX)
                record.body, record.body_length = <const uint8_t *>view.buf, <int32_t>view.len
                self._add(queue, record)
            except BatchFull:
                if index == start:
                    raise
                return index - start
            finally:
                PyBuffer_Release(&view)
        return count - start

    def add_batch(self, int32_t queue, const uint8_t[::1] batch not None, Py_ssize_t start=0, *,
                  int32_t sys_flag=0, int64_t born_timestamp=0, bytes born_host=b""):
        """Add the elements of a client's batch body from byte `start` on, until it is full.

        Returns (the byte where the next element begins, how many were added). Raises BatchIllegal
        for what is no element.
        """
        cdef Py_ssize_t at = start, added = 0
        cdef int64_t size
        cdef int unkept
        cdef Record record
        if not 0 <= start <= batch.shape[0]:
            raise ValueError(f"a batch of {batch.shape[0]} bytes has no byte {start}")
        record.sys_flag, record.born_timestamp = sys_flag, born_timestamp
        record.reconsume_times, record.prepared_offset = 0, 0
        set_hosts(&record, born_host, b"")
        while at < batch.shape[0]:
            size = parse_element(&batch[at], batch.shape[0] - at, &record)
            if size < 0:
                raise BatchIllegal(f"element {added}, at byte {at}, is none")
            try:
                unkept = find_unkept(record.properties, record.properties_length)
                if unkept >= 0:
                    refuse_unkept(added, unkept, record.properties, record.properties_length)
                self._add(queue, &record)
            except BatchFull:
                break
            at += size
            added += 1
        return at, added

    def add_stored(self, int32_t queue, const uint8_t[::1] stored not None, bytes properties=None,
                   *, reconsume_times=None, sys_flag=None, prepared_offset=None):
        """Add a copy of a record as it lies in the log, for another queue; its index.

        Everything is as in the record but what is given here; its CRC property is left out, and
        when it began to wait. Raises RecordDamaged when it is no whole record.
        """
        cdef Record record
        cdef int why
        why = REC_BAD_SIZE if stored.shape[0] < RECORD_MIN else parse_record(
            &stored[0], stored.shape[0], True, &record)
        if why != REC_OK:
            raise RecordDamaged(REASONS[why], 0)
        if properties is not None:
            record.properties = <const uint8_t *>PyBytes_AS_STRING(properties)
            record.properties_length = <int32_t>min(len(properties), 0x7FFFFFFF)
        record.properties_length = without_crc_property(
            record.properties, record.properties_length)
        if reconsume_times is not None:
            record.reconsume_times = reconsume_times
        if sys_flag is not None:
            record.sys_flag = sys_flag
        if prepared_offset is not None:
            record.prepared_offset = prepared_offset
        record.store_host_length = 0  # it is stored here
        if properties is None:
            self._add_delivered(queue, &record)
        else:
            self._add(queue, &record)
        return self.count - 1

    def cut(self, Py_ssize_t size, Py_ssize_t count):
        """Forget the last records; it was so large before them, by its `size` and `count`."""
        if not (0 <= size <= self.size and 0 <= count <= self.count and (count > 0) == (size > 0)):
            raise ValueError(f"{count} records of {size} bytes, of {self.count} of {self.size}")
        self.size, self.count = size, count

    def take(self):
        """The payload; the encoder is empty again."""
        cdef bytes payload = PyBytes_FromStringAndSize(<const char *>self._buffer, self.size)
        self.size = self.count = 0
        return payload


cdef bint find_uptime(Record *record, Py_ssize_t *begin, Py_ssize_t *end) noexcept nogil:
    """Where among its properties the one stands that says since when it waits."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    if not find_property(record.properties, record.properties_length, b"COMETMQ_UP",
                         UPTIME_NAME_BYTES, &value, &value_bytes):
        return False
    begin[0] = value - record.properties - UPTIME_NAME_BYTES - 1
    end[0] = min(value - record.properties + value_bytes + 1, record.properties_length)
    return True


cdef int set_hosts(Record *record, bytes born_host, bytes store_host) except -1:
    for host in (born_host, store_host):
        if len(host) not in (0, 8, 20):
            raise ValueError(f"host of {len(host)} bytes, 8 or 20 wanted")
    record.born_host = <const uint8_t *>PyBytes_AS_STRING(born_host)
    record.born_host_length = <int32_t>len(born_host)
    record.store_host = <const uint8_t *>PyBytes_AS_STRING(store_host)
    record.store_host_length = <int32_t>len(store_host)
    return 0


cdef int32_t without_crc_property(const uint8_t *properties, int32_t count) noexcept nogil:
    """How many bytes there are before the CRC property, which stands at the end if at all."""
    if (count >= CRC_PROPERTY_BYTES
            and memcmp(properties + count - CRC_PROPERTY_BYTES, b"__CRC32#\x01", 9) == 0):
        return count - CRC_PROPERTY_BYTES
    return count


cdef int parse_inner(
    const uint8_t *at, int64_t available, Py_ssize_t queues, Record *record
) noexcept nogil:
    """Read a record of a payload; every length is checked before it is followed. The index of its
    queue, or -1 if it cannot be one."""
    cdef int64_t size, inside
    cdef int32_t queue
    if available < INNER_RECORD_BYTES:
        return -1
    record.total_size = <int32_t>load_be32(at + INNER_RECORD_TOTAL_SIZE)
    queue = <int32_t>load_be32(at + INNER_RECORD_QUEUE)
    record.flag = <int32_t>load_be32(at + INNER_RECORD_FLAG)
    record.sys_flag = <int32_t>load_be32(at + INNER_RECORD_SYS_FLAG)
    record.born_timestamp = <int64_t>load_be64(at + INNER_RECORD_BORN_TIMESTAMP)
    record.reconsume_times = <int32_t>load_be32(at + INNER_RECORD_RECONSUME_TIMES)
    record.prepared_offset = <int64_t>load_be64(at + INNER_RECORD_PREPARED_TRANSACTION_OFFSET)
    record.body_length = <int32_t>load_be32(at + INNER_RECORD_BODY_LENGTH)
    record.properties_length = <int16_t>load_be16(at + INNER_RECORD_PROPERTIES_LENGTH)
    record.born_host_length = at[INNER_RECORD_BORN_HOST_LENGTH]
    record.store_host_length = at[INNER_RECORD_STORE_HOST_LENGTH]
    size = record.total_size
    inside = (INNER_RECORD_BYTES + <int64_t>record.born_host_length + record.store_host_length
              + record.properties_length + record.body_length)
    if (size != inside or size > available or record.body_length < 0
            or record.properties_length < 0 or not 0 <= queue < queues
            or not is_host_or_none(record.born_host_length)
            or not is_host_or_none(record.store_host_length)):
        return -1
    record.born_host = at + INNER_RECORD_BYTES
    record.store_host = record.born_host + record.born_host_length
    record.properties = record.store_host + record.store_host_length
    record.body = record.properties + record.properties_length
    return queue


cdef inline bint is_host_or_none(int32_t count) noexcept nogil:
    return count == 0 or count == 8 or count == 20


@cython.final
cdef class InnerBatch:
    """A payload of AppendRecords that was checked against a log and its queues."""

    cdef LogAppender _log
    cdef list _queues
    cdef const uint8_t[::1] _payload
    cdef readonly int64_t size  # bytes of its records in the log
    cdef readonly int64_t count

    def __init__(self, LogAppender log not None, list queues not None,
                 const uint8_t[::1] payload not None, int64_t count):
        """Raises BatchIllegal for a payload that is not `count` whole records of these queues,
        RecordTooLarge for a record over the limits, or more than a segment holds."""
        cdef Py_ssize_t i
        cdef int64_t at = 0
        cdef int queue
        cdef Record record
        self._log, self._queues, self._payload = log, queues, payload
        for i in range(len(queues)):
            if not isinstance(queues[i], QueueCursor):
                raise TypeError(f"{queues[i]!r} is no QueueCursor")
        while at < payload.shape[0] and self.count < count:
            queue = parse_inner(&payload[at], payload.shape[0] - at, len(queues), &record)
            if queue < 0:
                raise BatchIllegal(f"record {self.count}, at byte {at}, is none")
            at += record.total_size
            self.size += check_inner(log, <QueueCursor>queues[queue], &record)
            self.count += 1
        if self.count != count or at != payload.shape[0] or count == 0:
            raise BatchIllegal(
                f"{self.count} records in the first {at} bytes of {payload.shape[0]}, {count} "
                "announced")
        if self.size + BLANK_BYTES > log._segment_bytes:
            raise RecordTooLarge("batch", self.size, log._segment_bytes - BLANK_BYTES)

    def append(self, int64_t store_timestamp=0):
        """Lay all of it into the log; queue offset and physical offset of each record, as int64s.
        None if it does not fit into what is left of the segment.

        Prepared and rolled-back transaction records get queue offset 0 and take none (RocketMQ).
        """
        cdef LogAppender log = self._log
        cdef int64_t index, timestamp, at = 0
        cdef QueueCursor queue
        cdef bytes places
        cdef int64_t *place
        cdef Record record
        if log._base == NULL:
            raise ValueError("no segment is attached")
        if not log._has_room(self.size):
            return None
        places = PyBytes_FromStringAndSize(NULL, 16 * self.count)
        place = <int64_t *>PyBytes_AS_STRING(places)
        timestamp = log._timestamp(store_timestamp)
        for queue in self._queues:
            log._note(queue)
        for index in range(self.count):
            queue = <QueueCursor>self._queues[parse_inner(
                &self._payload[at], self._payload.shape[0] - at, len(self._queues), &record)]
            at += record.total_size
            place[2 * index + 1] = log.segment_start + log._at
            lay_inner(log, queue, &record, timestamp)
            place[2 * index] = record.queue_offset
        log.count += self.count
        return places


cdef inline bint complete_inner(LogAppender log, Record *record) noexcept:
    """Hosts that are not given are the broker's; whether the properties want a separator."""
    cdef bytes own = log.store_host
    if record.store_host_length == 0:
        record.store_host = <const uint8_t *>PyBytes_AS_STRING(own)
        record.store_host_length = <int32_t>len(own)
    if record.born_host_length == 0:
        record.born_host = <const uint8_t *>PyBytes_AS_STRING(own)
        record.born_host_length = <int32_t>len(own)
    return (log._crc_property and record.properties_length > 0
            and record.properties[record.properties_length - 1] != 2)


cdef inline int64_t inner_size(LogAppender log, QueueCursor queue, Record *record,
                               bint separator) noexcept:
    """Bytes in the log of a record that is complete."""
    return log._record_size(
        queue, record.body_length, record.properties_length, separator, record.born_host_length,
    ) + record.store_host_length - log._host_bytes


cdef int64_t check_inner(LogAppender log, QueueCursor queue, Record *record) except -1:
    """Bytes in the log of what an actor has stored. Raises RecordTooLarge."""
    cdef bint separator = complete_inner(log, record)
    cdef int64_t size = inner_size(log, queue, record, separator)
    log._check_stored(record.properties_length + (
        CRC_PROPERTY_BYTES + separator if log._crc_property else 0), size)
    return size


cdef void lay_inner(LogAppender log, QueueCursor queue, Record *record,
                    int64_t timestamp) noexcept:
    """The next record of the log, which has room for it; its queue was noted."""
    cdef bint separator = complete_inner(log, record)
    cdef int64_t size = inner_size(log, queue, record, separator)
    record.store_timestamp = timestamp
    if record.born_timestamp <= 0:
        record.born_timestamp = timestamp
    record.queue_offset = queue.next_offset if is_queued(record) else 0
    log._set_queue(record, queue)
    log._lay(record, log._at, size, record.queue_offset, record.body, record.body_length,
             record.properties, record.properties_length, separator)
    queue.next_offset += is_queued(record)
    log._at += size
