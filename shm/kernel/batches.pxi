# --- batch bodies that are stored once by their keys ---------------------------------------------------


def batch_keys(const uint8_t[::1] batch not None, Py_ssize_t count):
    """The one key of each message of a batch body. Raises BatchIllegal where there is none, or
    several."""
    cdef list found = []
    cdef Py_ssize_t at = 0, size = batch.shape[0], body_bytes, properties_bytes
    cdef Keys keys
    while at + BATCH_ELEMENT_BYTES + 2 <= size:
        body_bytes = <int32_t>load_be32(&batch[at + BATCH_ELEMENT_BODY_LENGTH])
        if body_bytes < 0 or body_bytes > size - at - BATCH_ELEMENT_BYTES - 2:
            break
        at += BATCH_ELEMENT_BYTES + body_bytes
        properties_bytes = <int16_t>load_be16(&batch[at])
        at += 2
        if properties_bytes < 0 or properties_bytes > size - at:
            break
        keys.keys = NULL
        if properties_bytes:
            find_keys(&batch[at], properties_bytes, &keys)
        if keys.keys == NULL or memchr(keys.keys, 32, keys.keys_bytes) != NULL:
            raise BatchIllegal(
                f"message {len(found)} of a batch that is stored once by its keys has "
                + ("none" if keys.keys == NULL else "several: one is wanted, without spaces"))
        found.append(whole_key(keys.keys[:keys.keys_bytes]))
        at += properties_bytes
    if at != size or len(found) != count:
        raise BatchIllegal(f"{len(found)} elements, {count} announced")
    return found


cdef bytes whole_key(bytes key):
    """The same. Raises BatchIllegal for what is no text: nobody could ask for it."""
    if not key.isascii():
        try:
            key.decode()
        except UnicodeDecodeError:
            raise BatchIllegal(f"the key {key[:100]!r} is no UTF-8") from None
    return key


def batch_without(const uint8_t[::1] batch not None, list left_out not None):
    """A batch body without the messages of these indexes, which ascend. It has been checked."""
    cdef list parts = []
    cdef Py_ssize_t at = 0, begin = 0, end, index = 0, size = batch.shape[0], skip
    for skip in left_out:
        while index < skip:
            at = after_element(&batch[at], at)
            index += 1
        end = after_element(&batch[at], at)
        if at > begin:
            parts.append(bytes(batch[begin:at]))
        begin = at = end
        index += 1
    if begin < size:
        parts.append(bytes(batch[begin:size]))
    return b"".join(parts)


cdef inline Py_ssize_t after_element(const uint8_t *element, Py_ssize_t at) noexcept nogil:
    cdef Py_ssize_t size = BATCH_ELEMENT_BYTES + <int32_t>load_be32(
        element + BATCH_ELEMENT_BODY_LENGTH)
    return at + size + 2 + <int16_t>load_be16(element + size)
