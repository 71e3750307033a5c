# --- text: hashes and properties ------------------------------------------------------------------


cdef uint32_t hash_on(uint32_t h, const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Java's String.hashCode over UTF-16 units, going on from the hash of what stands before.

    Bytes that are no UTF-8 count as U+FFFD.
    """
    cdef uint32_t point
    cdef Py_ssize_t at = 0
    cdef int more, i
    while at < count:
        if count - at >= 8 and is_ascii8(text + at):
            h = hash_ascii8(h, text + at)
            at += 8
            continue
        point = text[at]
        at += 1
        if point < 0x80:
            h = 31 * h + point
            continue
        if 0xC2 <= point <= 0xDF:
            more = 1
            point &= 0x1F
        elif 0xE0 <= point <= 0xEF:
            more = 2
            point &= 0x0F
        elif 0xF0 <= point <= 0xF4:
            more = 3
            point &= 0x07
        else:
            h = 31 * h + 0xFFFD
            continue
        for i in range(more):
            if at >= count or (text[at] & 0xC0) != 0x80:
                point = 0xFFFD
                break
            point = (point << 6) | (text[at] & 0x3F)
            at += 1
        if point >= 0x10000:
            point -= 0x10000
            h = 31 * h + (0xD800 + (point >> 10))
            h = 31 * h + (0xDC00 + (point & 0x3FF))
        else:
            h = 31 * h + point
    return h


cdef int32_t hash_utf8(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Java's String.hashCode."""
    return <int32_t>hash_on(0, text, count)


def java_hash(str text not None):
    """Java's String.hashCode over UTF-16 units, as a signed 32-bit number."""
    cdef Py_ssize_t count
    cdef const char *raw = PyUnicode_AsUTF8AndSize(text, &count)
    return hash_utf8(<const uint8_t *>raw, count)


def crc32(buffer, uint32_t value=0):
    """CRC-32 as zlib's, unmasked."""
    cdef const uint8_t[::1] view = buffer
    if view.shape[0] == 0:
        return value
    return crc_of(value, &view[0], view.shape[0])


cdef bint find_property(
    const uint8_t *properties, Py_ssize_t count, const char *name, Py_ssize_t name_bytes,
    const uint8_t **value, Py_ssize_t *value_bytes,
) noexcept nogil:
    """The last entry of that name, as RocketMQ's string2messageProperties would keep it."""
    cdef Py_ssize_t at = 0, end
    cdef const uint8_t *mark
    cdef bint found = False
    while at < count:
        mark = <const uint8_t *>memchr(properties + at, 2, count - at)
        end = count if mark == NULL else mark - properties
        # An empty value is dropped. A name holds no separator: so this is the first one.
        if (end - at > name_bytes + 1 and properties[at + name_bytes] == 1
                and memcmp(properties + at, name, name_bytes) == 0):
            value[0] = properties + at + name_bytes + 1
            value_bytes[0] = end - at - name_bytes - 1
            found = True
        at = end + 1
    return found


cdef int64_t tags_code_of(const uint8_t *properties, Py_ssize_t count) noexcept nogil:
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    if not find_property(properties, count, b"TAGS", 4, &value, &value_bytes):
        return 0
    return hash_utf8(value, value_bytes)


cdef str decode_text(const uint8_t *text, Py_ssize_t count):
    return PyUnicode_DecodeUTF8(<const char *>text, count, "replace")
