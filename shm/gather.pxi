# --- reading: from a ConsumeQueue to the records ---------------------------------------------------

cdef class LogView:
    """The CommitLog's segments as one address space, mapped as they are needed."""

    cdef readonly int64_t segment_bytes
    cdef dict _held  # segment start -> memory
    cdef const uint8_t **_bases  # by number relative to _first
    cdef int64_t _first, _count

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
        cdef const uint8_t[::1] memory = buffer
        if segment_start % self.segment_bytes or memory.shape[0] != self.segment_bytes:
            raise ValueError(f"{memory.shape[0]} bytes at {segment_start} are not a segment")
        self._held[segment_start] = memory
        self._rebuild()

    def drop(self, int64_t segment_start):
        self._held.pop(segment_start, None)
        self._rebuild()

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
        self._count = max(self._held) // self.segment_bytes - self._first + 1
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
        cdef int64_t number = physical_offset // self.segment_bytes - self._first
        if physical_offset < 0 or number < 0 or number >= self._count:
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


cdef struct Slice:
    const uint8_t *at
    int32_t size


def gather(
    LogView log not None, const uint8_t[::1] units not None, int64_t first_index, int64_t begin,
    int64_t end, int64_t log_min, int64_t log_max, tuple limits not None, codes=None,
    bint skip_removed=True, bint check_crc=True,
):
    """Collect the records of the ConsumeQueue entries [begin, end) into one buffer.

    Args:
        units: a ConsumeQueue segment whose first entry has `first_index`.
        log_min, log_max: only records wholly inside are read.
        limits: (count_max, bytes_max, scan_max, memory_bytes, hot_bytes, hot_count, cold_bytes,
            cold_count), RocketMQ's rules for what one answer may hold.
        codes: tags codes wanted, None = all.
        skip_removed: as RocketMQ, pass over what lies in the segment of an unreadable entry.
        check_crc: pass over records whose fields or body CRC do not hold.

    Returns (reason, payload, count, next_index, unreadable, detail, last_physical_offset, damaged):
    payload is bytes or None; `unreadable` counts entries whose record is not there or is another's;
    `damaged` lists the physical offsets of records that were passed over, None without one.
    """
    cdef Limits l
    cdef int64_t index = begin, position, phys, code, last_phys = -1
    cdef int64_t count = 0, total = 0, unreadable = 0, skip_below = -1, detail = -1
    cdef int32_t size
    cdef int reason = G_DONE
    cdef Py_ssize_t i, code_count = 0, room
    cdef int32_t wanted[32]
    cdef bint any_code = codes is None, hot, match
    cdef const uint8_t *unit
    cdef const uint8_t *at
    cdef Slice *slices
    cdef bytes payload = None
    cdef char *to
    cdef Record record
    cdef list damaged = None
    (l.count_max, l.bytes_max, l.scan_max, l.memory_bytes, l.hot_bytes, l.hot_count, l.cold_bytes,
     l.cold_count) = limits
    if not any_code:
        if len(codes) > 32:
            raise ValueError(f"{len(codes)} tags, at most 32")
        for value in codes:
            wanted[code_count] = value
            code_count += 1
    if begin < first_index or (end - first_index) * CONSUME_QUEUE_UNIT_BYTES > units.shape[0]:
        raise ValueError(f"entries [{begin}, {end}) are not in the segment from {first_index}")
    if begin >= end:
        return G_DONE, None, 0, begin, 0, -1, -1, None
    room = min(end - begin, max(1, min(l.count_max, max(l.hot_count, l.cold_count))))
    slices = <Slice *>PyMem_Malloc(room * sizeof(Slice))
    if slices == NULL:
        raise MemoryError
    try:
        while index < end:
            unit = &units[(index - first_index) * CONSUME_QUEUE_UNIT_BYTES]
            phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
            size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
            code = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)
            hot = log_max - phys <= l.memory_bytes
            if index - begin >= l.scan_max or count >= room:
                break
            if is_full(&l, count, total, size, hot) or total >= l.bytes_max:
                break
            last_phys = phys
            if skip_below >= 0 and phys < skip_below:
                index += 1
                continue
            if not any_code:
                match = False
                for i in range(code_count):
                    if wanted[i] == <int32_t>code:
                        match = True
                        break
                if not match:
                    index += 1
                    continue
            if phys < log_min or size < RECORD_MIN or phys + size > log_max or (
                    phys % log.segment_bytes + size > log.segment_bytes):
                at = NULL
            else:
                at = log.at(phys)
                if at == NULL:
                    reason = G_UNMAPPED
                    detail = phys - phys % log.segment_bytes
                    break
                # An entry must point at a record of that size which says it is here.
                if (load_be32(at) != <uint32_t>size
                        or <int64_t>load_be64(at + RECORD_HEAD_PHYSICAL_OFFSET) != phys):
                    at = NULL
            if at == NULL:
                unreadable += 1
                if skip_removed and count == 0:
                    skip_below = phys - phys % log.segment_bytes + log.segment_bytes
                index += 1
                continue
            if check_crc and parse_record(at, size, True, &record) != REC_OK:
                if damaged is None:
                    damaged = []
                damaged.append(phys)
                index += 1
                continue
            slices[count].at = at
            slices[count].size = size
            count += 1
            total += size
            index += 1
        if count and reason == G_DONE:
            payload = PyBytes_FromStringAndSize(NULL, total)
            to = PyBytes_AS_STRING(payload)
            for i in range(count):
                memcpy(to, slices[i].at, slices[i].size)
                to += slices[i].size
    finally:
        PyMem_Free(slices)
    return reason, payload, count, index, unreadable, detail, last_phys, damaged
