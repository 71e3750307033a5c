# --- timed messages: when one is due, as its properties say it ----------------------------------------

cdef enum:
    TIMED_DIGITS_MAX = 15  # of a time: what follows 9999-12-31 has more, or is refused


cdef int64_t number_of(const uint8_t *text, Py_ssize_t count) noexcept nogil:
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


cdef int64_t number_property(
    Record *record, const char *name, Py_ssize_t name_bytes
) noexcept nogil:
    """The number that a property has; -1: there is none, or it is no number."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0
    if not find_property(record.properties, record.properties_length, name, name_bytes, &value,
                         &count):
        return -1
    return number_of(value, count)


cdef int64_t due_of(Record *record) noexcept nogil:
    """When a record of the wheel's topic is due, in ms; -1: it does not say.

    TIMER_OUT_MS is the second that the wheel has it in, which ends a second later. Where
    TIMER_DELIVER_MS lies in that second, it is the exact time.
    """
    cdef int64_t out = number_property(record, b"TIMER_OUT_MS", 12)
    cdef int64_t exact
    if out < 0:
        return -1
    exact = number_property(record, b"TIMER_DELIVER_MS", 16)
    if exact > 0 and (exact - 1) // 1000 == out // 1000:
        return exact
    return (out // 1000 + 1) * 1000


def due_ms_of(const uint8_t[::1] stored not None):
    """When a record of the wheel's topic is due, in ms since 1970; -1: it does not say. Raises
    RecordDamaged."""
    cdef Record record
    cdef int why = REC_BAD_SIZE if stored.shape[0] < RECORD_MIN else parse_record(
        &stored[0], stored.shape[0], False, &record)
    if why != REC_OK:
        raise RecordDamaged(REASONS[why], 0)
    return due_of(&record)


cdef int64_t timed_due(Record *record, int64_t now) noexcept nogil:
    """What a client's element asks for; -1: nothing that can be understood."""
    cdef int64_t exact = number_property(record, b"TIMER_DELIVER_MS", 16)
    cdef int64_t delay = number_property(record, b"TIMER_DELAY_MS", 14)
    if (exact < 0) == (delay < 0):
        return -1
    return exact if delay < 0 else now + delay


cdef int check_timed(int64_t element, Record *record, int64_t due, int64_t latest) except -1:
    """Raise BatchIllegal for an element that may not wait in the wheel."""
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t count = 0
    if not 0 <= due <= latest:
        raise BatchIllegal(
            f"element {element}: one of TIMER_DELIVER_MS and TIMER_DELAY_MS is wanted, and a time "
            f"of at most {latest} ms since 1970")
    for name in (b"DELAY", b"TIMER_DELAY_SEC", b"TRAN_MSG"):
        if find_property(record.properties, record.properties_length,
                         PyBytes_AS_STRING(name), len(name), &value, &count):
            raise BatchIllegal(f"element {element}: {name.decode()} contradicts its time")
    return 0


def element_due_ms(const uint8_t[::1] batch not None, Py_ssize_t index, int64_t now):
    """When an element of a client's batch body wants to be delivered, in ms; -1: it does not say.

    Args:
        now: what TIMER_DELAY_MS counts from.
    """
    cdef int64_t at = 0, size = 0
    cdef Record record
    while at < batch.shape[0]:
        size = parse_element(&batch[at], batch.shape[0] - at, &record)
        if size < 0:
            raise BatchIllegal(f"at byte {at} is no element")
        if index == 0:
            return timed_due(&record, now)
        index -= 1
        at += size
    raise IndexError("the batch has no such element")
