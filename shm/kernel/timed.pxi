# --- timed messages: when one is due, as its properties say it ----------------------------------------


def due_ms_by(const uint8_t[::1] stored not None, int64_t clock, int64_t ahead):
    """That time of a record. Raises RecordDamaged."""
    cdef Record record
    cdef Timing timing
    parse_timed(stored, &record, &timing)
    return due_by(&timing, clock, ahead)


cdef int parse_timed(const uint8_t[::1] stored, Record *record, Timing *timing) except -1:
    cdef int why = REC_BAD_SIZE if stored.shape[0] < RECORD_MIN else parse_record(
        &stored[0], stored.shape[0], False, record)
    if why != REC_OK:
        raise RecordDamaged(REASONS[why], 0)
    read_timing(record.properties, record.properties_length, timing)
    return 0


def due_ms_of(const uint8_t[::1] stored not None):
    """When a record of the wheel's topic is due, in ms since 1970; -1: it does not say. Raises
    RecordDamaged."""
    cdef Record record
    cdef Timing timing
    parse_timed(stored, &record, &timing)
    return due_of(&timing)


def element_due_ms(const uint8_t[::1] batch not None, Py_ssize_t index, int64_t now):
    """When an element of a client's batch body wants to be delivered, in ms; -1: it does not say.

    Args:
        now: what TIMER_DELAY_MS counts from.
    """
    cdef int64_t at = 0, size = 0
    cdef Record record
    cdef Timing timing
    while at < batch.shape[0]:
        size = parse_element(&batch[at], batch.shape[0] - at, &record)
        if size < 0:
            raise BatchIllegal(f"at byte {at} is no element")
        if index == 0:
            read_timing(record.properties, record.properties_length, &timing)
            return timed_due(&timing, now)
        index -= 1
        at += size
    raise IndexError("the batch has no such element")
