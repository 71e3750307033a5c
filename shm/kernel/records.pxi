# --- records: what one is, which queue entry it gets, and whether an entry holds ---------------------
#
# The one place for these rules. Who dispatches, reads, walks or verifies asks here, so that nobody is
# laxer than the others.

from cometmq.protocol import names as _names

REASONS = (
    "ok",
    "end of segment",
    "no record magic",
    "impossible size",
    "fields and size disagree",
    "wrong body CRC",
    "stored position is not its place",
    "its topic, queue id or queue offset cannot be one",
    "its body cannot be unfolded",
    "the record there is none of this place in the queue",
    "no record can lie there",
)

QUEUE_OFFSET_MAX = QUEUE_OFFSET_LAST


def is_queue_name(str topic not None, queue_id):
    """Whether records may belong to such a queue: then it is a folder's name, inside the store."""
    cdef bytes raw = topic.encode(errors="replace")
    return 0 <= queue_id <= 0x7FFFFFFF and is_topic(
        <const uint8_t *>PyBytes_AS_STRING(raw), len(raw))


cdef int refuse_unkept(
    int64_t element, int which, const uint8_t *properties, Py_ssize_t count
) except -1:
    """Raise BatchIllegal with what a client of ours would have said."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    find_property(properties, count, unkept_name[which], unkept_bytes[which], &value,
                  &value_bytes)
    text = _names.unkept(unkept_name[which].decode(), decode_text(value, value_bytes))
    raise BatchIllegal(f"element {element}: {text}")


def delayed_code(const uint8_t[::1] stored not None, const int64_t[::1] levels_ms not None):
    """That tagsCode of a record, with so long a wait of each level. Raises RecordDamaged."""
    cdef Record record
    cdef int why = REC_BAD_SIZE if stored.shape[0] < RECORD_MIN else parse_record(
        &stored[0], stored.shape[0], False, &record)
    if why != REC_OK:
        raise RecordDamaged(REASONS[why], 0)
    return delay_code(&record, &levels_ms[0] if levels_ms.shape[0] else NULL, levels_ms.shape[0])


# --- walks ---


def stored_at(buffer, int64_t segment_start, int64_t physical_offset, int32_t size,
              bytes topic not None, int32_t queue_id, int64_t queue_offset):
    """The store time of the record that a queue's entry points at; None if the entry does not hold.

    Args:
        buffer: the log's segment; an entry that leads outside of it does not hold.
    """
    cdef const uint8_t[::1] view = buffer
    cdef Queue queue = queue_of(topic, queue_id)
    cdef Record record
    cdef int64_t at
    if not 0 <= segment_start <= physical_offset or size < RECORD_MIN:
        return None
    at = physical_offset - segment_start
    if at > view.shape[0] or size > view.shape[0] - at:
        return None
    if follow(&view[at], physical_offset, size, &queue, queue_offset, False, &record) != REC_OK:
        return None
    return record.store_timestamp


def scan(
    buffer, int64_t segment_start, int64_t begin, int64_t end, bint check_crc=True,
    bint check_position=True, int64_t count_max=0x7FFFFFFFFFFFFFFF,
):
    """Walk records from physical offset `begin` to at most `end`, both inside one segment.

    Returns (reached, reason, count, last_record, last_store_timestamp): where the walk stopped,
    an index into REASONS (0: at `end`, or `count_max` records were seen), how many records were
    whole, the physical offset of the last of them or -1, and its store time.

    Args:
        check_position: take only what says that it lies there, and can be of a queue.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t stop = end - segment_start, count = 0, last = -1, last_timestamp = 0
    cdef int reason = REC_OK
    cdef Record record
    with nogil:
        while at < stop and count < count_max:
            if check_position:
                reason = judge_record(&view[at], stop - at, segment_start + at, check_crc, &record)
            else:
                reason = parse_record(&view[at], stop - at, check_crc, &record)
            if reason != REC_OK:
                break
            count += 1
            last = segment_start + at
            last_timestamp = record.store_timestamp
            at += record.total_size
    return segment_start + at, reason, count, last, last_timestamp


def find_last(buffer, int64_t segment_start, int64_t begin, int64_t end, bytes topic not None):
    """The last record of a topic in [begin, end) of a segment, walking from record to record.

    Returns (reached, found, size, behind, timestamp before): where the walk stopped, which is `end`
    unless a record does not hold or a blank lies there; the physical offset and the size of that
    record, -1 and 0 if there is none; how many records lie between it and `reached`; the store time
    of the record before it, 0 for the first. Bodies are not looked at.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t stop = end - segment_start, found = -1, size = 0, behind = 0
    cdef int64_t timestamp = 0, timestamp_before = 0
    cdef const uint8_t *wanted = <const uint8_t *>PyBytes_AS_STRING(topic)
    cdef Py_ssize_t wanted_bytes = len(topic)
    cdef Record record
    with nogil:
        while at < stop:
            if record_here(&view[at], stop - at, segment_start + at, False, &record) != REC_OK:
                break
            behind += 1
            if (record.topic_length == wanted_bytes
                    and memcmp(record.topic, wanted, wanted_bytes) == 0):
                found, size, behind = segment_start + at, record.total_size, 0
                timestamp_before = timestamp
            timestamp = record.store_timestamp
            at += record.total_size
    return segment_start + at, found, size, behind, timestamp_before


def whole_records(buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t most):
    """Where the last record ends that begins in [begin, end) of a segment and lies whole in the
    first `most` bytes; the end of the first one, if that alone is larger. -1: none begins there.

    The blank that closes a segment is a record to its end. Only size, magic and place are looked
    at: for who passes on what the writer has published, and needs to know where he may cut it.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t stop = end - segment_start, limit = at + min(most, stop), reached = -1, size
    with nogil:
        while at < stop:
            size = size_here(&view[at], stop - at, segment_start + at, view.shape[0] - at)
            if size < 0 or (reached >= 0 and at + size > limit):
                break
            at += size
            reached = segment_start + at
            if at >= limit:
                break
    return reached


def records_before(
    buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t most, bytes topic not None
):
    """As `whole_records`, but it goes no further than to where a record of that topic begins.

    Returns (reached, body, size): `begin` if nothing was passed; where the body lies in the buffer
    of the record of that topic that begins at `reached`, and its size, -1 and 0 if it is another
    reason that ends the walk.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t first = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t at = first, stop = end - segment_start, limit = first + min(most, stop), size
    cdef int64_t body = -1, body_bytes = 0
    cdef const uint8_t *wanted = <const uint8_t *>PyBytes_AS_STRING(topic)
    cdef Py_ssize_t wanted_bytes = len(topic)
    cdef Record record
    with nogil:
        while at < stop:
            size = size_here(&view[at], stop - at, segment_start + at, view.shape[0] - at)
            if size < 0 or (at > first and at + size > limit):
                break
            if load_be32(&view[at + RECORD_HEAD_MAGIC]) != <uint32_t>MAGIC_BLANK:
                if parse_record(&view[at], size, False, &record) != REC_OK:
                    break
                if (record.topic_length == wanted_bytes
                        and memcmp(record.topic, wanted, wanted_bytes) == 0):
                    body, body_bytes = record.body - &view[0], record.body_length
                    break
            at += size
            if at >= limit:
                break
    return segment_start + at, body, body_bytes


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <string.h>
    extern void *memmem(const void *, size_t, const void *, size_t);
    """
    void *memmem(const void *text, size_t count, const void *wanted, size_t wanted_bytes) nogil


def find_record(
    buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t not_before=0,
):
    """The first whole record that begins in [begin, end) and says that it lies there; or -1.

    For the way out of a damaged stretch: everything that `judge_record` asks for must hold, CRC
    included, and its store time must not be before `not_before`. It may reach behind `end`.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t size = view.shape[0], stop = end - segment_start, found = -1
    cdef Record record
    cdef const uint8_t *base
    cdef const uint8_t *hit
    if at == stop or size - at < RECORD_MIN:
        return -1
    base = &view[0]
    with nogil:
        while at < stop and size - at >= RECORD_MIN:
            # Both magics begin with these three bytes.
            hit = <const uint8_t *>memmem(
                base + at + RECORD_HEAD_MAGIC, size - at - RECORD_HEAD_MAGIC, b"\xda\xa3\x20", 3)
            if hit == NULL:
                break
            at = hit - base - RECORD_HEAD_MAGIC
            if at >= stop:
                break
            if (judge_record(base + at, size - at, segment_start + at, True, &record) == REC_OK
                    and record.store_timestamp >= not_before):
                found = segment_start + at
                break
            at += 1
    return found
