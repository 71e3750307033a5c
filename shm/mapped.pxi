# --- reading where it lies: from a ConsumeQueue to messages, in the process of who wants them ------

cdef struct Pick:
    const uint8_t *at
    int64_t physical_offset
    int32_t size


def deliver(
    LogView log not None, const uint8_t[::1] units not None, int64_t first_index, int64_t begin,
    int64_t end, int64_t log_min, int64_t log_max, int64_t count_max, int64_t bytes_max,
    int64_t scan_max, codes=None, tags=None,
):
    """The messages of the ConsumeQueue entries [begin, end): `gather` and `decode` in one pass.

    Records are copied out of the log once, and it is the copy that is examined and handed out: what
    was found whole stays so, and nobody has to keep a segment mapped.

    Args:
        units: a ConsumeQueue segment whose first entry has `first_index`.
        log_min, log_max: only records wholly inside are read.
        count_max, bytes_max: at most so much, but never less than one message.
        scan_max: entries looked at.
        codes, tags: tags codes and tags wanted, None = all.

    Returns (reason, messages, bytes, next_index, unreadable, detail, damaged); see `gather`. With
    GATHER_UNMAPPED there are no messages.
    """
    cdef int64_t index = begin, phys, total = 0, count = 0, unreadable = 0, detail = -1, room
    cdef int32_t size, code
    cdef int32_t wanted[32]
    cdef Py_ssize_t i, code_count = 0
    cdef bint any_code = codes is None, match
    cdef const uint8_t *unit
    cdef const uint8_t *at
    cdef Pick *picks
    cdef bytes copy
    cdef uint8_t *to
    cdef Holder holder
    cdef Message message
    cdef list found = [], damaged = None
    cdef list texts = None if tags is None else [tag.encode() for tag in tags]
    if not any_code:
        if len(codes) > 32:
            raise ValueError(f"{len(codes)} tags, at most 32")
        for value in codes:
            wanted[code_count] = value
            code_count += 1
    if begin < first_index or (end - first_index) * CONSUME_QUEUE_UNIT_BYTES > units.shape[0]:
        raise ValueError(f"entries [{begin}, {end}) are not in the segment from {first_index}")
    room = min(end - begin, max(1, count_max))
    if room <= 0:
        return G_DONE, found, 0, begin, 0, -1, None
    picks = <Pick *>PyMem_Malloc(room * sizeof(Pick))
    if picks == NULL:
        raise MemoryError
    try:
        while index < end and count < room and index - begin < scan_max:
            unit = &units[(index - first_index) * CONSUME_QUEUE_UNIT_BYTES]
            phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
            size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
            if not any_code:
                code = <int32_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)
                match = False
                for i in range(code_count):
                    if wanted[i] == code:
                        match = True
                        break
                if not match:
                    index += 1
                    continue
            if phys < log_min or size < RECORD_MIN or phys + size > log_max or (
                    phys % log.segment_bytes + size > log.segment_bytes):
                unreadable += 1
                index += 1
                continue
            if count and total + size > bytes_max:
                break
            at = log.at(phys)
            if at == NULL:
                detail = phys - phys % log.segment_bytes
                break
            picks[count].at = at
            picks[count].physical_offset = phys
            picks[count].size = size
            count += 1
            total += size
            index += 1
        if count == 0:
            return (G_DONE if detail < 0 else G_UNMAPPED), found, 0, index, unreadable, detail, None
        copy = PyBytes_FromStringAndSize(NULL, total)
        holder = Holder(copy)
        to = <uint8_t *>PyBytes_AS_STRING(copy)
        for i in range(count):
            size = picks[i].size
            memcpy(to, picks[i].at, size)
            # An entry must point at a record of that size which says it is here.
            if (load_be32(to) != <uint32_t>size
                    or <int64_t>load_be64(to + RECORD_HEAD_PHYSICAL_OFFSET)
                    != picks[i].physical_offset):
                unreadable += 1
                continue
            message = Message.__new__(Message)
            if parse_record(to, size, True, &message._r) != REC_OK:
                if damaged is None:
                    damaged = []
                damaged.append(picks[i].physical_offset)
                continue
            if texts is None or has_tag(&message._r, texts):
                message._holder = holder
                message._begin = to
                found.append(message)
            to += size
    finally:
        PyMem_Free(picks)
    return G_DONE, found, total, index, unreadable, -1, damaged
