# --- dispatch: from the CommitLog to the ConsumeQueues ---------------------------------------------

cdef struct QueueSlot:
    uint64_t hash
    char *topic
    int32_t topic_bytes
    int32_t queue_id
    uint8_t *units  # mapping of the ConsumeQueue segment in use; NULL: none
    int64_t first_index  # index of the entry at units[0]
    int64_t limit_index  # entries below this have file space
    int64_t next_index  # the queue's maximum: one past the last entry
    uint64_t *published  # where the maximum is published for other processes

DISPATCH_DONE = 0  # reached the end that was asked for
DISPATCH_BLANK = 1  # the rest of the segment is blank
DISPATCH_NEW_QUEUE = 2  # the record's queue is not registered
DISPATCH_NEED_ROOM = 3  # the entry lies outside the slot's window: attach another
DISPATCH_BAD = 4  # not a record: args has the reason
DISPATCH_GAP = 6  # entries of this queue are missing before this one
DISPATCH_TAKEN = 7  # another, earlier record has this place in the queue

cdef enum:
    D_DONE = 0
    D_BLANK = 1
    D_NEW_QUEUE = 2
    D_NEED_ROOM = 3
    D_BAD = 4
    D_GAP = 6
    D_TAKEN = 7


cdef inline bint is_taken(const uint8_t *unit, int64_t physical_offset) noexcept nogil:
    """An entry of an earlier record: the first one keeps the place (RocketMQ)."""
    return (load_be32(unit + CONSUME_QUEUE_UNIT_SIZE) != 0 and not is_filler(unit)
            and <int64_t>load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET) < physical_offset)


cdef class Dispatcher:
    """Writes a ConsumeQueue entry for every record. Has one user, the dispatcher process.

    An entry's place is its record's queue offset, so writing it twice changes nothing.

    Args:
        levels_ms: how long each delay level waits, as int64s.
    """

    cdef QueueSlot *_slots
    cdef int32_t _count, _capacity
    cdef int32_t *_buckets  # open addressing: slot number + 1, 0 = free
    cdef uint32_t _mask
    cdef list _held  # what keeps the mappings alive: [segment view, published view] a slot
    cdef const int64_t[::1] _levels_ms
    cdef readonly int64_t last_store_timestamp

    def __cinit__(self, levels_ms not None):
        self._capacity = 64
        self._slots = <QueueSlot *>PyMem_Malloc(self._capacity * sizeof(QueueSlot))
        self._mask = 255
        self._buckets = <int32_t *>PyMem_Malloc((self._mask + 1) * sizeof(int32_t))
        if self._slots == NULL or self._buckets == NULL:
            raise MemoryError
        memset(self._buckets, 0, (self._mask + 1) * sizeof(int32_t))
        self._held = []
        self._levels_ms = levels_ms

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self._count):
            PyMem_Free(self._slots[i].topic)
        PyMem_Free(self._slots)
        PyMem_Free(self._buckets)

    def add_queue(self, str topic not None, int32_t queue_id, int64_t next_index, published,
                  Py_ssize_t published_at):
        """Register a queue; its number. `published` is the memory where its maximum is kept."""
        cdef bytes raw = topic.encode()
        cdef const uint8_t *name = <const uint8_t *>PyBytes_AS_STRING(raw)
        cdef QueueSlot *slot
        cdef uint8_t[::1] memory = published
        if published_at % 8 or not 0 <= published_at <= memory.shape[0] - 8:
            raise ValueError(f"no counter at {published_at}")
        if self.find_slot(name, <int32_t>len(raw), queue_id) >= 0:
            raise ValueError(f"queue {topic}/{queue_id} is registered already")
        if self._count == self._capacity:
            self._grow()
        slot = &self._slots[self._count]
        slot.topic = <char *>PyMem_Malloc(max(1, len(raw)))
        if slot.topic == NULL:
            raise MemoryError
        memcpy(slot.topic, name, len(raw))
        slot.topic_bytes = <int32_t>len(raw)
        slot.queue_id = queue_id
        slot.hash = self.hash_of(name, slot.topic_bytes, queue_id)
        slot.units = NULL
        slot.first_index = 0
        slot.limit_index = 0
        slot.next_index = next_index
        slot.published = <uint64_t *>&memory[published_at]
        self._held.append([None, memory])
        self._put_bucket(self._count)
        self._count += 1
        return self._count - 1

    def attach(self, int32_t slot_number, segment, int64_t first_index, int64_t limit_index):
        """Give a queue its window: a writable mapping whose first entry has `first_index`."""
        cdef uint8_t[::1] memory = segment
        cdef QueueSlot *slot = self._slot(slot_number)
        check_units(memory.shape[0], first_index, first_index, limit_index)
        slot.units = &memory[0]
        slot.first_index = first_index
        slot.limit_index = limit_index
        self._held[slot_number][0] = memory

    def detach(self, int32_t slot_number):
        """Let go of the queue's mapping, so that it can be closed."""
        cdef QueueSlot *slot = self._slot(slot_number)
        slot.units = NULL
        slot.first_index = slot.limit_index = 0
        self._held[slot_number][0] = None

    def next_index(self, int32_t slot_number):
        return self._slot(slot_number).next_index

    def set_next_index(self, int32_t slot_number, int64_t next_index):
        cdef QueueSlot *slot = self._slot(slot_number)
        slot.next_index = next_index
        store_release64(slot.published, <uint64_t>next_index)

    def find(self, str topic not None, int32_t queue_id):
        """The queue's number, or -1."""
        cdef bytes raw = topic.encode()
        return self.find_slot(
            <const uint8_t *>PyBytes_AS_STRING(raw), <int32_t>len(raw), queue_id)

    def put(self, int32_t slot_number, int64_t index, int64_t physical_offset, int32_t size,
            int64_t tags_code):
        """Write one entry, into the window; for what `dispatch` leaves to Python."""
        cdef QueueSlot *slot = self._slot(slot_number)
        if slot.units == NULL or not slot.first_index <= index < slot.limit_index:
            raise IndexError(f"entry {index} is outside the window")
        write_unit(self._unit(slot, index), physical_offset, size, tags_code)
        self._publish(slot, index)

    def dispatch(self, buffer, int64_t segment_start, int64_t begin, int64_t end,
                 int64_t enough=0x7FFFFFFFFFFFFFFF):
        """Write the entries of all records in [begin, end), which lies in one segment; but not of
        those that begin at `enough` or behind it.

        Returns (reached, reason, slot, index): how far it came and one of the DISPATCH_ reasons.
        `slot` is the queue's number where one is concerned, else -1; `index` the queue offset of
        the record at `reached`, or for DISPATCH_BAD an index into REASONS.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start, index = -1, pause
        cdef int32_t slot_number = -1
        cdef int reason
        pause = max(begin, min(end, enough)) - segment_start
        if at >= pause:
            return begin, D_DONE, -1, -1
        with nogil:
            reason = self._run(&view[0], segment_start, &at, stop, pause, &slot_number, &index)
        return segment_start + at, reason, slot_number, index

    cdef int _run(self, const uint8_t *base, int64_t segment_start, int64_t *at, int64_t stop,
                  int64_t pause, int32_t *slot_number, int64_t *index) noexcept nogil:
        cdef Record record
        cdef QueueSlot *slot
        cdef int why
        cdef int32_t number
        while at[0] < pause:
            why = record_here(base + at[0], stop - at[0], segment_start + at[0], False, &record)
            if why == REC_BLANK:
                return D_BLANK
            if why != REC_OK:
                index[0] = why
                return D_BAD
            # A queue that is registered has a name that may be: it is not looked at each time.
            number = slot_number[0]  # of the record before: most come in runs
            if number < 0 or not self._is_slot(number, &record):
                number = self.find_slot(record.topic, record.topic_length, record.queue_id)
            if not (has_place(&record) if number < 0
                    else 0 <= record.queue_offset <= QUEUE_OFFSET_LAST):
                index[0] = REC_BAD_QUEUE
                return D_BAD
            self.last_store_timestamp = record.store_timestamp
            if not is_queued(&record):
                at[0] += record.total_size
                continue
            slot_number[0] = number
            index[0] = record.queue_offset
            if number < 0:
                return D_NEW_QUEUE
            slot = &self._slots[number]
            if record.queue_offset > slot.next_index:
                return D_GAP
            if not slot.first_index <= record.queue_offset < slot.limit_index:
                return D_NEED_ROOM
            if record.queue_offset < slot.next_index and is_taken(
                    self._unit(slot, record.queue_offset), record.physical_offset):
                return D_TAKEN
            self._write(self._unit(slot, record.queue_offset), &record)
            self._publish(slot, record.queue_offset)
            at[0] += record.total_size
        slot_number[0] = -1
        return D_DONE

    cdef inline bint _is_slot(self, int32_t number, Record *record) noexcept nogil:
        cdef QueueSlot *slot = &self._slots[number]
        return (slot.queue_id == record.queue_id and slot.topic_bytes == record.topic_length
                and memcmp(slot.topic, record.topic, record.topic_length) == 0)

    cdef inline void _write(self, uint8_t *unit, Record *record) noexcept nogil:
        if not is_delayed(record.topic, record.topic_length):
            write_entry(unit, record)
            return
        write_unit(unit, record.physical_offset, record.total_size, delay_code(
            record, &self._levels_ms[0] if self._levels_ms.shape[0] else NULL,
            self._levels_ms.shape[0]))

    cdef inline uint8_t *_unit(self, QueueSlot *slot, int64_t index) noexcept nogil:
        """The entry of that index, which is inside the window."""
        return slot.units + (index - slot.first_index) * CONSUME_QUEUE_UNIT_BYTES

    cdef inline void _publish(self, QueueSlot *slot, int64_t index) noexcept nogil:
        if index >= slot.next_index:
            slot.next_index = index + 1
            store_release64(slot.published, <uint64_t>slot.next_index)

    cdef QueueSlot *_slot(self, int32_t number) except NULL:
        if not 0 <= number < self._count:
            raise IndexError(f"no queue {number}")
        return &self._slots[number]

    cdef uint64_t hash_of(self, const uint8_t *topic, int32_t count, int32_t queue_id) noexcept nogil:
        cdef uint64_t h = 0xCBF29CE484222325ULL
        cdef int32_t i
        for i in range(count):
            h = (h ^ topic[i]) * 0x100000001B3ULL
        h = (h ^ <uint32_t>queue_id) * 0x100000001B3ULL
        return h ^ (h >> 29)

    cdef int32_t find_slot(self, const uint8_t *topic, int32_t count, int32_t queue_id) noexcept nogil:
        cdef uint64_t h = self.hash_of(topic, count, queue_id)
        cdef uint32_t bucket = <uint32_t>h & self._mask
        cdef QueueSlot *slot
        while self._buckets[bucket]:
            slot = &self._slots[self._buckets[bucket] - 1]
            if (slot.hash == h and slot.queue_id == queue_id and slot.topic_bytes == count
                    and memcmp(slot.topic, topic, count) == 0):
                return self._buckets[bucket] - 1
            bucket = (bucket + 1) & self._mask
        return -1

    cdef void _put_bucket(self, int32_t number) noexcept nogil:
        cdef uint32_t bucket = <uint32_t>self._slots[number].hash & self._mask
        while self._buckets[bucket]:
            bucket = (bucket + 1) & self._mask
        self._buckets[bucket] = number + 1

    cdef int _grow(self) except -1:
        cdef int32_t i
        cdef QueueSlot *slots = <QueueSlot *>PyMem_Realloc(
            self._slots, 2 * self._capacity * sizeof(QueueSlot))
        if slots == NULL:
            raise MemoryError
        self._slots = slots
        self._capacity *= 2
        cdef int32_t *buckets = <int32_t *>PyMem_Realloc(
            self._buckets, 4 * self._capacity * sizeof(int32_t))
        if buckets == NULL:
            raise MemoryError
        self._buckets = buckets
        self._mask = <uint32_t>(4 * self._capacity - 1)
        memset(self._buckets, 0, 4 * self._capacity * sizeof(int32_t))
        for i in range(self._count):
            self._put_bucket(i)
        return 0
