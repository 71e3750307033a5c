# --- timed messages: when one is due, as its properties say it ----------------------------------------

from cometmq.shm.kernel.base cimport *

cdef enum:  # as protocol/uptime.py has them
    UPTIME_NAME_BYTES = 10
    UPTIME_CLOCK_DIGITS = 8
    UPTIME_DIGITS = 12


cdef enum:
    TIMED_DIGITS_MAX = 15  # of a time: what follows 9999-12-31 has more, or is refused


cdef inline int64_t number_of(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """A decimal number without a sign; -1 if it is none, or too long."""
    cdef int64_t found = 0
    cdef Py_ssize_t i
    if not 0 < count <= TIMED_DIGITS_MAX:
        return -1
    for i in range(count):
        if not 48 <= text[i] <= 57:
            return -1
        found = found * 10 + text[i] - 48
    return found


cdef struct Timing:  # what properties say of a message's time; of two of a name, the last
    int64_t exact  # TIMER_DELIVER_MS; -1: there is none, or it is no number
    int64_t delay  # TIMER_DELAY_MS
    int64_t out  # TIMER_OUT_MS
    int64_t up  # when it was stored first, in ms of the clock of that number; -1: it does not say
    int64_t clock
    bint recalls  # another message: TIMER_DEL_UNIQKEY
    const char *contradiction  # a property that does not go with a time; NULL: none
    const uint8_t *topic  # REAL_TOPIC
    Py_ssize_t topic_bytes
    const uint8_t *queue  # REAL_QID
    Py_ssize_t queue_bytes


cdef inline Py_ssize_t value_bytes_of(
    const uint8_t *entry, Py_ssize_t count, const char *name, Py_ssize_t name_bytes
) noexcept nogil:
    """Of an entry of that name, whose value stands behind the name and a separator; 0: it is
    another, or has none."""
    if (count > name_bytes + 1 and entry[name_bytes] == 1
            and memcmp(entry, name, name_bytes) == 0):
        return count - name_bytes - 1
    return 0


cdef inline void read_timing(const uint8_t *properties, Py_ssize_t count, Timing *found) noexcept nogil:
    """All of it in one walk, by `find_property`'s rules."""
    cdef Py_ssize_t at = 0, end
    cdef const uint8_t *mark
    found.exact = found.delay = found.out = found.up = found.clock = -1
    found.recalls, found.contradiction = False, NULL
    found.topic, found.topic_bytes = NULL, 0
    found.queue, found.queue_bytes = NULL, 0
    while at < count:
        mark = <const uint8_t *>memchr(properties + at, 2, count - at)
        end = count if mark == NULL else mark - properties
        if 67 <= properties[at] <= 84:  # C to T
            note_timing(properties + at, end - at, found)
        at = end + 1


cdef inline void note_timing(
    const uint8_t *entry, Py_ssize_t count, Timing *found
) noexcept nogil:
    """What one entry says."""
    cdef Py_ssize_t size
    if entry[0] == 84:  # T
        if (size := value_bytes_of(entry, count, b"TIMER_DELIVER_MS", 16)):
            found.exact = number_of(entry + 17, size)
        elif (size := value_bytes_of(entry, count, b"TIMER_OUT_MS", 12)):
            found.out = number_of(entry + 13, size)
        elif (size := value_bytes_of(entry, count, b"TIMER_DELAY_MS", 14)):
            found.delay = number_of(entry + 15, size)
        elif value_bytes_of(entry, count, b"TIMER_DEL_UNIQKEY", 17):
            found.recalls = True
        elif value_bytes_of(entry, count, b"TIMER_DELAY_SEC", 15):
            found.contradiction = b"TIMER_DELAY_SEC"
        elif value_bytes_of(entry, count, b"TRAN_MSG", 8):
            found.contradiction = b"TRAN_MSG"
    elif entry[0] == 82:  # R
        if (size := value_bytes_of(entry, count, b"REAL_TOPIC", 10)):
            found.topic, found.topic_bytes = entry + 11, size
        elif (size := value_bytes_of(entry, count, b"REAL_QID", 8)):
            found.queue, found.queue_bytes = entry + 9, size
    elif entry[0] == 67:  # C
        if (size := value_bytes_of(entry, count, b"COMETMQ_UP", UPTIME_NAME_BYTES)):
            note_uptime(entry + count - size, size, found)
    elif value_bytes_of(entry, count, b"DELAY", 5):
        found.contradiction = b"DELAY"


cdef inline void note_uptime(const uint8_t *value, Py_ssize_t count, Timing *found) noexcept nogil:
    """See protocol/uptime.py; a copy says more behind it."""
    cdef int64_t clock = 0
    cdef int i, digit
    found.up = found.clock = -1
    if count < UPTIME_CLOCK_DIGITS + 1 + UPTIME_DIGITS or value[UPTIME_CLOCK_DIGITS] != 45:  # -
        return
    for i in range(UPTIME_CLOCK_DIGITS):
        digit = value[i] - 48 if value[i] <= 57 else value[i] - 87
        if not (48 <= value[i] <= 57 or 97 <= value[i] <= 102):
            return
        clock = clock << 4 | digit
    found.up = number_of(value + UPTIME_CLOCK_DIGITS + 1, UPTIME_DIGITS)
    if found.up >= 0:
        found.clock = clock


cdef inline bytes queue_key(Timing *timing):
    """Of the queue that it is meant for: b"topic\\x01queue id"."""
    cdef bytes key = PyBytes_FromStringAndSize(NULL, timing.topic_bytes + 1 + timing.queue_bytes)
    cdef char *at = PyBytes_AS_STRING(key)
    memcpy(at, timing.topic, timing.topic_bytes)
    at[timing.topic_bytes] = 1
    memcpy(at + timing.topic_bytes + 1, timing.queue, timing.queue_bytes)
    return key


cdef inline int64_t due_of(Timing *timing) noexcept nogil:
    """When a record of the wheel's topic is due, in ms; -1: it does not say.

    TIMER_OUT_MS is the second that the wheel has it in, which ends a second later. Where
    TIMER_DELIVER_MS lies in that second, it is the exact time.
    """
    if timing.out < 0:
        return -1
    if timing.exact > 0 and (timing.exact - 1) // 1000 == timing.out // 1000:
        return timing.exact
    return (timing.out // 1000 + 1) * 1000


cdef inline int64_t due_by(Timing *timing, int64_t clock, int64_t ahead) noexcept nogil:
    """When a record of the wheel's topic is due by a wall clock that is so many ms ahead of that
    clock. Only that of a delay is another time than what the record says, if the wall clock was
    stepped since."""
    if timing.delay < 0 or timing.up < 0 or timing.clock != clock:
        return due_of(timing)
    return timing.up + timing.delay + ahead


cdef inline int64_t timed_due(Timing *timing, int64_t now) noexcept nogil:
    """What a client's element asks for; -1: nothing that can be understood."""
    if (timing.exact < 0) == (timing.delay < 0):
        return -1
    return timing.exact if timing.delay < 0 else now + timing.delay
