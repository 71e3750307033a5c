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


def half_at(const uint8_t[::1] segment not None, int64_t at, int64_t end, int64_t physical_offset,
            int64_t queue_offset, str group not None, str transaction not None,
            str topic not None):
    """(bytes, flags, queue that it is meant for) of the half message at byte `at`, if it is the
    one that its producer names, and no copy of another. None: look closer, it may be none.

    Args:
        end: no record goes on behind it.
        topic: that it is meant for.
    """
    cdef Record record
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0
    cdef int64_t queue_id
    cdef const char *name = b"__transactionId__"
    cdef Py_ssize_t name_bytes = 17
    end = min(end, segment.shape[0])
    if at < 0 or end < RECORD_MIN or at > end - RECORD_MIN:
        return None
    if parse_record(&segment[at], end - at, True, &record) != REC_OK:
        return None
    if (record.physical_offset != physical_offset or record.queue_offset != queue_offset
            or record.topic_length != len(HALF_TOPIC_NAME)
            or memcmp(record.topic, PyBytes_AS_STRING(HALF_TOPIC_NAME), record.topic_length) != 0):
        return None
    if not find_property(record.properties, record.properties_length, name, name_bytes, &value,
                         &count):
        name, name_bytes = b"UNIQ_KEY", 8
    queue_id = number_property(&record, b"REAL_QID", 8)
    if (queue_id < 0 or not property_is(&record, b"PGROUP", 6, group)
            or not property_is(&record, name, name_bytes, transaction)
            or not property_is(&record, b"REAL_TOPIC", 10, topic)
            or find_property(record.properties, record.properties_length,
                             b"TRAN_PREPARED_QUEUE_OFFSET", 26, &value, &count)):
        return None
    return record.total_size, record.sys_flag, queue_id


cdef bytes HALF_TOPIC_NAME = _names.HALF_TOPIC.encode()
