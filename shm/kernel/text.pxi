# --- text: hashes and properties ------------------------------------------------------------------


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
