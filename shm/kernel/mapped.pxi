# --- reading where it lies: from a ConsumeQueue to messages, in the process of who wants them ------

cdef struct Pick:
    const uint8_t *at
    int64_t queue_offset
    int64_t physical_offset
    int32_t size


def deliver(
    LogView log not None, const uint8_t[::1] units not None, int64_t first_index, int64_t begin,
    int64_t end, int64_t log_min, int64_t log_max, bytes topic not None, int32_t queue_id,
    int64_t count_max, int64_t bytes_max, int64_t scan_max, codes=None, tags=None,
    Filter filter=None,
):
    """The messages of the ConsumeQueue entries [begin, end): `gather` and `decode` in one pass.

    Records are copied out of the log once, and it is the copy that is examined and handed out: what
    was found whole stays so, and nobody has to keep a segment mapped.

    Args:
        units: a ConsumeQueue segment whose first entry has `first_index`.
        log_min, log_max: only records wholly inside are read.
        topic, queue_id: whose entries they are.
        count_max, bytes_max: at most so much, but never less than one message.
        scan_max: entries looked at.
        codes, tags: tags codes and tags wanted, None = all.
        filter: None = all.

    Returns (reason, messages, bytes, next_index, unreadable, detail, damaged); see `gather`. With
    GATHER_UNMAPPED there are no messages.
    """
    cdef Reach reach = Reach(log_min, log_max, log.segment_bytes)
    cdef Queue queue = queue_of(topic, queue_id)
    cdef Gathering g = Gathering(G_DONE, begin, 0, 0, 0, -1, -1, -1)
    cdef Codes wanted
    cdef int64_t room
    cdef Pick *picks
    cdef list found = [], damaged
    cdef list texts = None if tags is None else [tag.encode() for tag in tags]
    take_codes(&wanted, codes)
    check_units(units.shape[0], first_index, begin, end)
    if begin >= end:
        return G_DONE, found, 0, begin, 0, -1, None
    room = min(end - begin, max(1, count_max))
    picks = <Pick *>PyMem_Malloc(room * sizeof(Pick))
    if picks == NULL:
        raise MemoryError
    try:
        damaged = pick_for_copy(
            log, &units[0], first_index, end, &queue, &reach, room, bytes_max, scan_max, &wanted,
            filter, picks, &g)
        if g.count == 0:
            return g.reason, found, 0, g.index, g.unreadable, g.detail, damaged
        damaged = examine(picks, &g, &queue, texts, filter, found, damaged)
    finally:
        PyMem_Free(picks)
    return G_DONE, found, g.total, g.index, g.unreadable, -1, damaged


cdef list pick_for_copy(
    LogView log, const uint8_t *units, int64_t first_index, int64_t end, Queue *queue, Reach *reach,
    int64_t room, int64_t bytes_max, int64_t scan_max, Codes *wanted, Filter filter,
    Pick *picks, Gathering *g,
):
    """Find where the records are; what leads nowhere."""
    cdef int64_t phys, begin = g.index
    cdef int32_t size
    cdef int place
    cdef const uint8_t *unit
    cdef Pick *found
    cdef Record record
    cdef list damaged = None
    while g.index < end and g.count < room and g.index - begin < scan_max:
        unit = units + (g.index - first_index) * CONSUME_QUEUE_UNIT_BYTES
        phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
        size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
        if not is_wanted(wanted, <int32_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)):
            g.index += 1
            continue
        place = place_of(phys, size, reach)
        if place != PLACE_READ:
            if place == PLACE_WRONG:
                damaged = noted(damaged, g.index, phys, REC_NO_PLACE)
            else:
                g.unreadable += 1
            g.index += 1
            continue
        if g.count and g.total + size > bytes_max:
            break
        found = &picks[g.count]
        found.at = log.at(phys)
        if found.at == NULL:
            g.reason, g.detail = G_UNMAPPED, phys - phys % reach.segment_bytes
            break
        if filter is not None:
            if wanted.any:
                fetch_ahead(found.at, phys, unit, end - g.index)
            if follow_wanted(found.at, phys, size, queue, g.index, False, filter,
                             &record) == REC_UNWANTED:
                g.index += 1
                continue
        found.queue_offset, found.physical_offset, found.size = g.index, phys, size
        g.count += 1
        g.total += size
        g.index += 1
    return damaged


cdef list examine(
    Pick *picks, Gathering *g, Queue *queue, list texts, Filter filter, list found, list damaged,
):
    """Copy the records and hand out those that hold; what does not."""
    cdef bytes copy = PyBytes_FromStringAndSize(NULL, g.total)
    cdef Holder holder = Holder(copy)
    cdef uint8_t *to = <uint8_t *>PyBytes_AS_STRING(copy)
    cdef Message message
    cdef Pick *each
    cdef int64_t i
    cdef int why
    for i in range(g.count):
        each = &picks[i]
        memcpy(to, each.at, each.size)
        message = Message.__new__(Message)
        why = follow(to, each.physical_offset, each.size, queue, each.queue_offset, True,
                     &message._r)
        if why != REC_OK:
            damaged = noted(damaged, each.queue_offset, each.physical_offset, why)
            continue
        if (texts is None or has_tag(&message._r, texts)) and passes(filter, &message._r):
            message._holder = holder
            message._begin = to
            found.append(message)
        to += each.size
    return damaged
