# --- messages by key, ahead of the index: for a writer that stores no key twice -------------------------

cdef enum:
    # Entries of a slot that are followed for one key; with more, whoever asks looks for himself.
    CHAIN_MAX = 4096


cdef class KeyTail:
    """The newest record of each key of some topics, in a stretch of the log. One thread uses it."""

    cdef LogView _log
    cdef readonly int64_t begin, reached  # physical offsets
    cdef readonly Py_ssize_t count  # of keys
    cdef dict _topics  # topic -> key -> physical offset; all of them bytes
    cdef list _filled  # those of its values that have keys
    cdef bytes _last_topic
    cdef dict _last

    def __cinit__(self, LogView log not None):
        self._log = log
        self._topics = {}
        self._filled = []

    def restart(self, int64_t begin):
        """Forget what was seen, and begin there."""
        if begin < 0:
            raise ValueError(f"no record at {begin}")
        self.begin = self.reached = begin
        self.count = 0
        for keys in self._filled:
            (<dict>keys).clear()
        self._filled.clear()

    def watches(self, bytes topic not None):
        return topic in self._topics

    def watch(self, bytes topic not None):
        """Note its keys as well, from the next restart on."""
        self._topics[topic] = {}
        self._last = None

    def scan(self, int64_t end):
        """Look at all records up to there; a TAIL_ reason. TAIL_STRANGE: `reached` has damage."""
        cdef int64_t size = self._log.segment_bytes, stop
        cdef const uint8_t *base
        cdef Record record
        cdef int why
        while self.reached < end:
            base = self._log.at(self.reached)
            if base == NULL:
                return T_UNMAPPED
            stop = min(end, self.reached - self.reached % size + size)
            why = record_here(base, stop - self.reached, self.reached, False, &record)
            if why == REC_BLANK:
                self.reached += size - self.reached % size
                continue
            if why != REC_OK:
                return T_STRANGE
            self._take(&record)
            self.reached += record.total_size
        return T_DONE

    def skip_to(self, int64_t place):
        """Damage lies before that place: a record that does not hold has no key."""
        self.reached = max(self.reached, place)

    cdef int _take(self, Record *record) except -1:
        cdef Keys keys
        cdef dict known = self._keys_of(record)
        cdef const uint8_t *word
        cdef const uint8_t *end
        cdef const uint8_t *stop
        if known is None or not is_indexed(record, &keys) or keys.keys == NULL:
            return 0
        word, end = keys.keys, keys.keys + keys.keys_bytes
        before = len(known)
        if before == 0:
            self._filled.append(known)
        while word < end:
            stop = <const uint8_t *>memchr(word, 32, end - word)
            if stop == NULL:
                stop = end
            if stop > word:
                known[word[:stop - word]] = record.physical_offset
            word = stop + 1
        self.count += len(known) - before
        return 0

    cdef dict _keys_of(self, Record *record):
        """Of the record's topic; None: it is not watched."""
        if (self._last is None or len(self._last_topic) != record.topic_length
                or memcmp(PyBytes_AS_STRING(self._last_topic), record.topic,
                          record.topic_length) != 0):
            topic = record.topic[:record.topic_length]
            known = self._topics.get(topic)
            if known is None:
                return None
            self._last_topic, self._last = topic, known
        return self._last

    def find(self, bytes topic not None, list keys not None):
        """(index, physical offset) of each of these keys that is there."""
        cdef dict known = self._topics[topic]
        cdef Py_ssize_t index
        cdef list found = []
        if known:
            for index in range(len(keys)):
                at = known.get(keys[index])
                if at is not None:
                    found.append((index, at))
        return found


def index_hits(
    const uint8_t[::1] memory not None, uint32_t slots, int32_t entries, bytes topic not None,
    list keys not None, int64_t begin_ms,
):
    """Which of the keys, by their index, an index file may have at `begin_ms` or later.

    All that it has are among them, and some that only have the same hash; `index_chain` tells more.
    """
    cdef Py_ssize_t first, index, count = len(keys)
    cdef int32_t hashes[PENDING_MAX]
    cdef int64_t wanted = INDEX_HEADER_BYTES + 4 * <int64_t>slots
    cdef uint32_t prefix = 31 * hash_on(0, <const uint8_t *>PyBytes_AS_STRING(topic), len(topic)) + 35
    cdef bytes key
    cdef list found = []
    if slots < 1 or entries < 2 or memory.shape[0] != wanted + INDEX_ENTRY_BYTES * <int64_t>entries:
        raise ValueError(f"{memory.shape[0]} bytes: not {slots} slots and {entries} entries")
    for first in range(0, count, PENDING_MAX):
        for index in range(first, min(count, first + PENDING_MAX)):
            key = keys[index]
            hashes[index - first] = index_hash_of(
                hash_on(prefix, <const uint8_t *>PyBytes_AS_STRING(key), len(key)))
            prefetch_to_read(&memory[
                INDEX_HEADER_BYTES + 4 * <int64_t>(<uint32_t>hashes[index - first] % slots)])
        for index in range(first, min(count, first + PENDING_MAX)):
            if may_be_there(&memory[0], slots, entries, hashes[index - first], begin_ms):
                found.append(index)
    return found


cdef bint may_be_there(const uint8_t *base, uint32_t slots, int32_t entries, int32_t key_hash,
                       int64_t begin_ms) noexcept nogil:
    """Whether the chain leads to such an entry, or to what `index_chain` has to judge."""
    cdef const uint8_t *entry
    cdef int32_t number, count, previous, steps = 0
    cdef int64_t base_ms, time_ms
    number = <int32_t>load_acquire_be32(
        base + INDEX_HEADER_BYTES + 4 * <int64_t>(<uint32_t>key_hash % slots))
    if number == 0:
        return False
    count = <int32_t>load_acquire_be32(base + INDEX_HEADER_INDEX_COUNT)
    base_ms = <int64_t>load_be64(base + INDEX_HEADER_BEGIN_TIMESTAMP)
    if not 0 < number <= count or number >= entries:
        return False  # as `index_chain` has it
    while steps < CHAIN_MAX:
        entry = (base + INDEX_HEADER_BYTES + 4 * <int64_t>slots
                 + INDEX_ENTRY_BYTES * <int64_t>number)
        if <int32_t>load_be32(entry + INDEX_ENTRY_KEY_HASH) == key_hash:
            return True
        time_ms = base_ms + 1000 * <int64_t><int32_t>load_be32(entry + INDEX_ENTRY_TIME_DIFFERENCE)
        previous = <int32_t>load_be32(entry + INDEX_ENTRY_PREVIOUS)
        if previous == 0 or (time_ms < begin_ms - 1000 and number > 1):
            return False
        if not 0 < previous < number:
            return True
        number = previous
        steps += 1
    return True


def record_bytes(LogView log not None, int64_t physical_offset):
    """The record there, if it is a whole one with the right checksum; None: there is none.

    Raises KeyError where its segment is to be mapped first.
    """
    cdef const uint8_t *base = log.at(physical_offset)
    cdef int64_t size = log.segment_bytes
    cdef Record record
    if base == NULL:
        raise KeyError(physical_offset)
    if record_here(base, size - physical_offset % size, physical_offset, True, &record) != REC_OK:
        return None
    return base[:record.total_size]
