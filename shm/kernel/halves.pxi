# --- half messages: what a producer has named, before its transaction has ended -----------------------


cdef bint property_is(Record *record, const char *name, Py_ssize_t name_bytes, str text) except -1:
    """Whether the property has that text; one that is not there has none."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0, wanted = 0
    cdef const char *raw = PyUnicode_AsUTF8AndSize(text, &wanted)
    if not find_property(record.properties, record.properties_length, name, name_bytes, &value,
                         &count):
        return wanted == 0
    return count == wanted and memcmp(value, raw, count) == 0


cdef bint half_is_named(const uint8_t *at, int64_t available, int64_t physical_offset,
                        int64_t queue_offset, str group, str transaction, str topic,
                        Record *record) except -1:
    """Whether there is the half message that its producer names so, and no copy of another; it is
    in `record` then.

    Args:
        topic: that it is meant for.
    """
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0
    cdef const char *name = b"__transactionId__"
    cdef Py_ssize_t name_bytes = 17
    if available < RECORD_MIN or parse_record(at, available, True, record) != REC_OK:
        return False
    if (record.physical_offset != physical_offset or record.queue_offset != queue_offset
            or record.topic_length != len(HALF_TOPIC_NAME)
            or memcmp(record.topic, PyBytes_AS_STRING(HALF_TOPIC_NAME), record.topic_length) != 0):
        return False
    if not find_property(record.properties, record.properties_length, name, name_bytes, &value,
                         &count):
        name, name_bytes = b"UNIQ_KEY", 8
    return (property_is(record, b"PGROUP", 6, group)
            and property_is(record, name, name_bytes, transaction)
            and property_is(record, b"REAL_TOPIC", 10, topic)
            and not find_property(record.properties, record.properties_length,
                                  b"TRAN_PREPARED_QUEUE_OFFSET", 26, &value, &count))


@cython.final
cdef class HalfEnds:
    """Ends of transactions by columns, as a producer's command has them; whose half message is as
    most are is ended here.

    Args:
        counts: of half messages that each transaction has; they stand one after the other in the
            columns behind.
        topics: that they are meant for, each once; `topic_of` has their places.

    Raises ValueError for columns that do not fit together.
    """

    cdef str _group
    cdef list _transactions, _commits, _counts
    cdef list _topics, _topic_of, _queue_offsets, _physical_offsets

    def __init__(self, str group not None, list transactions not None, list commits not None,
                 list counts not None, list topics not None, list topic_of not None,
                 list queue_offsets not None, list physical_offsets not None):
        cdef Py_ssize_t rows = 0
        self._group, self._transactions, self._commits = group, transactions, commits
        self._counts, self._topics, self._topic_of = counts, topics, topic_of
        self._queue_offsets, self._physical_offsets = queue_offsets, physical_offsets
        if not len(transactions) == len(commits) == len(counts):
            raise ValueError(f"{len(transactions)} transactions, {len(commits)} ends, "
                             f"{len(counts)} counts")
        for count in counts:
            if not 0 <= count <= len(topic_of):
                raise ValueError(f"a transaction of {count} messages")
            rows += count
        if not rows == len(topic_of) == len(queue_offsets) == len(physical_offsets):
            raise ValueError(f"{rows} messages, of which {len(topic_of)} have topics, "
                             f"{len(queue_offsets)} numbers, {len(physical_offsets)} places")
        for place in topic_of:
            if not 0 <= place < len(topics):
                raise ValueError(f"topic {place} of {len(topics)}")

    def store(self, Py_ssize_t index, Py_ssize_t row, const uint8_t[::1] segment not None,
              int64_t start, int64_t limit, InnerEncoder encoder not None, queue_of,
              bytearray outcomes not None, int64_t base, dict ended not None,
              tuple words not None, Py_ssize_t bytes_max, Py_ssize_t ends_max):
        """Put ends into a write, from one on, as long as each is of one half message that lies in
        `segment`, was never copied, and is pending. The index of the first that is not, or for
        which there is no room.

        Args:
            row: of the first half message of transaction `index`.
            start: of the segment in the log; `limit`: where the log ends in it.
            encoder: takes what is committed.
            queue_of: the encoder's number for a topic and a queue; what it refuses is not stored.
            outcomes: of half messages from number `base` on, 0: pending; those behind are, too.
            ended: what this write ends, by the number of the half message.
            words: what it has there for a rollback, for a commit.
            bytes_max, ends_max: of the write.
        """
        cdef Record record
        cdef int64_t number, physical_offset, queue_id, at
        cdef uint8_t *known = <uint8_t *><char *>outcomes
        cdef Py_ssize_t known_count = len(outcomes)
        cdef bint commit
        cdef dict queues = {}
        limit = min(limit, segment.shape[0])
        while index < len(self._transactions) and self._counts[index] == 1:
            number, physical_offset = self._queue_offsets[row], self._physical_offsets[row]
            commit = self._commits[index]
            at = physical_offset - start if 0 <= start <= physical_offset else -1
            if (number < base or number - base < known_count and known[number - base]
                    or self._queue_offsets[row] in ended or len(ended) >= ends_max
                    or not 0 <= at < limit
                    or not half_is_named(&segment[at], limit - at, physical_offset, number,
                                         self._group, self._transactions[index],
                                         self._topics[self._topic_of[row]], &record)):
                break
            queue_id = number_property(&record, b"REAL_QID", 8)
            if (queue_id < 0 or encoder.size and encoder.size + record.total_size > bytes_max):
                break
            if commit:
                key = (self._topic_of[row], queue_id)
                queue = queues.get(key)
                if queue is None:
                    try:
                        queue = queues[key] = queue_of(self._topics[self._topic_of[row]], queue_id)
                    except Exception:
                        break  # it is said where this end is looked at closer
                record.properties_length = without_crc_property(
                    record.properties, record.properties_length)
                record.sys_flag = (record.sys_flag & ~TRANSACTION_BITS) | TRANSACTION_COMMIT
                record.prepared_offset = physical_offset
                record.store_host_length = 0  # it is stored here
                try:
                    encoder._add_delivered(queue, &record)
                except RecordTooLarge:
                    break  # as it is; with fewer properties it may do
            ended[self._queue_offsets[row]] = words[commit]
            index += 1
            row += 1
        return index


cdef enum:
    NUMBER_BYTES = 20  # of a queue offset and the comma behind it


def op_text(list ended not None, bytes letters not None):
    """The body of the op that says that these halves have ended, and its letters.

    Args:
        ended: queue offset and outcome of each.
        letters: by outcome.
    """
    cdef Py_ssize_t index, at = 0, count = len(ended)
    cdef bytes body = PyBytes_FromStringAndSize(NULL, NUMBER_BYTES * count)
    cdef bytes text = PyBytes_FromStringAndSize(NULL, count)
    cdef char *out = PyBytes_AS_STRING(body)
    cdef char digits[NUMBER_BYTES]
    cdef int64_t number
    cdef int outcome, length
    for index, (queue_offset, how) in enumerate(ended):
        number, outcome, length = queue_offset, how, 0
        if number < 0 or not 0 <= outcome < len(letters):
            raise ValueError(f"half message {number} has ended as {outcome}")
        PyBytes_AS_STRING(text)[index] = PyBytes_AS_STRING(letters)[outcome]
        while number >= 10:
            digits[length] = 48 + number % 10
            number //= 10
            length += 1
        out[at] = 48 + <char>number
        at += 1
        while length:
            length -= 1
            out[at] = digits[length]
            at += 1
        out[at] = 44  # a comma
        at += 1
    return body[:at], text


def note_ended(bytearray outcomes not None, int64_t base, int64_t span_max, ended):
    """Note the outcomes of half messages, a byte each from number `base` on, as far as `span_max`."""
    cdef int64_t index
    cdef Py_ssize_t known
    for number, outcome in ended:
        index = number - base
        if not 0 <= index < span_max:
            continue
        known = len(outcomes)
        if index >= known:
            outcomes.extend(bytes(index + 1 - known))
        outcomes[index] = outcome


cdef int32_t TRANSACTION_BITS = 0xC, TRANSACTION_COMMIT = 0x8  # of a record's flags
cdef bytes HALF_TOPIC_NAME = _names.HALF_TOPIC.encode()
