# --- index files: messages by key ------------------------------------------------------------------

from libc.limits cimport INT_MAX
INDEX_DONE = 0  # reached the end that was asked for
INDEX_BLANK = 1  # the rest of the segment is blank
INDEX_FULL = 2  # the file takes no more entries, or there is none
INDEX_NEED_ROOM = 3  # the next entry has no file space yet
INDEX_BAD = 4  # not a record
INDEX_ENOUGH = 5  # `count_max` records were looked at
INDEX_FOUND = 6  # `first_keyed`: here is one

cdef enum:
    I_DONE = 0
    I_BLANK = 1
    I_FULL = 2
    I_NEED_ROOM = 3
    I_BAD = 4
    I_ENOUGH = 5
    I_FOUND = 6
    # Keys that are hashed, and their slots fetched, before the first of them is put: random places
    # of 20 MB, so that the memory works on many of them at once.
    PENDING_MAX = 64


cdef struct Pending:
    int64_t physical_offset
    int64_t timestamp
    int32_t hash
    int32_t number  # of the key in its message


cdef class Indexer:
    """Puts the keys of records into one index file. Has one user, the dispatcher process.

    An entry is written before the header counts it, and counted before its slot names it: who
    follows a slot meets whole entries only, and a kill in between leaves nothing wrong.
    """

    cdef uint8_t *_base  # NULL: no file
    cdef uint8_t[::1] _memory
    cdef uint32_t _slots
    cdef int32_t _entries  # numbers below this may be used
    cdef int32_t _limit  # numbers below this have file space
    cdef int64_t _begin_timestamp
    cdef int64_t _again  # the record whose keys may be there already, -1: none
    cdef int64_t _partial  # the record whose first `_partial_keys` keys are in the file before
    cdef int32_t _partial_keys
    cdef int64_t _split  # the record whose keys up to `_split_hash` are in the file before
    cdef int32_t _split_hash
    cdef readonly int64_t end_physical_offset
    cdef readonly int64_t end_timestamp
    cdef readonly int32_t count  # the next entry's number
    cdef Pending _pending[PENDING_MAX]
    cdef int32_t _waiting

    def __cinit__(self):
        self._base = NULL
        self._again = self._partial = self._split = -1
        self.end_physical_offset = -1

    def attach(self, memory, uint32_t slots, int32_t entries, int32_t limit, bint split=False):
        """Go on in this file, of which entries below `limit` have space.

        With `split` the first keys of the file's first record are in the file before.
        """
        cdef uint8_t[::1] view = memory
        if slots < 1 or entries < 2 or limit > entries or view.shape[0] != (
                INDEX_HEADER_BYTES + 4 * <int64_t>slots + INDEX_ENTRY_BYTES * <int64_t>entries):
            raise ValueError(f"{view.shape[0]} bytes: not {slots} slots and {entries} entries")
        self._memory = view
        self._base = &view[0]
        self._slots = slots
        self._entries = entries
        self._limit = limit
        self._begin_timestamp = <int64_t>load_be64(self._base + INDEX_HEADER_BEGIN_TIMESTAMP)
        self.end_timestamp = <int64_t>load_be64(self._base + INDEX_HEADER_END_TIMESTAMP)
        self.end_physical_offset = <int64_t>load_be64(
            self._base + INDEX_HEADER_END_PHYSICAL_OFFSET)
        self.count = max(1, <int32_t>load_be32(self._base + INDEX_HEADER_INDEX_COUNT))
        if not self.count <= entries or (self.count > 1 and limit < self.count):
            self.detach()
            raise ValueError(f"entry {self.count} is the next of {entries}, {limit} have space")
        self._again = self.end_physical_offset if self.count > 1 else -1
        self._split = -1
        if self.count > 1:
            self._finish_put()
            if split:
                self._split = <int64_t>load_be64(self._base + INDEX_HEADER_BEGIN_PHYSICAL_OFFSET)
                self._split_hash = <int32_t>load_be32(self._entry(1) + INDEX_ENTRY_KEY_HASH)

    def set_limit(self, int32_t limit):
        """More file space was taken."""
        if not self._limit <= limit <= self._entries:
            raise ValueError(f"space for {limit} of {self._entries} entries, had {self._limit}")
        self._limit = limit

    def detach(self):
        self._base = NULL
        self._memory = None

    def index(self, buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t count_max):
        """Put the keys of all records in [begin, end), which lies in one segment.

        Records below `end_physical_offset` are passed over: they are in the file, or in the one
        before. Returns (reached, one of the INDEX_ reasons); after INDEX_FULL and INDEX_NEED_ROOM
        the keys of the record at `reached` that were put are not put again.
        """
        cdef const uint8_t[::1] view = buffer
        cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
        cdef int64_t stop = end - segment_start
        cdef int reason
        if at == stop:
            return begin, I_DONE
        with nogil:
            reason = self._run(&view[0], segment_start, &at, stop, count_max)
        return segment_start + at, reason

    cdef int _run(self, const uint8_t *base, int64_t segment_start, int64_t *at, int64_t stop,
                  int64_t count_max) noexcept nogil:
        cdef Record record
        cdef int64_t position = at[0], skip_below = self.end_physical_offset
        cdef int why, reason = I_DONE
        self._waiting = 0
        while position < stop:
            if count_max <= 0:
                reason = I_ENOUGH
                break
            why = record_here(
                base + position, stop - position, segment_start + position, False, &record)
            if why != REC_OK:
                reason = I_BLANK if why == REC_BLANK else I_BAD
                break
            if record.physical_offset >= skip_below:
                why = self._take(&record)
                if why != I_DONE:
                    at[0] = self._partial - segment_start
                    return why
            position += record.total_size
            count_max -= 1
        why = self._put_pending()
        if why != I_DONE:
            at[0] = self._partial - segment_start
            return why
        at[0] = position
        return reason

    cdef int _take(self, Record *record) noexcept nogil:
        """Hash the record's keys: the unique one, then KEYS as they are apart by single spaces."""
        cdef Keys keys
        cdef uint32_t topic
        cdef int32_t number = 0
        cdef const uint8_t *word
        cdef const uint8_t *end
        cdef const uint8_t *stop
        cdef int why
        if not is_indexed(record, &keys):
            return I_DONE
        topic = 31 * hash_on(0, record.topic, record.topic_length) + 35  # 35 is "#"
        if keys.unique != NULL:
            why = self._hold(record, hash_on(topic, keys.unique, keys.unique_bytes), number)
            if why != I_DONE:
                return why
            number += 1
        if keys.keys == NULL:
            return I_DONE
        word, end = keys.keys, keys.keys + keys.keys_bytes
        while word < end:
            stop = <const uint8_t *>memchr(word, 32, end - word)
            if stop == NULL:
                stop = end
            if stop > word:
                why = self._hold(record, hash_on(topic, word, stop - word), number)
                if why != I_DONE:
                    return why
                number += 1
            word = stop + 1
        return I_DONE

    cdef inline int _hold(self, Record *record, uint32_t h, int32_t number) noexcept nogil:
        """Keep a key for later, and have its slot fetched meanwhile."""
        cdef Pending *pending
        cdef int why
        if record.physical_offset == self._partial and number < self._partial_keys:
            return I_DONE
        if record.physical_offset == self._split:
            if index_hash_of(h) != self._split_hash:
                return I_DONE
            self._split = -1
        if self._waiting == PENDING_MAX:
            why = self._put_pending()
            if why != I_DONE:
                return why
        pending = &self._pending[self._waiting]
        pending.physical_offset = record.physical_offset
        pending.timestamp = record.store_timestamp
        pending.hash = index_hash_of(h)
        pending.number = number
        if self._base != NULL:
            prefetch_to_write(self._base + INDEX_HEADER_BYTES
                              + 4 * <int64_t>(<uint32_t>pending.hash % self._slots))
        self._waiting += 1
        return I_DONE

    cdef int _put_pending(self) noexcept nogil:
        cdef Pending *pending
        cdef int32_t i
        cdef int why
        for i in range(self._waiting):
            pending = &self._pending[i]
            why = self._put(pending)
            if why != I_DONE:
                self._partial = pending.physical_offset
                self._partial_keys = pending.number
                self._waiting = 0
                return why
        self._waiting = 0
        return I_DONE

    cdef int _put(self, Pending *pending) noexcept nogil:
        """RocketMQ IndexFile.putKey (store-format 4.3)."""
        cdef uint8_t *slot
        cdef uint8_t *entry
        cdef int32_t previous
        cdef int64_t seconds
        if self._base == NULL:
            return I_FULL
        slot = self._slot_of(pending.hash)
        previous = self._head(slot)
        if pending.physical_offset == self._again and pending.physical_offset != self._partial:
            if self._is_there(previous, pending):
                return I_DONE
        if self.count >= self._entries:
            return I_FULL
        if (self.count > 1 and pending.timestamp < self._begin_timestamp
                and <uint64_t>self._begin_timestamp - <uint64_t>pending.timestamp
                > <uint64_t>CLOCK_STEP_MS):
            return I_FULL  # entries hold seconds since the begin, when the clock was ahead
        if self.count >= self._limit:
            return I_NEED_ROOM
        seconds = 0
        if 0 < self._begin_timestamp < pending.timestamp:
            seconds = (pending.timestamp - self._begin_timestamp) // 1000
        entry = self._entry(self.count)
        store_be32(entry + INDEX_ENTRY_KEY_HASH, <uint32_t>pending.hash)
        store_be64(entry + INDEX_ENTRY_PHYSICAL_OFFSET, <uint64_t>pending.physical_offset)
        store_be32(entry + INDEX_ENTRY_TIME_DIFFERENCE, <uint32_t>max(0, min(seconds, INT_MAX)))
        store_be32(entry + INDEX_ENTRY_PREVIOUS, <uint32_t>previous)
        if previous == 0:
            store_be32(self._base + INDEX_HEADER_HASH_SLOT_COUNT,
                       load_be32(self._base + INDEX_HEADER_HASH_SLOT_COUNT) + 1)
        self._count_in(pending)
        store_release_be32(slot, <uint32_t>(self.count - 1))
        return I_DONE

    cdef void _count_in(self, Pending *pending) noexcept nogil:
        """The header, with the count last."""
        cdef uint8_t *header = self._base
        if self.count <= 1:
            store_be64(header + INDEX_HEADER_BEGIN_PHYSICAL_OFFSET,
                       <uint64_t>pending.physical_offset)
            store_be64(header + INDEX_HEADER_BEGIN_TIMESTAMP, <uint64_t>pending.timestamp)
            self._begin_timestamp = pending.timestamp
        self.end_physical_offset = pending.physical_offset
        self.end_timestamp = pending.timestamp
        store_be64(header + INDEX_HEADER_END_PHYSICAL_OFFSET, <uint64_t>pending.physical_offset)
        store_be64(header + INDEX_HEADER_END_TIMESTAMP, <uint64_t>pending.timestamp)
        self.count += 1
        store_release_be32(header + INDEX_HEADER_INDEX_COUNT, <uint32_t>self.count)

    cdef int32_t _head(self, const uint8_t *slot) noexcept nogil:
        """The number that a slot holds, 0 for one that it cannot hold (RocketMQ).

        An entry that RocketMQ had written, but not yet counted when it was killed, is about to be
        overwritten: its predecessor is the head.
        """
        cdef int32_t number = <int32_t>load_be32(slot)
        if number == self.count and number < self._limit:
            number = <int32_t>load_be32(self._entry(number) + INDEX_ENTRY_PREVIOUS)
        return number if 0 < number < self.count else 0

    cdef bint _is_there(self, int32_t number, Pending *pending) noexcept nogil:
        cdef uint8_t *entry
        cdef int32_t previous
        while number > 0:
            entry = self._entry(number)
            if <int64_t>load_be64(entry + INDEX_ENTRY_PHYSICAL_OFFSET) < pending.physical_offset:
                return False
            if <int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH) == pending.hash:
                return True
            previous = <int32_t>load_be32(entry + INDEX_ENTRY_PREVIOUS)
            number = previous if previous < number else 0
        return False

    cdef void _finish_put(self) noexcept nogil:
        """Whoever wrote the last entry may have been killed before its slot named it."""
        cdef int32_t number = self.count - 1
        cdef uint8_t *entry = self._entry(number)
        cdef int32_t h = <int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH)
        cdef uint8_t *slot
        if h < 0:
            return
        slot = self._slot_of(h)
        if load_be32(slot) == load_be32(entry + INDEX_ENTRY_PREVIOUS):
            store_release_be32(slot, <uint32_t>number)

    cdef inline uint8_t *_slot_of(self, int32_t h) noexcept nogil:
        return self._base + INDEX_HEADER_BYTES + 4 * <int64_t>(<uint32_t>h % self._slots)

    cdef inline uint8_t *_entry(self, int32_t number) noexcept nogil:
        return (self._base + INDEX_HEADER_BYTES + 4 * <int64_t>self._slots
                + INDEX_ENTRY_BYTES * <int64_t>number)


def index_hash(str topic not None, str key not None):
    """The hash that an entry of the key has."""
    cdef Py_ssize_t count
    cdef str text = f"{topic}#{key}"
    cdef const char *raw = PyUnicode_AsUTF8AndSize(text, &count)
    return index_hash_of(hash_on(0, <const uint8_t *>raw, count))


def first_keyed(buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t above=-1):
    """The first record in [begin, end) that belongs into the index and lies behind `above`.

    Returns (reached, reason): INDEX_FOUND, or why there is none before `reached`.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t at = check_inside(view.shape[0], segment_start, begin, end)
    cdef int64_t stop = end - segment_start
    cdef int why, reason = I_DONE
    cdef Record record
    cdef Keys keys
    with nogil:
        while at < stop:
            why = record_here(&view[at], stop - at, segment_start + at, False, &record)
            if why != REC_OK:
                reason = I_BLANK if why == REC_BLANK else I_BAD
                break
            if segment_start + at > above and is_indexed(&record, &keys):
                reason = I_FOUND
                break
            at += record.total_size
    return segment_start + at, reason


def index_chain(
    const uint8_t[::1] memory not None, uint32_t slots, int32_t entries, int32_t key_hash,
    int64_t begin_ms, int64_t end_ms, int64_t count_max, int32_t start=-1, bint exact=False,
    int64_t below=0x7fffffffffffffff,
):
    """Physical offsets of the entries with that hash and a time in [begin_ms, end_ms].

    Only those of records that begin before `below`. The newest first, RocketMQ's rules (store-format 4.5). An entry's time is whole seconds from
    the file's beginning, cut off: `exact` gives a second more room at the begin, so that who
    compares store times afterwards misses none.

    Returns (offsets, next number, whole): go on at the number if there is one; `whole` is False
    where the chain leads to what cannot be an entry.
    """
    cdef int64_t wanted = INDEX_HEADER_BYTES + 4 * <int64_t>slots
    cdef const uint8_t *entry
    cdef int32_t number, count, previous, seconds
    cdef int64_t base_ms, time_ms, phys, low, high
    cdef list found = []
    if slots < 1 or entries < 2 or key_hash < 0:
        raise ValueError(f"{slots} slots, {entries} entries, hash {key_hash}")
    if memory.shape[0] != wanted + INDEX_ENTRY_BYTES * <int64_t>entries:
        raise ValueError(f"{memory.shape[0]} bytes: not {slots} slots and {entries} entries")
    # The slot first: what it names is counted in a header that is read later.
    number = <int32_t>load_acquire_be32(
        &memory[INDEX_HEADER_BYTES + 4 * <int64_t>(<uint32_t>key_hash % slots)])
    count = <int32_t>load_acquire_be32(&memory[INDEX_HEADER_INDEX_COUNT])
    if start >= 0:
        number = start
    low = <int64_t>load_be64(&memory[INDEX_HEADER_BEGIN_PHYSICAL_OFFSET])
    high = <int64_t>load_be64(&memory[INDEX_HEADER_END_PHYSICAL_OFFSET])
    base_ms = <int64_t>load_be64(&memory[INDEX_HEADER_BEGIN_TIMESTAMP])
    base_ms = max(-(<int64_t>1 << 62), min(base_ms, <int64_t>1 << 62))
    if exact:
        begin_ms = max(begin_ms, -(<int64_t>1 << 62)) - 1000
    if number <= 0 or number > count or number >= entries or count <= 1:
        return found, 0, True
    while True:
        if <int64_t>len(found) >= count_max:
            return found, number, True
        entry = &memory[wanted + INDEX_ENTRY_BYTES * <int64_t>number]
        seconds = <int32_t>load_be32(entry + INDEX_ENTRY_TIME_DIFFERENCE)
        if seconds < 0:
            return found, 0, False
        time_ms = base_ms + 1000 * <int64_t>seconds
        if exact and number == 1:
            time_ms = base_ms  # that one's seconds count from the end of the file before
        phys = <int64_t>load_be64(entry + INDEX_ENTRY_PHYSICAL_OFFSET)
        if not low <= phys <= high:
            return found, 0, False
        if (<int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH) == key_hash
                and begin_ms <= time_ms <= end_ms and phys < below):
            found.append(phys)
        previous = <int32_t>load_be32(entry + INDEX_ENTRY_PREVIOUS)
        if previous == 0 or time_ms < begin_ms:
            return found, 0, True
        if not 0 < previous < number:  # chains lead to older entries only
            return found, 0, False
        number = previous


def index_is_whole(
    const uint8_t[::1] memory not None, uint32_t slots, int32_t entries, bint may_be_cut=True
):
    """Whether all slots and chains are what putting these entries one by one makes of them.

    Args:
        may_be_cut: the last put may have been cut off before its slot was written.
    """
    cdef int64_t wanted = INDEX_HEADER_BYTES + 4 * <int64_t>slots
    cdef int32_t *heads
    cdef bint whole
    if slots < 1 or entries < 2:
        raise ValueError(f"{slots} slots, {entries} entries")
    if memory.shape[0] != wanted + INDEX_ENTRY_BYTES * <int64_t>entries:
        return False
    heads = <int32_t *>PyMem_Malloc(slots * sizeof(int32_t))
    if heads == NULL:
        raise MemoryError
    memset(heads, 0, slots * sizeof(int32_t))
    with nogil:
        whole = chains_hold(&memory[0], slots, entries, heads, may_be_cut)
    PyMem_Free(heads)
    return whole


cdef bint chains_hold(const uint8_t *base, uint32_t slots, int32_t entries,
                      int32_t *heads, bint may_be_cut) noexcept nogil:
    cdef int32_t count = max(1, <int32_t>load_be32(base + INDEX_HEADER_INDEX_COUNT))
    cdef int64_t before = <int64_t>load_be64(base + INDEX_HEADER_BEGIN_PHYSICAL_OFFSET), phys
    cdef int64_t end = <int64_t>load_be64(base + INDEX_HEADER_END_PHYSICAL_OFFSET)
    cdef const uint8_t *entry = base + INDEX_HEADER_BYTES + 4 * <int64_t>slots
    cdef int32_t number, h, previous, last_previous = 0
    cdef uint32_t slot, last_slot = slots
    if count > entries or (count > 1 and not 0 <= before <= end):
        return False
    for number in range(1, count):
        entry += INDEX_ENTRY_BYTES
        h = <int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH)
        phys = <int64_t>load_be64(entry + INDEX_ENTRY_PHYSICAL_OFFSET)
        previous = <int32_t>load_be32(entry + INDEX_ENTRY_PREVIOUS)
        if h < 0 or phys < before or <int32_t>load_be32(entry + INDEX_ENTRY_TIME_DIFFERENCE) < 0:
            return False
        if number == 1 and phys != before:
            return False
        before = phys
        slot = <uint32_t>h % slots
        if previous != heads[slot]:
            return False
        last_slot, last_previous = slot, previous
        heads[slot] = number
    if count > 1 and before != end:
        return False
    for slot in range(slots):
        number = <int32_t>load_be32(base + INDEX_HEADER_BYTES + 4 * <int64_t>slot)
        if number != heads[slot] and not (
                may_be_cut and slot == last_slot and number == last_previous):
            return False
    return True
