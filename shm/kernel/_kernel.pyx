# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False
"""The native kernel: what is done per message, and what must be atomic. Decisions stay in Python.

Positions and sizes come from layout.pxi, which shm/kernel/layout.py prints. Functions marked nogil touch
raw memory only; every pointer they get has been checked against the size of its buffer before.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
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
    void crc_prepare()
    void crc_detect()
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

crc_prepare()
crc_detect()

cdef int64_t SYSTEM_PAGE = sysconf(_SC_PAGESIZE)

include "errors.pxi"
include "text.pxi"
include "records.pxi"
include "log_append.pxi"
include "mapping.pxi"
include "dispatch.pxi"
include "index.pxi"
include "filter.pxi"
include "gather.pxi"
include "messages.pxi"
include "mapped.pxi"
include "counters.pxi"
include "futex.pxi"
include "ends.pxi"
include "copying.pxi"
include "append.pxi"
include "inner.pxi"
include "timed.pxi"
include "delays.pxi"
include "timing.pxi"
include "waiting.pxi"
include "halves.pxi"
include "timers.pxi"
include "spans.pxi"
include "columns.pxi"
include "rows.pxi"
include "walk.pxi"
include "verify.pxi"
include "tail.pxi"
include "keyed.pxi"
include "json.pxi"
