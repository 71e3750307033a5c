"""What all extensions of the kernel compile in: the C library, the layouts, byte order and atomics,
hashes and properties.

Positions and sizes come from layout.pxi, which shm/kernel/layout.py prints. Functions marked nogil
touch raw memory only; every pointer they get has been checked against the size of its buffer before.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.errno cimport errno
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memchr, memcmp, memcpy, memset, strlen
from posix.mman cimport (
    MADV_DONTNEED, MAP_FAILED, MAP_SHARED, MS_SYNC, PROT_READ, PROT_WRITE, madvise, mlock, mmap,
    msync, munlock, munmap,
)
from posix.unistd cimport close as close_fd, getpid, sysconf, _SC_PAGESIZE, write as write_fd

include "layout.pxi"

cdef extern from "kernel.h" nogil:
    uint16_t load_be16(const uint8_t *p)
    uint32_t load_be32(const uint8_t *p)
    uint64_t load_be64(const uint8_t *p)
    void store_be16(uint8_t *p, uint16_t value)
    void store_be32(uint8_t *p, uint32_t value)
    void store_be64(uint8_t *p, uint64_t value)
    uint64_t load_acquire64(const uint64_t *p)
    uint64_t load_relaxed64(const uint64_t *p)
    void store_release64(uint64_t *p, uint64_t value)
    void full_fence()
    uint8_t exchange8(uint8_t *p, uint8_t value)
    int64_t now_ms()
    int64_t up_ms()
    uint32_t crc_of(uint32_t crc, const uint8_t *p, size_t count)
    uint32_t load_acquire_be32(const uint8_t *p)
    void store_release_be32(uint8_t *p, uint32_t value)
    bint is_ascii8(const uint8_t *p)
    bint same_bytes(const uint8_t *a, const uint8_t *b, Py_ssize_t count)
    const uint8_t *find_byte(const uint8_t *at, const uint8_t *stop, uint8_t value)
    uint32_t hash_ascii8(uint32_t h, const uint8_t *p)
    void prefetch_to_write(const uint8_t *p)
    void prefetch_to_read(const uint8_t *p)
    struct recent:
        pass
    int64_t recent_ms(recent *last)
    uint32_t *word_wiped_on_fork()
    void free_word(uint32_t *word)
    struct sleepers:
        pass
    void sleepers_begin(sleepers *s)
    void sleepers_end(sleepers *s)
    uint64_t sleepers_rings(sleepers *s)
    void sleepers_ring(sleepers *s)
    void sleepers_wait(sleepers *s, int doorbell, uint64_t rings, int64_t until_ns)


# --- text: hashes, properties, digits ---


cdef inline uint32_t hash_on(uint32_t h, const uint8_t *text, Py_ssize_t count) noexcept nogil:
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


cdef inline int32_t hash_utf8(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Java's String.hashCode."""
    return <int32_t>hash_on(0, text, count)


cdef inline bint find_property(
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


cdef inline int64_t tags_code_of(const uint8_t *properties, Py_ssize_t count) noexcept nogil:
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    if not find_property(properties, count, b"TAGS", 4, &value, &value_bytes):
        return 0
    return hash_utf8(value, value_bytes)


cdef inline str decode_text(const uint8_t *text, Py_ssize_t count):
    return PyUnicode_DecodeUTF8(<const char *>text, count, "replace")


cdef inline Py_ssize_t put_number(uint8_t *at, const char *name, int64_t value) noexcept nogil:
    """Write a property that is a number, 0 or more; its bytes."""
    cdef Py_ssize_t count = strlen(name), digits = digits_in(value)
    memcpy(at, name, count)
    at[count] = 1
    put_digits(at + count + 1, value, digits)
    count += 1 + digits
    at[count] = 2
    return count + 1


cdef inline Py_ssize_t number_bytes(const char *name, int64_t value) noexcept nogil:
    """Of what `put_number` writes."""
    return strlen(name) + 2 + digits_in(value)


cdef inline Py_ssize_t digits_in(int64_t value) noexcept nogil:
    cdef Py_ssize_t digits = 1
    if 1000000000000LL <= value < 10000000000000LL:  # what a time of our century has, in ms
        return 13
    while value >= 10:
        value //= 10
        digits += 1
    return digits


cdef inline void put_digits(uint8_t *at, int64_t value, Py_ssize_t digits) noexcept nogil:
    """So many, as `digits_in` has counted them."""
    cdef uint64_t high = <uint64_t>value
    cdef uint32_t low
    cdef int i
    if digits > 8:  # two chains of divisions, which the processor computes at once
        low = <uint32_t>(high % 100000000)
        high //= 100000000
        for i in range(8):
            digits -= 1
            at[digits] = 48 + low % 10
            low //= 10
    while digits > 0:
        digits -= 1
        at[digits] = 48 + high % 10
        high //= 10


cdef inline void write_hex(uint8_t *at, uint64_t value, int digits) noexcept nogil:
    cdef const char *digit = b"0123456789ABCDEF"
    cdef int i
    for i in range(digits):
        at[digits - 1 - i] = digit[value & 15]
        value >>= 4
