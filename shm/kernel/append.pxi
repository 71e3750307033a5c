# --- appending from any thread of the writer's process ---------------------------------------------

cdef enum:
    SLICE_NS = 100000000  # how long a signal, or the end, may stay unnoticed by who sleeps


@cython.final
cdef class Gate:
    """Whether an Appender goes straight to the log, or has to ask its desk.

    What nobody else's message may come into stands inside `with gate:`. `bar` is for what lasts.
    In a fork of this process it is shut, and `with` must not be used.
    """

    cdef object _lock
    cdef uint32_t *_open
    cdef int _depth
    cdef bint _barred

    def __cinit__(self):
        from threading import RLock

        self._lock = RLock()
        self._open = word_wiped_on_fork()
        if self._open == NULL:
            raise OSError("this kernel cannot wipe a page on fork (MADV_WIPEONFORK)")
        self._open[0] = 1

    def __dealloc__(self):
        if self._open != NULL:
            free_word(self._open)

    def __enter__(self):
        self._lock.acquire()
        self._depth += 1
        self._open[0] = 0
        return self

    def __exit__(self, *_):
        self._depth -= 1
        self._open[0] = self._depth == 0 and not self._barred
        self._lock.release()

    def bar(self, bint barred=True):
        """Have everybody ask, from now on until `bar(False)`. From any thread."""
        self._barred = barred
        self._open[0] = self._depth == 0 and not barred


@cython.final
cdef class Sleepers:
    """The threads of this process that sleep on counters with one doorbell. Threads share it."""

    cdef sleepers _s
    cdef int _fd
    cdef bint _over

    def __cinit__(self, int doorbell_fd):
        self._fd = -1
        sleepers_begin(&self._s)
        self._fd = _os.dup(doorbell_fd)

    def __dealloc__(self):
        if self._fd >= 0:
            close_fd(self._fd)  # modules may be gone when the interpreter ends
        sleepers_end(&self._s)

    def end(self):
        """Nobody sleeps any more: whoever does, or will, is told that it was in vain."""
        cdef uint64_t one = 1
        self._over = True
        sleepers_ring(&self._s)
        write_fd(self._fd, &one, 8)

    def wait(self, SleepCell cell not None, uint64_t at_least, double timeout_s):
        """Sleep until the counter is there; False if it is not after the time."""
        return self._wait(cell, at_least, <int64_t>(timeout_s * 1e9))

    cdef bint _wait(self, SleepCell cell, uint64_t at_least, int64_t timeout_ns) except -1:
        cdef int64_t until = monotonic_ns() + timeout_ns, now, slice_end
        cdef uint64_t rings
        while True:
            with nogil:
                slice_end = min(until, monotonic_ns() + SLICE_NS)
                while cell._load() < at_least and not self._over:
                    rings = sleepers_rings(&self._s)
                    exchange8(cell._flag, 1)
                    if cell._load() >= at_least:
                        break
                    sleepers_wait(&self._s, self._fd, rings, slice_end)
                    if monotonic_ns() >= slice_end:
                        break
                now = monotonic_ns()
            if cell._load() >= at_least:
                return True
            if self._over or now >= until:
                return False
            PyErr_CheckSignals()


@cython.final
cdef class Appender:
    """Appends messages to one queue of an embedded broker: `broker.appender(topic, queue_id)`.

    A message is stored when the call returns, as safely as a `send` that returns. Threads may share
    it, forks may not. What it returns are queue offsets.

    Raises what a producer's `send` raises when it is refused, and nothing was stored: what can be no
    argument (ArgumentIllegal), a message too large (MessageTooLarge), no room (DiskFull), a topic that is not writable (NoPermission), a
    broker that was closed (ShuttingDown) or has ended (StoreError). Under SYNC_FLUSH it raises
    FlushDiskTimeout when the disk does not confirm in time, and under SYNC_MASTER FlushSlaveTimeout
    or SlaveNotAvailable when slaves do not, or are not there: then it is stored.
    """

    cdef LogAppender _log
    cdef Gate _gate
    cdef readonly QueueCursor queue
    cdef object _desk
    cdef Sleepers _sleepers
    cdef SleepCell _flushed  # None under ASYNC_FLUSH: nobody waits for the disk
    cdef OwnedCell _synced
    cdef int64_t _timeout_ns, _unflushed_max
    cdef bint _slaves  # they have to have it, too
    cdef object _last_tags, _last_keys  # the texts that _last_text was made of
    cdef bytes _last_text

    def __init__(self, LogAppender log not None, Gate gate not None, QueueCursor queue not None,
                 desk, Sleepers sleepers not None, SleepCell flushed, OwnedCell synced,
                 double timeout_s, int64_t unflushed_max, bint slaves=False):
        self._log, self._gate, self.queue, self._desk = log, gate, queue, desk
        self._sleepers, self._flushed, self._synced = sleepers, flushed, synced
        self._timeout_ns, self._unflushed_max = <int64_t>(timeout_s * 1e9), unflushed_max
        self._slaves = slaves
        self._last_text = b""

    @property
    def topic(self):
        return self.queue.topic

    @property
    def queue_id(self):
        return self.queue.queue_id

    def append(self, body, tags=None, keys=None, properties=None, bint wait=True):
        """Append one message; its queue offset.

        Args:
            body: bytes-like, at least one byte.
            keys: keys to find the message by, separated by spaces.
            properties: text by name. Those without a value are omitted: RocketMQ's format has none.
            wait: under SYNC_FLUSH, until it is on the disk, under SYNC_MASTER, until slaves have
                it; else see `wait`.
        """
        cdef Py_buffer view
        cdef int64_t offset
        cdef bytes text = self._last_text
        if (tags is not self._last_tags or keys is not self._last_keys
                or properties is not None):
            text = self._text(tags, keys, properties)
        if PyBytes_CheckExact(body):
            offset = self._put(
                <const uint8_t *>PyBytes_AS_STRING(body), len(<bytes>body), text)
        else:
            try:
                PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
            except (TypeError, BufferError) as error:
                raise self._desk.not_bodies(error, body) from None
            try:
                offset = self._put(<const uint8_t *>view.buf, view.len, text)
            finally:
                PyBuffer_Release(&view)
        if offset < 0:
            offset = self._desk.append_all(self.queue, [bytes(memoryview(body))], text)
        if self._flushed is not None:
            self._make_durable(wait)
        if self._slaves and wait:
            self._desk.wait_for_slaves()
        return offset

    def append_many(self, bodies, tags=None, keys=None, properties=None, bint wait=True):
        """Append messages that differ in their bodies only, all or none; a range of queue offsets.

        Together they must fit into a segment of the log.
        """
        cdef list given
        cdef bytes text = self._text(tags, keys, properties)
        cdef int64_t first = -1
        try:
            given = bodies if type(bodies) is list else list(bodies)
            if given and self._is_open():
                first = self._log._append_all(self.queue, given, text)
            if first < 0:
                copies = [bytes(memoryview(body)) for body in given]
        except (TypeError, BufferError) as error:
            raise self._desk.not_bodies(error, bodies) from None
        if first >= 0:
            self._log._publish_one(self.queue)
            self._wake()
        else:
            first = self._desk.append_all(self.queue, copies, text)
        if self._flushed is not None:
            self._make_durable(wait)
        if self._slaves and wait:
            self._desk.wait_for_slaves()
        return range(first, first + len(given))

    def wait(self, timeout_s=None):
        """Sleep until everything that was appended before is on the disk, and slaves have it where
        the broker is a SYNC_MASTER.

        Under ASYNC_FLUSH that comes with the next flush. Raises FlushDiskTimeout after the time,
        which is `syncFlushTimeout` if not given; FlushSlaveTimeout, SlaveNotAvailable.
        """
        self._desk.wait_until_flushed(timeout_s)

    cdef bytes _text(self, tags, keys, properties):
        cdef bytes text
        if properties is None and tags is self._last_tags and keys is self._last_keys:
            return self._last_text
        if isinstance(tags, str) and "||" in tags:
            self._desk.check_tag(tags)
        try:
            if properties is not None:
                return encode_properties(tags, keys, self._desk.checked(properties))
            text = encode_properties(tags, keys)
        except (TypeError, ValueError) as error:
            raise self._desk.not_properties(error, tags, keys, properties) from None
        self._last_tags, self._last_keys, self._last_text = tags, keys, text
        return text

    cdef bint _is_open(self) noexcept:
        """Whether nothing stands against appending; else the desk says what it is."""
        if self._gate._open[0] == 0 or self.queue.barred:
            return False
        return self._flushed is None or (
            self._log.segment_start + self._log._at
            - <int64_t>self._flushed._load() <= self._unflushed_max
        )

    cdef int64_t _put(self, const uint8_t *body, int64_t body_bytes, bytes text) except -2:
        """The queue offset, or -1 where the desk has to be asked."""
        cdef int64_t offset = self.queue.next_offset
        if not (self._is_open() and self._log._append_one(self.queue, body, body_bytes, text)):
            return -1
        self._log._publish_one(self.queue)
        self._wake()
        return offset

    cdef inline int _wake(self) except -1:
        """Under SYNC_FLUSH nobody may see it yet: who sleeps on the queue is woken later."""
        full_fence()
        if self._flushed is None:
            self._log._wake_one(self.queue)
        return self._log._wake()

    cdef int _make_durable(self, bint wait) except -1:
        """By this thread itself, if that is one call; else the flush process is asked."""
        cdef uint64_t end = load_relaxed64(self._log._wrote._word)
        if wait and self._sync() >= end:
            full_fence()
            self._log._wake_one(self.queue)
            return 0
        self._log._want()  # which has a barrier
        self._log._wake_one(self.queue)  # who then sleeps on `flushed`
        if wait and not self._sleepers._wait(self._flushed, end, self._timeout_ns):
            self._desk.not_flushed()
        return 0

    cdef uint64_t _sync(self) except? 0:
        """Below where it is durable now. Other threads may have come further meanwhile."""
        cdef uint64_t end
        try:
            end = self._log._sync()
        except OSError as error:
            self._desk.take_out_of_service(error)
            self._desk.not_flushed()
        self._synced._raise_to(end)
        self._synced._wake()
        return end
