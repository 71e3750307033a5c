# --- whole segments: what lies in them by queue, and whether the queues say the same ----------------
#
# For audits and archives. Python is told of what is wrong, and asked for mappings; it never sees a
# record that holds.

WALK_DONE = 0  # reached the end that was asked for
WALK_BLANK = 1  # the rest of the segment is blank
WALK_DAMAGED = 2  # no record: the last number is an index into REASONS
WALK_WINDOW = 3  # the entry of the record lies outside the lane's window: attach another

# What `LogWalk.findings` holds; RocketMQ's rules of dispatch, see shm/kernel/dispatch.pxi.
WALK_KINDS = (
    "BODY_CRC", "TIME_BACKWARD", "OFFSET_DUP", "OFFSET_GAP", "CQ_MISSING", "CQ_PHY", "CQ_SIZE",
    "CQ_TAGS",
)

cdef enum:
    W_DONE = 0
    W_BLANK = 1
    W_DAMAGED = 2
    W_WINDOW = 3
    KIND_BODY_CRC = 0
    KIND_TIME_BACKWARD = 1
    KIND_OFFSET_DUP = 2
    KIND_OFFSET_GAP = 3
    KIND_CQ_MISSING = 4
    KIND_CQ_PHY = 5
    KIND_CQ_SIZE = 6
    KIND_CQ_TAGS = 7
    KIND_COUNT = 8
    DAY_MS = 86400000


cdef struct Lane:  # a queue, or a queue's messages of one day
    Py_ssize_t topic_at  # in the text
    int32_t topic_bytes
    uint32_t hash
    int32_t queue_id
    int32_t said[KIND_COUNT]  # findings of each kind
    int64_t day
    int64_t count, size_bytes, missing, matched
    int64_t first_offset, last_offset
    int64_t first_phys, last_phys
    int64_t first_ms, last_ms
    uint64_t log_sum, queue_sum
    const uint8_t *units  # NULL: there is no file
    int64_t first_index, limit_index  # of the window
    Grow places  # i64: positions in the segment


cdef inline uint64_t mixed(uint64_t index, uint64_t phys, uint64_t size, uint64_t code) noexcept nogil:
    """A checksum of one entry, to be put together by XOR (splitmix64's finish)."""
    cdef uint64_t x = (index * 0x9E3779B97F4A7C15ULL) ^ (phys * 0xD6E8FEB86659FD93ULL)
    x ^= (size << 32) ^ code
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL
    return x ^ (x >> 31)


cdef class LogWalk:
    """Goes over the records of segments. One thread uses it.

    Args:
        special: tagsCode of a raw record of the delay topic, which is a time.
        findings_max: kept of one kind and queue; what is more is counted.
    """

    cdef Grow _text
    cdef Lane *_lanes
    cdef int32_t *_table  # lane + 1, open addressing
    cdef Py_ssize_t _count, _room, _at  # _at: the lane of the record before
    cdef list _windows
    cdef object _special
    cdef int32_t _findings_max
    cdef int32_t _said[KIND_COUNT]  # of records that are in no queue
    cdef int64_t _last_ms
    cdef readonly list findings
    cdef readonly int64_t records
    cdef readonly int64_t left_out  # findings that were only counted

    def __cinit__(self, special=None, int32_t findings_max=100):
        self._special = special
        self._findings_max = findings_max
        self._windows = []
        self.findings = []
        self._last_ms = -0x7FFFFFFFFFFFFFFF
        self._resize(64)

    def __dealloc__(self):
        cdef Py_ssize_t number
        for number in range(self._count):
            free(self._lanes[number].places.data)
        free(self._text.data)
        free(self._lanes)
        free(self._table)

    def __len__(self):
        return self._count

    cdef int _resize(self, Py_ssize_t room) except -1 nogil:
        cdef Py_ssize_t number
        cdef Lane *lanes = <Lane *>realloc(self._lanes, room * sizeof(Lane))
        cdef int32_t *table
        if lanes != NULL:
            self._lanes = lanes
        table = <int32_t *>realloc(self._table, 2 * room * sizeof(int32_t))
        if table != NULL:
            self._table = table
        if lanes == NULL or table == NULL:
            with gil:
                raise MemoryError(f"{room} queues")
        self._room = room
        memset(table, 0, 2 * room * sizeof(int32_t))
        for number in range(self._count):
            self._enter(number)
        return 0

    cdef void _enter(self, Py_ssize_t number) noexcept nogil:
        cdef Py_ssize_t at = self._lanes[number].hash % <uint32_t>(2 * self._room)
        while self._table[at]:
            at = (at + 1) % (2 * self._room)
        self._table[at] = <int32_t>number + 1

    cdef bint _is(self, Lane *lane, Record *record, int64_t day) noexcept nogil:
        return (lane.queue_id == record.queue_id and lane.topic_bytes == record.topic_length
                and lane.day == day
                and memcmp(self._text.data + lane.topic_at, record.topic, lane.topic_bytes) == 0)

    cdef Py_ssize_t _lane_of(self, Record *record, int64_t day) except -1 nogil:
        cdef uint32_t h
        cdef Py_ssize_t at
        cdef Lane *lane
        if self._at < self._count and self._is(&self._lanes[self._at], record, day):
            return self._at
        h = crc_of(<uint32_t>record.queue_id ^ <uint32_t>day, record.topic, record.topic_length)
        at = h % <uint32_t>(2 * self._room)
        while self._table[at]:
            lane = &self._lanes[self._table[at] - 1]
            if lane.hash == h and self._is(lane, record, day):
                self._at = self._table[at] - 1
                return self._at
            at = (at + 1) % (2 * self._room)
        if self._count == self._room:
            self._resize(2 * self._room)
        lane = &self._lanes[self._count]
        memset(lane, 0, sizeof(Lane))
        lane.topic_at, lane.topic_bytes = self._text.size, record.topic_length
        lane.hash, lane.queue_id, lane.day = h, record.queue_id, day
        put_bytes(&self._text, record.topic, record.topic_length)
        self._enter(self._count)
        self._at = self._count
        self._count += 1
        return self._at

    cdef void _tally(self, Lane *lane, Record *record) noexcept nogil:
        if lane.count == 0:
            lane.first_offset = lane.last_offset = record.queue_offset
            lane.first_phys = record.physical_offset
            lane.first_ms = lane.last_ms = record.store_timestamp
        lane.first_offset = min(lane.first_offset, record.queue_offset)
        lane.last_offset = max(lane.last_offset, record.queue_offset)
        lane.first_ms = min(lane.first_ms, record.store_timestamp)
        lane.last_ms = max(lane.last_ms, record.store_timestamp)
        lane.last_phys = record.physical_offset
        lane.count += 1
        lane.size_bytes += record.total_size

    def name(self, Py_ssize_t number):
        """(topic, queue id) of a lane."""
        cdef Lane *lane
        if not 0 <= number < self._count:
            raise IndexError(f"no lane {number}")
        lane = &self._lanes[number]
        return decode_text(self._text.data + lane.topic_at, lane.topic_bytes), lane.queue_id

    def lanes(self):
        """A dict of each, in the order in which they were met."""
        cdef Py_ssize_t number
        cdef Lane *lane
        found = []
        for number in range(self._count):
            lane = &self._lanes[number]
            found.append({
                "topic": decode_text(self._text.data + lane.topic_at, lane.topic_bytes),
                "queue_id": lane.queue_id, "day": lane.day, "count": lane.count,
                "size_bytes": lane.size_bytes, "first_offset": lane.first_offset,
                "last_offset": lane.last_offset, "first_physical": lane.first_phys,
                "last_physical": lane.last_phys, "first_ms": lane.first_ms,
                "last_ms": lane.last_ms, "log_sum": lane.log_sum, "queue_sum": lane.queue_sum,
                "missing": lane.missing,
            })
        return found

    # --- archives ---

    def group(self, buffer, int64_t segment_start, int64_t begin, int64_t end):
        """Note where the records in [begin, end) of a segment lie, by queue and day of storing.

        Returns (reached, index into REASONS): a record that does not hold, CRC included, stops it.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start, day
        cdef int reason = REC_OK
        cdef Record record
        cdef Lane *lane
        with nogil:
            while at < stop:
                reason = judge_record(&view[at], stop - at, segment_start + at, True, &record)
                if reason != REC_OK:
                    break
                day = record.store_timestamp // DAY_MS  # C's: it truncates
                if record.store_timestamp < 0:
                    day = -1
                lane = &self._lanes[self._lane_of(&record, day)]
                self._tally(lane, &record)
                put_i64(&lane.places, at)
                self.records += 1
                at += record.total_size
        return segment_start + at, reason

    def fill(self, Columns columns not None, Py_ssize_t number, Py_ssize_t first, buffer):
        """Put a lane's records, from the one of that number on, into columns.

        Returns (a COLUMNS_ reason, the number reached). The buffer is the segment of `group`.
        """
        cdef const uint8_t[::1] view = buffer
        cdef Py_ssize_t count
        cdef const int64_t *places
        cdef int64_t at
        cdef int reason = COLS_DONE
        cdef Record record
        if not 0 <= number < self._count:
            raise IndexError(f"no lane {number}")
        count = self._lanes[number].places.size // 8
        places = <const int64_t *>self._lanes[number].places.data
        columns._ensure_begun()
        with nogil:
            while first < count:
                at = places[first]
                if at >= view.shape[0]:
                    reason = COLS_DAMAGED
                    break
                if parse_record(&view[at], view.shape[0] - at, False, &record) != REC_OK:
                    reason = COLS_DAMAGED
                    break
                if columns._is_full(record.total_size):
                    reason = COLS_FULL
                    break
                if columns._add_if_wanted(&record) != REC_OK:
                    reason = COLS_DAMAGED
                    break
                first += 1
        return reason, first

    # --- audits ---

    def attach(self, Py_ssize_t number, units, int64_t first_index, int64_t limit_index):
        """Give a lane its window on its ConsumeQueue; None: there is no such file."""
        cdef const uint8_t[::1] memory
        if not 0 <= number < self._count:
            raise IndexError(f"no lane {number}")
        while len(self._windows) <= number:
            self._windows.append(None)
        self._lanes[number].units = NULL
        if units is not None:
            memory = units
            check_units(memory.shape[0], first_index, first_index, limit_index)
            self._lanes[number].units = &memory[0]
            self._windows[number] = memory
        else:
            self._windows[number] = None
        self._lanes[number].first_index = first_index
        self._lanes[number].limit_index = limit_index

    def detach(self):
        """Let go of all mappings."""
        cdef Py_ssize_t number
        for number in range(self._count):
            self._lanes[number].units = NULL
            self._lanes[number].first_index = self._lanes[number].limit_index = 0
        self._windows = []

    def audit(self, buffer, int64_t segment_start, int64_t begin, int64_t end):
        """Compare the records in [begin, end) of a segment with their queues.

        Returns (reached, a WALK_ reason, lane, queue offset or index into REASONS). What is wrong
        with single records stands in `findings`: (index into WALK_KINDS, lane or -1, queue offset,
        physical offset, and what to say: of entries the size and tagsCode that are right, and
        physical offset, size and tagsCode that the entry has).
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start, index = -1
        cdef Py_ssize_t number = -1
        cdef int why, reason = W_DONE
        cdef Record record
        with nogil:
            while at < stop:
                why = judge_record(&view[at], stop - at, segment_start + at, False, &record)
                if why == REC_BLANK:
                    reason = W_BLANK
                    break
                if why != REC_OK:
                    reason, index = W_DAMAGED, why
                    break
                number = -1
                if is_queued(&record):
                    number = self._lane_of(&record, 0)
                    index = record.queue_offset
                    if not (self._lanes[number].first_index <= index
                            < self._lanes[number].limit_index):
                        reason = W_WINDOW
                        break
                self._check_record(number, &record)
                self.records += 1
                at += record.total_size
        return segment_start + at, reason, number, index

    cdef int _check_record(self, Py_ssize_t number, Record *record) except -1 nogil:
        cdef int64_t has
        if not body_is_whole(record):
            has = crc_of(0, record.body, record.body_length) & 0x7FFFFFFF
            self._note(KIND_BODY_CRC, number, record, record.body_crc, has, 0, 0, 0)
        if record.store_timestamp < self._last_ms:
            self._note(KIND_TIME_BACKWARD, number, record, self._last_ms, record.store_timestamp,
                       0, 0, 0)
        self._last_ms = max(self._last_ms, record.store_timestamp)
        if number >= 0:
            self._check_entry(number, record)
        return 0

    cdef int _check_entry(self, Py_ssize_t number, Record *record) except -1 nogil:
        cdef Lane *lane = &self._lanes[number]
        cdef int64_t index = record.queue_offset, code, phys, has_code
        cdef int32_t size
        cdef const uint8_t *unit
        cdef int kind = -1
        if lane.count and index <= lane.last_offset:
            return self._note(KIND_OFFSET_DUP, number, record, lane.last_offset + 1, index, 0, 0, 0)
        if lane.count and index > lane.last_offset + 1:
            self._note(KIND_OFFSET_GAP, number, record, lane.last_offset + 1, index,
                       lane.last_phys, 0, 0)
        code = self._code_of(record)
        self._tally(lane, record)
        lane.log_sum ^= mixed(index, record.physical_offset, record.total_size, code)
        if lane.units == NULL:
            lane.missing += 1
            return 0
        unit = lane.units + (index - lane.first_index) * CONSUME_QUEUE_UNIT_BYTES
        phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
        size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
        has_code = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)
        lane.queue_sum ^= mixed(index, phys, size, has_code)
        if size == 0 or is_filler(unit):
            lane.missing += 1
            kind = KIND_CQ_MISSING
        elif phys != record.physical_offset:
            kind = KIND_CQ_PHY
        elif size != record.total_size:
            kind = KIND_CQ_SIZE
        elif has_code != code:
            kind = KIND_CQ_TAGS
        if kind >= 0:
            self._note(kind, number, record, record.total_size, code, phys, size, has_code)
        return 0

    cdef int64_t _code_of(self, Record *record) except? -1 nogil:
        if not is_delayed(record.topic, record.topic_length):
            return tags_code_of(record.properties, record.properties_length)
        with gil:
            return self._special(PyBytes_FromStringAndSize(
                <const char *>(record.born_host - RECORD_HEAD_BYTES), record.total_size))

    cdef int _note(self, int kind, Py_ssize_t number, Record *record, int64_t a, int64_t b,
                   int64_t c, int64_t d, int64_t e) except -1 nogil:
        cdef int32_t *said = &self._said[0]
        if number >= 0:
            said = &self._lanes[number].said[0]
        if said[kind] >= self._findings_max:
            self.left_out += 1
            return 0
        said[kind] += 1
        with gil:
            self.findings.append((kind, number, record.queue_offset, record.physical_offset,
                                  a, b, c, d, e))
        return 0


# --- records out of archived columns ----------------------------------------------------------------

# In the order in which `put_records` takes them.
RECORD_FIELDS = (
    "topic", "queue_id", "queue_offset", "physical_offset", "record_version", "flag", "sys_flag",
    "born_ts", "store_ts", "born_host_raw", "store_host_raw", "reconsume_times",
    "prepared_txn_offset", "body_crc", "body_raw", "properties_raw", "record_raw",
)

cdef enum:
    F_TOPIC = 0
    F_QUEUE_ID = 1
    F_QUEUE_OFFSET = 2
    F_PHYSICAL_OFFSET = 3
    F_VERSION = 4
    F_FLAG = 5
    F_SYS_FLAG = 6
    F_BORN_TS = 7
    F_STORE_TS = 8
    F_BORN_HOST = 9
    F_STORE_HOST = 10
    F_RECONSUME_TIMES = 11
    F_PREPARED = 12
    F_BODY_CRC = 13
    F_BODY = 14
    F_PROPERTIES = 15
    F_RECORD = 16
    F_COUNT = 17


cdef struct Field:
    const uint8_t *valid  # bits; NULL: all are
    const uint8_t *offsets  # NULL: a number
    const uint8_t *data
    Py_ssize_t data_bytes
    Py_ssize_t shift  # rows in front


cdef inline int64_t number_at(Field *field, Py_ssize_t row, int width) noexcept nogil:
    if width == 4:
        return (<const int32_t *>field.data)[field.shift + row]
    return (<const int64_t *>field.data)[field.shift + row]


cdef inline Py_ssize_t text_at(Field *field, Py_ssize_t row, const uint8_t **text) noexcept nogil:
    """Its bytes; -1 for null, -2 where the offsets lead outside."""
    cdef Py_ssize_t at = field.shift + row
    cdef const int32_t *offsets = <const int32_t *>field.offsets
    cdef int32_t begin = offsets[at], end = offsets[at + 1]
    if field.valid != NULL and not field.valid[at // 8] >> (at % 8) & 1:
        return -1
    if not 0 <= begin <= end <= field.data_bytes:
        return -2
    text[0] = field.data + begin
    return end - begin


def put_records(uint8_t[::1] segment not None, int64_t segment_start, Py_ssize_t rows,
                list columns not None):
    """Write records where they lay, from columns as `Columns` makes them.

    Args:
        columns: for each of RECORD_FIELDS (rows in front, validity or None, offsets or None,
            data), Arrow's buffers.

    Raises ValueError for a row that cannot have been a record of this segment.
    """
    cdef Field fields[F_COUNT]
    cdef Py_ssize_t row, wrong = -1
    held = []
    if len(columns) != F_COUNT:
        raise ValueError(f"{len(columns)} columns, {F_COUNT} are wanted")
    for number, (shift, valid, offsets, data) in enumerate(columns):
        held.append(_set_field(&fields[number], shift, valid, offsets, data, rows,
                               8 if number in (F_QUEUE_OFFSET, F_PHYSICAL_OFFSET, F_BORN_TS,
                                               F_STORE_TS, F_PREPARED) else 4,
                               number in (F_TOPIC, F_BORN_HOST, F_STORE_HOST, F_BODY,
                                          F_PROPERTIES, F_RECORD)))
    with nogil:
        for row in range(rows):
            if not put_record(&segment[0], segment.shape[0], segment_start, fields, row):
                wrong = row
                break
    if wrong >= 0:
        raise ValueError(f"row {wrong} was no record of the segment at {segment_start}")


cdef _set_field(Field *field, Py_ssize_t shift, valid, offsets, data, Py_ssize_t rows, int width,
                bint is_text):
    """Check the buffers' sizes; what keeps them alive."""
    cdef const uint8_t[::1] view
    held = []
    memset(field, 0, sizeof(Field))
    field.shift = shift
    if is_text != (offsets is not None) or shift < 0:
        raise ValueError("a column of another type")
    for what, buffer in (("valid", valid), ("offsets", offsets), ("data", data)):
        if buffer is None:
            if what == "data" and not is_text and rows:
                raise ValueError("a column without data")
            continue
        view = memoryview(buffer).cast("B")
        held.append(view)
        if what == "valid":
            if view.shape[0] * 8 < shift + rows:
                raise ValueError("a validity bitmap that is too short")
            field.valid = &view[0]
        elif what == "offsets":
            if view.shape[0] < 4 * (shift + rows + 1):
                raise ValueError("offsets that are too short")
            field.offsets = &view[0]
        else:
            if not is_text and view.shape[0] < width * (shift + rows):
                raise ValueError("numbers that are too short")
            field.data, field.data_bytes = &view[0], view.shape[0]
    return held


cdef bint put_record(uint8_t *segment, int64_t segment_bytes, int64_t segment_start, Field *fields,
                     Py_ssize_t row) noexcept nogil:
    cdef int64_t phys = number_at(&fields[F_PHYSICAL_OFFSET], row, 8), at
    cdef const uint8_t *whole = NULL
    cdef Py_ssize_t count
    cdef Record record
    if phys < segment_start or segment_start < 0 or phys - segment_start >= segment_bytes:
        return False
    at = phys - segment_start
    count = text_at(&fields[F_RECORD], row, &whole)
    if count >= 0:
        if count < RECORD_MIN or at + count > segment_bytes:
            return False
        memcpy(segment + at, whole, count)
        return True
    if count == -2 or not take_fields(fields, row, segment_bytes - at, &record):
        return False
    record.physical_offset = phys
    put_texts(put_head(segment + at, &record), &record)
    return True


cdef bint take_fields(
    Field *fields, Py_ssize_t row, int64_t available, Record *record
) noexcept nogil:
    """A row as a record; False if it cannot have been one."""
    cdef int64_t version = number_at(&fields[F_VERSION], row, 4), size
    cdef Py_ssize_t body = text_at(&fields[F_BODY], row, &record.body)
    cdef Py_ssize_t topic = text_at(&fields[F_TOPIC], row, &record.topic)
    cdef Py_ssize_t properties = text_at(&fields[F_PROPERTIES], row, &record.properties)
    record.sys_flag = <int32_t>number_at(&fields[F_SYS_FLAG], row, 4)
    record.born_host_length = <int32_t>text_at(&fields[F_BORN_HOST], row, &record.born_host)
    record.store_host_length = <int32_t>text_at(&fields[F_STORE_HOST], row, &record.store_host)
    if (body < 0 or not 0 <= properties <= 0x7FFF or not 1 <= version <= 2
            or not 0 <= topic <= (0x7FFF if version == 2 else 0x7F)
            or record.born_host_length != (20 if record.sys_flag & SYS_BORN_HOST_V6 else 8)
            or record.store_host_length != (20 if record.sys_flag & SYS_STORE_HOST_V6 else 8)):
        return False
    size = (RECORD_HEAD_BYTES + record.born_host_length + 8 + record.store_host_length
            + RECORD_MIDDLE_BYTES + body + version + topic + 2 + properties)
    if size > available:
        return False
    record.total_size = <int32_t>size
    record.magic = <uint32_t>MAGIC_V2 if version == 2 else <uint32_t>MAGIC_V1
    record.body_length, record.topic_length = <int32_t>body, <int32_t>topic
    record.properties_length = <int32_t>properties
    record.body_crc = <int32_t>number_at(&fields[F_BODY_CRC], row, 4)
    record.queue_id = <int32_t>number_at(&fields[F_QUEUE_ID], row, 4)
    record.flag = <int32_t>number_at(&fields[F_FLAG], row, 4)
    record.queue_offset = number_at(&fields[F_QUEUE_OFFSET], row, 8)
    record.born_timestamp = number_at(&fields[F_BORN_TS], row, 8) // 1000
    record.store_timestamp = number_at(&fields[F_STORE_TS], row, 8) // 1000
    record.reconsume_times = <int32_t>number_at(&fields[F_RECONSUME_TIMES], row, 4)
    record.prepared_offset = number_at(&fields[F_PREPARED], row, 8)
    return True


cdef uint8_t *put_head(uint8_t *out, Record *record) noexcept nogil:
    """As it was, the CRC of its body too, be it right or wrong; where the body begins."""
    store_be32(out, <uint32_t>record.total_size)
    store_be32(out + RECORD_HEAD_MAGIC, record.magic)
    store_be32(out + RECORD_HEAD_BODY_CRC, <uint32_t>record.body_crc)
    store_be32(out + RECORD_HEAD_QUEUE_ID, <uint32_t>record.queue_id)
    store_be32(out + RECORD_HEAD_FLAG, <uint32_t>record.flag)
    store_be64(out + RECORD_HEAD_QUEUE_OFFSET, <uint64_t>record.queue_offset)
    store_be64(out + RECORD_HEAD_PHYSICAL_OFFSET, <uint64_t>record.physical_offset)
    store_be32(out + RECORD_HEAD_SYS_FLAG, <uint32_t>record.sys_flag)
    store_be64(out + RECORD_HEAD_BORN_TIMESTAMP, <uint64_t>record.born_timestamp)
    out += RECORD_HEAD_BYTES
    memcpy(out, record.born_host, record.born_host_length)
    out += record.born_host_length
    store_be64(out, <uint64_t>record.store_timestamp)
    memcpy(out + 8, record.store_host, record.store_host_length)
    out += 8 + record.store_host_length
    store_be32(out + RECORD_MIDDLE_RECONSUME_TIMES, <uint32_t>record.reconsume_times)
    store_be64(out + RECORD_MIDDLE_PREPARED_TRANSACTION_OFFSET, <uint64_t>record.prepared_offset)
    store_be32(out + RECORD_MIDDLE_BODY_LENGTH, <uint32_t>record.body_length)
    return out + RECORD_MIDDLE_BYTES


cdef void put_texts(uint8_t *out, Record *record) noexcept nogil:
    """Body, topic and properties."""
    memcpy(out, record.body, record.body_length)
    out += record.body_length
    if record.magic == <uint32_t>MAGIC_V2:
        store_be16(out, <uint16_t>record.topic_length)
        out += 2
    else:
        out[0] = <uint8_t>record.topic_length
        out += 1
    memcpy(out, record.topic, record.topic_length)
    store_be16(out + record.topic_length, <uint16_t>record.properties_length)
    memcpy(out + record.topic_length + 2, record.properties, record.properties_length)
