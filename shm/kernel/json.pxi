# --- RocketMQ's JSON: integers that stand as keys without quotes ------------------------------------

from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact
from cpython.ref cimport PyObject
from libc.stdint cimport INT64_MIN


cdef inline bint is_blank(uint8_t c) noexcept nogil:
    return c == b' ' or c == b'\n' or c == b'\t' or c == b'\r'


cdef Py_ssize_t end_of_key(const uint8_t *p, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    """Where the integer that begins at `at` ends, if a colon follows at once; else -1."""
    cdef Py_ssize_t first
    if at < end and p[at] == b'-':
        at += 1
    first = at
    while at < end and b'0' <= p[at] <= b'9':
        at += 1
    return at if at > first and at < end and p[at] == b':' else -1


cdef Py_ssize_t quote_into(const uint8_t *p, Py_ssize_t size, uint8_t *out) noexcept nogil:
    """Copy, with quotes around bare keys; how much was written. With out == NULL it only counts."""
    cdef Py_ssize_t at = 0, put = 0, end
    cdef bint in_string = False, key_may_follow = False
    cdef uint8_t c
    while at < size:
        c = p[at]
        if key_may_follow and (c == b'-' or b'0' <= c <= b'9'):
            end = end_of_key(p, at, size)
            if end > 0:
                if out != NULL:
                    out[put] = b'"'
                    memcpy(out + put + 1, p + at, end - at)
                    out[put + 1 + end - at] = b'"'
                put += end - at + 2
                at = end
                key_may_follow = False
                continue
        if in_string:
            if c == b'\\' and at + 1 < size:
                if out != NULL:
                    out[put] = c
                put += 1
                at += 1
                c = p[at]
            elif c == b'"':
                in_string = False
        elif c == b'"':
            in_string = True
            key_may_follow = False
        elif not is_blank(c):
            key_may_follow = c == b'{' or c == b','
        if out != NULL:
            out[put] = c
        put += 1
        at += 1
    return put


def quote_keys(content not None):
    cdef Py_buffer view
    cdef Py_ssize_t size
    cdef bytes quoted
    cdef uint8_t *out
    PyObject_GetBuffer(content, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            size = quote_into(<const uint8_t *>view.buf, view.len, NULL)
        quoted = PyBytes_FromStringAndSize(NULL, size)
        out = <uint8_t *>PyBytes_AS_STRING(quoted)
        with nogil:
            quote_into(<const uint8_t *>view.buf, view.len, out)
    finally:
        PyBuffer_Release(&view)
    return quoted


cdef enum:
    PAIR_BYTES = 44  # of two integers of 64 bits, a colon, a comma

cdef inline Py_ssize_t put_integer(char *out, int64_t value) noexcept nogil:
    """Its digits; how many bytes they are."""
    cdef char digits[20]
    cdef Py_ssize_t count = 0, at = 0
    cdef uint64_t rest = <uint64_t>value
    if value < 0:
        out[0] = b'-'
        at, rest = 1, 0 - rest
    while True:
        digits[count] = <char>(48 + rest % 10)
        count += 1
        rest //= 10
        if rest == 0:
            break
    while count:
        count -= 1
        out[at] = digits[count]
        at += 1
    return at


def integer_pairs(dict table not None):
    cdef Py_ssize_t at = 0, place = 0
    cdef PyObject *key
    cdef PyObject *value
    cdef char *out = <char *>PyMem_Malloc(PAIR_BYTES * PyDict_Size(table) + 1)
    if out == NULL:
        raise MemoryError
    try:
        while PyDict_Next(table, &place, &key, &value):
            if not PyLong_CheckExact(<object>key) or not PyLong_CheckExact(<object>value):
                raise TypeError("an integer was expected")
            at += put_integer(out + at, PyLong_AsLongLong(<object>key))
            out[at] = b':'
            at += 1 + put_integer(out + at + 1, PyLong_AsLongLong(<object>value))
            out[at] = b','
            at += 1
        return PyUnicode_DecodeUTF8(out, max(at - 1, 0), NULL)
    finally:
        PyMem_Free(out)


def indexed_pairs(const int64_t[::1] values not None):
    cdef Py_ssize_t at = 0, index
    cdef char *out = <char *>PyMem_Malloc(PAIR_BYTES * values.shape[0] + 1)
    if out == NULL:
        raise MemoryError
    try:
        for index in range(values.shape[0]):
            if values[index] == INT64_MIN:  # absent
                continue
            at += put_integer(out + at, index)
            out[at] = b':'
            at += 1 + put_integer(out + at + 1, values[index])
            out[at] = b','
            at += 1
        return PyUnicode_DecodeUTF8(out, max(at - 1, 0), NULL)
    finally:
        PyMem_Free(out)
