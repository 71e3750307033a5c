# --- counters shared between processes -------------------------------------------------------------


COUNTER_BYTES = CELL_BYTES
DOORBELLS_MAX = SLEEPERS_MAX
WAKE_WORDS_BYTES = WAKE_WORDS


@cython.final
cdef class WakeWords:
    """A word (futex) for each cell, on which processes sleep that have no doorbell.

    A word is odd while anybody sleeps on it. Who moves the cell makes it even again, in one step
    that also lets no later sleeper miss it, and wakes all. So a cell that nobody sleeps on costs
    one look, and who is killed asleep costs one wake-up in vain.

    A process that may only read the words sleeps on them as they are. While there may be such ones
    `silent` is set, and every word counts as odd.
    """

    def __init__(self, memory):
        cdef const uint8_t[::1] view = memory
        if view.shape[0] < WAKE_WORDS:
            raise ValueError(f"{view.shape[0]} bytes are no wake words")
        self._held = view
        self._words = <uint32_t *>&view[0]
        self.writable = not memoryview(memory).readonly

    @property
    def silent(self):
        return load32(&self._words[SILENT_AT // 4]) != 0

    @silent.setter
    def silent(self, bint value):
        assert self.writable
        self._words[SILENT_AT // 4] = value
        full_fence()

    def wake_everybody(self):
        """Have all sleepers look again: who died may have moved a cell without waking them."""
        cdef int number
        assert self.writable
        for number in range(WORDS_MAX):
            move_on(&self._words[number])
            wake_all(&self._words[number], True)

    def is_slept_on(self, int number):
        """Whether a process has said that it sleeps on the cell of that number; for tests."""
        return bool(0 <= number < WORDS_MAX and load32(&self._words[number]) & 1)

    cdef void _wake(self, int number) noexcept nogil:
        if load32(&self._words[SILENT_AT // 4]):
            move_on(&self._words[number])
            wake_all(&self._words[number], True)
        elif make_even(&self._words[number]):
            wake_all(&self._words[number], True)


cdef class ReadCell:
    """Anyone's view of a counter in the control file.

    Args:
        words: 2 where it has two writers, with a word each: the larger one counts.
        wake_words, number: on which of them processes without a doorbell sleep.
    """

    def __init__(self, memory, Py_ssize_t at, int words=1, WakeWords wake_words=None,
                 int number=0):
        if not 0 <= number < WORDS_MAX:
            raise ValueError(f"wake word {number}, at most {WORDS_MAX - 1}")
        self._wake_words, self._number = wake_words, number
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

    def __init__(self, memory, Py_ssize_t at, int doorbell, int words=1,
                 WakeWords wake_words=None, int number=0):
        cdef uint8_t[::1] writable = memory  # refuses a read-only mapping
        ReadCell.__init__(self, memory, at, words, wake_words, number)
        if not 0 <= doorbell < SLEEPERS_MAX:
            raise ValueError(f"doorbell {doorbell}, at most {SLEEPERS_MAX - 1}")
        self._flag = &writable[at + CELL_SLEEPERS + doorbell]

    def arm(self):
        """Ask to be woken at the next change. The exchange is a full barrier."""
        exchange8(self._flag, 1)

    def disarm(self):
        exchange8(self._flag, 0)


class InvariantBroken(AssertionError):
    """A counter was to be published above one that bounds it. Its writer ends, before anybody
    relies on what is not so."""


cdef uint32_t no_sleepers = 0


@cython.final
cdef class OwnedCell(ReadCell):
    """The writer's end. One process opens it; the others get a ReadCell or a SleepCell.

    Args:
        doorbells: eventfd of every process, by doorbell number; -1 where there is none.
        second: the second of two writers. Each moves its own word and rings for all sleepers.
    """

    def __init__(self, memory, Py_ssize_t at, doorbells=(), int words=1, bint second=False,
                 WakeWords wake_words=None, int number=0):
        cdef int i
        if wake_words is not None and not wake_words.writable:
            raise ValueError("who moves a counter must be able to write its wake word")
        self._writable = memory
        ReadCell.__init__(self, memory, at, words, wake_words, number)
        self._own = self._second if second else self._word
        self._flags = &self._writable[at + CELL_SLEEPERS]
        self._owned.value, self._owned.flags = self._own, <const uint64_t *>self._flags
        self._owned.word = self._owned.silent = &no_sleepers
        if wake_words is not None:
            self._owned.word = &wake_words._words[number]
            self._owned.silent = &wake_words._words[SILENT_AT // 4]
        for i in range(SLEEPERS_MAX):
            self._fds[i] = doorbells[i] if i < len(doorbells) else -1
        self._name, self._bounds = "counter", ()

    def bounded(self, str name not None, tuple bounds not None):
        """From now on it is never published above these: (name, ReadCell) of each. A bound of 0 is
        one whose writer has not begun."""
        for _, cell in bounds:
            if not isinstance(cell, ReadCell):
                raise TypeError(f"{cell!r} is no counter")
        self._name, self._bounds = name, bounds

    cdef int _check(self, uint64_t value) except -1:
        """Raise InvariantBroken for a value above a bound."""
        cdef uint64_t most
        for name, cell in self._bounds:
            most = (<ReadCell>cell)._load()
            if value > most and most > 0:
                raise InvariantBroken(f"{self._name} = {value} would be above {name} = {most}")
        return 0

    def publish(self, uint64_t value):
        """Publish a new value, release order. Sleepers go on sleeping until `wake`.

        Raises InvariantBroken for a lower one, or one above a bound.
        """
        cdef uint64_t before = load_relaxed64(self._own)
        if value < before:
            raise InvariantBroken(f"{self._name} = {value} would be below {before}, where it was")
        self._check(value)
        store_release64(self._own, value)

    def move(self, uint64_t value):
        """Publish a value that may be lower. Sleepers go on sleeping until `wake`."""
        store_release64(self._own, value)

    def raise_to(self, uint64_t value):
        """Publish a value, unless another thread has published a higher one. Raises
        InvariantBroken."""
        self._raise_to(value)

    cdef int _raise_to(self, uint64_t value) except -1:
        if value > load_relaxed64(self._own):
            self._check(value)
            store_release64(self._own, value)
        return 0

    def wake(self):
        """Ring for everyone who sleeps on it."""
        self._wake()

    def wake_moved(self):
        """Ring for everyone who sleeps on it, if it has moved since this was last asked for: who is
        woken in vain looks around all the same. For a word that only this method wakes for."""
        cdef uint64_t value = load_relaxed64(self._own)
        if value != self._rung:
            self._rung = value
            self._wake()

    def advance(self, uint64_t value):
        """Publish a new value, and wake."""
        self.publish(value)
        self._wake()

    def reset(self, uint64_t value):
        """Publish a value that may be lower: a new epoch, before anybody relies on the old one. So
        nothing bounds it: a bound may be told later."""
        store_release64(self._own, value)
        self._wake()

    def has_sleepers(self):
        """Whether anybody has armed it since it last moved. A full barrier comes first."""
        full_fence()
        return is_slept_on(&self._owned)

    cdef void _ring(self) noexcept:
        cdef uint64_t one = 1
        cdef int i
        if self._wake_words is not None:
            self._wake_words._wake(self._number)
        for i in range(SLEEPERS_MAX):
            if self._flags[i] and exchange8(&self._flags[i], 0) and self._fds[i] >= 0:
                write_fd(self._fds[i], &one, 8)
