"""Messages, batches and filters, for the extensions that go over many of them."""

cimport cython

from cometmq.shm.kernel.records cimport *

cdef enum:
    ID_BYTES = 32  # hex digits of a client-made id with an IPv4 address
    ELEMENT_MAX = 16777216

cdef enum:
    T_DONE = 0
    T_UNMAPPED = 1
    T_STRANGE = 2
    TAIL_ROOM = 8  # entries, at first
    TAIL_QUEUES_MAX = 65536  # remembered

cdef enum:
    FILTER_NAMES = 128
    V_BOOL = 1
    F_FAILED = 2  # a comparison of what cannot be compared: the message is not wanted


cdef struct Word:
    uint8_t op
    uint8_t negated
    uint16_t count
    uint32_t argument


cdef struct Value:
    int type
    int64_t whole  # of V_BOOL and V_LONG
    double number
    const uint8_t *text
    Py_ssize_t count


cdef struct Name:
    const uint8_t *text
    Py_ssize_t count


cdef struct Code:  # a verified program
    Word *words
    Py_ssize_t count
    Py_ssize_t names_count
    Name names[FILTER_NAMES]
    Value *values  # the constants: longs, then doubles, then texts


cdef class Filter:
    cdef Code code
    cdef list _kept  # the bytes that names and texts point into
    cdef readonly int depth  # of its stack

    cdef int _keep(self, tuple names, tuple texts, tuple longs, tuple doubles) except -1
    cdef int _load(self, Py_ssize_t number, const uint8_t *at, Py_ssize_t names, Py_ssize_t texts,
                   Py_ssize_t longs, Py_ssize_t doubles) except -1
    cdef int _verify(self) except -1


cdef int evaluate(
    Code *code, const uint8_t *properties, Py_ssize_t properties_bytes, Value *result
) noexcept nogil


cdef inline bint is_true_of(Code *code, const uint8_t *properties, Py_ssize_t count) noexcept nogil:
    cdef Value value
    return (evaluate(code, properties, count, &value) != F_FAILED
            and value.type == V_BOOL and value.whole == 1)


cdef inline bint passes(Filter wanted, Record *record) noexcept nogil:
    """None: everything does."""
    return wanted is None or is_true_of(&wanted.code, record.properties, record.properties_length)


cdef inline int follow_wanted(
    const uint8_t *at, int64_t physical_offset, int32_t size, Queue *queue, int64_t queue_offset,
    bint check_crc, Filter wanted, Record *record,
) noexcept nogil:
    """`follow`, or REC_UNWANTED: the body of what is not wanted is not looked at."""
    cdef int why = follow(at, physical_offset, size, queue, queue_offset,
                          check_crc and wanted is None, record)
    if why != REC_OK or wanted is None:
        return why
    if not passes(wanted, record):
        return REC_UNWANTED
    return REC_BAD_CRC if check_crc and not body_is_whole(record) else REC_OK


cdef enum:
    FETCHED_AHEAD = 8  # entries: what is fetched has come when it is its turn


cdef inline void fetch_ahead(
    const uint8_t *at, uint64_t physical_offset, const uint8_t *unit, int64_t left
) noexcept nogil:
    """Have the processor fetch a record that is evaluated soon, unless it lies in another segment.

    Between two records of a queue lie those of others, over which it does not see where the next
    one is. Nothing is looked at, so that an entry may say anything: its number is no pointer yet.

    Args:
        at: a record at that physical offset.
        unit: its entry, from which on there are so many.
    """
    cdef uint64_t ahead
    if left <= FETCHED_AHEAD:
        return
    unit += FETCHED_AHEAD * CONSUME_QUEUE_UNIT_BYTES
    ahead = <uint64_t>at + load_be64(unit + CONSUME_QUEUE_UNIT_PHYSICAL_OFFSET) - physical_offset
    prefetch_to_read(<const uint8_t *>ahead)
    prefetch_to_read(<const uint8_t *>(ahead + 64))
    ahead += load_be32(unit + CONSUME_QUEUE_UNIT_SIZE)
    prefetch_to_read(<const uint8_t *>(ahead - 65))
    prefetch_to_read(<const uint8_t *>(ahead - 1))


cdef class LogView:
    cdef readonly int64_t segment_bytes
    cdef dict _held  # segment start -> memory
    cdef const uint8_t **_bases  # by number relative to _first
    cdef int64_t _first, _count

    cdef const uint8_t *at(self, int64_t physical_offset) noexcept nogil


cdef class BatchEncoder:
    cdef uint8_t *_buffer
    cdef Py_ssize_t _capacity, _size_max, _count_max
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t count
    cdef bint _unique_keys
    cdef uint8_t _prefix[20]
    cdef int64_t _month_start
    cdef uint32_t _stamp
    cdef object _last_tags, _last_keys  # the texts that _last_text was made of
    cdef bytes _last_text

    cdef int _reserve(self, Py_ssize_t extra) except -1
    cdef Py_ssize_t _add(self, const uint8_t *body, Py_ssize_t body_bytes,
                         const uint8_t *properties, Py_ssize_t given, int32_t flag) except -1
    cdef Py_ssize_t _add_alike(self, bytes body, const uint8_t *more, Py_ssize_t count) except -2


cdef class Holder:
    cdef Py_buffer view
    cdef object source  # knows the way back of requests; None: nobody does


cdef class Message:
    cdef Holder _holder
    cdef Record _r
    cdef const uint8_t *_begin
    cdef bint _is_restored
    cdef bytes _plain  # the body of a compressed one, once it was asked for

    cdef bytes _unfolded(self)
    cdef str _property(self, const char *name, Py_ssize_t name_bytes)


cdef int refuse_unkept(
    int64_t element, int which, const uint8_t *properties, Py_ssize_t count
) except -1
