# --- the ends of all queues: how the writer tells them, and how those who wait look at them ----------


STRIPES = STRIPE_COUNT  # a queue belongs to the stripe `slot % STRIPES`, by its slot in the queue table


@cython.final
cdef class QueueCursor:
    """The writer's end of one topic queue: its names as bytes, and the next queue offset."""

    def __init__(self, str topic not None, int32_t queue_id, int64_t next_offset=0,
                 bint auto_version=True):
        self.topic = topic
        self.topic_bytes = topic.encode()
        self.topic_length = <int32_t>len(self.topic_bytes)
        self.queue_id = queue_id
        self.next_offset = next_offset
        self.slot = -1
        units = len(topic.encode("utf-16-be")) // 2
        self.long_topic = auto_version and units > 127
        if len(self.topic_bytes) > (32767 if self.long_topic else 127):
            raise ValueError(f"topic of {len(self.topic_bytes)} bytes")


cdef uint64_t *ends_in(object memory, Py_ssize_t at, Py_ssize_t slots) except NULL:
    """The words in the queue table that tell how far each queue is written."""
    cdef const uint8_t[::1] view = memory
    if at % 8 or slots < 1 or not 0 <= at <= view.shape[0] - 8 * slots:
        raise ValueError(f"no ends of {slots} queues at {at}")
    return <uint64_t *>&view[at]


@cython.final
cdef class QueueEnds:
    """Tells how far the writer has come with each queue: for the commitlog process.

    `place` gives a queue its word, once the dispatcher has given it a slot in the queue table. Until
    then nobody can sleep on it but by the counter `queues`: what is first appended to such a queue
    rings the dispatcher.

    Args:
        memory, at, slots: the ends, in the queue table; writable, and with file space where a slot is.
        stripes: cells that count what is told of their queues.
        dispatcher_fd: its doorbell.
    """

    def __init__(self, memory, Py_ssize_t at, Py_ssize_t slots, stripes, int dispatcher_fd=-1):
        cdef OwnedCell cell
        cdef int number
        self._memory = memory
        self._ends, self._slots = ends_in(memory, at, slots), slots
        self._stripes = [cell for cell in stripes]
        self._dispatcher_fd = dispatcher_fd
        if len(self._stripes) != STRIPE_COUNT:
            raise ValueError(f"{len(self._stripes)} stripes, {STRIPE_COUNT} wanted")
        for number, cell in enumerate(self._stripes):
            self._owned[number] = &cell._owned

    def place(self, QueueCursor queue not None, Py_ssize_t slot):
        """Tell of this queue from now on; what was appended to it before is told at once."""
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot}, there are {self._slots}")
        queue.slot = <int32_t>slot
        self._tell(queue)
        full_fence()
        self._wake(queue)

    cdef void _ring_for_slot(self, QueueCursor queue) noexcept:
        cdef uint64_t one = 1
        if not queue.has_rung:
            queue.has_rung = True
            if self._dispatcher_fd >= 0:
                write_fd(self._dispatcher_fd, &one, 8)


cdef struct Watched:
    uint32_t slot
    uint64_t offset  # news are what lies beyond it; NAMED: it was named, and nobody has come back

cdef enum:
    WATCH_ROOM = 16

cdef uint64_t NAMED = <uint64_t>-1


cdef class QueueWatch:
    """Which of many queues reach beyond an offset, each under a key.

    A look costs as much as there are stripes, and queues in the stripes that have moved. One thread
    uses it.
    """

    cdef const uint8_t[::1] _memory
    cdef uint64_t *_ends
    cdef Py_ssize_t _slots
    cdef list _stripes, _keys  # a list of keys for each stripe
    cdef dict _places
    cdef Watched *_watched[STRIPE_COUNT]
    cdef Py_ssize_t _room[STRIPE_COUNT]
    cdef uint64_t _seen[STRIPE_COUNT]
    cdef bint _is_behind[STRIPE_COUNT]  # it has news that were not named
    cdef Py_ssize_t _next  # the stripe to look at first

    def __init__(self, memory, Py_ssize_t at, Py_ssize_t slots, stripes):
        cdef ReadCell cell
        self._memory = memory
        self._ends, self._slots = ends_in(memory, at, slots), slots
        self._stripes = [cell for cell in stripes]
        if len(self._stripes) != STRIPE_COUNT:
            raise ValueError(f"{len(self._stripes)} stripes, {STRIPE_COUNT} wanted")
        self._keys = [[] for _ in range(STRIPE_COUNT)]
        self._places = {}

    def __dealloc__(self):
        cdef int stripe
        for stripe in range(STRIPE_COUNT):
            PyMem_Free(self._watched[stripe])

    def __len__(self):
        return len(self._places)

    def __contains__(self, key):
        return key in self._places

    def set(self, key, Py_ssize_t slot, uint64_t offset):
        """Name this queue when it reaches beyond the offset, once; then it has to be set again."""
        cdef Py_ssize_t stripe = slot % STRIPE_COUNT, index
        cdef list keys
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot}, there are {self._slots}")
        known = self._places.get(key)
        if known is None:
            keys = <list>self._keys[stripe]
            index = len(keys)
            if index == self._room[stripe]:
                self._grow(stripe)
            keys.append(key)
            self._places[key] = (stripe, index)
        else:
            index = known[1]
            if known[0] != stripe or self._watched[stripe][index].slot != slot:
                raise ValueError(f"{key!r} has another slot than {slot}")
        self._watched[stripe][index].slot = <uint32_t>slot
        self._watched[stripe][index].offset = offset
        if load_acquire64(&self._ends[slot]) > offset:
            self._is_behind[stripe] = True

    cdef int _grow(self, Py_ssize_t stripe) except -1:
        cdef Py_ssize_t room = max(WATCH_ROOM, 2 * self._room[stripe])
        cdef void *memory = PyMem_Realloc(self._watched[stripe], room * sizeof(Watched))
        if memory == NULL:
            raise MemoryError
        self._watched[stripe] = <Watched *>memory
        self._room[stripe] = room
        return 0

    def discard(self, key):
        """Watch it no longer. The last one of its stripe takes its place."""
        cdef Py_ssize_t stripe, index, last
        cdef list keys
        known = self._places.pop(key, None)
        if known is None:
            return
        stripe, index = known
        keys = <list>self._keys[stripe]
        last = len(keys) - 1
        if index != last:
            keys[index] = keys[last]
            self._watched[stripe][index] = self._watched[stripe][last]
            self._places[keys[index]] = (stripe, index)
        keys.pop()

    def end(self, Py_ssize_t slot):
        """How far a queue is written, watched or not."""
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot {slot}, there are {self._slots}")
        return load_acquire64(&self._ends[slot])

    def stripes(self):
        """Those with any queue that is watched."""
        return [number for number, keys in enumerate(self._keys) if keys]

    def news(self, Py_ssize_t count_max):
        """The keys of queues beyond their offsets, at most so many."""
        cdef Py_ssize_t turn, stripe = self._next
        cdef list found = []
        for turn in range(STRIPE_COUNT):
            if not self._look(stripe, found, count_max):
                break
            stripe = (stripe + 1) % STRIPE_COUNT
        self._next = stripe
        return found

    cdef bint _look(self, Py_ssize_t stripe, list found, Py_ssize_t count_max) except -1:
        """False if there was no room for all of it."""
        cdef uint64_t moved = load_acquire64(
            (<ReadCell>PyList_GET_ITEM(self._stripes, stripe))._word)
        cdef Py_ssize_t index
        cdef list keys
        cdef Watched *watched = self._watched[stripe]
        if moved == self._seen[stripe] and not self._is_behind[stripe]:
            return True
        self._seen[stripe], self._is_behind[stripe] = moved, False  # before: what comes now counts
        keys = <list>self._keys[stripe]
        for index in range(len(keys)):
            if load_acquire64(&self._ends[watched[index].slot]) > watched[index].offset:
                if len(found) >= count_max:
                    self._is_behind[stripe] = True
                    return False
                found.append(keys[index])
                watched[index].offset = NAMED
        return True
