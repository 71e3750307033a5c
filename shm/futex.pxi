# --- sleeping on counters without a doorbell: for processes that are not of the family --------------

from cpython.exc cimport PyErr_CheckSignals

cdef extern from "futex.h" nogil:
    ctypedef struct wait_entry:
        pass
    void fill_entry(wait_entry *entry, const void *word, uint64_t value, int shared)
    long wake_all(const void *word, int shared)
    int64_t monotonic_ns()
    int wait_for_any(wait_entry *entries, unsigned count, int64_t until_ns)
    void relax()
    enum:
        EAGAIN
        EINTR
        ENOSYS
        ETIMEDOUT

cdef enum:
    SLEEP_MAX = 127  # FUTEX_WAITV_MAX without the bell

SLEEP_CELLS_MAX = SLEEP_MAX


cdef class Bell:
    """Wakes a sleeper of the same process; what was rung before it sleeps is not lost."""

    cdef uint64_t _word

    def ring(self):
        store_release64(&self._word, self._word + 1)  # under the interpreter's lock
        wake_all(&self._word, False)


cdef class Sleeper:
    """Sleeps until one of several counters moves, or its bell is rung.

    look(), see whether there is something to do, and if not, sleep(): a counter that has moved
    since the look ends the sleep at once. The right to read the counters is enough. Their writer
    wakes by WakeList. One thread uses it.
    """

    cdef list _cells
    cdef Bell _bell
    cdef uint64_t _heard
    cdef Py_ssize_t _count
    cdef const uint64_t *_words[SLEEP_MAX]
    cdef uint64_t _seen[SLEEP_MAX]

    def __init__(self, cells, Bell bell not None):
        cdef ReadCell cell
        self._cells = list(cells)
        self._bell = bell
        if len(self._cells) > SLEEP_MAX:
            raise ValueError(f"{len(self._cells)} counters, at most {SLEEP_MAX}")
        for cell in self._cells:
            self._words[self._count] = cell._word
            self._count += 1
        self._heard = load_acquire64(&bell._word)
        self.look()

    def look(self):
        """From now on a change counts."""
        cdef Py_ssize_t i
        for i in range(self._count):
            self._seen[i] = load_acquire64(self._words[i])

    def hear(self):
        """What the bell was rung for is about to be looked at."""
        self._heard = load_acquire64(&self._bell._word)

    cdef bint _moved(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self._count):
            if load_acquire64(self._words[i]) != self._seen[i]:
                return True
        return load_acquire64(&self._bell._word) != self._heard

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
        with nogil:
            moved = self._moved()
            while not moved and now < spin_ns:
                for i in range(16):
                    relax()
                    if self._moved():
                        moved = True
                        break
                now = monotonic_ns()
        if moved or now >= until_ns:
            return moved
        for i in range(self._count):
            fill_entry(&entries[i], self._words[i], self._seen[i], True)
        fill_entry(&entries[self._count], &self._bell._word, self._heard, False)
        while True:
            with nogil:
                reason = wait_for_any(entries, <unsigned>self._count + 1, until_ns)
                moved = self._moved()
            if moved or reason == ETIMEDOUT:
                return moved
            if reason == EINTR:
                PyErr_CheckSignals()
            elif reason and reason != EAGAIN:
                raise OSError(reason, _os.strerror(reason))


cdef class WakeList:
    """Counters of this process on which others sleep by Sleeper.

    `wake` makes one system call for each that has moved since it was last called.
    """

    cdef list _cells
    cdef const uint64_t **_words
    cdef uint64_t *_seen
    cdef Py_ssize_t _count

    def __init__(self, cells):
        cdef ReadCell cell
        cdef Py_ssize_t count
        self._cells = list(cells)
        count = len(self._cells)
        self._words = <const uint64_t **>PyMem_Malloc(max(1, count) * sizeof(uint64_t *))
        self._seen = <uint64_t *>PyMem_Malloc(max(1, count) * sizeof(uint64_t))
        if self._words == NULL or self._seen == NULL:
            raise MemoryError
        for cell in self._cells:
            self._words[self._count] = cell._word
            self._seen[self._count] = load_relaxed64(cell._word)
            self._count += 1

    def __dealloc__(self):
        PyMem_Free(self._words)
        PyMem_Free(self._seen)

    def wake(self):
        """How many slept."""
        cdef Py_ssize_t i
        cdef uint64_t value
        cdef long woken, total = 0
        for i in range(self._count):
            value = load_relaxed64(self._words[i])
            if value != self._seen[i]:
                self._seen[i] = value
                woken = wake_all(self._words[i], True)
                if woken > 0:
                    total += woken
        return total


def wake_sleepers(ReadCell cell not None):
    """Wake whoever sleeps on a counter of this process; how many that were."""
    return max(0, wake_all(cell._word, True))
