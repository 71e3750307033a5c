# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=False
"""The native kernel: what is done per message, and what must be atomic. Decisions stay in Python.

Positions and sizes come from layout.pxi, which shm/layout.py prints. Functions marked nogil touch
raw memory only; every pointer they get has been checked against the size of its buffer before.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.errno cimport errno
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset
from posix.mman cimport MS_SYNC, msync
from posix.unistd cimport getpid, sysconf, _SC_PAGESIZE, write as write_fd

include "layout.pxi"

cdef extern from "kernel.h" nogil:
    uint16_t load_be16(const uint8_t *p)
    uint32_t load_be32(const uint8_t *p)
    uint64_t load_be64(const uint8_t *p)
    void store_be16(uint8_t *p, uint16_t value)
    void store_be32(uint8_t *p, uint32_t value)
    void store_be64(uint8_t *p, uint64_t value)
    uint64_t load_acquire64(const uint64_t *p)
    uint64_t load_relaxed64(const uint64_t *p)
    void store_release64(uint64_t *p, uint64_t value)
    void full_fence()
    uint8_t exchange8(uint8_t *p, uint8_t value)
    int64_t now_ms()
    void crc_prepare()
    void crc_detect()
    uint32_t crc_of(uint32_t crc, const uint8_t *p, size_t count)
    uint32_t load_acquire_be32(const uint8_t *p)
    void store_release_be32(uint8_t *p, uint32_t value)
    bint is_ascii8(const uint8_t *p)
    uint32_t hash_ascii8(uint32_t h, const uint8_t *p)
    void prefetch_to_write(const uint8_t *p)
    struct recent:
        pass
    int64_t recent_ms(recent *last)
    uint32_t *word_wiped_on_fork()
    void free_word(uint32_t *word)
    struct sleepers:
        pass
    void sleepers_begin(sleepers *s)
    void sleepers_end(sleepers *s)
    uint64_t sleepers_rings(sleepers *s)
    void sleepers_ring(sleepers *s)
    void sleepers_wait(sleepers *s, int doorbell, uint64_t rings, int64_t until_ns)

crc_prepare()
crc_detect()

cdef int64_t SYSTEM_PAGE = sysconf(_SC_PAGESIZE)


class BatchFull(Exception):
    """The message does not fit into this batch any more."""


class BatchIllegal(ValueError):
    """A batch body that is not what it says; nothing of it was taken."""


class RecordTooLarge(ValueError):
    """A message over the limits; args: (what, its size, the limit)."""


class RecordDamaged(Exception):
    """A record whose bytes contradict themselves; args: (reason, position in the buffer)."""


def layout_sizes():
    """Sizes as the kernel was compiled with them; a test compares them with shm/layout.py."""
    return {
        "RECORD_HEAD": RECORD_HEAD_BYTES,
        "RECORD_MIDDLE": RECORD_MIDDLE_BYTES,
        "BATCH_ELEMENT": BATCH_ELEMENT_BYTES,
        "CONSUME_QUEUE_UNIT": CONSUME_QUEUE_UNIT_BYTES,
        "INDEX_HEADER": INDEX_HEADER_BYTES,
        "INDEX_ENTRY": INDEX_ENTRY_BYTES,
    }


# --- text: hashes and properties ------------------------------------------------------------------


cdef uint32_t hash_on(uint32_t h, const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Java's String.hashCode over UTF-16 units, going on from the hash of what stands before.

    Bytes that are no UTF-8 count as U+FFFD.
    """
    cdef uint32_t point
    cdef Py_ssize_t at = 0
    cdef int more, i
    while at < count:
        if count - at >= 8 and is_ascii8(text + at):
            h = hash_ascii8(h, text + at)
            at += 8
            continue
        point = text[at]
        at += 1
        if point < 0x80:
            h = 31 * h + point
            continue
        if 0xC2 <= point <= 0xDF:
            more = 1
            point &= 0x1F
        elif 0xE0 <= point <= 0xEF:
            more = 2
            point &= 0x0F
        elif 0xF0 <= point <= 0xF4:
            more = 3
            point &= 0x07
        else:
            h = 31 * h + 0xFFFD
            continue
        for i in range(more):
            if at >= count or (text[at] & 0xC0) != 0x80:
                point = 0xFFFD
                break
            point = (point << 6) | (text[at] & 0x3F)
            at += 1
        if point >= 0x10000:
            point -= 0x10000
            h = 31 * h + (0xD800 + (point >> 10))
            h = 31 * h + (0xDC00 + (point & 0x3FF))
        else:
            h = 31 * h + point
    return h


cdef int32_t hash_utf8(const uint8_t *text, Py_ssize_t count) noexcept nogil:
    """Java's String.hashCode."""
    return <int32_t>hash_on(0, text, count)


def java_hash(str text not None):
    """Java's String.hashCode over UTF-16 units, as a signed 32-bit number."""
    cdef Py_ssize_t count
    cdef const char *raw = PyUnicode_AsUTF8AndSize(text, &count)
    return hash_utf8(<const uint8_t *>raw, count)


def crc32(buffer, uint32_t value=0):
    """CRC-32 as zlib's, unmasked."""
    cdef const uint8_t[::1] view = buffer
    if view.shape[0] == 0:
        return value
    return crc_of(value, &view[0], view.shape[0])


cdef bint find_property(
    const uint8_t *properties, Py_ssize_t count, const char *name, Py_ssize_t name_bytes,
    const uint8_t **value, Py_ssize_t *value_bytes,
) noexcept nogil:
    """The last entry of that name, as RocketMQ's string2messageProperties would keep it."""
    cdef Py_ssize_t at = 0, end, separator
    cdef bint found = False
    while at < count:
        end = at
        separator = -1
        while end < count and properties[end] != 2:
            if separator < 0 and properties[end] == 1:
                separator = end
            end += 1
        # An empty name or an empty value is dropped.
        if separator > at and separator < end - 1 and separator - at == name_bytes:
            if memcmp(properties + at, name, name_bytes) == 0:
                value[0] = properties + separator + 1
                value_bytes[0] = end - separator - 1
                found = True
        at = end + 1
    return found


cdef int64_t tags_code_of(const uint8_t *properties, Py_ssize_t count) noexcept nogil:
    cdef const uint8_t *value = NULL
    cdef Py_ssize_t value_bytes = 0
    if not find_property(properties, count, b"TAGS", 4, &value, &value_bytes):
        return 0
    return hash_utf8(value, value_bytes)


cdef str decode_text(const uint8_t *text, Py_ssize_t count):
    return PyUnicode_DecodeUTF8(<const char *>text, count, "replace")


# --- records --------------------------------------------------------------------------------------

cdef enum:
    REC_OK = 0
    REC_BLANK = 1
    REC_BAD_MAGIC = 2
    REC_BAD_SIZE = 3
    REC_BAD_FIELDS = 4
    REC_BAD_CRC = 5
    REC_BAD_POSITION = 6

REASONS = (
    "ok",
    "end of segment",
    "no record magic",
    "impossible size",
    "fields and size disagree",
    "wrong body CRC",
    "stored position is not its place",
)

# The smallest record: head, hosts of 8, store time, middle, empty body and topic and properties.
cdef enum:
    RECORD_MIN = 91


cdef struct Record:
    int32_t total_size
    uint32_t magic
    int32_t body_crc
    int32_t queue_id
    int32_t flag
    int64_t queue_offset
    int64_t physical_offset
    int32_t sys_flag
    int64_t born_timestamp
    int64_t store_timestamp
    int32_t reconsume_times
    int64_t prepared_offset
    int32_t body_length
    int32_t topic_length
    int32_t properties_length
    int32_t born_host_length
    int32_t store_host_length
    const uint8_t *born_host
    const uint8_t *store_host
    const uint8_t *body
    const uint8_t *topic
    const uint8_t *properties


cdef int parse_record(
    const uint8_t *at, int64_t available, bint check_crc, Record *record
) noexcept nogil:
    """Read a record's fields; every length is checked before it is followed."""
    cdef int64_t position, size
    if available < 8:
        return REC_BAD_SIZE
    record.total_size = <int32_t>load_be32(at)
    record.magic = load_be32(at + RECORD_HEAD_MAGIC)
    if record.magic == <uint32_t>MAGIC_BLANK:
        return REC_BLANK
    if record.magic != <uint32_t>MAGIC_V1 and record.magic != <uint32_t>MAGIC_V2:
        return REC_BAD_MAGIC
    size = record.total_size
    if size < RECORD_MIN or size > available:
        return REC_BAD_SIZE
    record.body_crc = <int32_t>load_be32(at + RECORD_HEAD_BODY_CRC)
    record.queue_id = <int32_t>load_be32(at + RECORD_HEAD_QUEUE_ID)
    record.flag = <int32_t>load_be32(at + RECORD_HEAD_FLAG)
    record.queue_offset = <int64_t>load_be64(at + RECORD_HEAD_QUEUE_OFFSET)
    record.physical_offset = <int64_t>load_be64(at + RECORD_HEAD_PHYSICAL_OFFSET)
    record.sys_flag = <int32_t>load_be32(at + RECORD_HEAD_SYS_FLAG)
    record.born_timestamp = <int64_t>load_be64(at + RECORD_HEAD_BORN_TIMESTAMP)
    record.born_host_length = 20 if record.sys_flag & SYS_BORN_HOST_V6 else 8
    record.store_host_length = 20 if record.sys_flag & SYS_STORE_HOST_V6 else 8
    position = RECORD_HEAD_BYTES
    record.born_host = at + position
    position += record.born_host_length
    record.store_timestamp = <int64_t>load_be64(at + position)
    position += 8
    record.store_host = at + position
    position += record.store_host_length
    if position + RECORD_MIDDLE_BYTES > size:
        return REC_BAD_FIELDS
    record.reconsume_times = <int32_t>load_be32(at + position + RECORD_MIDDLE_RECONSUME_TIMES)
    record.prepared_offset = <int64_t>load_be64(
        at + position + RECORD_MIDDLE_PREPARED_TRANSACTION_OFFSET)
    record.body_length = <int32_t>load_be32(at + position + RECORD_MIDDLE_BODY_LENGTH)
    position += RECORD_MIDDLE_BYTES
    if record.body_length < 0 or position + record.body_length + 4 > size + 1:
        return REC_BAD_FIELDS
    record.body = at + position
    position += record.body_length
    if record.magic == <uint32_t>MAGIC_V2:
        if position + 2 > size:
            return REC_BAD_FIELDS
        record.topic_length = <int16_t>load_be16(at + position)
        position += 2
    else:
        record.topic_length = <int8_t>at[position]
        position += 1
    if record.topic_length < 0 or position + record.topic_length + 2 > size:
        return REC_BAD_FIELDS
    record.topic = at + position
    position += record.topic_length
    record.properties_length = <int16_t>load_be16(at + position)
    position += 2
    record.properties = at + position
    if record.properties_length < 0 or position + record.properties_length != size:
        return REC_BAD_FIELDS
    if check_crc:
        if <int32_t>(crc_of(0, record.body, record.body_length) & 0x7FFFFFFF) != record.body_crc:
            return REC_BAD_CRC
    return REC_OK


def scan(
    buffer, int64_t segment_start, int64_t begin, int64_t end, bint check_crc=True,
    bint check_position=True, int64_t count_max=0x7FFFFFFFFFFFFFFF,
):
    """Walk records from physical offset `begin` to at most `end`, both inside one segment.

    Returns (reached, reason, count, last_record, last_store_timestamp): where the walk stopped,
    an index into REASONS (0: at `end`, or `count_max` records were seen), how many records were
    whole, the physical offset of the last of them or -1, and its store time.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t size = view.shape[0], at = begin - segment_start, stop = end - segment_start
    cdef int64_t count = 0, last = -1, last_timestamp = 0
    cdef int reason = REC_OK
    cdef Record record
    cdef const uint8_t *base
    if not 0 <= at <= stop <= size:
        raise ValueError(f"[{begin}, {end}) is not inside the segment at {segment_start}")
    if size == 0:
        return begin, 0, 0, -1, 0
    base = &view[0]
    with nogil:
        while at < stop and count < count_max:
            reason = parse_record(base + at, stop - at, check_crc, &record)
            if reason == REC_OK and check_position:
                if record.physical_offset != segment_start + at:
                    reason = REC_BAD_POSITION
            if reason != REC_OK:
                break
            count += 1
            last = segment_start + at
            last_timestamp = record.store_timestamp
            at += record.total_size
    return segment_start + at, reason, count, last, last_timestamp


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <string.h>
    extern void *memmem(const void *, size_t, const void *, size_t);
    """
    void *memmem(const void *text, size_t count, const void *wanted, size_t wanted_bytes) nogil


def find_record(
    buffer, int64_t segment_start, int64_t begin, int64_t end, int64_t not_before=0,
):
    """The first whole record that begins in [begin, end) and says that it lies there; or -1.

    For the way out of a damaged stretch: magic, fields, stored position and CRC must all hold,
    and its store time must not be before `not_before`. The record may reach behind `end`.
    """
    cdef const uint8_t[::1] view = buffer
    cdef int64_t size = view.shape[0], at = begin - segment_start, stop = end - segment_start
    cdef int64_t found = -1
    cdef Record record
    cdef const uint8_t *base
    cdef const uint8_t *hit
    if not 0 <= at <= stop <= size:
        raise ValueError(f"[{begin}, {end}) is not inside the segment at {segment_start}")
    if at == stop or size - at < RECORD_MIN:
        return -1
    base = &view[0]
    with nogil:
        while at < stop and size - at >= RECORD_MIN:
            # Both magics begin with these three bytes.
            hit = <const uint8_t *>memmem(
                base + at + RECORD_HEAD_MAGIC, size - at - RECORD_HEAD_MAGIC, b"\xda\xa3\x20", 3)
            if hit == NULL:
                break
            at = hit - base - RECORD_HEAD_MAGIC
            if at >= stop:
                break
            if (parse_record(base + at, size - at, True, &record) == REC_OK
                    and record.physical_offset == segment_start + at
                    and record.store_timestamp >= not_before):
                found = segment_start + at
                break
            at += 1
    return found


cdef void write_digits_reversed(uint8_t *at, uint32_t value) noexcept nogil:
    """Ten decimal digits, the least significant first (RocketMQ's appended CRC)."""
    cdef int i
    for i in range(10):
        at[i] = 48 + value % 10
        value //= 10


cdef class OwnedCell  # in counters.pxi


@cython.final
cdef class QueueCursor:
    """The writer's end of one topic queue: its names as bytes, and the next queue offset."""

    cdef bytes topic_bytes
    cdef readonly str topic
    cdef readonly int32_t queue_id
    cdef bint long_topic
    cdef public int64_t next_offset
    cdef public bint barred  # an Appender has to ask before it appends to it

    def __init__(self, str topic not None, int32_t queue_id, int64_t next_offset=0,
                 bint auto_version=True):
        self.topic = topic
        self.topic_bytes = topic.encode()
        self.queue_id = queue_id
        self.next_offset = next_offset
        units = len(topic.encode("utf-16-be")) // 2
        self.long_topic = auto_version and units > 127
        if len(self.topic_bytes) > (32767 if self.long_topic else 127):
            raise ValueError(f"topic of {len(self.topic_bytes)} bytes")


@cython.final
cdef class LogAppender:
    """Lays records into the current segment. Has one user, the holder of the put lock.

    Args:
        store_host: this broker's address, 8 or 20 bytes (IP and port).
        max_message_bytes: limit of a body; a whole record may have 65,536 more (RocketMQ).
        crc_property: append RocketMQ's __CRC32# property (enabledAppendPropCRC).
    """

    cdef Py_buffer _view
    cdef bint _attached
    cdef uint8_t *_base
    cdef int64_t _segment_bytes
    cdef int64_t _at
    cdef readonly int64_t segment_start
    cdef readonly int64_t last_store_timestamp
    cdef readonly bytes store_host
    cdef int64_t _max_message_bytes
    cdef recent _clock
    cdef bint _crc_property
    cdef readonly int64_t batch_queue_offset  # of the first message that append_batch laid down
    cdef readonly int64_t count  # messages laid down, from what `publishes` found on
    cdef OwnedCell _wrote, _timestamp_cell, _messages, _steps
    cdef int64_t _step_bytes
    cdef object _on_step
    cdef ReadCell _flushed
    cdef OwnedCell _wanted, _syncs
    cdef int64_t _sync_max

    def __init__(self, bytes store_host not None, int64_t max_message_bytes,
                 bint crc_property=False):
        if len(store_host) != 8 and len(store_host) != 20:
            raise ValueError(f"host of {len(store_host)} bytes, 8 or 20 wanted")
        self.store_host = store_host
        self._max_message_bytes = max_message_bytes
        self._crc_property = crc_property

    def attach(self, buffer, int64_t segment_start, int64_t physical_offset):
        """Go on in this writable segment at that physical offset."""
        self.detach()
        PyObject_GetBuffer(buffer, &self._view, PyBUF_WRITABLE)
        self._attached = True
        if not 0 <= physical_offset - segment_start <= self._view.len:
            self.detach()
            raise ValueError(f"{physical_offset} is not in the segment at {segment_start}")
        self._base = <uint8_t *>self._view.buf
        self._segment_bytes = self._view.len
        self.segment_start = segment_start
        self._at = physical_offset - segment_start

    def detach(self):
        if self._attached:
            PyBuffer_Release(&self._view)
            self._attached = False
        self._base = NULL
        self._segment_bytes = 0
        self._at = 0

    def __dealloc__(self):
        if self._attached:
            PyBuffer_Release(&self._view)

    @property
    def physical_offset(self):
        """The first byte that is not written."""
        return self.segment_start + self._at

    @property
    def remaining(self):
        return self._segment_bytes - self._at

    def publishes(self, OwnedCell wrote not None, OwnedCell timestamp not None,
                  OwnedCell messages not None, OwnedCell steps not None, int64_t step_bytes,
                  on_step):
        """Which counters `publish` moves; `on_step` is called with every `step_bytes` written."""
        self._wrote, self._timestamp_cell, self._messages = wrote, timestamp, messages
        self._steps, self._step_bytes, self._on_step = steps, step_bytes, on_step
        self.count = <int64_t>load_relaxed64(messages._word)

    def publish(self):
        """Whatever was laid down may be seen. Sleepers go on sleeping until `wake`."""
        self._publish()

    def wake(self):
        """Ring for everyone who sleeps on `wrote`; and on `steps`, if it has come so far."""
        self._wake()

    cdef void _publish(self) noexcept:
        store_release64(self._timestamp_cell._word, <uint64_t>self.last_store_timestamp)
        store_release64(self._messages._word, <uint64_t>self.count)
        store_release64(self._wrote._word, <uint64_t>(self.segment_start + self._at))

    cdef int _wake(self) except -1:
        cdef uint64_t step = load_relaxed64(self._wrote._word) // <uint64_t>self._step_bytes
        self._wrote._wake()
        if step > load_relaxed64(self._steps._word):
            store_release64(self._steps._word, step)
            self._steps._wake()
            self._on_step()
        return 0

    def syncs(self, ReadCell flushed not None, OwnedCell wanted not None, OwnedCell count not None,
              int64_t max_bytes):
        """Which counters `sync` and `want` look at and move; what is the flush process's to sync."""
        self._flushed, self._wanted, self._syncs = flushed, wanted, count
        self._sync_max = max_bytes

    def sync(self):
        """Make what is published durable by one call; below which offset it is then, which the
        caller publishes. 0: it is for the flush process, because it is much, or in more than one
        segment, or because that one is asked already.

        Raises OSError. Then nobody knows what is on the disk, and a second call must not ask.
        """
        return self._sync()

    cdef uint64_t _sync(self) except? 0:
        cdef int64_t begin = <int64_t>self._flushed._load(), start = self.segment_start
        cdef int64_t end = <int64_t>load_relaxed64(self._wrote._word), at
        cdef uint8_t *base = self._base
        cdef int code = 0
        if begin >= end:
            return end
        if (begin < start or end - begin > self._sync_max
                or <int64_t>load_relaxed64(self._wanted._own) > begin):
            return 0
        at = (begin - start) // SYSTEM_PAGE * SYSTEM_PAGE
        with nogil:
            if msync(base + at, end - start - at, MS_SYNC):
                code = errno
        if code:
            raise OSError(code, _os.strerror(code))
        if self._base != base or self.segment_start != start:
            return 0  # another thread has rolled over: this may not have been mapped to the end
        store_release64(self._syncs._own, load_relaxed64(self._syncs._own) + 1)
        return end

    def want(self):
        """Have the flush process make durable what is published."""
        self._want()

    cdef int _want(self) except -1:
        store_release64(self._wanted._own, load_relaxed64(self._wrote._word))
        self._wanted._wake()
        return 0

    def roll(self, buffer, int64_t segment_start):
        """Close this segment with a blank and go on in the next, in one step for all threads."""
        if self._at < self._segment_bytes:
            self.write_blank()
        self.attach(buffer, segment_start, segment_start)

    def write_blank(self):
        """Close the segment: everything that remains becomes the end-of-segment blank."""
        cdef int64_t left = self._segment_bytes - self._at
        if left < BLANK_BYTES:
            raise ValueError(f"{left} bytes left in the segment at {self.segment_start}")
        store_be32(self._base + self._at + BLANK_SIZE, <uint32_t>left)
        store_be32(self._base + self._at + BLANK_MAGIC, <uint32_t>MAGIC_BLANK)
        self._at = self._segment_bytes

    cdef int64_t _timestamp(self, int64_t wanted) noexcept:
        cdef int64_t now = wanted if wanted > 0 else recent_ms(&self._clock)
        if now < self.last_store_timestamp and wanted <= 0:
            now = self.last_store_timestamp  # the clock went back; the log does not
        self.last_store_timestamp = now
        return now

    cdef int64_t _record_size(
        self, QueueCursor queue, int64_t body_bytes, int64_t properties_bytes, bint separator,
        int born_host_bytes,
    ) noexcept:
        cdef int64_t size = (
            RECORD_HEAD_BYTES + born_host_bytes + 8 + len(self.store_host) + RECORD_MIDDLE_BYTES
            + body_bytes + (2 if queue.long_topic else 1) + len(queue.topic_bytes) + 2
            + properties_bytes
        )
        if self._crc_property:
            size += CRC_PROPERTY_BYTES + (1 if separator else 0)
        return size

    cdef uint8_t *_write(
        self, uint8_t *at, int64_t size, QueueCursor queue, int64_t queue_offset, int32_t sys_flag,
        int32_t flag, int64_t born_timestamp, const uint8_t *born_host, int born_host_bytes,
        int64_t store_timestamp, int32_t reconsume_times, int64_t prepared_offset,
        const uint8_t *body, int64_t body_bytes, const uint8_t *properties,
        int64_t properties_bytes, bint separator,
    ) noexcept:
        """One record at `at`, which has room for it; the byte behind it."""
        cdef uint8_t *begin = at
        cdef int64_t stored_properties = properties_bytes
        cdef int topic_bytes = <int>len(queue.topic_bytes)
        cdef int store_host_bytes = <int>len(self.store_host)
        if born_host_bytes == 20:
            sys_flag |= SYS_BORN_HOST_V6
        else:
            sys_flag &= ~SYS_BORN_HOST_V6
        if store_host_bytes == 20:
            sys_flag |= SYS_STORE_HOST_V6
        else:
            sys_flag &= ~SYS_STORE_HOST_V6
        store_be32(at + RECORD_HEAD_TOTAL_SIZE, <uint32_t>size)
        store_be32(at + RECORD_HEAD_MAGIC,
                   <uint32_t>MAGIC_V2 if queue.long_topic else <uint32_t>MAGIC_V1)
        store_be32(at + RECORD_HEAD_BODY_CRC, crc_of(0, body, body_bytes) & 0x7FFFFFFF)
        store_be32(at + RECORD_HEAD_QUEUE_ID, <uint32_t>queue.queue_id)
        store_be32(at + RECORD_HEAD_FLAG, <uint32_t>flag)
        store_be64(at + RECORD_HEAD_QUEUE_OFFSET, <uint64_t>queue_offset)
        store_be64(at + RECORD_HEAD_PHYSICAL_OFFSET,
                   <uint64_t>(self.segment_start + (at - self._base)))
        store_be32(at + RECORD_HEAD_SYS_FLAG, <uint32_t>sys_flag)
        store_be64(at + RECORD_HEAD_BORN_TIMESTAMP, <uint64_t>born_timestamp)
        at += RECORD_HEAD_BYTES
        memcpy(at, born_host, born_host_bytes)
        at += born_host_bytes
        store_be64(at, <uint64_t>store_timestamp)
        at += 8
        memcpy(at, PyBytes_AS_STRING(self.store_host), store_host_bytes)
        at += store_host_bytes
        store_be32(at + RECORD_MIDDLE_RECONSUME_TIMES, <uint32_t>reconsume_times)
        store_be64(at + RECORD_MIDDLE_PREPARED_TRANSACTION_OFFSET, <uint64_t>prepared_offset)
        store_be32(at + RECORD_MIDDLE_BODY_LENGTH, <uint32_t>body_bytes)
        at += RECORD_MIDDLE_BYTES
        memcpy(at, body, body_bytes)
        at += body_bytes
        if queue.long_topic:
            store_be16(at, <uint16_t>topic_bytes)
            at += 2
        else:
            at[0] = <uint8_t>topic_bytes
            at += 1
        memcpy(at, PyBytes_AS_STRING(queue.topic_bytes), topic_bytes)
        at += topic_bytes
        if self._crc_property:
            stored_properties += CRC_PROPERTY_BYTES + (1 if separator else 0)
        store_be16(at, <uint16_t>stored_properties)
        at += 2
        memcpy(at, properties, properties_bytes)
        at += properties_bytes
        if self._crc_property:
            if separator:
                at[0] = 2
                at += 1
            memcpy(at, b"__CRC32#\x01", 9)
            write_digits_reversed(at + 9, crc_of(0, begin, at - begin) & 0x7FFFFFFF)
            at[19] = 2
            at += CRC_PROPERTY_BYTES
        return at

    def append(
        self, QueueCursor queue not None, body, bytes properties=b"", int32_t flag=0,
        int32_t sys_flag=0, int64_t born_timestamp=0, bytes born_host=None,
        int64_t store_timestamp=0, int32_t reconsume_times=0, int64_t prepared_offset=0,
    ):
        """Append one message; its physical offset, or -1 when it does not fit into the segment.

        Times of 0 mean now. Prepared and rolled-back transaction records get queue offset 0 and
        take none (RocketMQ). Raises RecordTooLarge.
        """
        cdef Py_buffer view
        if isinstance(body, bytes):  # the usual thing, and a view of it costs as much as the record
            return self._append(
                queue, <const uint8_t *>PyBytes_AS_STRING(body), len(<bytes>body), properties, flag,
                sys_flag, born_timestamp, born_host, store_timestamp, reconsume_times,
                prepared_offset,
            )
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            return self._append(
                queue, <const uint8_t *>view.buf, view.len, properties, flag, sys_flag,
                born_timestamp, born_host, store_timestamp, reconsume_times, prepared_offset,
            )
        finally:
            PyBuffer_Release(&view)

    cdef int64_t _append(
        self, QueueCursor queue, const uint8_t *body, int64_t body_bytes, bytes properties,
        int32_t flag, int32_t sys_flag, int64_t born_timestamp, bytes born_host,
        int64_t store_timestamp, int32_t reconsume_times, int64_t prepared_offset,
    ) except -2:
        cdef int64_t properties_bytes = len(properties)
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef bytes born = self.store_host if born_host is None else born_host
        cdef int born_bytes = <int>len(born)
        cdef bint separator = (
            self._crc_property and properties_bytes > 0 and raw_properties[properties_bytes - 1] != 2
        )
        cdef int64_t size, queue_offset, timestamp, start
        cdef int transaction = sys_flag & SYS_TRANSACTION_MASK
        if self._base == NULL:
            raise ValueError("no segment is attached")
        if born_bytes != 8 and born_bytes != 20:
            raise ValueError(f"host of {born_bytes} bytes, 8 or 20 wanted")
        size = self._record_size(queue, body_bytes, properties_bytes, separator, born_bytes)
        self._check_sizes(body_bytes, properties_bytes + (CRC_PROPERTY_BYTES + separator
                          if self._crc_property else 0), size)
        if size + BLANK_BYTES > self._segment_bytes - self._at:
            return -1
        queue_offset = queue.next_offset
        if transaction == SYS_TRANSACTION_PREPARED or transaction == SYS_TRANSACTION_ROLLBACK:
            queue_offset = 0
        timestamp = self._timestamp(store_timestamp)
        start = self._at
        self._write(
            self._base + start, size, queue, queue_offset, sys_flag, flag,
            born_timestamp if born_timestamp > 0 else timestamp,
            <const uint8_t *>PyBytes_AS_STRING(born), born_bytes, timestamp, reconsume_times,
            prepared_offset, body, body_bytes, raw_properties, properties_bytes, separator,
        )
        if transaction != SYS_TRANSACTION_PREPARED and transaction != SYS_TRANSACTION_ROLLBACK:
            queue.next_offset += 1
        self._at = start + size
        self.count += 1
        return self.segment_start + start

    cdef int _check_sizes(self, int64_t body_bytes, int64_t properties_bytes,
                          int64_t size) except -1:
        if body_bytes > self._max_message_bytes:
            raise RecordTooLarge("body", body_bytes, self._max_message_bytes)
        if properties_bytes > PROPERTIES_MAX_BYTES:
            raise RecordTooLarge("properties", properties_bytes, PROPERTIES_MAX_BYTES)
        if size > self._max_message_bytes + 65536:
            raise RecordTooLarge("record", size, self._max_message_bytes + 65536)
        if size + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("record", size, self._segment_bytes - BLANK_BYTES)
        return 0

    def append_many(self, QueueCursor queue not None, list bodies not None, Py_ssize_t start=0,
                    bytes properties=b""):
        """Append bodies[start:] as messages of their own, all with the same properties.

        Returns the index of the first that was not appended: len(bodies), or where the segment
        ended. Raises RecordTooLarge at a body that is too large; those before it are appended.
        """
        cdef Py_ssize_t index = start, count = len(bodies)
        cdef int64_t timestamp = self._timestamp(0), size, at
        cdef int64_t properties_bytes = len(properties)
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef const uint8_t *host = <const uint8_t *>PyBytes_AS_STRING(self.store_host)
        cdef int host_bytes = <int>len(self.store_host)
        cdef bint separator = (
            self._crc_property and properties_bytes > 0 and raw_properties[properties_bytes - 1] != 2
        )
        cdef Py_buffer view
        if self._base == NULL:
            raise ValueError("no segment is attached")
        while index < count:
            PyObject_GetBuffer(bodies[index], &view, PyBUF_SIMPLE)
            try:
                size = self._record_size(queue, view.len, properties_bytes, separator, host_bytes)
                self._check_sizes(view.len, properties_bytes, size)
                if size + BLANK_BYTES > self._segment_bytes - self._at:
                    break
                self._write(
                    self._base + self._at, size, queue, queue.next_offset, 0, 0, timestamp, host,
                    host_bytes, timestamp, 0, 0, <const uint8_t *>view.buf, view.len,
                    raw_properties, properties_bytes, separator,
                )
            finally:
                PyBuffer_Release(&view)
            queue.next_offset += 1
            self._at += size
            self.count += 1
            index += 1
        return index

    def append_all(self, QueueCursor queue not None, list bodies not None, bytes properties=b""):
        """Append bodies as messages of their own, all or none; the first one's queue offset.

        -1 when they do not fit into what is left of the segment; see `check_all` for the rest.
        """
        if self._base == NULL:
            raise ValueError("no segment is attached")
        return self._append_all(queue, bodies, properties)

    def check_all(self, QueueCursor queue not None, list bodies not None, bytes properties=b""):
        """Raises RecordTooLarge if they, or one of them, fit into no segment; BatchIllegal for an
        empty one."""
        cdef int64_t size, total = 0
        cdef bint separator = self._wants_separator(properties)
        for body in bodies:
            if not body:
                raise BatchIllegal("a message needs a body of at least one byte")
            size = self._record_size(
                queue, len(<bytes?>body), len(properties), separator, <int>len(self.store_host))
            self._check_sizes(len(body), len(properties) + (CRC_PROPERTY_BYTES + separator
                              if self._crc_property else 0), size)
            total += size
        if total + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("batch", total, self._segment_bytes - BLANK_BYTES)

    cdef int64_t _append_all(self, QueueCursor queue, list bodies, bytes properties) except -2:
        """Append them one behind the other, all or none; the first one's queue offset.

        -1 where something stands against it: a body that is no bytes, or empty, or too large, or
        no room in the segment.
        """
        cdef Py_ssize_t index, count = len(bodies)
        cdef int64_t size, total = 0, first = queue.next_offset, timestamp
        cdef int64_t properties_bytes = len(properties), body_bytes
        cdef const uint8_t *raw_properties = <const uint8_t *>PyBytes_AS_STRING(properties)
        cdef const uint8_t *host = <const uint8_t *>PyBytes_AS_STRING(self.store_host)
        cdef int host_bytes = <int>len(self.store_host)
        cdef bint separator = self._wants_separator(properties)
        for index in range(count):
            if not PyBytes_CheckExact(bodies[index]):
                return -1
            body_bytes = len(<bytes>bodies[index])
            size = self._record_size(queue, body_bytes, properties_bytes, separator, host_bytes)
            if not self._may_be(body_bytes, properties_bytes, separator, size):
                return -1
            total += size
        if total + BLANK_BYTES > self._segment_bytes - self._at:
            return -1
        timestamp = self._timestamp(0)
        for index in range(count):
            body_bytes = len(<bytes>bodies[index])
            size = self._record_size(queue, body_bytes, properties_bytes, separator, host_bytes)
            self._write(
                self._base + self._at, size, queue, queue.next_offset, 0, 0, timestamp, host,
                host_bytes, timestamp, 0, 0,
                <const uint8_t *>PyBytes_AS_STRING(bodies[index]), body_bytes,
                raw_properties, properties_bytes, separator,
            )
            queue.next_offset += 1
            self._at += size
        self.count += count
        return first

    cdef bint _wants_separator(self, bytes properties) noexcept:
        """Whether properties that do not end with one need it before the CRC property."""
        cdef Py_ssize_t count = len(properties)
        return self._crc_property and count > 0 and properties[count - 1] != 2

    cdef bint _may_be(self, int64_t body_bytes, int64_t properties_bytes, bint separator,
                      int64_t size) noexcept:
        """What `_check_sizes` would let pass, and a body of at least one byte."""
        if self._crc_property:
            properties_bytes += CRC_PROPERTY_BYTES + separator
        return (
            0 < body_bytes <= self._max_message_bytes and properties_bytes <= PROPERTIES_MAX_BYTES
            and size <= self._max_message_bytes + 65536
            and size + BLANK_BYTES <= self._segment_bytes
        )

    def append_batch(
        self, QueueCursor queue not None, const uint8_t[::1] batch not None, int64_t count,
        int32_t sys_flag=0, int64_t born_timestamp=0, bytes born_host=None,
        int64_t store_timestamp=0, int32_t reconsume_times=0,
    ):
        """Append a client batch body of `count` elements, all or nothing.

        The physical offset of the first record, or -1 when the batch does not fit into what is
        left of the segment. Raises BatchIllegal for a body that is not `count` whole elements,
        RecordTooLarge for one that is over the limits.
        """
        cdef bytes born = self.store_host if born_host is None else born_host
        cdef int born_bytes = <int>len(born)
        cdef int64_t total, start, timestamp
        if self._base == NULL:
            raise ValueError("no segment is attached")
        if born_bytes != 8 and born_bytes != 20:
            raise ValueError(f"host of {born_bytes} bytes, 8 or 20 wanted")
        if sys_flag & SYS_TRANSACTION_MASK:
            raise BatchIllegal("a batch cannot be part of a transaction")
        total = self._check_batch(queue, batch, count, born_bytes)
        if total + BLANK_BYTES > self._segment_bytes - self._at:
            return -1
        timestamp = self._timestamp(store_timestamp)
        start = self._at
        self._write_batch(
            queue, &batch[0], count, sys_flag, born_timestamp if born_timestamp > 0 else timestamp,
            <const uint8_t *>PyBytes_AS_STRING(born), born_bytes, timestamp, reconsume_times,
        )
        self.batch_queue_offset = queue.next_offset
        queue.next_offset += count
        self._at = start + total
        self.count += count
        return self.segment_start + start

    def check_batch(self, QueueCursor queue not None, const uint8_t[::1] batch not None,
                    int64_t count, int born_bytes):
        """Bytes of a batch's records. Raises what `append_batch` would raise of it."""
        return self._check_batch(queue, batch, count, born_bytes)

    cdef int64_t _check_batch(self, QueueCursor queue, const uint8_t[::1] batch, int64_t count,
                              int born_bytes) except -1:
        cdef int64_t total
        if count <= 0 or batch.shape[0] == 0:
            raise BatchIllegal(f"a batch of {count} elements in {batch.shape[0]} bytes")
        total = self._measure(queue, &batch[0], batch.shape[0], count, born_bytes)
        if total + BLANK_BYTES > self._segment_bytes:
            raise RecordTooLarge("batch", total, self._segment_bytes - BLANK_BYTES)
        return total

    cdef int64_t _measure(self, QueueCursor queue, const uint8_t *batch, int64_t batch_bytes,
                          int64_t count, int born_bytes) except -1:
        """Bytes of all records; every length is checked against the batch before it is followed."""
        cdef int64_t at = 0, total = 0, size, body_bytes, properties_bytes, element = 0
        cdef int64_t crc_bytes = CRC_PROPERTY_BYTES if self._crc_property else 0
        while at < batch_bytes:
            if element == count:
                raise BatchIllegal(f"{batch_bytes - at} bytes behind the last of {count} elements")
            if batch_bytes - at < BATCH_ELEMENT_BYTES + 2:
                raise BatchIllegal(f"element {element}: {batch_bytes - at} bytes are no element")
            body_bytes = <int32_t>load_be32(batch + at + BATCH_ELEMENT_BODY_LENGTH)
            if body_bytes < 0 or body_bytes > batch_bytes - at - BATCH_ELEMENT_BYTES - 2:
                raise BatchIllegal(
                    f"element {element}: body of {body_bytes} bytes, {batch_bytes - at} are left")
            properties_bytes = <int16_t>load_be16(batch + at + BATCH_ELEMENT_BYTES + body_bytes)
            size = BATCH_ELEMENT_BYTES + body_bytes + 2 + properties_bytes
            if properties_bytes < 0 or size > batch_bytes - at:
                raise BatchIllegal(
                    f"element {element}: properties of {properties_bytes} bytes do not fit")
            if <int32_t>load_be32(batch + at + BATCH_ELEMENT_TOTAL_SIZE) != size:
                raise BatchIllegal(f"element {element}: its size field is not {size}")
            at += size
            size = self._record_size(queue, body_bytes, properties_bytes, False, born_bytes)
            self._check_sizes(body_bytes, properties_bytes + crc_bytes, size)
            total += size
            element += 1
        if element != count:
            raise BatchIllegal(f"{element} elements, {count} announced")
        return total

    cdef void _write_batch(
        self, QueueCursor queue, const uint8_t *batch, int64_t count, int32_t sys_flag,
        int64_t born_timestamp, const uint8_t *born, int born_bytes, int64_t timestamp,
        int32_t reconsume_times,
    ) noexcept:
        cdef uint8_t *to = self._base + self._at
        cdef int64_t element, body_bytes, properties_bytes
        cdef const uint8_t *body
        for element in range(count):
            body_bytes = <int32_t>load_be32(batch + BATCH_ELEMENT_BODY_LENGTH)
            body = batch + BATCH_ELEMENT_BYTES
            properties_bytes = <int16_t>load_be16(body + body_bytes)
            to = self._write(
                to, self._record_size(queue, body_bytes, properties_bytes, False, born_bytes),
                queue, queue.next_offset + element, sys_flag,
                <int32_t>load_be32(batch + BATCH_ELEMENT_FLAG), born_timestamp, born, born_bytes,
                timestamp, reconsume_times, 0, body, body_bytes, body + body_bytes + 2,
                properties_bytes, False,
            )
            batch = body + body_bytes + 2 + properties_bytes


include "dispatch.pxi"
include "index.pxi"
include "gather.pxi"
include "messages.pxi"
include "mapped.pxi"
include "counters.pxi"
include "futex.pxi"
include "append.pxi"
include "spans.pxi"
include "columns.pxi"
include "rows.pxi"
include "walk.pxi"
include "tail.pxi"
