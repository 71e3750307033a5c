# --- copying: the log of a master, laid down as its frames bring it ----------------------------------

COPY_MORE = 0  # whatever has come is taken, as far as it goes
COPY_ROOM = 1  # file space is needed, or the next segment: the appender's `wanted`
COPY_GAP = 2  # a frame that does not begin where the copy ends
COPY_FRAME = 3  # a frame of an impossible size
COPY_RECORD = 4  # what has come is no record of that place
COPY_CLOSED = 5  # the other side has closed the socket

cdef enum:
    C_MORE = 0
    C_ROOM = 1
    C_GAP = 2
    C_FRAME = 3
    C_RECORD = 4
    C_CLOSED = 5
    COPY_STREAM = 1 << 20  # bytes that are taken from the socket at once
    _COPY_FRAME_MAX = 1 << 26
    COPY_CURSORS = 1 << 18  # that are known here; others are asked for each time

COPY_STREAM_BYTES = COPY_STREAM
COPY_FRAME_MAX = _COPY_FRAME_MAX

cdef extern from *:
    """
    #include <poll.h>
    #include <sys/socket.h>
    """
    enum:
        MSG_DONTWAIT
    ssize_t recv(int fd, void *into, size_t count, int flags) nogil
    void *memmove(void *into, const void *what, size_t count) nogil
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long count, int timeout_ms) nogil
    enum:
        MSG_DONTWAIT
        POLLIN


@cython.final
cdef class LogCopy:
    """Takes a master's frames (RocketMQ DefaultHAConnection: where it begins, how long it is, the
    log's bytes, cut anywhere) and lays whole records down as they are, each where it says that it
    lies. For the holder of the put lock.

    A record is judged before it is believed. What has come of one that is not whole lies in the
    segment behind the log's end, where nobody looks, and no memory is taken for it. Its head is laid
    down last: a power cut must not leave one that looks whole, with zeros for what had not come.

    Args:
        log: lays down at its end; the caller publishes.
        record_max: bytes that a record has at most.
        cursor_of: called with the topic and the id of a queue whose first message this copy meets;
            the cursor by which those who wait for its messages are told of them, or None.
    """

    cdef LogAppender _log
    cdef object _cursor_of
    cdef dict _cursors
    cdef QueueCursor _last
    cdef int64_t _record_max
    cdef uint8_t *_stream
    cdef Py_ssize_t _begin, _end  # of what lies in it
    cdef int64_t _frame_left  # bytes of the frame that were not taken yet
    cdef int64_t _held  # bytes behind the log's end
    cdef uint8_t[BLANK_BYTES] _head  # of a record or blank that is not whole: its size, its magic
    cdef int64_t _cut_bytes  # its size; 0: there is none, or its head has not come
    cdef readonly int64_t frames  # since the last `forget`
    cdef readonly int64_t frame_offset  # of the last one
    cdef readonly int64_t frame_bytes
    cdef readonly str why  # what is wrong with the record at the log's end

    def __cinit__(self):
        self._stream = <uint8_t *>PyMem_Malloc(COPY_STREAM)
        if self._stream == NULL:
            raise MemoryError

    def __init__(self, LogAppender log not None, int64_t record_max, cursor_of):
        self._log, self._record_max, self._cursor_of = log, record_max, cursor_of
        self._cursors = {}
        self.why = ""

    def __dealloc__(self):
        PyMem_Free(self._stream)

    @property
    def end(self):
        """The physical offset behind what has been laid down, whole or not: the next byte's."""
        return self._log.segment_start + self._log._at + self._held

    @property
    def held(self):
        """Bytes of a record that is not whole yet."""
        return self._held

    # --- what comes ---

    def receive(self, int fd):
        """Take what a socket holds, as far as there is room; how many bytes, 0 where the other side
        has closed it, -1 where there is nothing. Raises OSError."""
        cdef ssize_t got
        cdef int code = 0
        self._make_space()
        if self._end == COPY_STREAM:
            return -1
        with nogil:
            got = recv(fd, self._stream + self._end, COPY_STREAM - self._end, MSG_DONTWAIT)
            if got < 0:
                code = errno
        if got < 0:
            if code == EAGAIN or code == EINTR:
                return -1
            raise OSError(code, _os.strerror(code))
        self._end += got
        return got

    def feed(self, const uint8_t[::1] content):
        """As `receive`, from memory; how many bytes there was room for."""
        cdef Py_ssize_t count
        self._make_space()
        count = min(content.shape[0], <Py_ssize_t>COPY_STREAM - self._end)
        if count:
            memcpy(self._stream + self._end, &content[0], count)
            self._end += count
        return count

    def follow(self, int fd, int other_fd, double timeout_s):
        """Sleep until `other_fd` can be read or the time is over (below 0: it never is). What comes
        through `fd` meanwhile is laid down, published and woken for, without the interpreter.

        COPY_MORE, or what has ended it sooner: a reason of `take`, or COPY_CLOSED. Raises OSError;
        ValueError for a log that publishes nothing.
        """
        cdef pollfd polled[2]
        cdef int64_t until_ns = monotonic_ns() + <int64_t>(min(timeout_s, 1e6) * 1e9), left_ns = 0
        cdef int ready, code = 0, what = C_MORE
        polled[0].fd, polled[1].fd = fd, other_fd
        polled[0].events = polled[1].events = POLLIN
        polled[1].revents = 0
        if self._log._wrote is None:
            raise ValueError("a log that publishes nothing")
        while what == C_MORE and not polled[1].revents and left_ns >= 0:
            polled[0].revents = 0
            with nogil:
                if timeout_s >= 0:
                    left_ns = until_ns - monotonic_ns()
                ready = poll(polled, 2, -1 if timeout_s < 0 else
                             <int>(max(<int64_t>0, left_ns + 999999) // 1000000))
                if ready < 0:
                    code = errno
            if ready < 0:
                if code != EINTR:
                    raise OSError(code, _os.strerror(code))
                PyErr_CheckSignals()
            elif polled[0].revents:
                what = self._take_from(fd)
        return what

    cdef int _take_from(self, int fd) except -1:
        """What the socket holds now becomes the log's, as far as it goes."""
        cdef LogAppender log = self._log
        cdef int64_t before = log.segment_start + log._at
        cdef Py_ssize_t got = self.receive(fd)
        cdef int what
        if got <= 0:
            return C_CLOSED if got == 0 else C_MORE
        try:
            what = self.take()
        finally:  # also in front of what cannot be taken: this end is told to the other side
            if log.segment_start + log._at > before:
                log.publish()
                log.wake()
        return what

    cdef void _make_space(self) noexcept:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            memmove(self._stream, self._stream + self._begin, self._end - self._begin)
            self._end -= self._begin
            self._begin = 0

    # --- where it goes ---

    def take(self):
        """Lay down what has come; one of the COPY_ reasons why it stopped. With COPY_GAP,
        COPY_FRAME or COPY_RECORD nothing more can be taken before `forget`."""
        cdef int what = C_RECORD if self.why else C_MORE
        if self._log._base == NULL and self._begin < self._end:
            self._log.wanted = BLANK_BYTES
            return C_ROOM
        while what == C_MORE:
            if self._frame_left == 0:
                if self._end - self._begin < HA_FRAME_BYTES:
                    break
                what = self._open_frame()
            elif self._begin == self._end:
                break
            else:
                what = self._lay()
        return what

    def forget(self):
        """The connection is lost: what is not whole comes again. No byte of it stays behind."""
        if self._held:
            memset(self._log._base + self._log._at, 0, self._held)
        self._held = self._frame_left = self._begin = self._end = self.frames = 0
        self._cut_bytes = 0
        self.why = ""

    cdef int _open_frame(self) except -1:
        cdef const uint8_t *at = self._stream + self._begin
        self.frame_offset = <int64_t>load_be64(at + HA_FRAME_PHYSICAL_OFFSET)
        self.frame_bytes = <int32_t>load_be32(at + HA_FRAME_SIZE)
        if not 0 <= self.frame_bytes <= _COPY_FRAME_MAX:
            return C_FRAME
        if <uint64_t>self.frame_offset != (
                <uint64_t>self._log.segment_start + <uint64_t>self._log._at
                + <uint64_t>self._held):
            return C_GAP
        self._begin += HA_FRAME_BYTES
        self._frame_left = self.frame_bytes
        self.frames += 1
        return C_MORE

    cdef int _lay(self) except -1:
        """What has come of the frame, as far as there is file space in the segment."""
        cdef LogAppender log = self._log
        cdef int64_t begin = log._at + self._held
        cdef int64_t left = log._segment_bytes - begin
        cdef int64_t count = min(min(self._frame_left, left), log._reserved - begin)
        if count <= 0:
            # In a segment that is full, or of the next one: there is none before the first record.
            log.wanted = self._held + (min(self._frame_left, left) if left else BLANK_BYTES)
            return C_ROOM
        count = min(count, <int64_t>(self._end - self._begin))
        memcpy(log._base + begin, self._stream + self._begin, count)
        self._begin += count
        self._frame_left -= count
        self._held += count
        return self._judge()

    cdef int _judge(self) except -1:
        """Whole records become the log's, one after the other."""
        cdef LogAppender log = self._log
        cdef Record record
        cdef uint8_t *at
        cdef int64_t left, size
        cdef int why
        while self._held >= max(BLANK_BYTES, self._cut_bytes):
            at = log._base + log._at
            left = log._segment_bytes - log._at
            if self._cut_bytes:
                memcpy(at, self._head, BLANK_BYTES)
                self._cut_bytes = 0
            size = <int32_t>load_be32(at + RECORD_HEAD_TOTAL_SIZE)
            why = self._judge_head(at, size, left)
            if why == REC_OK and size > self._held:
                memcpy(self._head, at, BLANK_BYTES)
                memset(at, 0, BLANK_BYTES)
                self._cut_bytes = size
                return C_MORE
            if why == REC_OK:
                why = judge_record(at, size, log.segment_start + log._at, True, &record)
            if why != REC_OK and not (why == REC_BLANK and size == left):
                return self._refuse(why, at, size, left)
            if why == REC_OK:
                self._take_in(&record)
            log._at += size
            self._held -= size
        return C_MORE

    cdef int _judge_head(self, const uint8_t *at, int64_t size, int64_t left) noexcept:
        """Behind a record there is room for a blank, or nothing at all (RocketMQ). A blank, with
        whatever lies behind its head, reaches to the segment's end."""
        cdef uint32_t magic = load_be32(at + RECORD_HEAD_MAGIC)
        if magic == <uint32_t>MAGIC_BLANK:
            return REC_OK if size == left else REC_BLANK
        if magic != <uint32_t>MAGIC_V1 and magic != <uint32_t>MAGIC_V2:
            return REC_BAD_MAGIC
        if not RECORD_MIN <= size <= min(left, self._record_max) or 0 < left - size < BLANK_BYTES:
            return REC_BAD_SIZE
        return REC_OK

    cdef int _take_in(self, Record *record) except -1:
        """Whoever waits for its queue's messages is told with the next `publish`."""
        cdef LogAppender log = self._log
        cdef QueueCursor queue
        if is_queued(record):
            queue = self._last
            if queue is None or not _is_cursor_of(queue, record):
                queue = self._last = self._find(record)
            if queue is not None:
                log._note(queue)
                queue.next_offset = max(queue.next_offset, record.queue_offset + 1)
        log.count += 1
        log.last_store_timestamp = record.store_timestamp
        return 0

    cdef QueueCursor _find(self, Record *record):
        cdef bytes topic = PyBytes_FromStringAndSize(
            <const char *>record.topic, record.topic_length)
        key = topic, record.queue_id
        if key not in self._cursors:
            if len(self._cursors) >= COPY_CURSORS:
                self._cursors.clear()
            self._cursors[key] = self._cursor_of(topic.decode(), record.queue_id)
        return <QueueCursor?>self._cursors[key] if self._cursors[key] is not None else None

    cdef int _refuse(self, int why, const uint8_t *at, int64_t size, int64_t left) except -1:
        """In words, with what was expected and what has come."""
        cdef int64_t place
        what = REASONS[why]
        if why == REC_BAD_MAGIC:
            what += f": {load_be32(at + RECORD_HEAD_MAGIC):#010x}"
        elif why == REC_BAD_SIZE:
            what += (f": {size} bytes, where {left} are left in the segment and a record may have "
                     f"{self._record_max}: are mappedFileSizeCommitLog and maxMessageSize the "
                     "master's?")
        elif why == REC_BLANK:
            what = (f"a blank of {size} bytes where {left} are left in the segment: is "
                    "mappedFileSizeCommitLog the master's?")
        elif why == REC_BAD_POSITION:
            place = <int64_t>load_be64(at + RECORD_HEAD_PHYSICAL_OFFSET)
            what += f": it says {place}"
        elif why == REC_BAD_CRC:
            what += f": {load_be32(at + RECORD_HEAD_BODY_CRC):#010x} is stored"
        self.why = what
        return C_RECORD


cdef inline bint _is_cursor_of(QueueCursor queue, Record *record) noexcept:
    return (queue.queue_id == record.queue_id and queue.topic_length == record.topic_length
            and memcmp(PyBytes_AS_STRING(queue.topic_bytes), record.topic,
                       record.topic_length) == 0)


def unset_bytes(Py_ssize_t size):
    """A bytearray that has whatever its memory had: for who fills all of it before anybody looks."""
    if size < 0:
        raise ValueError("a negative size")
    return PyByteArray_FromStringAndSize(NULL, size)
