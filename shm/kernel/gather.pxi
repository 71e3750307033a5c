# --- reading: from a ConsumeQueue to the records ---------------------------------------------------

cdef class LogView:
    """The CommitLog's segments as one address space, mapped as they are needed."""

    def __cinit__(self, int64_t segment_bytes):
        if segment_bytes <= 0:
            raise ValueError(f"segments of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes
        self._held = {}
        self._bases = NULL
        self._count = 0

    def __dealloc__(self):
        PyMem_Free(self._bases)

    def set(self, int64_t segment_start, buffer):
        """A mapping of the whole segment."""
        cdef int64_t number
        cdef const uint8_t[::1] memory = buffer
        if (segment_start % self.segment_bytes or memory.shape[0] != self.segment_bytes
                or not 0 <= segment_start <= 0x7FFFFFFFFFFFFFFF - self.segment_bytes):
            raise ValueError(f"{memory.shape[0]} bytes at {segment_start} are not a segment")
        self._held[segment_start] = memory
        number = segment_start // self.segment_bytes - self._first
        if 0 <= number < self._count:
            self._bases[number] = &memory[0]
        else:
            self._rebuild()

    def drop(self, int64_t segment_start):
        cdef int64_t number = segment_start // self.segment_bytes - self._first
        if self._held.pop(segment_start, None) is not None:
            self._bases[number] = NULL

    def clear(self):
        self._held.clear()
        self._rebuild()

    @property
    def starts(self):
        return sorted(self._held)

    def _rebuild(self):
        cdef const uint8_t[::1] memory
        PyMem_Free(self._bases)
        self._bases = NULL
        self._count = 0
        if not self._held:
            return
        self._first = min(self._held) // self.segment_bytes
        # With room for as many behind them: segments are mapped one by one.
        self._count = max(self._held) // self.segment_bytes - self._first + 1 + len(self._held)
        self._bases = <const uint8_t **>PyMem_Malloc(self._count * sizeof(uint8_t *))
        if self._bases == NULL:
            self._count = 0
            raise MemoryError
        memset(self._bases, 0, self._count * sizeof(uint8_t *))
        for start, held in self._held.items():
            memory = held
            self._bases[start // self.segment_bytes - self._first] = &memory[0]

    cdef const uint8_t *at(self, int64_t physical_offset) noexcept nogil:
        """The byte's address, or NULL if its segment is not mapped."""
        cdef int64_t number
        if physical_offset < 0:
            return NULL
        number = physical_offset // self.segment_bytes - self._first
        if number < 0 or number >= self._count:
            return NULL
        if self._bases[number] == NULL:
            return NULL
        return self._bases[number] + physical_offset % self.segment_bytes


GATHER_DONE = 0
GATHER_UNMAPPED = 1  # a segment has to be mapped first: its start is in `detail`

cdef enum:
    G_DONE = 0
    G_UNMAPPED = 1


cdef struct Limits:
    int64_t count_max  # messages wanted
    int64_t bytes_max  # bytes wanted
    int64_t scan_max  # entries looked at
    int64_t memory_bytes  # so far behind the log's end counts as in memory
    int64_t hot_bytes
    int64_t hot_count
    int64_t cold_bytes
    int64_t cold_count
    int64_t room  # for so many slices


cdef bint is_full(Limits *limits, int64_t count, int64_t total, int64_t size,
                  bint hot) noexcept nogil:
    """RocketMQ's isTheBatchFull: never before the first message."""
    if count == 0:
        return False
    if count + 1 > limits.count_max or total + size > limits.bytes_max:
        return True
    if hot:
        return total + size > limits.hot_bytes or count > limits.hot_count - 1
    return total + size > limits.cold_bytes or count > limits.cold_count - 1


cdef list noted(list damaged, int64_t index, int64_t physical_offset, int why):
    if damaged is None:
        damaged = []
    damaged.append((index, physical_offset, why))
    return damaged


cdef struct Slice:
    const uint8_t *at
    int32_t size


cdef struct Codes:  # of tags
    bint any
    Py_ssize_t count
    int32_t wanted[32]


cdef int take_codes(Codes *codes, wanted) except -1:
    """None: any."""
    codes.any, codes.count = wanted is None, 0
    if wanted is None:
        return 0
    if len(wanted) > 32:
        raise ValueError(f"{len(wanted)} tags, at most 32")
    for value in wanted:
        codes.wanted[codes.count] = value
        codes.count += 1
    return 0


cdef inline bint is_wanted(Codes *codes, int32_t code) noexcept nogil:
    cdef Py_ssize_t i
    if codes.any:
        return True
    for i in range(codes.count):
        if codes.wanted[i] == code:
            return True
    return False


cdef struct Gathering:  # how far it has come
    int reason
    int64_t index, count, total, unreadable, skip_below, detail, last_phys


def gather(
    LogView log not None, const uint8_t[::1] units not None, int64_t first_index, int64_t begin,
    int64_t end, int64_t log_min, int64_t log_max, bytes topic not None, int32_t queue_id,
    tuple limits not None, codes=None, bint skip_removed=True, bint check_crc=True,
    Filter filter=None,
):
    """Collect the records of a queue's ConsumeQueue entries [begin, end) into one buffer.

    Args:
        units: a ConsumeQueue segment whose first entry has `first_index`.
        log_min, log_max: only records wholly inside are read.
        topic, queue_id: whose entries they are.
        limits: (count_max, bytes_max, scan_max, memory_bytes, hot_bytes, hot_count, cold_bytes,
            cold_count), RocketMQ's rules for what one answer may hold.
        codes: tags codes wanted, None = all.
        skip_removed: as RocketMQ, pass over what lies in the segment of an unreadable entry.
        check_crc: pass over records whose body CRC does not hold.
        filter: None = all.

    Returns (reason, payload, count, next_index, unreadable, detail, last_physical_offset, damaged):
    payload is bytes or None; `unreadable` counts entries whose record is not there any more, or
    never was; `damaged` lists what does not hold and was passed over, None without: (queue offset,
    physical offset, index into REASONS).
    """
    cdef Limits l
    cdef Codes wanted
    cdef Queue queue = queue_of(topic, queue_id)
    cdef Reach reach = Reach(log_min, log_max, log.segment_bytes)
    cdef Gathering g = Gathering(G_DONE, begin, 0, 0, 0, -1, -1, -1)
    cdef Slice *slices
    cdef bytes payload = None
    cdef list damaged
    (l.count_max, l.bytes_max, l.scan_max, l.memory_bytes, l.hot_bytes, l.hot_count, l.cold_bytes,
     l.cold_count) = limits
    take_codes(&wanted, codes)
    check_units(units.shape[0], first_index, begin, end)
    if begin >= end:
        return G_DONE, None, 0, begin, 0, -1, -1, None
    l.room = min(end - begin, max(1, min(l.count_max, max(l.hot_count, l.cold_count))))
    slices = <Slice *>PyMem_Malloc(l.room * sizeof(Slice))
    if slices == NULL:
        raise MemoryError
    try:
        damaged = pick(log, &units[0], first_index, end, &queue, &reach, &l, &wanted, skip_removed,
                       check_crc, filter, slices, &g)
        if g.count and g.reason == G_DONE:
            payload = joined(slices, g.count, g.total)
    finally:
        PyMem_Free(slices)
    return g.reason, payload, g.count, g.index, g.unreadable, g.detail, g.last_phys, damaged


cdef list pick(
    LogView log, const uint8_t *units, int64_t first_index, int64_t end, Queue *queue, Reach *reach,
    Limits *l, Codes *wanted, bint skip_removed, bint check_crc, Filter filter,
    Slice *slices, Gathering *g,
):
    """Find the records; what does not hold."""
    cdef int64_t phys, begin = g.index
    cdef int32_t size
    cdef int place, why
    cdef bint hot
    cdef const uint8_t *unit
    cdef const uint8_t *at
    cdef Record record
    cdef list damaged = None
    while g.index < end:
        unit = units + (g.index - first_index) * CONSUME_QUEUE_UNIT_BYTES
        phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
        size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
        hot = phys >= 0 and (phys > reach.log_max or reach.log_max - phys <= l.memory_bytes)
        if g.index - begin >= l.scan_max or g.count >= l.room:
            break
        if is_full(l, g.count, g.total, size, hot) or g.total >= l.bytes_max:
            break
        g.last_phys = phys
        if (g.skip_below >= 0 and phys < g.skip_below) or not is_wanted(
                wanted, <int32_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)
        ):
            g.index += 1
            continue
        place = place_of(phys, size, reach)
        if place == PLACE_GONE or place == PLACE_FILLER:
            g.unreadable += 1
            if skip_removed and g.count == 0:
                g.skip_below = phys - phys % reach.segment_bytes + reach.segment_bytes
            g.index += 1
            continue
        why = REC_NO_PLACE
        if place == PLACE_READ:
            at = log.at(phys)
            if at == NULL:
                g.reason, g.detail = G_UNMAPPED, phys - phys % reach.segment_bytes
                break
            if filter is not None and wanted.any:
                fetch_ahead(at, phys, unit, end - g.index)
            why = follow_wanted(at, phys, size, queue, g.index, check_crc, filter, &record)
        if why == REC_UNWANTED:
            pass
        elif why != REC_OK:
            damaged = noted(damaged, g.index, phys, why)
        else:
            slices[g.count].at, slices[g.count].size = at, size
            g.count += 1
            g.total += size
        g.index += 1
    return damaged


cdef bytes joined(Slice *slices, int64_t count, int64_t total):
    cdef bytes payload = PyBytes_FromStringAndSize(NULL, total)
    cdef char *to = PyBytes_AS_STRING(payload)
    cdef int64_t i
    for i in range(count):
        memcpy(to, slices[i].at, slices[i].size)
        to += slices[i].size
    return payload
