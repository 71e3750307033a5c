# --- ahead of the dispatcher: the entries that a queue is about to get -------------------------------

TAIL_DONE = 0  # everything was looked at
TAIL_UNMAPPED = 1  # the segment that begins at or before `reached` is to be mapped first
TAIL_STRANGE = 2  # something that the dispatcher has to judge

cdef enum:
    T_DONE = 0
    T_UNMAPPED = 1
    T_STRANGE = 2


def tail_units(
    LogView log not None, int64_t begin, int64_t end, str topic not None, int32_t queue_id,
    int64_t queue_offset,
):
    """The ConsumeQueue entries of one queue's records in [begin, end), from `queue_offset` on.

    What they are is the dispatcher's rule (dispatch.pxi); where that has more to do than to write
    an entry, this stops. Records below `queue_offset` have their entry and are passed over.

    Returns (reason, reached, entries).
    """
    cdef bytes name = topic.encode()
    cdef const uint8_t *wanted = <const uint8_t *>PyBytes_AS_STRING(name)
    cdef int32_t wanted_bytes = <int32_t>len(name)
    cdef int64_t size = log.segment_bytes, at = begin, stop
    cdef int reason = T_DONE, why, transaction
    cdef const uint8_t *base
    cdef Record record
    cdef uint8_t unit[CONSUME_QUEUE_UNIT_BYTES]
    cdef bytearray found = bytearray()
    if begin < 0:
        raise ValueError(f"no record at {begin}")
    if name == b"SCHEDULE_TOPIC_XXXX":
        return T_STRANGE, begin, found
    while at < end:
        base = log.at(at)
        if base == NULL:
            reason = T_UNMAPPED
            break
        stop = min(end, at - at % size + size)
        why = parse_record(base, stop - at, False, &record)
        if why == REC_BLANK:
            at = at - at % size + size
            continue
        if why != REC_OK or record.physical_offset != at:
            reason = T_STRANGE
            break
        transaction = record.sys_flag & SYS_TRANSACTION_MASK
        if (record.queue_id == queue_id and record.topic_length == wanted_bytes
                and memcmp(record.topic, wanted, wanted_bytes) == 0
                and record.queue_offset >= queue_offset
                and transaction != SYS_TRANSACTION_PREPARED
                and transaction != SYS_TRANSACTION_ROLLBACK):
            if record.queue_offset > queue_offset:
                reason = T_STRANGE
                break
            write_unit(unit, at, record.total_size,
                       tags_code_of(record.properties, record.properties_length))
            found += (<char *>unit)[:CONSUME_QUEUE_UNIT_BYTES]
            queue_offset += 1
        at += record.total_size
    return reason, at, found
