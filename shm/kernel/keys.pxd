# --- keys of messages, as the index has them ---------------------------------------------------------

from cometmq.shm.kernel.records cimport *


cdef struct Keys:
    const uint8_t *unique  # NULL: none
    Py_ssize_t unique_bytes
    const uint8_t *keys  # NULL: none
    Py_ssize_t keys_bytes


cdef inline int32_t index_hash_of(uint32_t h) noexcept nogil:
    """RocketMQ indexKeyHashMethod: Math.abs, and 0 for the one number that has no absolute."""
    cdef int32_t signed = <int32_t>h
    if signed >= 0:
        return signed
    return 0 if h == <uint32_t>0x80000000 else -signed


cdef inline void find_keys(const uint8_t *at, Py_ssize_t count, Keys *found) noexcept nogil:
    """UNIQ_KEY and KEYS in one pass; the last of a name counts, an empty value does not."""
    cdef const uint8_t *end = at + count
    cdef const uint8_t *stop
    found.unique = NULL
    found.keys = NULL
    while at < end:
        stop = <const uint8_t *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        if stop - at > 5 and memcmp(at, b"KEYS\x01", 5) == 0:
            found.keys = at + 5
            found.keys_bytes = stop - at - 5
        elif stop - at > 9 and memcmp(at, b"UNIQ_KEY\x01", 9) == 0:
            found.unique = at + 9
            found.unique_bytes = stop - at - 9
        at = stop + 1


cdef inline bint is_indexed(Record *record, Keys *keys) noexcept nogil:
    """Whether the record has anything to be found by. Rolled-back records are not indexed."""
    if record.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_ROLLBACK:
        return False
    find_keys(record.properties, record.properties_length, keys)
    return keys.unique != NULL or keys.keys != NULL
