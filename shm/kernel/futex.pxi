# --- sleeping on cells without a doorbell: for processes that are not of the family -----------------

cdef enum:
    SLEEP_MAX = 127  # FUTEX_WAITV_MAX without the bell

SLEEP_CELLS_MAX = SLEEP_MAX


cdef class Bell:
    """Wakes a sleeper of the same process; what was rung before it sleeps is not lost."""

    cdef uint32_t _word

    def ring(self):
        move_on(&self._word)
        wake_all(&self._word, False)


cdef class Sleeper:
    """Sleeps until one of several cells moves, or its bell is rung.

    look(), see whether there is something to do, and if not, sleep(): a cell that has moved since
    the look ends the sleep at once. The right to read the cells is enough (see WakeWords). One
    thread uses it.
    """

    cdef list _cells
    cdef Bell _bell
    cdef uint32_t _heard
    cdef Py_ssize_t _count
    cdef const uint64_t *_words[SLEEP_MAX]
    cdef const uint64_t *_second_words[SLEEP_MAX]
    cdef uint32_t *_wake_words[SLEEP_MAX]
    cdef bint _writable[SLEEP_MAX]
    cdef uint64_t _seen[SLEEP_MAX]

    def __init__(self, cells, Bell bell not None):
        cdef ReadCell cell
        self._cells = list(cells)
        self._bell = bell
        if len(self._cells) > SLEEP_MAX:
            raise ValueError(f"{len(self._cells)} cells, at most {SLEEP_MAX}")
        for cell in self._cells:
            if cell._wake_words is None:
                raise ValueError("a cell without a wake word")
            self._words[self._count], self._second_words[self._count] = cell._word, cell._second
            self._wake_words[self._count] = cell._wake_words._words + cell._number
            self._writable[self._count] = cell._wake_words.writable
            self._count += 1
        self._heard = load32(&bell._word)
        self.look()

    def look(self):
        """From now on a change counts."""
        cdef Py_ssize_t i
        for i in range(self._count):
            self._seen[i] = self._value(i)

    def hear(self):
        """What the bell was rung for is about to be looked at."""
        self._heard = load32(&self._bell._word)

    cdef inline uint64_t _value(self, Py_ssize_t i) noexcept nogil:
        return max(load_acquire64(self._words[i]), load_acquire64(self._second_words[i]))

    cdef bint _moved(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self._count):
            if self._value(i) != self._seen[i]:
                return True
        return load32(&self._bell._word) != self._heard

    cdef void _fill(self, wait_entry *entries) noexcept nogil:
        """Say that this process sleeps. What moves from here on wakes it."""
        cdef Py_ssize_t i
        cdef uint32_t value
        for i in range(self._count):
            value = make_odd(self._wake_words[i]) if self._writable[i] else load32(
                self._wake_words[i])
            fill_entry(&entries[i], self._wake_words[i], value, True)
        fill_entry(&entries[self._count], &self._bell._word, self._heard, False)

    def sleep(self, double timeout_s, double spin_s=0):
        """Whether something moved within the time; until `spin_s` it looks without sleeping.

        Signals are handled. Raises OSError where the kernel cannot wait for several words.
        """
        cdef wait_entry entries[SLEEP_MAX + 1]
        cdef Py_ssize_t i
        cdef int64_t now = monotonic_ns(), until_ns, spin_ns
        cdef int reason = 0
        cdef bint moved
        until_ns = now + <int64_t>(min(timeout_s, 1e6) * 1e9)
        spin_ns = min(until_ns, now + <int64_t>(spin_s * 1e9))
        moved = self._moved()
        # The interpreter's lock is let go once, to sleep: a thread that was just given something to
        # do takes it, and to have it back in between would be to wait for that thread.
        if not moved and now < spin_ns:
            with nogil:
                while not moved and now < spin_ns:
                    for i in range(16):
                        relax()
                        if self._moved():
                            moved = True
                            break
                    now = monotonic_ns()
        if moved or now >= until_ns:
            return moved
        while True:
            with nogil:
                self._fill(entries)
                moved = self._moved()
                if not moved:
                    reason = wait_for_any(entries, <unsigned>self._count + 1, until_ns)
                    moved = self._moved()
            if moved or reason == ETIMEDOUT:
                return moved
            if reason == EINTR:
                PyErr_CheckSignals()
            elif reason and reason != EAGAIN:
                raise OSError(reason, _os.strerror(reason))


def wait_until(ReadCell cell not None, uint64_t least, double timeout_s):
    """Sleep until a counter has come to a value; whether it has within the time.

    For who has nothing else to do meanwhile, and is answered at once: no doorbell is rung, and no
    inbox looked at. The cell has a wake word that may be written.
    """
    cdef WakeWords words = cell._wake_words
    cdef int64_t until_ns = monotonic_ns() + <int64_t>(min(timeout_s, 1e6) * 1e9)
    cdef uint32_t *word
    cdef uint32_t odd
    cdef int reason = 0
    if words is None or not words.writable:
        raise ValueError("a cell without a wake word that may be written")
    word = words._words + cell._number
    while cell._load() < least:
        if reason == ETIMEDOUT:
            return False
        with nogil:
            odd = make_odd(word)
            if cell._load() < least:
                reason = wait_for_one(word, odd, until_ns)
        if reason == EINTR:
            PyErr_CheckSignals()
    return True
