# --- stretches of queues, and memory that grows ------------------------------------------------------
#
# For all that goes over many records without a Python object a message.

from libc.stdlib cimport free, malloc, realloc

cdef int64_t SUM_MAX = <int64_t>1 << 62  # what sizes of 32 bits are added to without overflow


cdef struct Grow:
    uint8_t *data
    Py_ssize_t size
    Py_ssize_t capacity


cdef int grow_to(Grow *g, Py_ssize_t capacity) except -1 nogil:
    cdef uint8_t *grown
    cdef Py_ssize_t wanted = max(capacity, 2 * g.capacity, 1024)
    grown = <uint8_t *>realloc(g.data, wanted)
    if grown == NULL:
        with gil:
            raise MemoryError(f"{wanted} bytes of a batch")
    g.data = grown
    g.capacity = wanted
    return 0


cdef inline int reserve_in(Grow *g, Py_ssize_t extra) except -1 nogil:
    if g.size + extra > g.capacity:
        grow_to(g, g.size + extra)
    return 0


cdef inline int put_i32(Grow *g, int32_t value) except -1 nogil:
    reserve_in(g, 4)
    (<int32_t *>(g.data + g.size))[0] = value
    g.size += 4
    return 0


cdef inline int put_i64(Grow *g, int64_t value) except -1 nogil:
    reserve_in(g, 8)
    (<int64_t *>(g.data + g.size))[0] = value
    g.size += 8
    return 0


cdef inline int put_bytes(Grow *g, const uint8_t *raw, Py_ssize_t count) except -1 nogil:
    reserve_in(g, count)
    memcpy(g.data + g.size, raw, count)
    g.size += count
    return 0


cdef Py_ssize_t utf8_step(const uint8_t *text, Py_ssize_t count, bint *good) noexcept nogil:
    """Bytes of the character at `text`; where it is none, of what one U+FFFD stands for.

    Unicode's table 3-7 and its "maximal subpart", as Python's decoder has it.
    """
    cdef uint8_t first = text[0], low = 0x80, high = 0xBF
    cdef Py_ssize_t more, i
    good[0] = True
    if first < 0x80:
        return 1
    if 0xC2 <= first <= 0xDF:
        more = 1
    elif 0xE0 <= first <= 0xEF:
        more = 2
        if first == 0xE0:
            low = 0xA0
        elif first == 0xED:
            high = 0x9F
    elif 0xF0 <= first <= 0xF4:
        more = 3
        if first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
    else:
        good[0] = False
        return 1
    for i in range(1, more + 1):
        if i >= count or not low <= text[i] <= high:
            good[0] = False
            return i
        low, high = 0x80, 0xBF
    return more + 1


cdef int put_text(Grow *g, const uint8_t *text, Py_ssize_t count) except -1 nogil:
    """Text that may be anything: what is no UTF-8 becomes U+FFFD."""
    cdef Py_ssize_t at = 0, step
    cdef bint good
    while count - at >= 8 and is_ascii8(text + at):
        at += 8
    while at < count and text[at] < 0x80:
        at += 1
    put_bytes(g, text, at)
    if at == count:
        return 0
    reserve_in(g, 3 * (count - at))
    while at < count:
        step = utf8_step(text + at, count - at, &good)
        if good:
            memcpy(g.data + g.size, text + at, step)
            g.size += step
        else:
            memcpy(g.data + g.size, b"\xef\xbf\xbd", 3)
            g.size += 3
        at += step
    return 0


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


def unit_marks(
    const uint8_t[::1] units not None, int64_t first_index, int64_t begin, int64_t end,
    int64_t bytes_max, int64_t count_max, int64_t held_bytes, int64_t held_count,
    Py_ssize_t marks_max,
):
    """Where parts of at most so many bytes or messages begin, by the sizes in a ConsumeQueue.

    A part has one message at least. `held_bytes`, `held_count` are what the part that goes on here
    holds already. Returns (marks, reached, bytes in [begin, reached), held bytes, held count).
    """
    cdef int64_t index = begin, total = 0
    cdef int32_t size
    cdef list marks = []
    check_units(units.shape[0], first_index, begin, end)
    if bytes_max < 0 or held_bytes < 0 or held_count < 0 or held_bytes > SUM_MAX or (
            held_count > SUM_MAX):
        raise ValueError(f"parts of {bytes_max} bytes, {held_bytes} and {held_count} are held")
    while index < end:
        size = <int32_t>load_be32(&units[(index - first_index) * CONSUME_QUEUE_UNIT_BYTES
                                         + CONSUME_QUEUE_UNIT_SIZE])
        if size < 0 or size == FILLER_SIZE:
            size = 0
        if held_count and (held_bytes > bytes_max - size or held_count >= count_max):
            if len(marks) == marks_max:
                break
            marks.append(index)
            held_bytes = held_count = 0
        held_bytes += size
        held_count += 1
        total += size
        index += 1
    return marks, index, total, held_bytes, held_count


def units_below(const uint8_t[::1] units not None, int64_t begin, int64_t end, int64_t bound):
    """One past the last of the entries [begin, end) whose record ends at or below `bound`."""
    cdef const uint8_t *unit
    cdef int64_t phys
    cdef int32_t size
    check_units(units.shape[0], 0, begin, end)
    while end > begin:
        unit = &units[(end - 1) * CONSUME_QUEUE_UNIT_BYTES]
        phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
        size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
        # A filler says nothing; it lies below if what stands before it does.
        if not is_filler(unit) and 0 <= phys <= bound and 0 < size <= bound - phys:
            break
        end -= 1
    return end
