# --- entries of ConsumeQueues --------------------------------------------------------------------------


cdef int64_t SUM_MAX = <int64_t>1 << 62  # what sizes of 32 bits are added to without overflow


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

def units_end(const uint8_t[::1] units not None, int64_t begin, int64_t end):
    """The first ConsumeQueue entry in [begin, end) that is not valid; `end` if all are.

    Valid means: physical offset >= 0 and size > 0 (RocketMQ). Counted in entries.
    """
    cdef int64_t index = begin
    cdef const uint8_t *unit
    check_units(units.shape[0], 0, begin, end)
    while index < end:
        unit = &units[index * CONSUME_QUEUE_UNIT_BYTES]
        if (<int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET) < 0
                or <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE) <= 0):
            break
        index += 1
    return index


def fill_units(uint8_t[::1] units not None, int64_t begin, int64_t end):
    """Write RocketMQ's fillers, entries that stand for nothing, into [begin, end)."""
    cdef int64_t index
    check_units(units.shape[0], 0, begin, end)
    for index in range(begin, end):
        write_unit(&units[index * CONSUME_QUEUE_UNIT_BYTES], 0, FILLER_SIZE, 0)


def fillers_end(const uint8_t[::1] units not None, int64_t begin, int64_t end):
    """The first entry in [begin, end) that is no filler; `end` if all are."""
    cdef int64_t index = begin
    check_units(units.shape[0], 0, begin, end)
    while index < end and is_filler(&units[index * CONSUME_QUEUE_UNIT_BYTES]):
        index += 1
    return index


cdef int64_t real_before(const uint8_t[::1] units, int64_t end) noexcept nogil:
    """The last of the first `end` entries that is no filler; -1 if all are."""
    while end > 0 and is_filler(&units[(end - 1) * CONSUME_QUEUE_UNIT_BYTES]):
        end -= 1
    return end - 1


cdef bint lies_before(const uint8_t[::1] units, int64_t index, int64_t bound) noexcept nogil:
    return <int64_t>load_be64(
        &units[index * CONSUME_QUEUE_UNIT_BYTES + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET]) < bound


cdef bint is_split(const uint8_t[::1] units, int64_t at, int64_t end, int64_t bound) noexcept nogil:
    """Whether the two entries in front of `at` lie before the bound, and the two behind do not."""
    cdef int64_t index = at, i
    for i in range(2):
        index = real_before(units, index)
        if index >= 0 and not lies_before(units, index, bound):
            return False
    for index in range(at, min(end, at + 2)):
        if not is_filler(&units[index * CONSUME_QUEUE_UNIT_BYTES]) and lies_before(
                units, index, bound):
            return False
    return True


def units_before(const uint8_t[::1] units not None, int64_t end, int64_t bound):
    """How many of the first `end` entries name records that begin before `bound`: they ascend.

    A filler says nothing of its place; the entry before it does. Where an entry contradicts its
    neighbours, all are looked at, so that a damaged one does not decide it.
    """
    cdef int64_t low = 0, high = end, middle, real, index, best = 0, score = 0, best_score = 0
    check_units(units.shape[0], 0, 0, end)
    if end <= 0:
        return 0
    with nogil:
        real = real_before(units, end)
        if real < 0 or lies_before(units, real, bound):
            low = end
        while low < high:
            middle = (low + high) // 2
            real = real_before(units, middle + 1)
            if real < 0 or lies_before(units, real, bound):
                low = middle + 1
            else:
                high = real
        if not is_split(units, low, end, bound):
            for index in range(end):
                if is_filler(&units[index * CONSUME_QUEUE_UNIT_BYTES]):
                    continue
                score += -1 if lies_before(units, index, bound) else 1
                if score < best_score:
                    best, best_score = index + 1, score
            low = best
    return low


def last_real(const uint8_t[::1] units not None, int64_t begin, int64_t end):
    """The last entry in [begin, end) that is no filler; -1 if all are."""
    cdef int64_t index
    check_units(units.shape[0], 0, begin, end)
    if begin >= end:
        return -1
    index = end - 1
    while index >= begin and is_filler(&units[index * CONSUME_QUEUE_UNIT_BYTES]):
        index -= 1
    return index if index >= begin else -1
