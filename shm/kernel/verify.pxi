# --- a whole store, looked over: records against queues, and both kinds of entries against records ----
#
# Python is told of what is wrong, and asked for mappings; what holds never leaves this file.

VERIFY_DONE = 0  # reached the end that was asked for
VERIFY_SEGMENT = 1  # the record lies in another segment of the log: hand that in
VERIFY_WRONG = 2  # the last number is an index into REASONS

cdef enum:
    V_DONE = 0
    V_SEGMENT = 1
    V_WRONG = 2


@cython.final
cdef class StoreVerify(LogWalk):
    """Goes over a log's records, each against its entry. One thread uses it.

    `findings`: as LogWalk's, of kind CQ_PHY for an entry that is not the record's, and CQ_TAGS. The
    delay topic's tagsCode depends on a setting of the broker and is not looked at.
    """

    def __cinit__(self):
        self._findings_max = 0x7FFFFFFF

    def verify(self, buffer, int64_t segment_start, int64_t begin, int64_t end):
        """Compare the records in [begin, end) of a segment with their entries.

        Returns (reached, a WALK_ reason, lane, queue offset or index into REASONS): WALK_WINDOW
        asks for the lane's window, all others are the end of a stretch.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start, size = view.shape[0], index = -1
        cdef Py_ssize_t number = -1
        cdef int why, reason = W_DONE
        cdef Lane *lane
        cdef Record record
        with nogil:
            while at < stop:
                why = judge_record(&view[at], size - at, segment_start + at, True, &record)
                if why != REC_OK:
                    reason, index = W_BLANK if why == REC_BLANK else W_DAMAGED, why
                    break
                if is_queued(&record):
                    number, index = self._lane_of(&record, 0), record.queue_offset
                    lane = &self._lanes[number]
                    if not lane.first_index <= index < lane.limit_index:
                        reason = W_WINDOW
                        break
                    self._compare(number, lane, &record)
                self.records += 1
                at += record.total_size
        return segment_start + at, reason, number, index

    cdef int _compare(self, Py_ssize_t number, Lane *lane, Record *record) except -1 nogil:
        cdef int64_t index = record.queue_offset, phys, code, has_code
        cdef int32_t size
        cdef const uint8_t *unit
        if lane.count == 0 or index > lane.last_offset:
            lane.last_offset = index
        lane.count += 1
        if lane.units == NULL:
            return 0
        unit = lane.units + (index - lane.first_index) * CONSUME_QUEUE_UNIT_BYTES
        phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
        size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
        if phys != record.physical_offset or size != record.total_size:
            return self._note(KIND_CQ_PHY, number, record, record.total_size, 0, phys, size, 0)
        lane.matched += 1
        if is_delayed(record.topic, record.topic_length):
            return 0
        code = tags_code_of(record.properties, record.properties_length)
        has_code = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)
        if has_code != code:
            return self._note(KIND_CQ_TAGS, number, record, size, code, phys, size, has_code)
        return 0

    def tally_of(self, str topic not None, int32_t queue_id):
        """(one past the last queue offset that a record has, entries that are a record's) of a
        queue; None if no record is in it."""
        cdef bytes raw = topic.encode()
        cdef Record wanted
        cdef Lane *lane
        wanted.topic = <const uint8_t *>PyBytes_AS_STRING(raw)
        wanted.topic_length, wanted.queue_id = <int32_t>len(raw), queue_id
        lane = &self._lanes[self._lane_of(&wanted, 0)]
        return (lane.last_offset + 1, lane.matched) if lane.count else None


def live_units(const uint8_t[::1] units not None, int64_t begin, int64_t end, int64_t log_min):
    """How many of the entries [begin, end) of a segment stand for a record at `log_min` or
    behind."""
    cdef int64_t index, count = 0
    cdef const uint8_t *unit
    check_units(units.shape[0], 0, begin, end)
    with nogil:
        for index in range(begin, end):
            unit = &units[index * CONSUME_QUEUE_UNIT_BYTES]
            count += is_live_unit(unit, log_min)
    return count


cdef inline bint is_live_unit(const uint8_t *unit, int64_t log_min) noexcept nogil:
    """Whether an entry is to have a record: not if nothing was written, nor a filler, nor one whose
    record is gone."""
    cdef int64_t phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
    return (load_be32(unit + CONSUME_QUEUE_UNIT_SIZE) != 0 and not is_filler(unit)
            and not 0 <= phys < log_min)


def wrong_unit(
    const uint8_t[::1] units not None, int64_t first_index, int64_t begin, int64_t end,
    const uint8_t[::1] log, int64_t log_start, int64_t log_min, int64_t log_max,
    int64_t segment_bytes, bytes topic not None, int32_t queue_id,
):
    """The first of a queue's entries [begin, end) that does not hold.

    Args:
        log: the log's segment at `log_start`; None: no entry's record is in it.

    Returns (queue offset, a VERIFY_ reason, index into REASONS). Go on at the queue offset for
    VERIFY_SEGMENT, and behind it for VERIFY_WRONG.
    """
    cdef int64_t index = begin, phys
    cdef int32_t size
    cdef int why = REC_OK
    cdef const uint8_t *unit
    cdef Queue queue = queue_of(topic, queue_id)
    cdef Reach reach = Reach(log_min, log_max, segment_bytes)
    cdef Record record
    check_units(units.shape[0], first_index, begin, end)
    check_log(log, segment_bytes)
    with nogil:
        while index < end:
            unit = &units[(index - first_index) * CONSUME_QUEUE_UNIT_BYTES]
            if is_live_unit(unit, log_min):
                phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
                size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
                if place_of(phys, size, &reach) != PLACE_READ:
                    why = REC_NO_PLACE
                    break
                if log is None or not log_start <= phys < log_start + segment_bytes:
                    break
                why = follow(&log[phys - log_start], phys, size, &queue, index, True, &record)
                if why != REC_OK:
                    break
            index += 1
    if index == end:
        return index, V_DONE, REC_OK
    return index, V_SEGMENT if why == REC_OK else V_WRONG, why


cdef int check_log(const uint8_t[::1] log, int64_t segment_bytes) except -1:
    if log is not None and log.shape[0] != segment_bytes:
        raise ValueError(f"{log.shape[0]} bytes: not a segment of {segment_bytes}")
    return 0


def wrong_index_entry(
    const uint8_t[::1] memory not None, uint32_t slots, int32_t entries, int32_t begin,
    const uint8_t[::1] log, int64_t log_start, int64_t log_min, int64_t log_max,
    int64_t segment_bytes,
):
    """The first of an index file's entries, from number `begin` on, whose record does not have a
    key of that hash.

    Returns (number, a VERIFY_ reason, index into REASONS), as `wrong_unit`.
    """
    cdef int64_t wanted = INDEX_HEADER_BYTES + 4 * <int64_t>slots, phys
    cdef int32_t number = max(1, begin), count
    cdef int why = REC_OK
    cdef const uint8_t *entry
    if slots < 1 or memory.shape[0] != wanted + INDEX_ENTRY_BYTES * <int64_t>entries:
        raise ValueError(f"{memory.shape[0]} bytes: not {slots} slots and {entries} entries")
    check_log(log, segment_bytes)
    count = min(<int32_t>load_be32(&memory[INDEX_HEADER_INDEX_COUNT]), entries)
    with nogil:
        while number < count:
            entry = &memory[wanted + INDEX_ENTRY_BYTES * <int64_t>number]
            phys = <int64_t>load_be64(entry + INDEX_ENTRY_PHYSICAL_OFFSET)
            if not 0 <= phys < log_min:
                if phys < 0 or phys >= log_max:
                    why = REC_NO_PLACE
                    break
                if log is None or not log_start <= phys < log_start + segment_bytes:
                    break
                why = keyed_there(&log[phys - log_start], log_start + segment_bytes - phys, phys,
                                  <int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH))
                if why != REC_OK:
                    break
            number += 1
    if number >= count:
        return number, V_DONE, REC_OK
    return number, V_SEGMENT if why == REC_OK else V_WRONG, why


cdef int keyed_there(
    const uint8_t *at, int64_t available, int64_t physical_offset, int32_t wanted
) noexcept nogil:
    """REC_OK where the record at that place is to be found by a key of that hash, or why not."""
    cdef Record record
    cdef Keys keys
    cdef uint32_t topic
    cdef const uint8_t *word
    cdef const uint8_t *end
    cdef const uint8_t *stop
    cdef int why = record_here(at, available, physical_offset, False, &record)
    if why != REC_OK:
        return REC_BAD_SIZE if why == REC_BLANK else why
    if not is_indexed(&record, &keys):
        return REC_ANOTHER
    topic = 31 * hash_on(0, record.topic, record.topic_length) + 35  # 35 is "#"
    if (keys.unique != NULL
            and index_hash_of(hash_on(topic, keys.unique, keys.unique_bytes)) == wanted):
        return REC_OK
    if keys.keys == NULL:
        return REC_ANOTHER
    word, end = keys.keys, keys.keys + keys.keys_bytes
    while word < end:
        stop = <const uint8_t *>memchr(word, 32, end - word)
        if stop == NULL:
            stop = end
        if stop > word and index_hash_of(hash_on(topic, word, stop - word)) == wanted:
            return REC_OK
        word = stop + 1
    return REC_ANOTHER
