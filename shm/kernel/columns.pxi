# --- records as Arrow buffers -----------------------------------------------------------------------
#
# For analytic readers: no Python object a message. A batch is collected row by row into growing
# buffers in Arrow's layout (validity bits, 32-bit offsets, data), which are handed out as they are.

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdio cimport snprintf

cdef extern from "<string.h>" nogil:
    void *memchr(const void *text, int wanted, size_t count)

COLUMN_NAMES = (
    "topic", "broker", "queue_id", "queue_offset", "store_ts", "born_ts", "keys", "tags",
    "unique_key", "body", "properties", "reconsume_times", "physical_offset", "store_size",
    "body_crc", "flag", "sys_flag", "born_host", "store_host", "prepared_txn_offset",
    "properties_raw", "body_raw", "msg_id",
)
# What an archive needs beside them to give each record back byte by byte. `record_raw` is the whole
# record where the other columns cannot, else null.
ARCHIVE_NAMES = ("record_version", "born_host_raw", "store_host_raw", "record_raw")

cdef enum:  # positions in both, one after the other
    COL_TOPIC = 0
    COL_BROKER = 1
    COL_QUEUE_ID = 2
    COL_QUEUE_OFFSET = 3
    COL_STORE_TS = 4
    COL_BORN_TS = 5
    COL_KEYS = 6
    COL_TAGS = 7
    COL_UNIQUE_KEY = 8
    COL_BODY = 9
    COL_PROPERTIES = 10
    COL_RECONSUME_TIMES = 11
    COL_PHYSICAL_OFFSET = 12
    COL_STORE_SIZE = 13
    COL_BODY_CRC = 14
    COL_FLAG = 15
    COL_SYS_FLAG = 16
    COL_BORN_HOST = 17
    COL_STORE_HOST = 18
    COL_PREPARED_TXN_OFFSET = 19
    COL_PROPERTIES_RAW = 20
    COL_BODY_RAW = 21
    COL_MSG_ID = 22
    COL_RECORD_VERSION = 23
    COL_BORN_HOST_RAW = 24
    COL_STORE_HOST_RAW = 25
    COL_RECORD_RAW = 26

COLUMNS_DONE = 0
COLUMNS_FULL = 1  # take the batch, then go on
COLUMNS_UNMAPPED = 2  # a segment has to be mapped first: `detail` is its start
COLUMNS_GONE = 3  # the record is not there any more: it lay below the log's beginning
COLUMNS_HOLE = 4  # no record of this queue offset is there: a filler, or an entry of another's
COLUMNS_DAMAGED = 5  # see `damage`

cdef enum:
    COLS_DONE = 0
    COLS_FULL = 1
    COLS_UNMAPPED = 2
    COLS_GONE = 3
    COLS_HOLE = 4
    COLS_DAMAGED = 5
    COLUMN_BUFFERS = 6
    PROPS_MAX = 8192  # a name, a value and two separators: 4 bytes at least
    PROPS_TABLE = 16384


cdef int64_t MS_MAX = <int64_t>(0x7FFFFFFFFFFFFFFF // 1000)


cdef class ArrowBuffer:
    """Memory of one column. It is written again only when nobody looks at it any more."""

    cdef Grow grow
    cdef Py_ssize_t exports

    def __cinit__(self):
        grow_to(&self.grow, 1024)

    def __dealloc__(self):
        free(self.grow.data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.grow.data, self.grow.size, 1, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1


cdef struct Prop:
    const uint8_t *name
    const uint8_t *value
    int32_t name_bytes
    int32_t value_bytes


cdef struct Column:
    int id
    Py_ssize_t nulls
    Grow *at[COLUMN_BUFFERS]


cdef inline bint is_text(int column) noexcept nogil:
    return column in (COL_TOPIC, COL_BROKER, COL_KEYS, COL_TAGS, COL_UNIQUE_KEY, COL_BORN_HOST,
                      COL_STORE_HOST, COL_MSG_ID, COL_BODY, COL_PROPERTIES_RAW, COL_BODY_RAW,
                      COL_BORN_HOST_RAW, COL_STORE_HOST_RAW, COL_RECORD_RAW)


cdef class Columns:
    """Collects records into one batch of Arrow columns after another.

    What is asked for is put in at most `rows_max` rows or `bytes_max` bytes of records and
    unfolded bodies, but one record always fits. A single thread uses it.
    """

    cdef Column *_columns
    cdef Py_ssize_t _count
    cdef bint _taken, _wants_props, _wants_map, _wants_body, _check_crc, _decompress, _null_body
    cdef bytes _broker, _plain
    cdef str _trouble
    cdef const uint8_t *_broker_text
    cdef Py_ssize_t _broker_bytes
    cdef list _pools, _held  # buffers of each place; those of this batch
    cdef Prop *_props
    cdef Py_ssize_t _prop_count
    cdef int32_t *_prop_table
    cdef Prop _keys, _tags, _unique
    cdef Py_ssize_t _rows_max
    cdef int64_t _bytes_max, _bytes
    cdef readonly Py_ssize_t rows
    cdef readonly int64_t detail
    cdef readonly tuple damage
    cdef readonly int64_t nulled
    # the filter
    cdef int64_t _begin_ms, _end_ms
    cdef list _texts  # keeps alive what the next two look at
    cdef Filter _filter
    cdef Prop *_wanted_tags
    cdef Prop *_wanted_keys
    cdef int32_t *_codes
    cdef Py_ssize_t _tag_count, _key_count  # -1 = all are wanted

    def __cinit__(self, names, str broker not None, *, Py_ssize_t rows_max=16384,
                  int64_t bytes_max=4194304, bint check_crc=True, bint decompress=True,
                  bint null_body=False, tags=None, keys=None, int64_t begin_ms=-1,
                  int64_t end_ms=0x7FFFFFFFFFFFFFFF, Filter filter=None):
        cdef Py_ssize_t number
        if rows_max < 1 or not 1 <= bytes_max <= 0x20000000:
            raise ValueError(f"batches of {rows_max} rows, {bytes_max} bytes")
        self._count = len(names)
        self._columns = <Column *>malloc(max(1, self._count) * sizeof(Column))
        self._props = <Prop *>malloc(PROPS_MAX * sizeof(Prop))
        self._prop_table = <int32_t *>malloc(PROPS_TABLE * sizeof(int32_t))
        if self._columns == NULL or self._props == NULL or self._prop_table == NULL:
            raise MemoryError
        for number, name in enumerate(names):
            self._columns[number].id = (COLUMN_NAMES + ARCHIVE_NAMES).index(name)
        self._broker = broker.encode()
        self._broker_text = <const uint8_t *>PyBytes_AS_STRING(self._broker)
        self._broker_bytes = len(self._broker)
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._check_crc, self._decompress, self._null_body = check_crc, decompress, null_body
        self._texts = []
        self._tag_count = self._keep(tags, &self._wanted_tags)
        self._key_count = self._keep(keys, &self._wanted_keys)
        self._codes = <int32_t *>malloc(max(1, self._tag_count) * sizeof(int32_t))
        if self._codes == NULL:
            raise MemoryError
        for number in range(self._tag_count):
            self._codes[number] = hash_utf8(
                self._wanted_tags[number].value, self._wanted_tags[number].value_bytes)
        self._begin_ms, self._end_ms = begin_ms, end_ms
        self._filter = filter
        self._wants_map = "properties" in names
        self._wants_body = "body" in names
        self._wants_props = (self._wants_map or tags is not None or keys is not None
                             or not {"keys", "tags", "unique_key"}.isdisjoint(names))
        self._pools = [[[] for _ in range(COLUMN_BUFFERS)] for _ in range(self._count)]
        self._begin_batch()

    cdef Py_ssize_t _keep(self, texts, Prop **into) except? -1:
        """The texts as bytes that nogil code may look at; their count."""
        cdef Py_ssize_t count = 0
        cdef bytes raw
        if texts is None:
            return -1
        texts = list(texts)
        into[0] = <Prop *>malloc(max(1, len(texts)) * sizeof(Prop))
        if into[0] == NULL:
            raise MemoryError
        for text in texts:
            raw = (<str>text).encode()
            self._texts.append(raw)
            into[0][count].value = <const uint8_t *>PyBytes_AS_STRING(raw)
            into[0][count].value_bytes = <int32_t>len(raw)
            count += 1
        return count

    def __dealloc__(self):
        free(self._columns)
        free(self._wanted_tags)
        free(self._wanted_keys)
        free(self._codes)
        free(self._props)
        free(self._prop_table)

    # --- batches ---

    cdef _begin_batch(self):
        cdef Py_ssize_t number, place
        cdef ArrowBuffer buffer
        cdef Column *column
        self._held = []
        for number in range(self._count):
            column = &self._columns[number]
            column.nulls = 0
            buffers = []
            for place in range(_places(column.id)):
                buffer = _unused(self._pools[number][place])
                buffer.grow.size = 0
                column.at[place] = &buffer.grow
                buffers.append(buffer)
            self._held.append(buffers)
            if is_text(column.id):
                put_i32(column.at[1], 0)
            elif column.id == COL_PROPERTIES:
                for place in (1, 2, 4):
                    put_i32(column.at[place], 0)
        self.rows = 0
        self._bytes = 0
        self._taken = False

    def take(self):
        """(rows, for each column (nulls, buffers)).

        The next batch takes other memory as long as somebody looks at these buffers.

        Buffers: (data) for numbers, (validity, offsets, data) for text and bytes, (none, offsets,
        offsets of names, names, offsets of values, values) for the properties.
        """
        cdef Py_ssize_t number
        found = self.rows, [
            (self._columns[number].nulls, tuple(self._held[number])) for number in range(self._count)
        ]
        self._taken = True
        self.rows = 0
        return found

    cdef int _ensure_begun(self) except -1:
        """Not earlier: who took the last batch must have had the time to look at its buffers."""
        if self._taken:
            self._begin_batch()
        return 0

    cdef bint _is_full(self, int64_t size) noexcept nogil:
        return self.rows > 0 and (
            self.rows >= self._rows_max or self._bytes + size > self._bytes_max)

    # --- where records come from ---

    def gather(
        self, LogView log not None, const uint8_t[::1] units not None, int64_t first_index,
        int64_t begin, int64_t end, int64_t log_min, int64_t log_max, bytes topic not None,
        int32_t queue_id,
    ):
        """Take the records of the ConsumeQueue entries [begin, end) of a queue.

        Args:
            units: a ConsumeQueue segment whose first entry has `first_index`.
            log_min, log_max: only records wholly inside are read.

        Returns (a COLUMNS_ reason, the index that it stopped at).
        """
        cdef int64_t index = begin, phys
        cdef int32_t size
        cdef int reason = COLS_DONE, why, place
        cdef const uint8_t *unit
        cdef const uint8_t *at
        cdef Queue queue = queue_of(topic, queue_id)
        # There the code is the time of delivery.
        cdef bint by_code = self._tag_count >= 0 and not is_delayed(queue.topic, queue.topic_bytes)
        cdef Record record
        cdef Reach reach
        check_units(units.shape[0], first_index, begin, end)
        reach.log_min, reach.log_max, reach.segment_bytes = log_min, log_max, log.segment_bytes
        self._ensure_begun()
        with nogil:
            while index < end:
                unit = &units[(index - first_index) * CONSUME_QUEUE_UNIT_BYTES]
                phys = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
                size = <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
                if by_code and not self._has_code(
                        <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE)):
                    index += 1
                    continue
                place = place_of(phys, size, &reach)
                if place != PLACE_READ:
                    reason = COLS_GONE if place == PLACE_GONE else COLS_HOLE
                    break
                if self._is_full(size):
                    reason = COLS_FULL
                    break
                at = log.at(phys)
                if at == NULL:
                    reason = COLS_UNMAPPED
                    self.detail = phys - phys % log.segment_bytes
                    break
                why = self._null_damaged(
                    follow(at, phys, size, &queue, index, self._check_crc, &record), &record)
                if why == REC_ANOTHER:
                    reason = COLS_HOLE
                    break
                if why == REC_OK:
                    why = self._add_if_wanted(&record)
                if why != REC_OK:
                    reason = COLS_DAMAGED
                    self._note_damage(why, at, size, index, phys)
                    break
                index += 1
        return reason, index

    def decode_run(self, buffer, Py_ssize_t at, bytes topic not None, int32_t queue_id,
                   int64_t next_index, int64_t end, bint gaps=False):
        """Take records of one queue that stand one after the other, as a pull answers them.

        Args:
            gaps: some were left out on purpose; else a missing one is a COLUMNS_HOLE.

        Returns (a COLUMNS_ reason, position reached, the queue offset that it stopped at).
        """
        cdef const uint8_t[::1] view = buffer
        cdef Py_ssize_t stop = view.shape[0]
        cdef int reason = COLS_DONE, why
        cdef Queue queue = queue_of(topic, queue_id)
        cdef int32_t size
        cdef int64_t index
        cdef Record record
        self._ensure_begun()
        with nogil:
            while at < stop and next_index < end:
                size = <int32_t>load_be32(&view[at]) if stop - at >= RECORD_MIN else 0
                if size < RECORD_MIN or size > stop - at:
                    with gil:
                        raise RecordDamaged("impossible size", at)
                if self._is_full(size):
                    reason = COLS_FULL
                    break
                index = <int64_t>load_be64(&view[at + RECORD_HEAD_QUEUE_OFFSET])
                if gaps and index >= end:
                    break
                if gaps and index > next_index:
                    next_index = index
                if index > next_index:
                    reason = COLS_HOLE  # of one: what stands there is looked at again
                    break
                why = self._null_damaged(
                    follow(&view[at], <int64_t>load_be64(&view[at + RECORD_HEAD_PHYSICAL_OFFSET]),
                           size, &queue, next_index, self._check_crc, &record), &record)
                if why == REC_OK:
                    why = self._add_if_wanted(&record)
                if why != REC_OK:
                    reason = COLS_DAMAGED
                    self._note_damage(
                        why, &view[at], size, next_index,
                        <int64_t>load_be64(&view[at + RECORD_HEAD_PHYSICAL_OFFSET]))
                    break
                next_index += 1
                at += size
        return reason, at, next_index

    def scan(self, buffer, int64_t segment_start, int64_t begin, int64_t end,
             QueueSpans wanted=None):
        """Take the records in [begin, end) of a segment, as they lie there.

        Args:
            wanted: only of these queues and offsets; None takes all, also those that are in no
                queue (prepared and rolled back transactions).

        Returns (a COLUMNS_ reason, the physical offset reached). At a blank the segment is done.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start
        cdef int reason = COLS_DONE, why
        cdef int32_t size
        cdef Span *span
        cdef Record record
        self._ensure_begun()
        with nogil:
            while at < stop:
                size = 0
                if stop - at >= 8:
                    size = <int32_t>load_be32(&view[at])
                    if self._is_full(size):
                        reason = COLS_FULL
                        break
                why = self._null_damaged(
                    judge_record(&view[at], stop - at, segment_start + at, self._check_crc,
                                 &record), &record)
                if why == REC_BLANK:
                    at = stop
                    break
                if why == REC_OK:
                    size = record.total_size
                    if wanted is not None:
                        span = wanted.find(record.topic, record.topic_length, record.queue_id)
                        if span == NULL or not is_queued(&record) or not (
                                span.begin <= record.queue_offset < span.end):
                            at += size
                            continue
                    why = self._add_if_wanted(&record)
                if why != REC_OK:
                    reason = COLS_DAMAGED
                    self._note_damage(why, &view[at], size if 0 <= size <= stop - at else 0, -1,
                                      segment_start + at)
                    break
                at += size
        return reason, segment_start + at

    cdef int _null_damaged(self, int why, Record *record) noexcept nogil:
        """With `null_body` a record whose body alone is damaged is taken without it."""
        if why == REC_BAD_CRC and self._null_body:
            record.body = NULL
            self.nulled += 1
            return REC_OK
        return why

    cdef int _note_damage(self, int why, const uint8_t *at, int64_t size, int64_t index,
                          int64_t phys) except -1 nogil:
        """(reason, queue offset, physical offset, CRC that it says, CRC that it has, details)."""
        cdef Record record
        cdef int64_t said = -1, has = -1
        if why == REC_BAD_BODY and parse_record(at, size, False, &record) == REC_OK:
            index = record.queue_offset
        if why == REC_BAD_CRC and parse_record(at, size, False, &record) == REC_OK:
            said = record.body_crc
            has = crc_of(0, record.body, record.body_length) & 0x7FFFFFFF
            index = record.queue_offset
        with gil:
            details = self._trouble if why == REC_BAD_BODY else ""
            self.damage = (REASONS[why], index, phys, said, has, details)
        return 0

    # --- filters ---

    cdef bint _has_code(self, int64_t code) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self._tag_count):
            if self._codes[i] == <int32_t>code:
                return True
        return False

    cdef bint _is_wanted(self, Record *record) except -1 nogil:
        if not self._begin_ms <= record.store_timestamp < self._end_ms:
            return False
        if not passes(self._filter, record):
            return False
        if self._wants_props:
            self._read_properties(record)
        if self._tag_count >= 0 and not one_of(self._wanted_tags, self._tag_count, &self._tags):
            return False
        return self._key_count < 0 or one_of(self._wanted_keys, self._key_count, &self._keys)

    cdef int _add_if_wanted(self, Record *record) except -1 nogil:
        """REC_OK, or REC_BAD_BODY: nothing was added then."""
        if not self._is_wanted(record):
            return REC_OK
        return self._add(record)

    # --- properties ---

    cdef void _read_properties(self, Record *record) noexcept nogil:
        """Split them, and find those with a column of their own. The last of a name counts."""
        cdef const uint8_t *at = record.properties
        cdef const uint8_t *stop = at + record.properties_length
        cdef const uint8_t *end
        cdef const uint8_t *separator
        cdef Prop prop
        self._prop_count = 0
        self._keys.value = self._tags.value = self._unique.value = NULL
        while at < stop:
            end = <const uint8_t *>memchr(at, 2, stop - at)
            if end == NULL:
                end = stop
            separator = <const uint8_t *>memchr(at, 1, end - at)
            # An empty name or an empty value is dropped.
            if separator != NULL and separator > at and separator + 1 < end:
                prop.name, prop.name_bytes = at, <int32_t>(separator - at)
                prop.value, prop.value_bytes = separator + 1, <int32_t>(end - separator - 1)
                if prop.name_bytes == 4 and memcmp(at, b"KEYS", 4) == 0:
                    self._keys = prop
                elif prop.name_bytes == 4 and memcmp(at, b"TAGS", 4) == 0:
                    self._tags = prop
                elif prop.name_bytes == 8 and memcmp(at, b"UNIQ_KEY", 8) == 0:
                    self._unique = prop
                if self._wants_map:
                    self._put_property(&prop)
            at = end + 1

    cdef void _put_property(self, Prop *prop) noexcept nogil:
        cdef Py_ssize_t number, at
        if self._prop_count < 16:
            for number in range(self._prop_count):
                if same_name(&self._props[number], prop):
                    self._props[number] = prop[0]
                    return
        else:  # so many that comparing each with each would be somebody's weapon
            if self._prop_count == 16:
                memset(self._prop_table, 0, PROPS_TABLE * sizeof(int32_t))
                for number in range(16):
                    self._prop_table[self._place(&self._props[number])] = <int32_t>number + 1
            at = self._place(prop)
            if self._prop_table[at]:
                self._props[self._prop_table[at] - 1] = prop[0]
                return
            self._prop_table[at] = <int32_t>self._prop_count + 1
        self._props[self._prop_count] = prop[0]
        self._prop_count += 1

    cdef Py_ssize_t _place(self, Prop *prop) noexcept nogil:
        """Where the name stands in the table, or the free place where it belongs."""
        cdef Py_ssize_t at = crc_of(0, prop.name, prop.name_bytes) % PROPS_TABLE
        while self._prop_table[at] and not same_name(&self._props[self._prop_table[at] - 1], prop):
            at = (at + 1) % PROPS_TABLE
        return at

    # --- rows ---

    cdef int _add(self, Record *record) except -1 nogil:
        cdef Py_ssize_t number
        cdef Column *column
        cdef const uint8_t *body = record.body
        cdef Py_ssize_t body_bytes = record.body_length
        if (self._wants_body and self._decompress and record.sys_flag & SYS_COMPRESSED
                and body != NULL):
            if not self._unfold(record, &body, &body_bytes):
                return REC_BAD_BODY
        for number in range(self._count):
            column = &self._columns[number]
            if column.id == COL_BODY:
                self._put(column, body, body_bytes, False)
            else:
                self._add_value(column, record)
        self.rows += 1
        self._bytes += record.total_size + (body_bytes if body != record.body else 0)
        return REC_OK

    cdef bint _unfold(self, Record *record, const uint8_t **body,
                      Py_ssize_t *body_bytes) except -1 with gil:
        """The one thing here that makes an object a message: the codecs are Python's."""
        try:
            self._plain = decompress(
                PyBytes_FromStringAndSize(<const char *>record.body, record.body_length),
                record.sys_flag)
        except Exception as error:  # each codec has errors of its own
            self._trouble = str(error)
            if self._null_body:
                self.nulled += 1
                body[0] = NULL
            return self._null_body
        body[0] = <const uint8_t *>PyBytes_AS_STRING(self._plain)
        body_bytes[0] = len(self._plain)
        return True

    cdef int _add_value(self, Column *column, Record *record) except -1 nogil:
        cdef int id = column.id
        if id == COL_TOPIC:
            self._put(column, record.topic, record.topic_length, True)
        elif id == COL_BROKER:
            self._put(column, self._broker_text, self._broker_bytes, True)
        elif id == COL_QUEUE_ID:
            put_i32(column.at[0], record.queue_id)
        elif id == COL_QUEUE_OFFSET:
            put_i64(column.at[0], record.queue_offset)
        elif id == COL_STORE_TS:
            put_i64(column.at[0], microseconds(record.store_timestamp))
        elif id == COL_BORN_TS:
            put_i64(column.at[0], microseconds(record.born_timestamp))
        elif id == COL_KEYS:
            self._put(column, self._keys.value, self._keys.value_bytes, True)
        elif id == COL_TAGS:
            self._put(column, self._tags.value, self._tags.value_bytes, True)
        elif id == COL_UNIQUE_KEY:
            self._put(column, self._unique.value, self._unique.value_bytes, True)
        elif id == COL_PROPERTIES:
            self._put_map(column)
        elif id == COL_RECONSUME_TIMES:
            put_i32(column.at[0], record.reconsume_times)
        elif id == COL_PHYSICAL_OFFSET:
            put_i64(column.at[0], record.physical_offset)
        elif id == COL_STORE_SIZE:
            put_i32(column.at[0], record.total_size)
        elif id == COL_BODY_CRC:
            put_i32(column.at[0], record.body_crc)
        elif id == COL_FLAG:
            put_i32(column.at[0], record.flag)
        elif id == COL_SYS_FLAG:
            put_i32(column.at[0], record.sys_flag)
        elif id == COL_BORN_HOST:
            self._put_host(column, record.born_host, record.born_host_length)
        elif id == COL_STORE_HOST:
            self._put_host(column, record.store_host, record.store_host_length)
        elif id == COL_PREPARED_TXN_OFFSET:
            put_i64(column.at[0], record.prepared_offset)
        elif id == COL_PROPERTIES_RAW:
            self._put(column, record.properties, record.properties_length, False)
        elif id == COL_BODY_RAW:
            self._put(column, record.body, record.body_length, False)
        elif id == COL_MSG_ID:
            self._put_id(column, record)
        elif id == COL_RECORD_VERSION:
            put_i32(column.at[0], 2 if record.magic == <uint32_t>MAGIC_V2 else 1)
        elif id == COL_BORN_HOST_RAW:
            self._put(column, record.born_host, record.born_host_length, False)
        elif id == COL_STORE_HOST_RAW:
            self._put(column, record.store_host, record.store_host_length, False)
        elif is_regular(record):
            self._put(column, NULL, 0, False)
        else:
            self._put(column, record.born_host - RECORD_HEAD_BYTES, record.total_size, False)
        return 0

    cdef int _put(self, Column *column, const uint8_t *value, Py_ssize_t count,
                  bint text) except -1 nogil:
        """NULL is null."""
        self._put_valid(column, value != NULL)
        if value != NULL:
            if text:
                put_text(column.at[2], value, count)
            else:
                put_bytes(column.at[2], value, count)
        put_i32(column.at[1], <int32_t>column.at[2].size)
        return 0

    cdef int _put_valid(self, Column *column, bint valid) except -1 nogil:
        cdef Grow *bits = column.at[0]
        if self.rows % 8 == 0:
            reserve_in(bits, 1)
            bits.data[bits.size] = 0
            bits.size += 1
        if valid:
            bits.data[self.rows // 8] |= <uint8_t>(1 << (self.rows % 8))
        else:
            column.nulls += 1
        return 0

    cdef int _put_map(self, Column *column) except -1 nogil:
        cdef Py_ssize_t number
        cdef Prop *prop
        for number in range(self._prop_count):
            prop = &self._props[number]
            put_text(column.at[3], prop.name, prop.name_bytes)
            put_i32(column.at[2], <int32_t>column.at[3].size)
            put_text(column.at[5], prop.value, prop.value_bytes)
            put_i32(column.at[4], <int32_t>column.at[5].size)
        return put_i32(column.at[1], <int32_t>(column.at[2].size // 4 - 1))

    cdef int _put_host(self, Column *column, const uint8_t *host, int count) except -1 nogil:
        cdef char text[64]
        cdef int used, i
        cdef int32_t port = <int32_t>load_be32(host + count - 4)
        if count == 8:
            used = snprintf(text, 64, "%d.%d.%d.%d:%d", host[0], host[1], host[2], host[3], port)
        else:
            used = 0
            for i in range(8):
                used += snprintf(text + used, 64 - used, "%s%x", b"[" if i == 0 else b":",
                                 load_be16(host + 2 * i))
            used += snprintf(text + used, 64 - used, "]:%d", port)
        return self._put(column, <const uint8_t *>text, used, False)

    cdef int _put_id(self, Column *column, Record *record) except -1 nogil:
        """RocketMQ's offset message id."""
        cdef uint8_t text[56]
        cdef int i, host = record.store_host_length
        for i in range(host):
            write_hex(text + 2 * i, record.store_host[i], 2)
        write_hex(text + 2 * host, <uint64_t>record.physical_offset, 16)
        return self._put(column, text, 2 * host + 16, False)


cdef inline bint same_name(Prop *left, Prop *right) noexcept nogil:
    return (left.name_bytes == right.name_bytes
            and memcmp(left.name, right.name, left.name_bytes) == 0)


cdef bint is_regular(Record *record) noexcept nogil:
    """Whether the columns hold all of it: no time was saturated, no byte of the topic replaced."""
    cdef Py_ssize_t at = 0
    cdef bint good = True
    while good and at < record.topic_length:
        at += utf8_step(record.topic + at, record.topic_length - at, &good)
    return (good and -MS_MAX <= record.born_timestamp <= MS_MAX
            and -MS_MAX <= record.store_timestamp <= MS_MAX)


cdef inline int64_t microseconds(int64_t ms) noexcept nogil:
    """Saturated: a hostile born time must not wrap around."""
    return max(-MS_MAX, min(ms, MS_MAX)) * 1000


cdef bint one_of(Prop *wanted, Py_ssize_t count, Prop *prop) noexcept nogil:
    cdef Py_ssize_t i
    if prop.value == NULL:
        return False
    for i in range(count):
        if wanted[i].value_bytes == prop.value_bytes and memcmp(
                wanted[i].value, prop.value, prop.value_bytes) == 0:
            return True
    return False


cdef int _places(int column) noexcept:
    if is_text(column):
        return 3
    return COLUMN_BUFFERS if column == COL_PROPERTIES else 1


cdef ArrowBuffer _unused(list pool):
    """One that nobody looks at any more, or a new one."""
    cdef ArrowBuffer buffer
    for buffer in pool:
        if buffer.exports == 0:
            return buffer
    buffer = ArrowBuffer()
    if len(pool) < 4:
        pool.append(buffer)
    return buffer
