# --- counters shared between processes -------------------------------------------------------------

cdef enum:
    CELL_BYTES = 128  # two cache lines: the value, and who sleeps on it
    CELL_SLEEPERS = 64
    SLEEPERS_MAX = 32

COUNTER_BYTES = CELL_BYTES
DOORBELLS_MAX = SLEEPERS_MAX


cdef class ReadCell:
    """Anyone's view of a counter in the control file.

    Args:
        words: 2 where it has two writers, with a word each: the larger one counts.
    """

    cdef const uint8_t[::1] _memory
    cdef uint64_t *_word
    cdef uint64_t *_second  # `_word` again where there is one only

    def __init__(self, memory, Py_ssize_t at, int words=1):
        self._memory = memory
        if at % 64 or not 0 <= at <= self._memory.shape[0] - CELL_BYTES:
            raise ValueError(f"no counter at {at}")
        self._word = <uint64_t *>&self._memory[at]
        self._second = self._word + (words - 1)

    cdef uint64_t _load(self) noexcept nogil:
        """Acquire order: whoever sees a value also sees the bytes it covers."""
        return max(load_acquire64(self._word), load_acquire64(self._second))

    @property
    def value(self):
        return self._load()


cdef class SleepCell(ReadCell):
    """The view of a process that sleeps until the counter moves. Needs writable memory.

    arm(), look at the value once more, then sleep on the doorbell; the writer rings it once.
    """

    cdef uint8_t *_flag

    def __init__(self, memory, Py_ssize_t at, int doorbell, int words=1):
        cdef uint8_t[::1] writable = memory  # refuses a read-only mapping
        ReadCell.__init__(self, memory, at, words)
        if not 0 <= doorbell < SLEEPERS_MAX:
            raise ValueError(f"doorbell {doorbell}, at most {SLEEPERS_MAX - 1}")
        self._flag = &writable[at + CELL_SLEEPERS + doorbell]

    def arm(self):
        """Ask to be woken at the next change. The exchange is a full barrier."""
        exchange8(self._flag, 1)

    def disarm(self):
        exchange8(self._flag, 0)


cdef class OwnedCell(ReadCell):
    """The writer's end. One process opens it; the others get a ReadCell or a SleepCell.

    Args:
        doorbells: eventfd of every process, by doorbell number; -1 where there is none.
        second: the second of two writers. Each moves its own word and rings for all sleepers.
    """

    cdef uint8_t[::1] _writable
    cdef uint64_t *_own
    cdef uint8_t *_flags
    cdef int _fds[SLEEPERS_MAX]

    def __init__(self, memory, Py_ssize_t at, doorbells=(), int words=1, bint second=False):
        cdef int i
        self._writable = memory
        ReadCell.__init__(self, memory, at, words)
        self._own = self._second if second else self._word
        self._flags = &self._writable[at + CELL_SLEEPERS]
        for i in range(SLEEPERS_MAX):
            self._fds[i] = doorbells[i] if i < len(doorbells) else -1

    def publish(self, uint64_t value):
        """Publish a new value, release order. Sleepers go on sleeping until `wake`."""
        assert value >= load_relaxed64(self._own), (value, load_relaxed64(self._own))
        store_release64(self._own, value)

    def raise_to(self, uint64_t value):
        """Publish a value, unless another thread has published a higher one."""
        self._raise_to(value)

    cdef void _raise_to(self, uint64_t value) noexcept:
        if value > load_relaxed64(self._own):
            store_release64(self._own, value)

    def wake(self):
        """Ring for everyone who sleeps on it."""
        self._wake()

    def advance(self, uint64_t value):
        """Publish a new value, and wake."""
        self.publish(value)
        self._wake()

    def reset(self, uint64_t value):
        """Publish a value that may be lower: a new epoch, before anybody relies on the old one."""
        store_release64(self._own, value)
        self._wake()

    def has_sleepers(self):
        """Whether anybody has armed it since it last moved. A full barrier comes first."""
        return self._asleep()

    cdef bint _asleep(self) noexcept:
        cdef uint64_t *words = <uint64_t *>self._flags
        full_fence()  # stores before must be visible before the flags are looked at
        return (words[0] | words[1] | words[2] | words[3]) != 0

    cdef int _wake(self) except -1:
        cdef uint64_t one = 1
        cdef int i
        if not self._asleep():
            return 0
        for i in range(SLEEPERS_MAX):
            if self._flags[i] and exchange8(&self._flags[i], 0) and self._fds[i] >= 0:
                write_fd(self._fds[i], &one, 8)
        return 0
