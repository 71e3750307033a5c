# --- ahead of the dispatcher: the entries that queues are about to get -------------------------------


TAIL_DONE = T_DONE  # everything was looked at
TAIL_UNMAPPED = T_UNMAPPED  # the segment that `reached` lies in is to be mapped first
TAIL_STRANGE = T_STRANGE  # something that the dispatcher has to judge


cdef struct TailQueue:
    uint64_t hash
    uint8_t *topic
    int32_t topic_bytes
    int32_t queue_id
    uint64_t begun  # number of the tail that the rest is of
    int64_t first  # queue offset of the first entry
    int64_t count
    int64_t whole  # so many entries have their tags code
    int64_t room
    uint8_t *units
    bint is_read  # somebody has asked for it: its entries get their tags codes at once
    bint is_strange


@cython.final
cdef class TailView:
    """Entries [first, end) that a queue is about to get, and the first ones of them.

    `is_stuck`: what comes behind them is for the dispatcher to judge.
    """

    cdef readonly int64_t first, end
    cdef readonly bytes units
    cdef readonly bint is_stuck


cdef class Tail:
    """The records of the log between two places, by their queues; each is looked at once, for all
    queues. One thread uses it.

    What the entries are is the dispatcher's rule (dispatch.pxi); where that has more to do than to
    write an entry, this stops, for a queue or for all.
    """

    cdef LogView _log
    cdef readonly int64_t begin, reached  # physical offsets
    cdef readonly bint is_strange  # what lies at `reached`
    cdef TailQueue *_queues
    cdef int32_t _count, _room, _last
    cdef int32_t *_buckets  # open addressing: queue's number + 1, 0 = free
    cdef uint32_t _mask
    cdef uint64_t _number

    def __cinit__(self, LogView log not None):
        self._log = log
        self._mask = 63
        self._buckets = <int32_t *>PyMem_Malloc((self._mask + 1) * sizeof(int32_t))
        if self._buckets == NULL:
            raise MemoryError
        memset(self._buckets, 0, (self._mask + 1) * sizeof(int32_t))
        self._number = 1

    def __dealloc__(self):
        self._forget_queues()
        PyMem_Free(self._queues)
        PyMem_Free(self._buckets)

    cdef void _forget_queues(self) noexcept:
        cdef int32_t i
        for i in range(self._count):
            PyMem_Free(self._queues[i].topic)
            PyMem_Free(self._queues[i].units)
        self._count = 0
        if self._buckets != NULL:
            memset(self._buckets, 0, (self._mask + 1) * sizeof(int32_t))

    def restart(self, int64_t begin):
        """Forget what was seen, and begin there."""
        if begin < 0:
            raise ValueError(f"no record at {begin}")
        self.begin = self.reached = begin
        self.is_strange = False
        self._number += 1
        if self._count > TAIL_QUEUES_MAX:
            self._forget_queues()

    def give_up(self):
        """What comes next is for the dispatcher to judge, until the next restart."""
        self.is_strange = True

    def scan(self, int64_t end):
        """Look at all records up to there; a TAIL_ reason."""
        cdef int reason = T_DONE, why
        cdef int64_t size = self._log.segment_bytes, stop
        cdef const uint8_t *base
        cdef Record record
        if self.is_strange:
            return T_STRANGE
        while self.reached < end:
            base = self._log.at(self.reached)
            if base == NULL:
                return T_UNMAPPED
            stop = min(end, self.reached - self.reached % size + size)
            why = record_here(base, stop - self.reached, self.reached, False, &record)
            if why == REC_BLANK:
                self.reached += size - self.reached % size
                continue
            if why != REC_OK or not 0 <= record.queue_offset <= QUEUE_OFFSET_LAST:
                self.is_strange = True
                return T_STRANGE
            if is_queued(&record):
                self._take(&record)
            self.reached += record.total_size
        return T_DONE

    cdef int _take(self, Record *record) except -1:
        cdef TailQueue *queue = self._queue_of(record)
        cdef uint8_t *unit
        if queue.begun != self._number:
            queue.begun, queue.first = self._number, record.queue_offset
            queue.count = queue.whole = 0
            queue.is_strange = is_delayed(record.topic, record.topic_length)
        if queue.is_strange or record.queue_offset < queue.first + queue.count:
            return 0  # it has an entry, and another one's it will not get
        if record.queue_offset > queue.first + queue.count:
            queue.is_strange = True
            return 0
        if queue.count == queue.room:
            self._grow_units(queue)
        unit = queue.units + queue.count * CONSUME_QUEUE_UNIT_BYTES
        if queue.is_read and queue.whole == queue.count:
            write_entry(unit, record)
            queue.whole += 1
        else:
            write_unit(unit, record.physical_offset, record.total_size, 0)
        queue.count += 1
        return 0

    cdef int _grow_units(self, TailQueue *queue) except -1:
        cdef int64_t room = max(TAIL_ROOM, 2 * queue.room)
        cdef void *units = PyMem_Realloc(queue.units, room * CONSUME_QUEUE_UNIT_BYTES)
        if units == NULL:
            raise MemoryError
        queue.units, queue.room = <uint8_t *>units, room
        return 0

    # --- queues by their names ---

    cdef TailQueue *_queue_of(self, Record *record) except NULL:
        """That of a record; most often it is the same as that of the one before."""
        cdef TailQueue *queue
        cdef int32_t number
        if self._last < self._count:
            queue = &self._queues[self._last]
            if (queue.queue_id == record.queue_id and queue.topic_bytes == record.topic_length
                    and memcmp(queue.topic, record.topic, record.topic_length) == 0):
                return queue
        number = self._find(record.topic, record.topic_length, record.queue_id)
        if number < 0:
            number = self._add(record.topic, record.topic_length, record.queue_id)
        self._last = number
        return &self._queues[number]

    cdef uint64_t _hash(self, const uint8_t *topic, int32_t count, int32_t queue_id) noexcept nogil:
        cdef uint64_t h = 0xCBF29CE484222325ULL
        cdef int32_t i
        for i in range(count):
            h = (h ^ topic[i]) * 0x100000001B3ULL
        h = (h ^ <uint32_t>queue_id) * 0x100000001B3ULL
        return h ^ (h >> 29)

    cdef int32_t _find(self, const uint8_t *topic, int32_t count, int32_t queue_id) noexcept nogil:
        cdef uint64_t h = self._hash(topic, count, queue_id)
        cdef uint32_t bucket = <uint32_t>h & self._mask
        cdef TailQueue *queue
        while self._buckets[bucket]:
            queue = &self._queues[self._buckets[bucket] - 1]
            if (queue.hash == h and queue.queue_id == queue_id and queue.topic_bytes == count
                    and memcmp(queue.topic, topic, count) == 0):
                return self._buckets[bucket] - 1
            bucket = (bucket + 1) & self._mask
        return -1

    cdef int32_t _add(self, const uint8_t *topic, int32_t count, int32_t queue_id) except -1:
        cdef TailQueue *queue
        cdef uint8_t *name
        if self._count == self._room:
            self._grow()
        name = <uint8_t *>PyMem_Malloc(max(1, count))
        if name == NULL:
            raise MemoryError
        memcpy(name, topic, count)
        queue = &self._queues[self._count]
        memset(queue, 0, sizeof(TailQueue))
        queue.topic, queue.topic_bytes, queue.queue_id = name, count, queue_id
        queue.hash = self._hash(topic, count, queue_id)
        self._put_bucket(self._count)
        self._count += 1
        return self._count - 1

    cdef int _grow(self) except -1:
        """Room for twice as many queues, in buckets four times as many."""
        cdef int32_t room = max(16, 2 * self._room), i
        cdef void *memory = PyMem_Realloc(self._queues, room * sizeof(TailQueue))
        if memory == NULL:
            raise MemoryError
        self._queues = <TailQueue *>memory
        memory = PyMem_Realloc(self._buckets, 4 * room * sizeof(int32_t))
        if memory == NULL:
            raise MemoryError
        self._buckets, self._mask, self._room = <int32_t *>memory, <uint32_t>(4 * room - 1), room
        memset(self._buckets, 0, 4 * room * sizeof(int32_t))
        for i in range(self._count):
            self._put_bucket(i)
        return 0

    cdef void _put_bucket(self, int32_t number) noexcept nogil:
        cdef uint32_t bucket = <uint32_t>self._queues[number].hash & self._mask
        while self._buckets[bucket]:
            bucket = (bucket + 1) & self._mask
        self._buckets[bucket] = number + 1

    # --- what was found ---

    def view(self, str topic not None, int32_t queue_id, int64_t high, int64_t queue_offset,
             int64_t count_max):
        """What a queue is about to get, from an offset on if that is in it.

        Args:
            count_max: of the entries themselves.
            high: how far the dispatcher has come with the queue, at least at `begin`.
        """
        cdef bytes raw = topic.encode()
        cdef const uint8_t *name = <const uint8_t *>PyBytes_AS_STRING(raw)
        cdef int32_t number = self._find(name, <int32_t>len(raw), queue_id)
        cdef TailView found = TailView.__new__(TailView)
        cdef TailQueue *queue
        cdef int64_t at
        found.first = found.end = high
        found.units = b""
        found.is_stuck = self.is_strange
        if number < 0:
            return found
        queue = &self._queues[number]
        queue.is_read = True
        if queue.begun != self._number:
            return found
        found.is_stuck = found.is_stuck or queue.is_strange or high < queue.first
        if queue.first <= high < queue.first + queue.count:
            found.end = queue.first + queue.count
            at = min(max(high, queue_offset), found.end)
            found.first = at
            at -= queue.first
            number = <int32_t>max(0, min(queue.count - at, count_max))
            if at + number > queue.whole and not self._make_whole(queue, at + number):
                found.first = found.end = high
                found.is_stuck = True
                return found
            found.units = (<char *>queue.units)[
                at * CONSUME_QUEUE_UNIT_BYTES:(at + number) * CONSUME_QUEUE_UNIT_BYTES]
        return found

    cdef bint _make_whole(self, TailQueue *queue, int64_t end) noexcept nogil:
        """Give the first entries their tags codes."""
        cdef Record record
        cdef uint8_t *unit
        cdef const uint8_t *base
        cdef int64_t at
        while queue.whole < end:
            unit = queue.units + queue.whole * CONSUME_QUEUE_UNIT_BYTES
            at = <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET)
            base = self._log.at(at)
            if base == NULL or record_here(
                    base, <int32_t>load_be32(unit + CONSUME_QUEUE_UNIT_SIZE), at, False,
                    &record) != REC_OK:
                return False
            write_entry(unit, &record)
            queue.whole += 1
        return True
