# --- appending ------------------------------------------------------------------------------------


cdef enum:
    CLOCK_STEP_MS = 1000  # smaller steps back hold store times; see actors/runtime/clock_steps.py


@cython.final
cdef class LogAppender:
    """Lays records into the current segment. Has one user, the holder of the put lock.

    Args:
        store_host: this broker's address, 8 or 20 bytes (IP and port).
        max_message_bytes: limit of a body; a whole record may have 65,536 more (RocketMQ).
        crc_property: append RocketMQ's __CRC32# property (enabledAppendPropCRC).
    """

    cdef Py_buffer _view
    cdef bint _attached
    cdef uint8_t *_base
    cdef int64_t _segment_bytes
    cdef int64_t _reserved  # of the segment: file space is there below it, and nothing goes beyond
    cdef int64_t _at
    cdef readonly int64_t wanted  # bytes that found no room last, with a blank behind them
    cdef readonly int64_t segment_start
    cdef readonly int64_t last_store_timestamp
    cdef int64_t _set_back_from, _set_back_to  # _set_back_to 0: no step to report
    cdef readonly bytes store_host
    cdef int32_t _host_bytes
    cdef int64_t _max_message_bytes
    cdef recent _clock
    cdef bint _crc_property
    cdef public int64_t batch_queue_offset  # of the first message that append_batch laid down
    cdef readonly int64_t count  # messages laid down, from what `publishes` found on
    cdef OwnedCell _wrote, _timestamp_cell, _messages, _steps
    cdef int64_t _step_bytes
    cdef object _on_step
    cdef ReadCell _flushed
    cdef OwnedCell _wanted, _syncs
    cdef int64_t _sync_max
    cdef QueueEnds _ends
    cdef list _moved  # queues that were appended to; it keeps its length, and stale ones at its end
    cdef Py_ssize_t _told_count  # so many are told of: their sleepers are to be woken
    cdef Py_ssize_t _moved_count  # so many are to be told of or woken

    def __init__(self, bytes store_host not None, int64_t max_message_bytes,
                 bint crc_property=False):
        if len(store_host) != 8 and len(store_host) != 20:
            raise ValueError(f"host of {len(store_host)} bytes, 8 or 20 wanted")
        self.store_host = store_host
        self._host_bytes = <int32_t>len(store_host)
        self._max_message_bytes = max_message_bytes
        self._crc_property = crc_property
        self._moved = []

    def attach(self, buffer, int64_t segment_start, int64_t physical_offset,
               int64_t reserved_to=-1):
        """Go on in this writable segment at that physical offset.

        Args:
            reserved_to: physical offset; the segment's file space is there below it. -1: all of it.
        """
        self.detach()
        PyObject_GetBuffer(buffer, &self._view, PyBUF_WRITABLE)
        self._attached = True
        if not 0 <= physical_offset - segment_start <= self._view.len:
            self.detach()
            raise ValueError(f"{physical_offset} is not in the segment at {segment_start}")
        self._base = <uint8_t *>self._view.buf
        self._segment_bytes = self._view.len
        self.segment_start = segment_start
        self._at = physical_offset - segment_start
        self._reserved = self._segment_bytes
        if reserved_to >= 0:
            self.reserve_to(reserved_to)

    def reserve_to(self, int64_t physical_offset):
        """File space of the segment is there below this; a store beyond it might be a SIGBUS."""
        self._reserved = min(self._segment_bytes, physical_offset - self.segment_start)
        assert self._at <= self._reserved, (self.physical_offset, physical_offset)

    def detach(self):
        if self._attached:
            PyBuffer_Release(&self._view)
            self._attached = False
        self._base = NULL
        self._segment_bytes = self._reserved = 0
        self._at = 0

    def __dealloc__(self):
        if self._attached:
            PyBuffer_Release(&self._view)

    @property
    def physical_offset(self):
        """The first byte that is not written."""
        return self.segment_start + self._at

    @property
    def remaining(self):
        """Bytes of the segment that nothing was laid into, with and without file space."""
        return self._segment_bytes - self._at

    cdef inline bint _has_room(self, int64_t count) noexcept:
        """For so many bytes and a blank behind them; else `wanted` says what there should be."""
        if count + BLANK_BYTES <= self._reserved - self._at:
            return True
        self.wanted = count + BLANK_BYTES
        return False

    def publishes(self, OwnedCell wrote not None, OwnedCell timestamp not None,
                  OwnedCell messages not None, OwnedCell steps not None, int64_t step_bytes,
                  on_step):
        """Which counters `publish` moves; `on_step` is called with every `step_bytes` written."""
        self._wrote, self._timestamp_cell, self._messages = wrote, timestamp, messages
        self._steps, self._step_bytes, self._on_step = steps, step_bytes, on_step
        self.count = <int64_t>load_relaxed64(messages._word)

    def tells(self, QueueEnds ends not None):
        """Where `publish` tells how far the queues reach that were appended to."""
        self._ends = ends

    def publish(self):
        """Whatever was laid down may be seen. Sleepers go on sleeping until `wake`."""
        cdef QueueCursor queue
        self._publish()
        while self._told_count < self._moved_count:
            queue = <QueueCursor>PyList_GET_ITEM(self._moved, self._told_count)
            queue.is_noted = False
            self._ends._tell(queue)
            self._told_count += 1

    def wake(self):
        """Wake those who sleep on queues, if `wake_queues` has not, and ring for everyone who sleeps
        on `wrote`; and on `steps`, if it has come so far."""
        self.wake_queues()
        self._wake()

    cpdef wake_queues(self):
        """Wake those who sleep on queues alone: whoever reads what was published."""
        cdef Py_ssize_t told = self._told_count, index
        full_fence()
        for index in range(told):
            self._ends._wake(<QueueCursor>PyList_GET_ITEM(self._moved, index))
        if told:
            for index in range(told, self._moved_count):  # not published yet: normally there is none
                self._moved[index - told] = self._moved[index]
            self._moved_count -= told
            self._told_count = 0

    cdef inline int _note(self, QueueCursor queue) except -1:
        """It is about to be appended to: nothing may fail behind that."""
        if self._ends is not None and not queue.is_noted:
            if self._moved_count == len(self._moved):
                self._moved.append(None)
            self._moved[self._moved_count] = queue
            self._moved_count += 1
            queue.is_noted = True
        return 0

    cdef inline void _publish_one(self, QueueCursor queue) noexcept:
        """`publish` of what was appended to one queue only."""
        self._publish()
        if self._ends is not None:
            self._ends._tell(queue)

    cdef inline void _wake_one(self, QueueCursor queue) noexcept:
        """Wake those who sleep on one queue; behind a full barrier."""
        if self._ends is not None:
            self._ends._wake(queue)

    cdef void _publish(self) noexcept:
        store_release64(self._messages._word, <uint64_t>self.count)
        store_release64(self._wrote._word, <uint64_t>(self.segment_start + self._at))
        # Last: who reads the time and then `wrote` finds all of that time below it.
        store_release64(self._timestamp_cell._word, <uint64_t>self.last_store_timestamp)

    cdef int _wake(self) except -1:
        """Behind a full barrier."""
        cdef uint64_t step = load_relaxed64(self._wrote._word) // <uint64_t>self._step_bytes
        self._wrote._wake_fenced()
        if step > load_relaxed64(self._steps._word):
            store_release64(self._steps._word, step)
            self._steps._wake()
            self._on_step()
        return 0

    def syncs(self, ReadCell flushed not None, OwnedCell wanted not None, OwnedCell count not None,
              int64_t max_bytes):
        """Which counters `sync` and `want` look at and move; what is the flush process's to sync."""
        self._flushed, self._wanted, self._syncs = flushed, wanted, count
        self._sync_max = max_bytes

    def sync(self):
        """Make what is published durable by one call; below which offset it is then, which the
        caller publishes. 0: it is for the flush process, because it is much, or in more than one
        segment, or because that one is asked already.

        Raises OSError. Then nobody knows what is on the disk, and a second call must not ask.
        """
        return self._sync()

    cdef uint64_t _sync(self) except? 0:
        cdef int64_t begin = <int64_t>self._flushed._load(), start = self.segment_start
        cdef int64_t end = <int64_t>load_relaxed64(self._wrote._word), at
        cdef uint8_t *base = self._base
        cdef int code = 0
        cdef Py_buffer held
        if begin >= end:
            return end
        if base == NULL:
            return 0
        if (begin < start or end - begin > self._sync_max
                or <int64_t>load_relaxed64(self._wanted._own) > begin):
            return 0
        at = (begin - start) // SYSTEM_PAGE * SYSTEM_PAGE
        # Another thread may roll over meanwhile, and let go of what this one still syncs.
        PyObject_GetBuffer(<object>self._view.obj, &held, PyBUF_SIMPLE)
        with nogil:
            if msync(base + at, end - start - at, MS_SYNC):
                code = errno
        PyBuffer_Release(&held)
        if code:
            raise OSError(code, _os.strerror(code))
        store_release64(self._syncs._own, load_relaxed64(self._syncs._own) + 1)
        return end

    def want(self):
        """Have the flush process make durable what is published."""
        self._want()

    cdef int _want(self) except -1:
        store_release64(self._wanted._own, load_relaxed64(self._wrote._word))
        self._wanted._wake()
        return 0

    def roll(self, buffer, int64_t segment_start, int64_t reserved_to=-1):
        """Close this segment with a blank and go on in the next, in one step for all threads."""
        if self._at < self._segment_bytes:
            self.write_blank()
        self.attach(buffer, segment_start, segment_start, reserved_to)

    def write_blank(self):
        """Close the segment: everything that remains becomes the end-of-segment blank."""
        cdef int64_t left = self._segment_bytes - self._at
        assert self._at + BLANK_BYTES <= self._reserved or left < BLANK_BYTES, "no file space"
        if left < BLANK_BYTES:
            raise ValueError(f"{left} bytes left in the segment at {self.segment_start}")
        store_be32(self._base + self._at + BLANK_SIZE, <uint32_t>left)
        store_be32(self._base + self._at + BLANK_MAGIC, <uint32_t>MAGIC_BLANK)
        self._at = self._segment_bytes

    cdef int64_t _timestamp(self, int64_t wanted) noexcept:
        cdef int64_t now = wanted if wanted > 0 else recent_ms(&self._clock)
        if now < self.last_store_timestamp and wanted <= 0:
            if self.last_store_timestamp - now <= CLOCK_STEP_MS:
                now = self.last_store_timestamp  # hold it until the clock catches up
            elif self._set_back_to == 0:
                self._set_back_from, self._set_back_to = self.last_store_timestamp, now
            else:
                self._set_back_to = now
        self.last_store_timestamp = now
        return now

    def take_step_back(self):
        """Return (before, after) in ms if the clock was set back between two records since the last
        call, otherwise None. RocketMQ's store times follow its clock as well."""
        if self._set_back_to == 0:
            return None
        found = self._set_back_from, self._set_back_to
        self._set_back_to = 0
        return found

    cdef inline int64_t _record_size(
        self, QueueCursor queue, int64_t body_bytes, int64_t properties_bytes, bint separator,
        int born_host_bytes,
    ) noexcept:
        cdef int64_t size = (
            RECORD_HEAD_BYTES + born_host_bytes + 8 + self._host_bytes + RECORD_MIDDLE_BYTES
            + body_bytes + (2 if queue.long_topic else 1) + queue.topic_length + 2
            + properties_bytes
        )
        if self._crc_property:
            size += CRC_PROPERTY_BYTES + (1 if separator else 0)
        return size

    cdef inline void _begin(
        self, Record *record, QueueCursor queue, int64_t timestamp, int64_t born_timestamp,
        const uint8_t *born_host, int born_host_bytes, int32_t sys_flag=0,
        int32_t reconsume_times=0, int64_t prepared_offset=0,
    ) noexcept:
        """What is common to the records of one call. What differs comes with `_lay`."""
        self._set_queue(record, queue)
        record.flag, record.sys_flag = 0, sys_flag
        record.store_timestamp, record.born_timestamp = timestamp, born_timestamp
        record.reconsume_times, record.prepared_offset = reconsume_times, prepared_offset
        record.born_host, record.born_host_length = born_host, born_host_bytes
        record.store_host = <const uint8_t *>PyBytes_AS_STRING(self.store_host)
        record.store_host_length = self._host_bytes

    cdef inline void _set_queue(self, Record *record, QueueCursor queue) noexcept:
        record.magic = <uint32_t>MAGIC_V2 if queue.long_topic else <uint32_t>MAGIC_V1
        record.queue_id = queue.queue_id
        record.topic = <const uint8_t *>PyBytes_AS_STRING(queue.topic_bytes)
        record.topic_length = queue.topic_length

    cdef inline void _lay(
        self, Record *record, int64_t at, int64_t size, int64_t queue_offset,
        const uint8_t *body, int64_t body_bytes, const uint8_t *properties,
        int64_t properties_bytes, bint separator,
    ) noexcept:
        """One record at that place of the segment, which has room for it."""
        record.total_size, record.queue_offset = <int32_t>size, queue_offset
        record.physical_offset = self.segment_start + at
        record.body, record.body_length = body, <int32_t>body_bytes
        record.properties, record.properties_length = properties, <int32_t>properties_bytes
        lay_record(self._base + at, record, self._crc_property, separator)

    def append(
        self, QueueCursor queue not None, body, bytes properties=b"", int32_t flag=0,
        int32_t sys_flag=0, int64_t born_timestamp=0, bytes born_host=None,
        int64_t store_timestamp=0, int32_t reconsume_times=0, int64_t prepared_offset=0,
    ):
        """Append one message; its physical offset, or -1 when there is no room: see `wanted`.

        Times of 0 mean now. Prepared and rolled-back transaction records get queue offset 0 and
        take none (RocketMQ). Raises RecordTooLarge.
        """
        cdef Py_buffer view
        self._note(queue)
        if isinstance(body, bytes):  # the usual thing, and a view of it costs as much as the record
            return self._append(
                queue, <const uint8_t *>PyBytes_AS_STRING(body), len(<bytes>body), properties, flag,
                sys_flag, born_timestamp, born_host, store_timestamp, reconsume_times,
                prepared_offset,
            )
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            self._note(queue)  # another thread may have published meanwhile
            return self._append(
                queue, <const uint8_t *>view.buf, view.len, properties, flag, sys_flag,
                born_timestamp, born_host, store_timestamp, reconsume_times, prepared_offset,
            )
        finally:
            PyBuffer_Release(&view)

    cdef int64_t _append(
        self, QueueCursor queue, const uint8_t *body, int64_t body_bytes, bytes properties,
        int32_t flag, int32_t sys_flag, int64_t born_timestamp, bytes born_host,
        int64_t store_timestamp, int32_t reconsume_times, int64_t prepared_offset,
    ) except -2:
        cdef int64_t properties_bytes = len(properties)
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef bytes born = self.store_host if born_host is None else born_host
        cdef int born_bytes = <int>len(born)
        cdef bint separator = self._wants_separator(properties)
        cdef int64_t size, queue_offset, timestamp, start
        cdef Record record
        cdef bint placed = takes_place(sys_flag)
        if self._base == NULL:
            raise ValueError("no segment is attached")
        if born_bytes != 8 and born_bytes != 20:
            raise ValueError(f"host of {born_bytes} bytes, 8 or 20 wanted")
        size = self._record_size(queue, body_bytes, properties_bytes, separator, born_bytes)
        self._check_sizes(body_bytes, properties_bytes + (CRC_PROPERTY_BYTES + separator
                          if self._crc_property else 0), size)
        if not self._has_room(size):
            return -1
        queue_offset = queue.next_offset
        if not placed:
            queue_offset = 0
        timestamp = self._timestamp(store_timestamp)
        start = self._at
        self._begin(
            &record, queue, timestamp, born_timestamp if born_timestamp > 0 else timestamp,
            <const uint8_t *>PyBytes_AS_STRING(born), born_bytes, sys_flag, reconsume_times,
            prepared_offset,
        )
        record.flag = flag
        self._lay(&record, start, size, queue_offset, body, body_bytes, raw_properties,
                  properties_bytes, separator)
        if placed:
            queue.next_offset += 1
        self._at = start + size
        self.count += 1
        return self.segment_start + start

    cdef bint _append_one(
        self, QueueCursor queue, const uint8_t *body, int64_t body_bytes, bytes properties,
    ) noexcept:
        """Append one message of now and of this host; False where something stands against it: a
        body that is empty or too large, or no room in the segment."""
        cdef Py_ssize_t properties_bytes = PyBytes_GET_SIZE(properties)
        cdef bint separator = self._wants_separator(properties)
        cdef int64_t timestamp, size = self._record_size(
            queue, body_bytes, properties_bytes, separator, self._host_bytes)
        cdef Record record
        if not (self._may_be(body_bytes, properties_bytes, separator, size)
                and self._has_room(size)):
            return False
        timestamp = self._timestamp(0)
        self._begin(&record, queue, timestamp, timestamp,
                    <const uint8_t *>PyBytes_AS_STRING(self.store_host), self._host_bytes)
        self._lay(&record, self._at, size, queue.next_offset, body, body_bytes,
                  <const uint8_t *>PyBytes_AS_STRING(properties), properties_bytes, separator)
        queue.next_offset += 1
        self._at += size
        self.count += 1
        return True

    cdef int _check_sizes(self, int64_t body_bytes, int64_t properties_bytes,
                          int64_t size) except -1:
        """What clients send."""
        if body_bytes > self._max_message_bytes:
            raise RecordTooLarge("body", body_bytes, self._max_message_bytes)
        if properties_bytes <= PROPERTIES_MAX_BYTES and size > self._max_message_bytes + 65536:
            raise RecordTooLarge("record", size, self._max_message_bytes + 65536)
        return self._check_stored(properties_bytes, size)

    cdef int _check_stored(self, int64_t properties_bytes, int64_t size) except -1:
        """What the broker stores itself: a copy of what lies in the log was accepted once, maybe
        when larger ones were."""
        if properties_bytes > PROPERTIES_MAX_BYTES:
            raise RecordTooLarge("properties", properties_bytes, PROPERTIES_MAX_BYTES)
        if size + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("record", size, self._segment_bytes - BLANK_BYTES)
        return 0

    def append_many(self, QueueCursor queue not None, list bodies not None, Py_ssize_t start=0,
                    bytes properties=b""):
        """Append bodies[start:] as messages of their own, all with the same properties.

        Returns the index of the first that was not appended: len(bodies), or where the room
        ended. Raises RecordTooLarge at a body that is too large; those before it are appended.
        """
        cdef Py_ssize_t index = start, count = len(bodies)
        cdef int64_t timestamp = self._timestamp(0), size, at
        cdef int64_t properties_bytes = len(properties)
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef const uint8_t *host = <const uint8_t *>PyBytes_AS_STRING(self.store_host)
        cdef int host_bytes = self._host_bytes
        cdef bint separator = self._wants_separator(properties)
        cdef Py_buffer view
        cdef Record record
        if self._base == NULL:
            raise ValueError("no segment is attached")
        self._begin(&record, queue, timestamp, timestamp, host, host_bytes)
        while index < count:
            PyObject_GetBuffer(bodies[index], &view, PyBUF_SIMPLE)
            try:
                self._note(queue)
                size = self._record_size(queue, view.len, properties_bytes, separator, host_bytes)
                self._check_sizes(view.len, properties_bytes, size)
                if not self._has_room(size):
                    break
                self._lay(&record, self._at, size, queue.next_offset, <const uint8_t *>view.buf,
                          view.len, raw_properties, properties_bytes, separator)
            finally:
                PyBuffer_Release(&view)
            queue.next_offset += 1
            self._at += size
            self.count += 1
            index += 1
        return index

    def append_all(self, QueueCursor queue not None, list bodies not None, bytes properties=b""):
        """Append bodies as messages of their own, all or none; the first one's queue offset.

        -1 when there is no room for them: see `wanted`, and `check_all` for the rest.
        """
        if self._base == NULL:
            raise ValueError("no segment is attached")
        self._note(queue)
        return self._append_all(queue, bodies, properties)

    def check_all(self, QueueCursor queue not None, list bodies not None, bytes properties=b""):
        """Raises RecordTooLarge if they, or one of them, fit into no segment; BatchIllegal for an
        empty one."""
        cdef int64_t size, total = 0
        cdef bint separator = self._wants_separator(properties)
        for body in bodies:
            if not body:
                raise BatchIllegal("a message needs a body of at least one byte")
            size = self._record_size(
                queue, len(<bytes?>body), len(properties), separator, self._host_bytes)
            self._check_sizes(len(body), len(properties) + (CRC_PROPERTY_BYTES + separator
                              if self._crc_property else 0), size)
            total += size
        if total + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("batch", total, self._segment_bytes - BLANK_BYTES)

    cdef int64_t _append_all(self, QueueCursor queue, list bodies, bytes properties) except -2:
        """Append them one behind the other, all or none; the first one's queue offset.

        -1 where something stands against it: a body that is no bytes, or empty, or too large, or
        no room in the segment.
        """
        cdef Py_ssize_t index, count = len(bodies)
        cdef int64_t size, total = 0, first = queue.next_offset, timestamp
        cdef int64_t properties_bytes = len(properties), body_bytes
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef const uint8_t *host = <const uint8_t *>PyBytes_AS_STRING(self.store_host)
        cdef int host_bytes = self._host_bytes
        cdef bint separator = self._wants_separator(properties)
        cdef Record record
        for index in range(count):
            if not PyBytes_CheckExact(bodies[index]):
                return -1
            body_bytes = len(<bytes>bodies[index])
            size = self._record_size(queue, body_bytes, properties_bytes, separator, host_bytes)
            if not self._may_be(body_bytes, properties_bytes, separator, size):
                return -1
            total += size
        if not self._has_room(total):
            return -1
        timestamp = self._timestamp(0)
        self._begin(&record, queue, timestamp, timestamp, host, host_bytes)
        for index in range(count):
            body_bytes = len(<bytes>bodies[index])
            size = self._record_size(queue, body_bytes, properties_bytes, separator, host_bytes)
            self._lay(
                &record, self._at, size, queue.next_offset,
                <const uint8_t *>PyBytes_AS_STRING(bodies[index]), body_bytes,
                raw_properties, properties_bytes, separator,
            )
            queue.next_offset += 1
            self._at += size
        self.count += count
        return first

    cdef inline bint _wants_separator(self, bytes properties) noexcept:
        """Whether properties that do not end with one need it before the CRC property."""
        cdef Py_ssize_t count = PyBytes_GET_SIZE(properties)
        return self._crc_property and count > 0 and PyBytes_AS_STRING(properties)[count - 1] != 2

    cdef inline bint _may_be(self, int64_t body_bytes, int64_t properties_bytes, bint separator,
                      int64_t size) noexcept:
        """What `_check_sizes` would let pass, and a body of at least one byte."""
        if self._crc_property:
            properties_bytes += CRC_PROPERTY_BYTES + separator
        return (
            0 < body_bytes <= self._max_message_bytes and properties_bytes <= PROPERTIES_MAX_BYTES
            and size <= self._max_message_bytes + 65536
            and size + BLANK_BYTES <= self._segment_bytes
        )

    def append_batch(
        self, QueueCursor queue not None, const uint8_t[::1] batch not None, int64_t count,
        int32_t sys_flag=0, int64_t born_timestamp=0, bytes born_host=None,
        int64_t store_timestamp=0, int32_t reconsume_times=0,
    ):
        """Append a client batch body of `count` elements, all or nothing.

        The physical offset of the first record, or -1 when there is no room for the batch: see
        `wanted`. Raises BatchIllegal for a body that is not `count` whole elements,
        RecordTooLarge for one that is over the limits.
        """
        cdef bytes born = self.store_host if born_host is None else born_host
        cdef int born_bytes = <int>len(born)
        cdef int64_t total, start, timestamp
        if self._base == NULL:
            raise ValueError("no segment is attached")
        if born_bytes != 8 and born_bytes != 20:
            raise ValueError(f"host of {born_bytes} bytes, 8 or 20 wanted")
        if sys_flag & SYS_TRANSACTION_MASK:
            raise BatchIllegal("a batch cannot be part of a transaction")
        total = self._check_batch(queue, batch, count, born_bytes)
        if not self._has_room(total):
            return -1
        self._note(queue)
        timestamp = self._timestamp(store_timestamp)
        start = self._at
        self._write_batch(
            queue, &batch[0], count, sys_flag, born_timestamp if born_timestamp > 0 else timestamp,
            <const uint8_t *>PyBytes_AS_STRING(born), born_bytes, timestamp, reconsume_times,
        )
        self.batch_queue_offset = queue.next_offset
        queue.next_offset += count
        self._at = start + total
        self.count += count
        return self.segment_start + start

    def check_batch(self, QueueCursor queue not None, const uint8_t[::1] batch not None,
                    int64_t count, int born_bytes):
        """Bytes of a batch's records. Raises what `append_batch` would raise of it."""
        return self._check_batch(queue, batch, count, born_bytes)

    def count_fitting(self, QueueCursor queue not None, const uint8_t[::1] batch not None,
                      int born_bytes, int64_t room):
        """How many elements of a batch have records that fit into so many bytes of a segment,
        beside its blank, and where the next one begins. The batch was checked before."""
        cdef int64_t at = 0, count = 0, body_bytes, size
        room -= BLANK_BYTES
        while at < batch.shape[0]:
            body_bytes = <int32_t>load_be32(&batch[at + BATCH_ELEMENT_BODY_LENGTH])
            size = <int32_t>load_be32(&batch[at + BATCH_ELEMENT_TOTAL_SIZE])
            room -= self._record_size(
                queue, body_bytes, size - BATCH_ELEMENT_BYTES - body_bytes - 2, False, born_bytes)
            if room < 0:
                break
            at += size
            count += 1
        return count, at

    cdef int64_t _check_batch(self, QueueCursor queue, const uint8_t[::1] batch, int64_t count,
                              int born_bytes) except -1:
        cdef int64_t total
        if count <= 0 or batch.shape[0] == 0:
            raise BatchIllegal(f"a batch of {count} elements in {batch.shape[0]} bytes")
        total = self._measure(queue, &batch[0], batch.shape[0], count, born_bytes)
        if total + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("batch", total, self._segment_bytes - BLANK_BYTES)
        return total

    cdef int64_t _measure(self, QueueCursor queue, const uint8_t *batch, int64_t batch_bytes,
                          int64_t count, int born_bytes) except -1:
        """Bytes of all records; every length is checked against the batch before it is followed."""
        cdef int64_t at = 0, total = 0, size, body_bytes, properties_bytes, element = 0
        cdef int unkept
        cdef int64_t crc_bytes = CRC_PROPERTY_BYTES if self._crc_property else 0
        while at < batch_bytes:
            if element == count:
                raise BatchIllegal(f"{batch_bytes - at} bytes behind the last of {count} elements")
            if batch_bytes - at < BATCH_ELEMENT_BYTES + 2:
                raise BatchIllegal(f"element {element}: {batch_bytes - at} bytes are no element")
            body_bytes = <int32_t>load_be32(batch + at + BATCH_ELEMENT_BODY_LENGTH)
            if body_bytes < 0 or body_bytes > batch_bytes - at - BATCH_ELEMENT_BYTES - 2:
                raise BatchIllegal(
                    f"element {element}: body of {body_bytes} bytes, {batch_bytes - at} are left")
            properties_bytes = <int16_t>load_be16(batch + at + BATCH_ELEMENT_BYTES + body_bytes)
            size = BATCH_ELEMENT_BYTES + body_bytes + 2 + properties_bytes
            if properties_bytes < 0 or size > batch_bytes - at:
                raise BatchIllegal(
                    f"element {element}: properties of {properties_bytes} bytes do not fit")
            if <int32_t>load_be32(batch + at + BATCH_ELEMENT_TOTAL_SIZE) != size:
                raise BatchIllegal(f"element {element}: its size field is not {size}")
            unkept = find_unkept(batch + at + BATCH_ELEMENT_BYTES + body_bytes + 2, properties_bytes)
            if unkept >= 0:
                refuse_unkept(element, unkept, batch + at + BATCH_ELEMENT_BYTES + body_bytes + 2,
                              properties_bytes)
            at += size
            size = self._record_size(queue, body_bytes, properties_bytes, False, born_bytes)
            self._check_sizes(body_bytes, properties_bytes + crc_bytes, size)
            total += size
            element += 1
        if element != count:
            raise BatchIllegal(f"{element} elements, {count} announced")
        return total

    cdef void _write_batch(
        self, QueueCursor queue, const uint8_t *batch, int64_t count, int32_t sys_flag,
        int64_t born_timestamp, const uint8_t *born, int born_bytes, int64_t timestamp,
        int32_t reconsume_times,
    ) noexcept:
        cdef int64_t element, size, body_bytes, properties_bytes, at = self._at
        cdef const uint8_t *body
        cdef Record record
        self._begin(&record, queue, timestamp, born_timestamp, born, born_bytes, sys_flag,
                    reconsume_times)
        for element in range(count):
            body_bytes = <int32_t>load_be32(batch + BATCH_ELEMENT_BODY_LENGTH)
            record.flag = <int32_t>load_be32(batch + BATCH_ELEMENT_FLAG)
            body = batch + BATCH_ELEMENT_BYTES
            properties_bytes = <int16_t>load_be16(body + body_bytes)
            size = self._record_size(queue, body_bytes, properties_bytes, False, born_bytes)
            self._lay(&record, at, size, queue.next_offset + element, body, body_bytes,
                      body + body_bytes + 2, properties_bytes, False)
            at += size
            batch = body + body_bytes + 2 + properties_bytes
