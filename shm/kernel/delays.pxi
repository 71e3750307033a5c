# --- delay levels: what has waited is copied to where it was meant for; what was given back waits -----

DELAYS_DONE = 0  # the payload ends, or there is no room for more
DELAYS_EARLY = 1  # it waits on, for so many ms
DELAYS_NEW_QUEUE = 2  # a queue has no number yet
DELAYS_AHEAD = 3  # it was stamped by a clock that is ahead of this one, in another boot
DELAYS_ODD = 4  # no copy can be stored, or for no queue

from cometmq.protocol import uptime as _uptime

cdef enum:
    DL_DONE = 0
    DL_EARLY = 1
    DL_NEW_QUEUE = 2
    DL_AHEAD = 3
    DL_ODD = 4

cdef int64_t UP_AHEAD_MS = _uptime.AHEAD_MS


def fill_due(InnerEncoder encoder not None, const uint8_t[::1] payload not None, Py_ssize_t begin,
             dict queues not None, int64_t delay, int64_t wall, int64_t clock, int64_t up):
    """Add copies of a delay level's records, from byte `begin` of a payload on, as long as they
    have waited long enough.

    Args:
        queues: b"topic\\x01queue id" -> the encoder's number; -1: there can be no such queue.
        delay: how many ms a record waits.
        wall: now, in ms since 1970.
        clock, up: now, by the clock that nobody sets.

    Returns (reason, the byte and the queue offset of the record that is next, -1 at the end; how
    long it waits or the key of its queue).
    """
    cdef Py_ssize_t at = begin, count = payload.shape[0]
    cdef int64_t waited
    cdef Record record
    cdef Timing timing
    cdef bytes key
    if not 0 <= begin <= count:
        raise ValueError(f"byte {begin} of {count}")
    while at < count:
        if parse_record(&payload[at], count - at, True, &record) != REC_OK:
            raise RecordDamaged("no record that waits", at)
        read_timing(record.properties, record.properties_length, &timing)
        waited = waited_by(&record, &timing, wall, clock, up)
        if waited < 0:
            return DL_AHEAD, at, record.queue_offset, None
        if waited < delay:
            return DL_EARLY, at, record.queue_offset, delay - waited
        key = queue_key(&timing)
        number = queues.get(key)
        if number is None:
            return DL_NEW_QUEUE, at, record.queue_offset, key
        if number < 0:
            return DL_ODD, at, record.queue_offset, None
        try:
            encoder._add_due(number, &record)
        except BatchFull:
            return DL_DONE, at, record.queue_offset, None
        except RecordTooLarge:
            return DL_ODD, at, record.queue_offset, None
        at += record.total_size
    return DL_DONE, at, -1, None


cdef inline int64_t waited_by(
    Record *record, Timing *timing, int64_t wall, int64_t clock, int64_t up
) noexcept nogil:
    """For how many ms: by the clock that nobody sets, if the record has a time of it; else by the
    wall clock, below 0 where that has been set back since. As `Now.waited_ms`, for which a time
    that is a little ahead (`UP_AHEAD_MS`) is below 0."""
    if timing.up < 0 or timing.clock != clock or timing.up > up + UP_AHEAD_MS:
        return wall - max(<int64_t>0, record.store_timestamp)
    return max(<int64_t>0, up - timing.up)


def again_properties(Message message not None, bytes topic not None, bytes tail not None,
                     bint waits):
    """The properties of a copy that comes again, as they stand in its record: those of the message
    without what a copy has anew, RETRY_TOPIC and ORIGIN_MESSAGE_ID where they are missing, `tail`.

    Args:
        topic: that the message was sent to.
        waits: the copy is told anew where it is meant for.
    """
    cdef const uint8_t *given = message._r.properties
    cdef Py_ssize_t count = message._r.properties_length, at = 0, end, size = 0
    cdef const uint8_t *mark
    cdef uint8_t *kept = <uint8_t *>PyMem_Malloc(count + 1)
    cdef bint has_topic = False, has_origin = False
    if kept == NULL:
        raise MemoryError
    try:
        while at < count:
            mark = <const uint8_t *>memchr(given + at, 2, count - at)
            end = count if mark == NULL else mark - given
            if is_kept_again(given + at, end - at, waits):
                has_topic |= value_bytes_of(given + at, end - at, b"RETRY_TOPIC", 11) > 0
                has_origin |= value_bytes_of(given + at, end - at, b"ORIGIN_MESSAGE_ID", 17) > 0
                memcpy(kept + size, given + at, end - at)
                size += end - at
                kept[size] = 2
                size += 1
            at = end + 1
        copied = PyBytes_FromStringAndSize(<const char *>kept, size)
    finally:
        PyMem_Free(kept)
    if not has_topic:
        copied += b"RETRY_TOPIC\x01" + topic + b"\x02"
    if not has_origin:
        copied += b"ORIGIN_MESSAGE_ID\x01" + message.offset_msg_id.encode() + b"\x02"
    return copied + tail


cdef bint is_kept_again(const uint8_t *entry, Py_ssize_t count, bint waits) noexcept nogil:
    """Of an entry: it has a name and a value, and none of the names that a copy has anew."""
    cdef const uint8_t *mark = <const uint8_t *>memchr(entry, 1, count) if count > 0 else NULL
    cdef Py_ssize_t name_bytes = 0 if mark == NULL else mark - entry
    if name_bytes == 0 or name_bytes + 1 == count:
        return False
    if name_bytes == 4:
        return memcmp(entry, b"WAIT", 4) != 0
    if name_bytes == 5:
        return memcmp(entry, b"DELAY", 5) != 0
    if name_bytes == 8:
        return (memcmp(entry, b"__CRC32#", 8) != 0
                and not (waits and memcmp(entry, b"REAL_QID", 8) == 0))
    if name_bytes == 10:
        return (memcmp(entry, b"COMETMQ_UP", 10) != 0
                and not (waits and memcmp(entry, b"REAL_TOPIC", 10) == 0))
    return True
