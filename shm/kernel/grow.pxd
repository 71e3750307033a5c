# --- memory that grows -------------------------------------------------------------------------------

from libc.stdlib cimport free, malloc, realloc

from cometmq.shm.kernel.base cimport *


cdef struct Grow:
    uint8_t *data
    Py_ssize_t size
    Py_ssize_t capacity


cdef inline int grow_to(Grow *g, Py_ssize_t capacity) except -1 nogil:
    cdef uint8_t *grown
    cdef Py_ssize_t wanted = max(capacity, 2 * g.capacity, 1024)
    grown = <uint8_t *>realloc(g.data, wanted)
    if grown == NULL:
        with gil:
            raise MemoryError(f"{wanted} bytes of a batch")
    g.data = grown
    g.capacity = wanted
    return 0


cdef inline int reserve_in(Grow *g, Py_ssize_t extra) except -1 nogil:
    if g.size + extra > g.capacity:
        grow_to(g, g.size + extra)
    return 0


cdef inline int put_i32(Grow *g, int32_t value) except -1 nogil:
    reserve_in(g, 4)
    (<int32_t *>(g.data + g.size))[0] = value
    g.size += 4
    return 0


cdef inline int put_i64(Grow *g, int64_t value) except -1 nogil:
    reserve_in(g, 8)
    (<int64_t *>(g.data + g.size))[0] = value
    g.size += 8
    return 0


cdef inline int put_bytes(Grow *g, const uint8_t *raw, Py_ssize_t count) except -1 nogil:
    reserve_in(g, count)
    memcpy(g.data + g.size, raw, count)
    g.size += count
    return 0


cdef inline Py_ssize_t utf8_step(const uint8_t *text, Py_ssize_t count, bint *good) noexcept nogil:
    """Bytes of the character at `text`; where it is none, of what one U+FFFD stands for.

    Unicode's table 3-7 and its "maximal subpart", as Python's decoder has it.
    """
    cdef uint8_t first = text[0], low = 0x80, high = 0xBF
    cdef Py_ssize_t more, i
    good[0] = True
    if first < 0x80:
        return 1
    if 0xC2 <= first <= 0xDF:
        more = 1
    elif 0xE0 <= first <= 0xEF:
        more = 2
        if first == 0xE0:
            low = 0xA0
        elif first == 0xED:
            high = 0x9F
    elif 0xF0 <= first <= 0xF4:
        more = 3
        if first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
    else:
        good[0] = False
        return 1
    for i in range(1, more + 1):
        if i >= count or not low <= text[i] <= high:
            good[0] = False
            return i
        low, high = 0x80, 0xBF
    return more + 1


cdef inline int put_text(Grow *g, const uint8_t *text, Py_ssize_t count) except -1 nogil:
    """Text that may be anything: what is no UTF-8 becomes U+FFFD."""
    cdef Py_ssize_t at = 0, step
    cdef bint good
    while count - at >= 8 and is_ascii8(text + at):
        at += 8
    while at < count and text[at] < 0x80:
        at += 1
    put_bytes(g, text, at)
    if at == count:
        return 0
    reserve_in(g, 3 * (count - at))
    while at < count:
        step = utf8_step(text + at, count - at, &good)
        if good:
            memcpy(g.data + g.size, text + at, step)
            g.size += step
        else:
            memcpy(g.data + g.size, b"\xef\xbf\xbd", 3)
            g.size += 3
        at += step
    return 0
