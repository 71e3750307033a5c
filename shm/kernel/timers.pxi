# --- the timer wheel: a slot for each second, and a log of the units that chain off it ---------------
#
# RocketMQ's files. Its units have the second; ours have the millisecond within it, which RocketMQ
# passes over: a unit of the time t is due at t + 1, and one of a whole second when that is over.

TIMERS_DONE = 0
TIMERS_NO_ROOM = 1  # the timer log wants a segment more, at `end`
TIMERS_OCCUPIED = 2  # a slot still has what is due two weeks earlier
TIMERS_UNMAPPED = 3  # a segment of the log has to be mapped
TIMERS_NEW_QUEUE = 4  # a queue has no number yet
TIMERS_ROLL = 5  # it waits longer than the wheel lets it
TIMERS_EARLY = 6  # the wall clock was set forward: its delay is not over
TIMERS_LARGE = 7  # no copy of it can be stored
TIMERS_NOWHERE = 8  # there can be no such queue
TIMERS_SKEW_MS = 50  # by so much a wall clock may differ from where it is thought to be

cdef enum:
    TM_DONE = 0
    TM_NO_ROOM = 1
    TM_OCCUPIED = 2
    TM_UNMAPPED = 3
    TM_NEW_QUEUE = 4
    TM_ROLL = 5
    TM_EARLY = 6
    TM_LARGE = 7
    TM_NOWHERE = 8
    TM_SKEW_MS = 50
    TIMER_BLANK_BYTES = 16  # i32 size, i64 0, u32 magic: behind the last unit of a segment

cdef int64_t PLACE_MAX = 0x7FFFFFFFFFFFFFFF


cdef struct Due:
    int64_t due
    int64_t physical_offset
    int64_t position  # of its unit
    int32_t size
    int32_t magic


cdef int compare_due(const void *left, const void *right) noexcept nogil:
    cdef const Due *a = <const Due *>left
    cdef const Due *b = <const Due *>right
    return is_behind(a.due, a.physical_offset, b.due, b.physical_offset) - is_behind(
        b.due, b.physical_offset, a.due, a.physical_offset)


cdef inline bint is_behind(int64_t due, int64_t place, int64_t at_due, int64_t at_place) noexcept nogil:
    return due > at_due or (due == at_due and place > at_place)


cdef inline bint is_recall(int32_t magic) noexcept nogil:
    return magic & TIMER_DELETE and not magic & TIMER_ROLL


cdef inline int64_t unit_time(int64_t due) noexcept nogil:
    """What stands in a unit; never 0 ms, which is RocketMQ's."""
    cdef int64_t time = max(due - 1, 0)
    return time if time % 1000 else time + 1


cdef inline int64_t unit_due(int64_t time) noexcept nogil:
    return time + 1 if time % 1000 else time + 1000


cdef inline int64_t unit_due_of(const uint8_t *unit) noexcept nogil:
    return unit_due(<int64_t>load_be64(unit + TIMER_UNIT_BASE_MS)
                    + <int32_t>load_be32(unit + TIMER_UNIT_AFTER_MS))


@cython.final
cdef class TimerWheel:
    """What waits, by the second in which it is due. One thread uses it.

    `at_due` and `at_place` say how far it has been delivered: whatever is due before, or then and
    not behind that physical offset.

    What has a delay is due by a clock that nobody sets, and lies where the wall clock was to be then.
    Where that one was set forward since, it comes up early, and waits on. Where it was set back,
    `askew` finds it, and it is stored anew with the time that it has now: a *move* (end, clock,
    ahead, until) says that this was done of what lies before that end, for a wall clock so many ms
    ahead of that clock, and that none of it is due later than `until`. What recalls others lies
    where they lay before; so as soon as there is a move, all of that counts, wherever it lies.

    Args:
        slots: memory of the wheel's file.
        units: the timer log's segments, mapped to be written.
    """

    cdef uint8_t[::1] _slots
    cdef LogView _units
    cdef int64_t _slot_count
    cdef Due *_due  # of the second, in order
    cdef Py_ssize_t _count, _next, _capacity
    cdef int64_t _seen  # the unit of this second that was taken last, -1: none
    cdef list _recalls  # of this second: physical offsets
    cdef list _recalls_anywhere
    cdef readonly list passed  # (due, place, end): below that end it was delivered so far once
    cdef int64_t _clock  # that nobody sets; -1: there is none
    cdef int64_t _ahead  # so many ms the wall clock is ahead of it
    cdef list _moves
    cdef public bint is_askew  # something was put that is due before it comes up
    cdef dict _latest  # segment of the timer log -> time of its latest unit
    cdef readonly int64_t end  # of the timer log
    cdef readonly int64_t pending  # messages
    cdef readonly int64_t second  # that is being delivered
    cdef readonly int64_t at_due, at_place
    cdef readonly int64_t last_place  # physical offset in the last unit; -1: there is none
    cdef readonly int64_t read_place  # of the last record that was put or passed over
    cdef readonly int64_t left  # ms until what `fill` came to last is due

    def __init__(self, uint8_t[::1] slots not None, LogView units not None, int64_t end,
                 int64_t at_due, int64_t at_place, list passed not None):
        if slots.shape[0] % TIMER_SLOT_BYTES or not slots.shape[0]:
            raise ValueError(f"{slots.shape[0]} bytes are not slots")
        self._slots, self._units, self.end = slots, units, end
        self._slot_count = slots.shape[0] // TIMER_SLOT_BYTES
        self._recalls, self._latest = [], {}
        self._clock = -1
        self._moves, self._recalls_anywhere = [], []
        self._seen = self.last_place = self.read_place = -1
        self.passed = list(passed)
        self.at_due, self.at_place = at_due, at_place
        self.second = max(at_due - 1, 0) // 1000

    def __dealloc__(self):
        PyMem_Free(self._due)

    cdef inline uint8_t *_slot(self, int64_t second) noexcept:
        return &self._slots[second % self._slot_count * TIMER_SLOT_BYTES]

    cdef inline uint8_t *_unit(self, int64_t position) noexcept:
        """NULL where there is none."""
        if not 0 <= position < self.end:
            return NULL
        return <uint8_t *>self._units.at(position)

    cdef inline int64_t _last_of(self, int64_t second) noexcept:
        cdef uint8_t *slot = self._slot(second)
        if second <= 0 or <int64_t>load_be64(slot) != second:
            return -1
        return <int64_t>load_be64(slot + TIMER_SLOT_LAST)

    # --- putting ---

    cdef bint _is_occupied(self, int64_t second) noexcept:
        cdef int64_t there = <int64_t>load_be64(self._slot(second))
        return there != second and there >= self.second and there > 0

    cdef int _link(self, int64_t second, int64_t position, int32_t magic) except -1:
        """Make a unit the last one of its slot."""
        cdef uint8_t *slot = self._slot(second)
        cdef int64_t last = self._last_of(second), start
        cdef int32_t count = 0 if last < 0 else <int32_t>load_be32(slot + TIMER_SLOT_COUNT)
        store_be64(self._unit(position) + TIMER_UNIT_PREVIOUS, <uint64_t>last)
        if last < 0:
            store_be64(slot + TIMER_SLOT_FIRST, <uint64_t>position)
        store_be64(slot + TIMER_SLOT_LAST, <uint64_t>position)
        store_be32(slot + TIMER_SLOT_COUNT,
                   <uint32_t>(count - 1 if magic & TIMER_DELETE else count + 1))
        store_be32(slot + TIMER_SLOT_MAGIC, 0)
        store_be64(slot, <uint64_t>second)
        start = position - position % self._units.segment_bytes
        if second > <int64_t>self._latest.get(start, -1):
            self._latest[start] = second
        return 0

    cdef int _put(self, int64_t due, int32_t magic, Record *record, Timing *timing) except -1:
        cdef int64_t time = unit_time(due), rest, place = record.physical_offset
        cdef uint8_t *unit
        if self._is_occupied(time // 1000):
            return TM_OCCUPIED
        rest = self._units.segment_bytes - self.end % self._units.segment_bytes
        unit = <uint8_t *>self._units.at(self.end)
        if unit != NULL and TIMER_UNIT_BYTES + TIMER_BLANK_BYTES > rest:
            store_be32(unit, <uint32_t>rest)
            store_be64(unit + 4, 0)
            store_be32(unit + 12, <uint32_t>MAGIC_BLANK)
            self.end += rest
            unit = <uint8_t *>self._units.at(self.end)
        if unit == NULL:
            return TM_NO_ROOM
        store_be64(unit + TIMER_UNIT_PREVIOUS, <uint64_t>-1)
        store_be32(unit + TIMER_UNIT_MAGIC, <uint32_t>magic)
        store_be64(unit + TIMER_UNIT_BASE_MS, <uint64_t>(time // 1000 * 1000))
        store_be32(unit + TIMER_UNIT_AFTER_MS, <uint32_t>(time % 1000))
        store_be64(unit + TIMER_UNIT_PHYSICAL_OFFSET, <uint64_t>place)
        store_be32(unit + TIMER_UNIT_RECORD_SIZE, <uint32_t>record.total_size)
        store_be32(unit + TIMER_UNIT_TOPIC_HASH, <uint32_t>hash_utf8(
            timing.topic, timing.topic_bytes))
        store_be64(unit + TIMER_UNIT_ZERO, 0)
        store_be32(unit, TIMER_UNIT_BYTES)
        self.end += TIMER_UNIT_BYTES
        self.last_place = place
        self.pending += not is_recall(magic)
        self._link(time // 1000, self.end - TIMER_UNIT_BYTES, magic)
        return TM_DONE

    def put(self, const uint8_t[::1] records not None, int64_t window_ms, int64_t frontier):
        """Take records of the wheel's topic, as a queue's reader hands them out.

        Args:
            window_ms: what waits longer is stored anew meanwhile.
            frontier: queue offset; of those before it, what is due before `at_due` was delivered.

        Returns (reason, queue offset of the first that was not taken, physical offsets of those
        that are overdue, and of those that do not say when they are due).
        """
        cdef int64_t at = 0, due
        cdef int32_t magic
        cdef int why
        cdef Record record
        cdef Timing timing
        cdef list late = [], odd = []
        cdef bint moved
        record.queue_offset = -1
        while at < records.shape[0]:
            why = parse_record(&records[at], records.shape[0] - at, False, &record)
            if why != REC_OK:
                raise RecordDamaged(REASONS[why], at)
            read_timing(record.properties, record.properties_length, &timing)
            due = place_in_wheel(&record, &timing, window_ms, &magic)
            moved = bool(self._moves) and self._is_moved(&timing, record.physical_offset)
            if due < 0:
                odd.append(record.physical_offset)
            elif moved:
                pass
            elif self._is_over(due, magic, record.physical_offset):
                if record.queue_offset >= frontier and not is_recall(magic):
                    late.append(record.physical_offset)
            else:
                why = self._put(due, magic, &record, &timing)
                if why != TM_DONE:
                    return why, record.queue_offset, late, odd
                if self._lies_late(&timing, self._clock, self._ahead):
                    self.is_askew = True
            if timing.recalls and self._moves:
                self._recalls_anywhere.append(record.physical_offset)
            self.read_place = max(self.read_place, record.physical_offset)
            at += record.total_size
        return TM_DONE, record.queue_offset + 1, late, odd

    cdef bint _is_over(self, int64_t due, int32_t magic, int64_t place) except -1:
        """Not so what recalls others in a second that has not passed."""
        cdef int64_t time = unit_time(due)
        if is_recall(magic) and time // 1000 >= self.second:
            return False
        return self._is_delivered(unit_due(time), place)

    cdef bint _is_delivered(self, int64_t due, int64_t place) except -1:
        if not is_behind(due, place, self.at_due, self.at_place):
            return True
        for at_due, at_place, end in self.passed:
            if place < <int64_t>end and not is_behind(due, place, at_due, at_place):
                return True
        return False

    def turn_back(self, int64_t now):
        """The clock was set back: what is put from here on is due by the new time."""
        self.passed.append((self.at_due, self.at_place, max(self.read_place, self.last_place) + 1))
        self._next_second(max(now - 1, 0) // 1000)
        self.at_due, self.at_place = now, PLACE_MAX

    # --- the wall clock was stepped ---

    def follow_clock(self, int64_t clock, int64_t ahead, list moves not None):
        """
        Args:
            clock: that nobody sets, by its number.
            ahead: how far the wall clock is ahead of it.
            moves: what was stored anew.
        """
        self._clock, self._ahead, self._moves = clock, ahead, moves

    def find_recalls(self, LogView log not None, int64_t since):
        """Have all count that recalls others, as what those are about is or will be moved. What is
        put while there are moves counts by itself.

        Args:
            since: what was due before has no say any more.
        """
        cdef int64_t position, place
        cdef int32_t magic
        cdef const uint8_t *unit
        self._recalls_anywhere.clear()
        for start in self._units.starts:
            position = start
            while (unit := self._unit_in(&position, <int64_t>start)) != NULL:
                position += TIMER_UNIT_BYTES
                magic = <int32_t>load_be32(unit + TIMER_UNIT_MAGIC)
                if not magic & TIMER_DELETE:
                    continue
                if is_recall(magic) and unit_due_of(unit) < since:
                    continue  # one that is to be stored anew on its way is due later
                place = <int64_t>load_be64(unit + TIMER_UNIT_PHYSICAL_OFFSET)
                if may_recall(log, place, <int32_t>load_be32(unit + TIMER_UNIT_RECORD_SIZE)):
                    self._recalls_anywhere.append(place)

    cdef const uint8_t *_unit_in(self, int64_t *position, int64_t start) noexcept:
        """The unit there; NULL behind the last one of that segment."""
        cdef const uint8_t *unit
        cdef int64_t rest = start + self._units.segment_bytes - position[0]
        if position[0] >= self.end or rest < TIMER_UNIT_BYTES + TIMER_BLANK_BYTES:
            return NULL
        unit = self._unit(position[0])
        if unit == NULL or load_be32(unit) != TIMER_UNIT_BYTES:
            return NULL
        return unit

    cdef inline bint _lies_late(self, Timing *timing, int64_t clock, int64_t ahead) noexcept:
        return due_of(timing) > due_by(timing, clock, ahead) + TM_SKEW_MS

    cdef bint _is_moved(self, Timing *timing, int64_t place) except -1:
        """Whether a record was stored anew with another time."""
        for end, clock, ahead, _ in self._moves:
            if place < <int64_t>end and self._lies_late(timing, clock, ahead):
                return True
        return False

    def askew(self, LogView log not None, int64_t begin, int64_t position, Py_ssize_t count_max):
        """Look for what waits and is due before it comes up.

        Args:
            begin: physical offset of the first that counts.
            position: in the timer log, where the search goes on.

        Returns (TIMERS_UNMAPPED or TIMERS_DONE, [(physical offset, position of its unit)], the
        position behind); what is not mapped is the last of these. It is over when the position is
        `end`.
        """
        cdef list found = []
        cdef int64_t place, start, size = self._units.segment_bytes
        cdef const uint8_t *unit
        cdef int reason = TM_DONE
        cdef Py_ssize_t looked = 0
        starts = self._units.starts
        position = max(position, min(starts, default=self.end))
        while position < self.end and len(found) < count_max and looked < 65536:
            start = position - position % size
            unit = self._unit_in(&position, start)
            if unit == NULL:
                position = min([each for each in starts if each > start], default=self.end)
                continue
            looked += 1
            place = <int64_t>load_be64(unit + TIMER_UNIT_PHYSICAL_OFFSET)
            if place >= begin:
                reason = self._is_askew(log, unit, place)
                if reason != TM_DONE:
                    found.append((place, position))
                if reason == TM_UNMAPPED:
                    return reason, found, position + TIMER_UNIT_BYTES
            position += TIMER_UNIT_BYTES
        return TM_DONE, found, position

    def pass_over(self, int64_t position):
        """What a unit is about was stored anew: it is marked so that RocketMQ passes over it, too.
        If the mark is lost, the moves tell."""
        cdef uint8_t *unit = self._unit(position)
        if unit == NULL:
            return
        store_be32(unit + TIMER_UNIT_MAGIC, TIMER_DEFAULT | TIMER_DELETE)
        if <int64_t>load_be64(unit + TIMER_UNIT_BASE_MS) // 1000 > self.second:
            self.pending -= 1  # else it is counted when it is passed over

    cdef int _is_askew(self, LogView log, const uint8_t *unit, int64_t place) except -1:
        """TM_EARLY: it is. TM_UNMAPPED: its record cannot be read."""
        cdef Due due
        cdef Record record
        cdef Timing timing
        cdef const uint8_t *stored
        due.magic = <int32_t>load_be32(unit + TIMER_UNIT_MAGIC)
        due.size = <int32_t>load_be32(unit + TIMER_UNIT_RECORD_SIZE)
        due.physical_offset = place
        due.due = unit_due_of(unit)
        if is_recall(due.magic) or self._is_delivered(due.due, place):
            return TM_DONE
        stored = log.at(place)
        if stored == NULL or not is_timed(stored, log.segment_bytes, &due, False, &record):
            return TM_UNMAPPED
        read_timing(record.properties, record.properties_length, &timing)
        if not self._lies_late(&timing, self._clock, self._ahead):
            return TM_DONE
        return TM_DONE if self._is_moved(&timing, place) else TM_EARLY

    # --- a start ---

    def load(self, int64_t log_max):
        """Chain what still waits, from `end` on, as the timer log has it; `end` is where it ends
        then, or where something stands that is no unit of a record below `log_max`."""
        cdef int64_t time, place, rest
        cdef int32_t magic, size
        cdef uint8_t *unit
        while True:
            unit = <uint8_t *>self._units.at(self.end)
            if unit == NULL:
                break
            rest = self._units.segment_bytes - self.end % self._units.segment_bytes
            if rest < TIMER_BLANK_BYTES:
                break
            size = <int32_t>load_be32(unit)
            if size == rest and load_be32(unit + 12) == <uint32_t>MAGIC_BLANK:
                self.end += rest
                continue
            magic = <int32_t>load_be32(unit + TIMER_UNIT_MAGIC)
            if (size != TIMER_UNIT_BYTES or rest < TIMER_UNIT_BYTES
                    or not 0 < magic <= TIMER_MAGIC_MASK):
                break
            place = <int64_t>load_be64(unit + TIMER_UNIT_PHYSICAL_OFFSET)
            time = (<int64_t>load_be64(unit + TIMER_UNIT_BASE_MS)
                    + <int32_t>load_be32(unit + TIMER_UNIT_AFTER_MS))
            if not self.last_place < place < log_max or time <= 0 or time > PLACE_MAX // 2:
                break
            self.end += TIMER_UNIT_BYTES
            self.last_place = place
            if self._is_over(unit_due(time), magic, place):
                continue
            if self._is_occupied(time // 1000):
                break
            self.pending += not is_recall(magic)
            self._link(time // 1000, self.end - TIMER_UNIT_BYTES, magic)
    cdef int _next_second(self, int64_t second) except -1:
        self.second = second
        self._seen = -1
        self._count = self._next = 0
        self._recalls.clear()
        if self.at_due < second * 1000:
            self.at_due, self.at_place = second * 1000, PLACE_MAX
            if self.passed:
                self.passed = [each for each in self.passed if each[0] > self.at_due]
        return 0

    def drop_before(self, int64_t start):
        """A segment of the timer log is gone."""
        self._latest.pop(start, None)

    def over(self):
        """Segments of the timer log in which nothing waits."""
        here = self.end - self.end % self._units.segment_bytes
        return sorted(start for start in self._units.starts
                      if start < here and self._latest.get(start, -1) < self.second)

    # --- what is due ---

    def turn(self, int64_t now):
        """Go on through the seconds, to one in which something is due and not delivered; whether
        there is one."""
        cdef int64_t last
        while True:
            last = self._last_of(self.second)
            if last != self._seen:
                self._gather(last)
            if self._next < self._count:
                return self._due[self._next].due <= now
            if (self.second + 1) * 1000 > now:
                return False
            if now // 1000 - self.second > self._slot_count:
                self._next_second(min(self._nearest(), now // 1000))
            else:
                self._next_second(self.second + 1)

    cdef int64_t _nearest(self) noexcept:
        """The first second behind this one in which something waits."""
        cdef int64_t i, second, found = PLACE_MAX
        for i in range(self._slot_count):
            second = <int64_t>load_be64(&self._slots[i * TIMER_SLOT_BYTES])
            if self.second < second < found:
                found = second
        return found

    cdef int _gather(self, int64_t last) except -1:
        """Take the units of this second that came since."""
        cdef int64_t position = last, due, place
        cdef int32_t magic
        cdef const uint8_t *unit
        while position >= 0 and position != self._seen:
            unit = self._unit(position)
            if unit == NULL:
                break
            magic = <int32_t>load_be32(unit + TIMER_UNIT_MAGIC)
            place = <int64_t>load_be64(unit + TIMER_UNIT_PHYSICAL_OFFSET)
            due = unit_due_of(unit)
            if is_recall(magic):
                self._recalls.append(place)
            elif not self._is_delivered(due, place):
                self._add_due(due, place, position, magic,
                              <int32_t>load_be32(unit + TIMER_UNIT_RECORD_SIZE))
            position = <int64_t>load_be64(unit + TIMER_UNIT_PREVIOUS)
        self._seen = last
        qsort(self._due + self._next, self._count - self._next, sizeof(Due), compare_due)
        return 0

    cdef int _add_due(self, int64_t due, int64_t place, int64_t position, int32_t magic,
                      int32_t size) except -1:
        cdef Due *grown
        cdef Py_ssize_t wanted
        if self._count == self._capacity:
            wanted = max(2 * self._capacity, 64)
            grown = <Due *>PyMem_Realloc(self._due, wanted * sizeof(Due))
            if grown == NULL:
                raise MemoryError
            self._due, self._capacity = grown, wanted
        self._due[self._count] = Due(due, place, position, size, magic)
        self._count += 1
        return 0

    def take_recalls(self, Py_ssize_t count_max):
        """Physical offsets of so many records that recall others, of this second or of any that
        count, each once; fewer: these were all."""
        taken = self._recalls[:count_max]
        del self._recalls[:count_max]
        rest = count_max - len(taken)
        taken += self._recalls_anywhere[:rest]
        del self._recalls_anywhere[:rest]
        return taken

    def fill(self, InnerEncoder encoder not None, LogView log not None, dict queues not None,
             set recalled not None, int64_t now, int64_t up, Py_ssize_t count_max,
             Py_ssize_t begin):
        """Add copies of what is due, from number `begin` on, until enough are in the encoder.

        Args:
            queues: b"topic\\x01queue id" -> the encoder's number; -1: there can be no such queue.
            recalled: b"unique key" or b"topic+unique key" of what is not delivered.
            up: now, by the clock that nobody sets.

        Returns (reason, number that is next, a physical offset or the key of a queue).
        """
        cdef Py_ssize_t at = begin
        cdef const uint8_t *stored
        cdef Record record
        cdef Timing timing
        cdef bytes key
        self.left = 0
        while at < self._count and self._due[at].due <= now and encoder.count < count_max:
            stored = log.at(self._due[at].physical_offset)
            if stored == NULL:
                return TM_UNMAPPED, at, self._due[at].physical_offset
            if not is_timed(stored, log.segment_bytes, &self._due[at], True, &record):
                return TM_UNMAPPED, at, self._due[at].physical_offset
            read_timing(record.properties, record.properties_length, &timing)
            if self._moves and self._is_moved(&timing, record.physical_offset):
                at += 1
                continue
            if self._due[at].magic & TIMER_ROLL:
                return TM_ROLL, at, self._due[at].physical_offset
            if recalled and is_recalled(&record, recalled):
                at += 1
                continue
            if timing.delay >= 0 and timing.up >= 0 and timing.clock == self._clock:
                self.left = timing.up + timing.delay - up
                if self.left > TM_SKEW_MS:
                    return TM_EARLY, at, self._due[at].physical_offset
                if self.left > 0:
                    break
            key = queue_key(&timing)
            number = queues.get(key)
            if number is None:
                return TM_NEW_QUEUE, at, key
            if number < 0:
                return TM_NOWHERE, at, self._due[at].physical_offset
            try:
                encoder._add_due(number, &record)
            except BatchFull:
                break
            except RecordTooLarge:
                return TM_LARGE, at, self._due[at].physical_offset
            at += 1
        return TM_DONE, at, None

    @property
    def next(self):
        """The number of the first that is not delivered."""
        return self._next

    def place_of(self, Py_ssize_t number):
        """(due, physical offset) of the one before that number; how far it is delivered then."""
        if not self._next < number <= self._count:
            raise ValueError(f"number {number} of {self._next} to {self._count}")
        return self._due[number - 1].due, self._due[number - 1].physical_offset

    def advance(self, Py_ssize_t number):
        """They are delivered up to that number."""
        place = self.place_of(number)
        self.pending -= number - self._next
        self._next = number
        self.at_due, self.at_place = place

    def next_due(self, int64_t horizon):
        """Not before that time anything is due, in ms; looks no further than `horizon` seconds."""
        cdef int64_t second
        if self._next < self._count:
            return self._due[self._next].due
        for second in range(self.second, self.second + horizon):
            if self._last_of(second) != (self._seen if second == self.second else -1):
                return second * 1000 + 1
        return (self.second + horizon) * 1000

    def relink(self):
        """Chain of this second only what still waits, for another one who goes on with it."""
        cdef Py_ssize_t i
        cdef int64_t previous = -1
        cdef uint8_t *slot = self._slot(self.second)
        if self._last_of(self.second) < 0 or self._last_of(self.second) != self._seen:
            return
        for i in range(self._next, self._count):
            store_be64(self._unit(self._due[i].position) + TIMER_UNIT_PREVIOUS, <uint64_t>previous)
            previous = self._due[i].position
            if i == self._next:
                store_be64(slot + TIMER_SLOT_FIRST, <uint64_t>previous)
        store_be64(slot + TIMER_SLOT_LAST, <uint64_t>previous)
        store_be32(slot + TIMER_SLOT_COUNT, <uint32_t>(self._count - self._next))
        if previous < 0:
            store_be64(slot, 0)
        self._seen = previous


cdef int64_t place_in_wheel(
    Record *record, Timing *timing, int64_t window_ms, int32_t *magic
) noexcept nogil:
    """When the wheel has a record come up, and as what; -1: it does not say when it is due.

    What waits longer than the window comes up before, to be stored anew. That depends on the record
    alone, so that it is the same whenever the wheel is made.
    """
    cdef int64_t due = due_of(timing), excess
    magic[0] = TIMER_DEFAULT
    if timing.recalls:
        magic[0] |= TIMER_DELETE
    excess = due - record.store_timestamp - window_ms
    if due < 0 or excess < 0:
        return due
    magic[0] |= TIMER_ROLL
    return record.store_timestamp + (window_ms // 2 if excess < window_ms // 3 else window_ms)


cdef bint is_timed(
    const uint8_t *stored, int64_t segment_bytes, const Due *due, bint check_crc, Record *record
) noexcept nogil:
    """Whether a unit's record is there, and one of the wheel."""
    cdef int64_t rest = segment_bytes - due.physical_offset % segment_bytes
    if due.size > rest or parse_record(stored, rest, check_crc, record) != REC_OK:
        return False
    return (record.physical_offset == due.physical_offset and record.total_size == due.size
            and record.topic_length == 19
            and memcmp(record.topic, b"rmq_sys_wheel_timer", 19) == 0)


cdef bint may_recall(LogView log, int64_t place, int32_t size) noexcept:
    """Whether a unit that is marked to be deleted is about what recalls another, not what was moved;
    also of what is not mapped."""
    cdef Due due
    cdef Record record
    cdef Timing timing
    cdef const uint8_t *stored = log.at(place)
    due.physical_offset, due.size = place, size
    if stored == NULL or not is_timed(stored, log.segment_bytes, &due, False, &record):
        return True
    read_timing(record.properties, record.properties_length, &timing)
    return timing.recalls


cdef bint is_recalled(Record *record, set recalled):
    """RocketMQ has had two forms of what a recall names."""
    cdef const uint8_t *topic = NULL
    cdef const uint8_t *key = NULL
    cdef Py_ssize_t topic_bytes = 0, key_bytes = 0
    find_property(record.properties, record.properties_length, b"UNIQ_KEY", 8, &key, &key_bytes)
    find_property(record.properties, record.properties_length, b"REAL_TOPIC", 10, &topic,
                  &topic_bytes)
    return (key[:key_bytes] in recalled
            or topic[:topic_bytes] + b"+" + key[:key_bytes] in recalled)
