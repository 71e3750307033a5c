# --- timing: when a message is to be delivered, as its sender says it --------------------------------

from cpython.datetime cimport (
    PyDateTime_Check, PyDateTime_DATE_GET_HOUR, PyDateTime_DATE_GET_MICROSECOND,
    PyDateTime_DATE_GET_MINUTE, PyDateTime_DATE_GET_SECOND, PyDateTime_DELTA_GET_DAYS,
    PyDateTime_DELTA_GET_MICROSECONDS, PyDateTime_DELTA_GET_SECONDS, PyDateTime_GET_DAY,
    PyDateTime_GET_MONTH, PyDateTime_GET_YEAR, PyDelta_Check, datetime, datetime_tzinfo, get_utc,
    import_datetime,
)
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_Check
from libc.math cimport ceil, isfinite

from cometmq.protocol import errors as _errors
from cometmq.protocol import timed as _timed

import_datetime()

cdef object UTC = get_utc()

cdef enum:
    TIMING_BYTES = 40  # of the longest property that says it

cdef int64_t LATEST = _timed.LATEST_MS
cdef const char *DELIVER_NAME = b"TIMER_DELIVER_MS"
cdef const char *DELAY_NAME = b"TIMER_DELAY_MS"


cdef inline int64_t up(int64_t value, int64_t unit) noexcept nogil:
    """Divided, and never rounded down: no message is early."""
    cdef int64_t whole = value // unit  # towards zero
    return whole + (value > 0 and whole * unit != value)


cdef int64_t days_before(int64_t year, int64_t month, int64_t day) noexcept nogil:
    """Days from 1970-01-01 to a date of the Gregorian calendar, of the years 1 to 9999."""
    cdef int64_t years = year - (month <= 2)
    cdef int64_t months = month + (9 if month <= 2 else -3)  # since March
    return (years * 365 + years // 4 - years // 100 + years // 400 + (153 * months + 2) // 5
            + day - 1 - 719468)


cdef int64_t offset_us(deliver_at) except? -1:
    """How far its clock is ahead of UTC, in microseconds."""
    if type(deliver_at) is datetime and datetime_tzinfo(deliver_at) is UTC:
        return 0  # what most programs compute with, and no method of Python's is called
    offset = deliver_at.utcoffset()
    if offset is None:
        raise _errors.ArgumentIllegal(
            f"deliver_at={deliver_at.isoformat()} has no time zone: whose clock is meant?")
    return (1000000 * (86400 * <int64_t>PyDateTime_DELTA_GET_DAYS(offset)
                       + PyDateTime_DELTA_GET_SECONDS(offset))
            + PyDateTime_DELTA_GET_MICROSECONDS(offset))


cdef int64_t due_time(deliver_at) except -1:
    """Milliseconds since 1970; what lies before that is due at 0."""
    cdef int64_t seconds, offset, found
    if not PyDateTime_Check(deliver_at):
        raise _errors.ArgumentIllegal(f"deliver_at={deliver_at!r:.80}: a datetime is wanted")
    offset = offset_us(deliver_at)
    seconds = 86400 * days_before(
        PyDateTime_GET_YEAR(deliver_at), PyDateTime_GET_MONTH(deliver_at),
        PyDateTime_GET_DAY(deliver_at))
    seconds += (3600 * PyDateTime_DATE_GET_HOUR(deliver_at)
                + 60 * PyDateTime_DATE_GET_MINUTE(deliver_at)
                + PyDateTime_DATE_GET_SECOND(deliver_at))
    found = up(1000000 * seconds + PyDateTime_DATE_GET_MICROSECOND(deliver_at) - offset, 1000)
    if found > LATEST:
        raise _errors.ArgumentIllegal(
            f"deliver_at={deliver_at.isoformat()} is beyond the year 9999")
    return max(found, 0)


cdef int64_t delay_time(deliver_after) except -1:
    """Milliseconds; what is negative is none at all."""
    cdef double found
    if PyDelta_Check(deliver_after):
        found = (86400000.0 * PyDateTime_DELTA_GET_DAYS(deliver_after)
                 + 1000.0 * PyDateTime_DELTA_GET_SECONDS(deliver_after)
                 + up(PyDateTime_DELTA_GET_MICROSECONDS(deliver_after), 1000))
    elif PyFloat_Check(deliver_after):
        found = ceil(PyFloat_AS_DOUBLE(deliver_after) * 1000)
        if not isfinite(PyFloat_AS_DOUBLE(deliver_after)):
            raise _errors.ArgumentIllegal(f"deliver_after={deliver_after}: seconds are wanted")
    elif isinstance(deliver_after, int) and not isinstance(deliver_after, bool):
        # What is beyond either end is as good as that end.
        found = 1000.0 * <double>min(max(deliver_after, -1), LATEST)
    else:
        raise _errors.ArgumentIllegal(
            f"deliver_after={deliver_after!r:.80}: a timedelta or seconds are wanted")
    if found > LATEST:
        raise _errors.ArgumentIllegal(
            f"deliver_after is {found / 1000:g} s or more: that is beyond the year 9999")
    return <int64_t>found if found > 0 else 0


cdef int64_t timing_of(deliver_at, deliver_after, const char **name) except -1:
    """The time, and the property that has it."""
    if deliver_at is not None and deliver_after is not None:
        raise _errors.ArgumentIllegal("deliver_at and deliver_after are both given")
    name[0] = DELAY_NAME if deliver_at is None else DELIVER_NAME
    return delay_time(deliver_after) if deliver_at is None else due_time(deliver_at)


def timing(deliver_at, deliver_after):
    """(name, value) of the property that says when a message is to be delivered. Raises
    ArgumentIllegal."""
    cdef const char *name = NULL
    cdef int64_t found = timing_of(deliver_at, deliver_after, &name)
    return name.decode(), str(found)


cdef Py_ssize_t put_timing(uint8_t *at, deliver_at, deliver_after) except -1:
    """Write that property, of TIMING_BYTES at most; its bytes."""
    cdef const char *name = NULL
    cdef int64_t found = timing_of(deliver_at, deliver_after, &name)
    return put_number(at, name, found)
