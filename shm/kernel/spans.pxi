# --- stretches of queues, and memory that grows ------------------------------------------------------
#
# For all that goes over many records without a Python object a message.


cdef struct Span:
    Py_ssize_t topic_at  # in the text
    Py_ssize_t topic_bytes
    uint32_t hash
    int32_t queue_id
    int64_t begin
    int64_t end


cdef class QueueSpans:
    """Queues and a stretch of each: what is wanted of a log, or what was seen in it."""

    cdef Grow _text
    cdef Span *_spans
    cdef int32_t *_table  # slot + 1, open addressing
    cdef Py_ssize_t _count, _room

    def __cinit__(self):
        self._resize(64)

    def __dealloc__(self):
        free(self._text.data)
        free(self._spans)
        free(self._table)

    def __len__(self):
        return self._count

    cdef int _resize(self, Py_ssize_t room) except -1 nogil:
        cdef Py_ssize_t slot
        cdef Span *spans = <Span *>realloc(self._spans, room * sizeof(Span))
        cdef int32_t *table
        if spans != NULL:
            self._spans = spans
        table = <int32_t *>realloc(self._table, 2 * room * sizeof(int32_t))
        if table != NULL:
            self._table = table
        if spans == NULL or table == NULL:
            with gil:
                raise MemoryError
        self._room = room
        memset(table, 0, 2 * room * sizeof(int32_t))
        for slot in range(self._count):
            self._enter(slot)
        return 0

    cdef void _enter(self, Py_ssize_t slot) noexcept nogil:
        cdef Py_ssize_t at = self._spans[slot].hash % <uint32_t>(2 * self._room)
        while self._table[at]:
            at = (at + 1) % (2 * self._room)
        self._table[at] = <int32_t>slot + 1

    cdef Span *find(self, const uint8_t *topic, Py_ssize_t count, int32_t queue_id) noexcept nogil:
        cdef uint32_t h = crc_of(<uint32_t>queue_id, topic, count)
        cdef Py_ssize_t at = h % <uint32_t>(2 * self._room)
        cdef Span *span
        while self._table[at]:
            span = &self._spans[self._table[at] - 1]
            if (span.hash == h and span.queue_id == queue_id and span.topic_bytes == count
                    and memcmp(self._text.data + span.topic_at, topic, count) == 0):
                return span
            at = (at + 1) % (2 * self._room)
        return NULL

    cdef Span *put(self, const uint8_t *topic, Py_ssize_t count, int32_t queue_id,
                   int64_t begin, int64_t end) except NULL nogil:
        cdef Span *span
        if self._count == self._room:
            self._resize(2 * self._room)
        span = &self._spans[self._count]
        span.topic_at = self._text.size
        span.topic_bytes = count
        span.hash = crc_of(<uint32_t>queue_id, topic, count)
        span.queue_id = queue_id
        span.begin = begin
        span.end = end
        put_bytes(&self._text, topic, count)
        self._enter(self._count)
        self._count += 1
        return span

    def add(self, str topic not None, int32_t queue_id, int64_t begin, int64_t end):
        cdef bytes raw = topic.encode()
        self.put(<const uint8_t *>PyBytes_AS_STRING(raw), len(raw), queue_id, begin, end)

    def items(self):
        cdef Py_ssize_t slot
        cdef Span *span
        found = []
        for slot in range(self._count):
            span = &self._spans[slot]
            topic = decode_text(self._text.data + span.topic_at, span.topic_bytes)
            found.append((topic, span.queue_id, span.begin, span.end))
        return found

    def survey(self, buffer, int64_t segment_start, int64_t begin, int64_t end):
        """Widen the stretches by the queue offsets of the whole records in [begin, end).

        Returns (reached, index into REASONS). Records that have no place in a queue, prepared and
        rolled back transactions, do not count.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start
        cdef int reason = REC_OK
        cdef Record record
        cdef Span *span
        with nogil:
            while at < stop:
                reason = judge_record(&view[at], stop - at, segment_start + at, False, &record)
                if reason != REC_OK:
                    break
                at += record.total_size
                if not is_queued(&record):
                    continue
                span = self.find(record.topic, record.topic_length, record.queue_id)
                if span == NULL:
                    self.put(record.topic, record.topic_length, record.queue_id,
                             record.queue_offset, record.queue_offset + 1)
                else:
                    span.begin = min(span.begin, record.queue_offset)
                    span.end = max(span.end, record.queue_offset + 1)
        return segment_start + at, reason
