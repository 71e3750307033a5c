"""What the processes of a run share: counters, and where each queue ends."""

cimport cython
from cpython.list cimport PyList_GET_ITEM

from cometmq.shm.kernel.base cimport *

cdef extern from "futex.h" nogil:
    long wake_all(const void *word, int shared)
    uint32_t load32(const uint32_t *word)
    uint32_t make_odd(uint32_t *word)
    bint make_even(uint32_t *word)
    void move_on(uint32_t *word)
    ctypedef struct wait_entry:
        pass
    void fill_entry(wait_entry *entry, const void *word, uint32_t value, int shared)
    int64_t monotonic_ns()
    int wait_for_any(wait_entry *entries, unsigned count, int64_t until_ns)
    int wait_for_one(const uint32_t *word, uint32_t value, int64_t until_ns)
    void relax()
    enum:
        EAGAIN
        EINTR
        ENOSYS
        ETIMEDOUT

cdef enum:
    CELL_BYTES = 128  # two cache lines: the value, and who sleeps on it
    CELL_SLEEPERS = 64
    SLEEPERS_MAX = 32
    WORDS_MAX = 128  # of a WakeWords
    SILENT_AT = 1024
    WAKE_WORDS = 4096

cdef enum:
    STRIPE_COUNT = 32


cdef struct Owned:  # what its owner touches with every change of a cell
    uint64_t *value
    const uint64_t *flags  # of doorbells, SLEEPERS_MAX bytes
    const uint32_t *word  # odd while anybody sleeps on it
    const uint32_t *silent  # unless it is 0, anybody may


@cython.final
cdef class WakeWords:
    cdef object _held  # what keeps the memory
    cdef uint32_t *_words
    cdef readonly bint writable

    cdef void _wake(self, int number) noexcept nogil


cdef class ReadCell:
    cdef const uint8_t[::1] _memory
    cdef uint64_t *_word
    cdef uint64_t *_second  # `_word` again where there is one only
    cdef WakeWords _wake_words
    cdef int _number

    cdef uint64_t _load(self) noexcept nogil


cdef class SleepCell(ReadCell):
    cdef uint8_t *_flag


cdef inline bint is_slept_on(const Owned *cell) noexcept nogil:
    """Whether there is anybody to wake; behind a full barrier."""
    return (cell.flags[0] | cell.flags[1] | cell.flags[2] | cell.flags[3]
            | (load32(cell.word) & 1) | load32(cell.silent)) != 0


@cython.final
cdef class OwnedCell(ReadCell):
    cdef uint8_t[::1] _writable
    cdef uint64_t *_own
    cdef uint8_t *_flags
    cdef Owned _owned
    cdef int _fds[SLEEPERS_MAX]
    cdef uint64_t _rung  # the value that was last rung for by `wake_moved`; 0 was never anybody's news
    cdef str _name
    cdef tuple _bounds

    cdef int _check(self, uint64_t value) except -1
    cdef int _raise_to(self, uint64_t value) except -1

    cdef inline void _wake(self) noexcept:
        full_fence()  # stores before must be visible before the flags are looked at
        self._wake_fenced()

    cdef inline void _wake_fenced(self) noexcept:
        if is_slept_on(&self._owned):
            self._ring()

    cdef void _ring(self) noexcept


@cython.final
cdef class QueueCursor:
    cdef bytes topic_bytes
    cdef readonly str topic
    cdef readonly int32_t queue_id
    cdef int32_t topic_length
    cdef bint long_topic
    cdef public int64_t next_offset
    cdef public bint barred  # an Appender has to ask before it appends to it
    cdef readonly int32_t slot  # in the queue table; -1: it is not known yet
    cdef bint is_noted  # among those that a LogAppender has appended to
    cdef bint has_rung  # for a slot


@cython.final
cdef class QueueEnds:
    cdef uint8_t[::1] _memory
    cdef uint64_t *_ends
    cdef Py_ssize_t _slots
    cdef list _stripes
    cdef Owned *_owned[STRIPE_COUNT]  # theirs
    cdef int _dispatcher_fd

    cdef inline void _tell(self, QueueCursor queue) noexcept:
        """After `wrote`: whoever sees the end finds the records below it in the log."""
        cdef uint64_t *count
        if queue.slot >= 0:
            store_release64(&self._ends[queue.slot], <uint64_t>queue.next_offset)
            count = self._owned[queue.slot % STRIPE_COUNT].value
            store_release64(count, load_relaxed64(count) + 1)

    cdef inline void _wake(self, QueueCursor queue) noexcept:
        """Who sleeps on it; behind a full barrier."""
        cdef int stripe = queue.slot % STRIPE_COUNT
        if queue.slot < 0:
            self._ring_for_slot(queue)
        elif is_slept_on(self._owned[stripe]):
            (<OwnedCell>PyList_GET_ITEM(self._stripes, stripe))._ring()

    cdef void _ring_for_slot(self, QueueCursor queue) noexcept
