# --- records: what one is, which queue entry it gets, and whether an entry holds ---------------------
#
# The one place for these rules. Who dispatches, reads, walks or verifies asks here, so that nobody is
# laxer than the others. They are compiled into each extension.

from cometmq.shm.kernel.base cimport *

cdef extern from *:
    """
    #define QUEUE_OFFSET_LAST (INT64_MAX / 20 - 1)
    """
    # With it an entry's place in its queue, in bytes, can still be counted.
    const int64_t QUEUE_OFFSET_LAST

cdef enum:
    REC_OK = 0
    REC_BLANK = 1
    REC_BAD_MAGIC = 2
    REC_BAD_SIZE = 3
    REC_BAD_FIELDS = 4
    REC_BAD_CRC = 5
    REC_BAD_POSITION = 6
    REC_BAD_QUEUE = 7
    REC_BAD_BODY = 8
    REC_ANOTHER = 9
    REC_NO_PLACE = 10
    REC_UNWANTED = 11  # a filter does not want it; no fault, and never reported


# The smallest record: head, hosts of 8, store time, middle, empty body and topic and properties.
cdef enum:
    RECORD_MIN = 91
    FILLER_SIZE = 0x7FFFFFFF


cdef struct Record:
    int32_t total_size
    uint32_t magic
    int32_t body_crc
    int32_t queue_id
    int32_t flag
    int64_t queue_offset
    int64_t physical_offset
    int32_t sys_flag
    int64_t born_timestamp
    int64_t store_timestamp
    int32_t reconsume_times
    int64_t prepared_offset
    int32_t body_length
    int32_t topic_length
    int32_t properties_length
    int32_t born_host_length
    int32_t store_host_length
    const uint8_t *born_host
    const uint8_t *store_host
    const uint8_t *body
    const uint8_t *topic
    const uint8_t *properties


cdef inline int parse_record(
    const uint8_t *at, int64_t available, bint check_crc, Record *record
) noexcept nogil:
    """Read a record's fields; every length is checked before it is followed."""
    cdef int64_t position, size
    if available < 8:
        return REC_BAD_SIZE
    record.total_size = <int32_t>load_be32(at)
    record.magic = load_be32(at + RECORD_HEAD_MAGIC)
    if record.magic == <uint32_t>MAGIC_BLANK:
        return REC_BLANK
    if record.magic != <uint32_t>MAGIC_V1 and record.magic != <uint32_t>MAGIC_V2:
        return REC_BAD_MAGIC
    size = record.total_size
    if size < RECORD_MIN or size > available:
        return REC_BAD_SIZE
    record.body_crc = <int32_t>load_be32(at + RECORD_HEAD_BODY_CRC)
    record.queue_id = <int32_t>load_be32(at + RECORD_HEAD_QUEUE_ID)
    record.flag = <int32_t>load_be32(at + RECORD_HEAD_FLAG)
    record.queue_offset = <int64_t>load_be64(at + RECORD_HEAD_QUEUE_OFFSET)
    record.physical_offset = <int64_t>load_be64(at + RECORD_HEAD_PHYSICAL_OFFSET)
    record.sys_flag = <int32_t>load_be32(at + RECORD_HEAD_SYS_FLAG)
    record.born_timestamp = <int64_t>load_be64(at + RECORD_HEAD_BORN_TIMESTAMP)
    record.born_host_length = 20 if record.sys_flag & SYS_BORN_HOST_V6 else 8
    record.store_host_length = 20 if record.sys_flag & SYS_STORE_HOST_V6 else 8
    position = RECORD_HEAD_BYTES
    record.born_host = at + position
    position += record.born_host_length
    record.store_timestamp = <int64_t>load_be64(at + position)
    position += 8
    record.store_host = at + position
    position += record.store_host_length
    if position + RECORD_MIDDLE_BYTES > size:
        return REC_BAD_FIELDS
    record.reconsume_times = <int32_t>load_be32(at + position + RECORD_MIDDLE_RECONSUME_TIMES)
    record.prepared_offset = <int64_t>load_be64(
        at + position + RECORD_MIDDLE_PREPARED_TRANSACTION_OFFSET)
    record.body_length = <int32_t>load_be32(at + position + RECORD_MIDDLE_BODY_LENGTH)
    position += RECORD_MIDDLE_BYTES
    return parse_texts(at, position, check_crc, record)


cdef inline int parse_texts(
    const uint8_t *at, int64_t position, bint check_crc, Record *record
) noexcept nogil:
    """The fields from the body on, which have lengths of their own."""
    cdef int64_t size = record.total_size
    if record.body_length < 0 or position + record.body_length + 4 > size + 1:
        return REC_BAD_FIELDS
    record.body = at + position
    position += record.body_length
    if record.magic == <uint32_t>MAGIC_V2:
        if position + 2 > size:
            return REC_BAD_FIELDS
        record.topic_length = <int16_t>load_be16(at + position)
        position += 2
    else:
        record.topic_length = <int8_t>at[position]
        position += 1
    if record.topic_length < 0 or position + record.topic_length + 2 > size:
        return REC_BAD_FIELDS
    record.topic = at + position
    position += record.topic_length
    record.properties_length = <int16_t>load_be16(at + position)
    position += 2
    record.properties = at + position
    if record.properties_length < 0 or position + record.properties_length != size:
        return REC_BAD_FIELDS
    if check_crc and not body_is_whole(record):
        return REC_BAD_CRC
    return REC_OK


cdef inline bint body_is_whole(Record *record) noexcept nogil:
    return <int32_t>(crc_of(0, record.body, record.body_length) & 0x7FFFFFFF) == record.body_crc


# --- laying one down ---


cdef inline uint8_t *lay_head(uint8_t *at, Record *record) noexcept nogil:
    """The fields before the body; the bits of its system flag that say what its hosts are, too."""
    record.sys_flag &= ~(SYS_BORN_HOST_V6 | SYS_STORE_HOST_V6)
    if record.born_host_length == 20:
        record.sys_flag |= SYS_BORN_HOST_V6
    if record.store_host_length == 20:
        record.sys_flag |= SYS_STORE_HOST_V6
    store_be32(at + RECORD_HEAD_TOTAL_SIZE, <uint32_t>record.total_size)
    store_be32(at + RECORD_HEAD_MAGIC, record.magic)
    store_be32(at + RECORD_HEAD_BODY_CRC, crc_of(0, record.body, record.body_length) & 0x7FFFFFFF)
    store_be32(at + RECORD_HEAD_QUEUE_ID, <uint32_t>record.queue_id)
    store_be32(at + RECORD_HEAD_FLAG, <uint32_t>record.flag)
    store_be64(at + RECORD_HEAD_QUEUE_OFFSET, <uint64_t>record.queue_offset)
    store_be64(at + RECORD_HEAD_PHYSICAL_OFFSET, <uint64_t>record.physical_offset)
    store_be32(at + RECORD_HEAD_SYS_FLAG, <uint32_t>record.sys_flag)
    store_be64(at + RECORD_HEAD_BORN_TIMESTAMP, <uint64_t>record.born_timestamp)
    at += RECORD_HEAD_BYTES
    memcpy(at, record.born_host, record.born_host_length)
    at += record.born_host_length
    store_be64(at, <uint64_t>record.store_timestamp)
    at += 8
    memcpy(at, record.store_host, record.store_host_length)
    at += record.store_host_length
    store_be32(at + RECORD_MIDDLE_RECONSUME_TIMES, <uint32_t>record.reconsume_times)
    store_be64(at + RECORD_MIDDLE_PREPARED_TRANSACTION_OFFSET, <uint64_t>record.prepared_offset)
    store_be32(at + RECORD_MIDDLE_BODY_LENGTH, <uint32_t>record.body_length)
    return at + RECORD_MIDDLE_BYTES


cdef inline uint8_t *lay_record(
    uint8_t *at, Record *record, bint crc_property, bint separator
) noexcept nogil:
    """A record at `at`, which has room for its `total_size`; the byte behind it.

    Its body's CRC is computed. With RocketMQ's CRC property behind its properties, for which they
    want a separator unless they end with one.
    """
    cdef uint8_t *begin = at
    cdef int32_t properties_length = record.properties_length
    if crc_property:
        properties_length += CRC_PROPERTY_BYTES + (1 if separator else 0)
    at = lay_head(at, record)
    memcpy(at, record.body, record.body_length)
    at += record.body_length
    if record.magic == <uint32_t>MAGIC_V2:
        store_be16(at, <uint16_t>record.topic_length)
        at += 2
    else:
        at[0] = <uint8_t>record.topic_length
        at += 1
    memcpy(at, record.topic, record.topic_length)
    at += record.topic_length
    store_be16(at, <uint16_t>properties_length)
    at += 2
    memcpy(at, record.properties, record.properties_length)
    at += record.properties_length
    if crc_property:
        if separator:
            at[0] = 2
            at += 1
        memcpy(at, b"__CRC32#\x01", 9)
        write_digits_reversed(at + 9, crc_of(0, begin, at - begin) & 0x7FFFFFFF)
        at[19] = 2
        at += CRC_PROPERTY_BYTES
    return at


cdef inline void write_digits_reversed(uint8_t *at, uint32_t value) noexcept nogil:
    """Ten decimal digits, the least significant first (RocketMQ's appended CRC)."""
    cdef int i
    for i in range(10):
        at[i] = 48 + value % 10
        value //= 10


cdef inline bint is_topic(const uint8_t *topic, Py_ssize_t count) noexcept nogil:
    """protocol/names' rule. What it passes is also the name of a folder inside the store."""
    cdef Py_ssize_t i
    cdef bint long_name = (count > 7 and memcmp(topic, b"%RETRY%", 7) == 0) or (
        count > 5 and memcmp(topic, b"%DLQ%", 5) == 0)
    if not 0 < count <= (LONG_TOPIC_MAX if long_name else TOPIC_MAX):
        return False
    for i in range(count):
        if not topic_byte[topic[i]]:
            return False
    return True


cdef inline bint has_place(Record *record) noexcept nogil:
    """Whether there may be a queue with such a message. If so, no sum with its offset overflows."""
    return (record.queue_id >= 0 and 0 <= record.queue_offset <= QUEUE_OFFSET_LAST
            and is_topic(record.topic, record.topic_length))


cdef inline int record_here(
    const uint8_t *at, int64_t available, int64_t physical_offset, bint check_crc, Record *record
) noexcept nogil:
    """Whether a record that says so lies at that place of the log: REC_OK, or why not."""
    cdef int why = parse_record(at, available, check_crc, record)
    if why == REC_OK and record.physical_offset != physical_offset:
        return REC_BAD_POSITION
    return why


cdef inline int judge_record(
    const uint8_t *at, int64_t available, int64_t physical_offset, bint check_crc, Record *record
) noexcept nogil:
    """As `record_here`, of one whose topic may be made a path of, and whose queue offset may be
    counted with."""
    cdef int why = record_here(at, available, physical_offset, check_crc, record)
    if why == REC_OK and not has_place(record):
        return REC_BAD_QUEUE
    return why


cdef inline int find_unkept(const uint8_t *properties, Py_ssize_t count) noexcept nogil:
    """Which of the properties that a client may not set yet stands there; -1: none. One without a
    value is none, as RocketMQ reads it."""
    cdef Py_ssize_t at = 0, size
    cdef const uint8_t *end
    cdef int i
    while at + 2 < count:
        for i in range(UNKEPT_COUNT):
            if load_be16(properties + at) != unkept_begin[i]:
                continue
            size = unkept_bytes[i]
            if (at + size + 1 < count and properties[at + size] == 1
                    and properties[at + size + 1] != 2
                    and memcmp(properties + at, unkept_name[i], size) == 0):
                return i
        end = <const uint8_t *>memchr(properties + at, 2, count - at)
        if end == NULL:
            break
        at = end - properties + 1
    return -1


# --- entries ---


cdef inline bint is_queued(Record *record) noexcept nogil:
    """Prepared and rolled back transactions have no place in a queue (RocketMQ's dispatch)."""
    return takes_place(record.sys_flag)


cdef inline bint takes_place(int32_t sys_flag) noexcept nogil:
    """Whether a message with that flag gets a queue offset of its own."""
    cdef int32_t kind = sys_flag & SYS_TRANSACTION_MASK
    return kind != SYS_TRANSACTION_PREPARED and kind != SYS_TRANSACTION_ROLLBACK


cdef inline bint is_delayed(const uint8_t *topic, Py_ssize_t count) noexcept nogil:
    """The delay topic's tagsCode is a time (`delay_code`)."""
    return count == 19 and memcmp(topic, b"SCHEDULE_TOPIC_XXXX", 19) == 0


cdef inline void write_unit(
    uint8_t *unit, int64_t physical_offset, int32_t size, int64_t tags_code
) noexcept nogil:
    store_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET, <uint64_t>physical_offset)
    store_be32(unit + CONSUME_QUEUE_UNIT_SIZE, <uint32_t>size)
    store_be64(unit + CONSUME_QUEUE_UNIT_TAGS_CODE, <uint64_t>tags_code)


cdef inline int64_t delay_code(Record *record, const int64_t *levels_ms, Py_ssize_t count) noexcept nogil:
    """tagsCode of a record of SCHEDULE_TOPIC_XXXX (store-format 3.2): when it is due, in ms since
    1970, as 64 bits hold it; of one that says no level, as of any other record."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0, i
    cdef int64_t level = 0
    if find_property(record.properties, record.properties_length, b"DELAY", 5, &value,
                     &value_bytes):
        for i in range(value_bytes):
            if not 48 <= value[i] <= 57:
                level = 0
                break
            level = min(10 * level + value[i] - 48, count)
    if level == 0:
        return tags_code_of(record.properties, record.properties_length)
    return <int64_t>(<uint64_t>record.store_timestamp + <uint64_t>levels_ms[level - 1])


cdef inline void write_entry(uint8_t *unit, Record *record) noexcept nogil:
    """The entry that a record gets, if it is queued and not delayed."""
    write_unit(unit, record.physical_offset, record.total_size,
               tags_code_of(record.properties, record.properties_length))


cdef inline bint is_filler(const uint8_t *unit) noexcept nogil:
    """RocketMQ's entry that stands for nothing."""
    return (load_be32(unit + CONSUME_QUEUE_UNIT_SIZE) == FILLER_SIZE
            and load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET) == 0)


cdef enum:
    PLACE_READ = 0  # inside the log: look there
    PLACE_GONE = 1  # below the log's beginning
    PLACE_FILLER = 2
    PLACE_WRONG = 3


cdef struct Reach:  # of the log
    int64_t log_min
    int64_t log_max
    int64_t segment_bytes


cdef inline int place_of(int64_t physical_offset, int32_t size, Reach *reach) noexcept nogil:
    """Where an entry's record is to be looked for. Whatever the entry says, nothing overflows."""
    if physical_offset < 0 or size < RECORD_MIN:
        return PLACE_WRONG
    if size == FILLER_SIZE and physical_offset == 0:
        return PLACE_FILLER
    if physical_offset < reach.log_min:
        return PLACE_GONE
    if (physical_offset > reach.log_max or size > reach.log_max - physical_offset
            or size > reach.segment_bytes - physical_offset % reach.segment_bytes):
        return PLACE_WRONG
    return PLACE_READ


cdef struct Queue:  # whose entries are followed
    const uint8_t *topic
    Py_ssize_t topic_bytes
    int32_t queue_id


cdef inline Queue queue_of(bytes topic, int32_t queue_id):
    """It is good as long as the topic's bytes are."""
    cdef Queue queue
    queue.topic = <const uint8_t *>PyBytes_AS_STRING(topic)
    queue.topic_bytes = len(topic)
    queue.queue_id = queue_id
    return queue


cdef inline bint is_of(Record *record, Queue *queue) noexcept nogil:
    return (record.queue_id == queue.queue_id and record.topic_length == queue.topic_bytes
            and same_bytes(record.topic, queue.topic, queue.topic_bytes))


cdef inline bint holds(
    Record *record, int64_t physical_offset, int32_t size, Queue *queue, int64_t queue_offset
) noexcept nogil:
    """Whether a queue's entry holds: `record`, parsed at its physical offset, has its size, says
    that it lies there, and is the queue's message of that offset."""
    if record.total_size != size or record.physical_offset != physical_offset:
        return False
    if record.queue_offset == queue_offset and is_of(record, queue):
        return is_queued(record)
    return is_light(record, queue, queue_offset)


cdef inline int follow(
    const uint8_t *at, int64_t physical_offset, int32_t size, Queue *queue, int64_t queue_offset,
    bint check_crc, Record *record,
) noexcept nogil:
    """Read the record that an entry points at: REC_OK, or why it must not be handed out."""
    cdef int why = parse_record(at, size, False, record)
    if why != REC_OK:
        return REC_BAD_SIZE if why == REC_BLANK else why
    if not holds(record, physical_offset, size, queue, queue_offset):
        return REC_ANOTHER
    if check_crc and not body_is_whole(record):
        return REC_BAD_CRC
    return REC_OK


cdef inline bint is_light(Record *record, Queue *queue, int64_t queue_offset) noexcept nogil:
    """Whether the record stands in one of RocketMQ's light queues, too: its properties name them,
    and in the same order the queue offset in each (store-format 3.7)."""
    cdef const uint8_t *names = NULL
    cdef const uint8_t *offsets = NULL
    cdef Py_ssize_t names_bytes = 0, offsets_bytes = 0, number = 0, count
    if (queue.queue_id != 0 or queue.topic_bytes < 5 or memcmp(queue.topic, b"%LMQ%", 5) != 0
            or not find_property(record.properties, record.properties_length,
                                 b"INNER_MULTI_DISPATCH", 20, &names, &names_bytes)
            or not find_property(record.properties, record.properties_length,
                                 b"INNER_MULTI_QUEUE_OFFSET", 24, &offsets, &offsets_bytes)):
        return False
    while names_bytes > 0:
        count = piece_bytes(names, names_bytes)
        if count == queue.topic_bytes and memcmp(names, queue.topic, count) == 0:
            return number_in(offsets, offsets_bytes, number) == queue_offset
        number += 1
        names += count + 1
        names_bytes -= count + 1
    return False


cdef inline Py_ssize_t piece_bytes(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Up to the next comma."""
    cdef Py_ssize_t at = 0
    while at < count and text[at] != 44:
        at += 1
    return at


cdef inline int64_t number_in(const uint8_t *text, Py_ssize_t count, Py_ssize_t number) noexcept nogil:
    """The decimal number of that place in a list; -1 if there is none."""
    cdef Py_ssize_t i, piece
    cdef int64_t found = 0
    while number > 0 and count > 0:
        piece = piece_bytes(text, count) + 1
        text += piece
        count -= piece
        number -= 1
    piece = piece_bytes(text, count) if count > 0 else 0
    if not 0 < piece <= 18:
        return -1
    for i in range(piece):
        if not 48 <= text[i] <= 57:
            return -1
        found = 10 * found + text[i] - 48
    return found


cdef inline int check_units(Py_ssize_t size, int64_t first_index, int64_t begin, int64_t end) except -1:
    """Raise ValueError unless the entries [begin, end) lie in so many bytes of a ConsumeQueue whose
    first entry has `first_index`; an empty stretch lies anywhere."""
    if first_index < 0 or begin < first_index or (
            end > begin and end - first_index > size // CONSUME_QUEUE_UNIT_BYTES):
        raise ValueError(
            f"entries [{begin}, {end}) are not in the segment: {size} bytes from {first_index} on")
    return 0


cdef inline int64_t check_inside(
    Py_ssize_t size, int64_t segment_start, int64_t begin, int64_t end
) except -1:
    """Raise ValueError unless [begin, end) lies in a segment; where it begins there."""
    if segment_start < 0 or not segment_start <= begin <= end or end - segment_start > size:
        raise ValueError(f"[{begin}, {end}) is not inside the segment at {segment_start}")
    return begin - segment_start


cdef inline int64_t size_here(
    const uint8_t *at, int64_t available, int64_t physical_offset, int64_t to_segment_end
) noexcept nogil:
    """Of the record, or of the blank, that begins there; -1 if none does."""
    cdef int64_t size
    cdef uint32_t magic
    if available < 8:
        return -1
    size = <int32_t>load_be32(at)
    magic = load_be32(at + RECORD_HEAD_MAGIC)
    if magic == <uint32_t>MAGIC_BLANK:
        return size if size == to_segment_end and size <= available else -1
    if magic != <uint32_t>MAGIC_V1 and magic != <uint32_t>MAGIC_V2:
        return -1
    if size < RECORD_MIN or size > available:
        return -1
    if <int64_t>load_be64(at + RECORD_HEAD_PHYSICAL_OFFSET) != physical_offset:
        return -1
    return size


cdef inline int64_t parse_element(const uint8_t *at, int64_t available, Record *record) noexcept nogil:
    """Read an element of a batch body: flag, body, properties; every length is checked before it is
    followed. Its bytes, or -1 if it is none."""
    cdef int64_t body_bytes, properties_bytes, size
    if available < BATCH_ELEMENT_BYTES + 2:
        return -1
    body_bytes = <int32_t>load_be32(at + BATCH_ELEMENT_BODY_LENGTH)
    if body_bytes < 0 or body_bytes > available - BATCH_ELEMENT_BYTES - 2:
        return -1
    properties_bytes = <int16_t>load_be16(at + BATCH_ELEMENT_BYTES + body_bytes)
    size = BATCH_ELEMENT_BYTES + body_bytes + 2 + properties_bytes
    if (properties_bytes < 0 or size > available
            or <int32_t>load_be32(at + BATCH_ELEMENT_TOTAL_SIZE) != size):
        return -1
    record.flag = <int32_t>load_be32(at + BATCH_ELEMENT_FLAG)
    record.body = at + BATCH_ELEMENT_BYTES
    record.body_length = <int32_t>body_bytes
    record.properties = record.body + body_bytes + 2
    record.properties_length = <int32_t>properties_bytes
    return size
