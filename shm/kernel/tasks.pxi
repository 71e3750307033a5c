# --- tasks of an event loop: what many of them wait for is told to all, one behind the other ----------

cdef extern from "Python.h":
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    int PySet_Add(object found, object key) except -1
    int PySet_Discard(object found, object key) except -1

cdef enum:
    WAITED_FOR, TOLD, CANCELLED


@cython.freelist(256)
@cython.final
cdef class Awaited:
    """What a task waits for: asyncio's future, for less.

    A future calls its task back by way of the event loop, which takes a handle, a turn and 1.5 us.
    Who tells this has the task go on there and then, which only a callback of the loop may do, and
    no task.
    """

    cdef public bint _asyncio_future_blocking  # as a task asks for it
    cdef object _loop, _error, _message
    cdef TaskTransaction _begun  # what waits for its begin; None: it waits for its end
    cdef object _callback, _context
    cdef list _others  # callbacks beside that one, with their contexts
    cdef int _state

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        if self._state == WAITED_FOR:
            self._asyncio_future_blocking = True
            return self
        raise StopIteration(self.result())

    def get_loop(self):
        return self._loop

    def done(self):
        return self._state != WAITED_FOR

    def cancelled(self):
        return self._state == CANCELLED

    def result(self):
        if self._state == TOLD:
            if self._error is not None:
                raise self._error
            if self._begun is not None:
                # Here, and not where the answer is heard: a task may be cancelled in between.
                PySet_Add(self._begun._shared.open, self._begun._id)
            return self._begun
        from asyncio import CancelledError, InvalidStateError

        if self._state == CANCELLED:
            raise CancelledError() if self._message is None else CancelledError(self._message)
        raise InvalidStateError("nothing was told yet")

    def exception(self):
        if self._state == TOLD:
            return self._error
        return self.result()  # which raises

    def add_done_callback(self, callback, *, context=None):
        if context is None:
            from contextvars import copy_context

            context = copy_context()
        if self._state != WAITED_FOR:
            self._loop.call_soon(callback, self, context=context)
        elif self._callback is None:
            self._callback, self._context = callback, context
        else:
            if self._others is None:
                self._others = []
            self._others.append((callback, context))

    def remove_done_callback(self, callback):
        cdef list left = [each for each in self._callbacks() if each[0] != callback]
        cdef Py_ssize_t removed = len(self._callbacks()) - len(left)
        self._callback = self._context = self._others = None
        for each, context in left:
            self.add_done_callback(each, context=context)
        return removed

    def cancel(self, msg=None):
        if self._state != WAITED_FOR:
            return False
        self._state, self._message = CANCELLED, msg
        self._call_back_soon()
        return True

    cdef list _callbacks(self):
        cdef list found = [] if self._callback is None else [(self._callback, self._context)]
        return found + (self._others or [])

    cdef int _call_back_soon(self) except -1:
        for callback, context in self._callbacks():
            self._loop.call_soon(callback, self, context=context)
        self._callback = self._context = self._others = None
        return 0

    cdef int _tell(self, error) except -1:
        """Its task goes on. Raises what no task keeps to itself: KeyboardInterrupt, SystemExit."""
        cdef object callback = self._callback, context = self._context
        if self._state != WAITED_FOR:
            return 0
        self._state, self._error = TOLD, error
        if self._others is not None:
            return self._call_back_soon()
        if callback is None:
            return 0  # nobody has come to wait yet
        self._callback = self._context = None
        PyContext_Enter(context)
        try:
            callback(self)
        finally:
            PyContext_Exit(context)
        return 0


cdef class TaskTransactions:
    """What the transactions of an asyncio producer share.

    Args:
        open: takes the ids of those that are at work.
        part: makes a part of a transaction, of a topic and two offsets.
        bytes_max: the largest body of a transaction that begins together with others; 0: none does.
        timeout_s: for an end.
    """

    cdef public object loop  # that its tasks run in
    cdef public bint is_due  # that what begins and ends is sent
    cdef readonly Py_ssize_t gathered  # what has begun or ends since then
    cdef readonly Py_ssize_t waiting  # transactions whose tasks wait, or did until they were cancelled
    cdef readonly set open
    cdef dict _beginning, _ending  # by topic; by broker
    cdef Py_ssize_t _telling  # above 0: a task goes on now, so its loop is not closed
    cdef object _part
    cdef Py_ssize_t _bytes_max
    cdef double _timeout_s

    def __init__(self, set open not None, part, Py_ssize_t bytes_max, double timeout_s):
        self.open, self._part = open, part
        self._bytes_max, self._timeout_s = bytes_max, timeout_s
        self._beginning, self._ending = {}, {}

    def is_ready(self, topic):
        """Whether a message to that topic would block nothing now."""
        raise NotImplementedError

    def send_soon(self):
        """Something has begun, or ends, for the first time since all of that was taken."""
        raise NotImplementedError

    def take_beginning(self):
        """Those that begin, by topic."""
        found, self._beginning = self._beginning, {}
        self.is_due, self.gathered = False, 0
        return found

    def forget(self):
        """Their loop was closed: none of the tasks that began or ended one goes on."""
        self._beginning.clear()
        self._ending.clear()
        self.open.clear()
        self.is_due, self.gathered, self.waiting = False, 0, 0

    @property
    def ending(self):
        """Those that end, by broker."""
        return self._ending

    cdef int _put(self, dict waiting, str key, TaskTransaction transaction) except -1:
        """It waits among those of that key, to be sent."""
        cdef object some
        # A loop that was closed since has not come to send it.
        if not self.is_due or not self._telling and self.loop.is_closed():
            self.send_soon()
            self.is_due = True
        some = waiting.get(key)
        if some is None:
            waiting[key] = [transaction]
        else:
            (<list>some).append(transaction)
        self.gathered += 1
        return 0

    cdef Awaited _awaited(self, TaskTransaction begun):
        cdef Awaited awaited = Awaited.__new__(Awaited)
        awaited._loop, awaited._begun = self.loop, begun
        self.waiting += 1
        return awaited


cdef class TaskTransaction:
    """A transaction of an asyncio task, as long as it goes as most do: its first message is a body
    alone and begins together with others', there is no second one, and its block ends it.

    All else is its subclass's: `_begin_apart` takes what is no such message, `_enter` and `_leave`
    are awaited where it goes otherwise.
    """

    cdef public TaskTransactions _shared
    cdef public str _id, _broker
    cdef public object _ended  # how, or how it was to be; None: not yet
    cdef public object _first  # a message that begins apart from others, until it is entered
    cdef public bint _failed  # a message may be missing
    cdef public Py_ssize_t _bytes  # of bodies
    cdef public double _deadline  # of its end; time.monotonic()
    cdef public int _attempts
    cdef str _topic
    cdef bytes _body
    cdef bint _is_entered
    cdef int64_t _queue_offset, _physical_offset
    cdef list _all_parts  # None: there is the one
    cdef Awaited _awaited  # what its task waits for

    def __cinit__(self):
        self._id = ""

    def __init__(self, TaskTransactions shared not None, topic, body, dict options not None):
        self._shared = shared
        if (options or not PyBytes_CheckExact(body) or not 0 < len(<bytes>body) <= shared._bytes_max
                or type(topic) is not str
                or topic not in shared._beginning and not shared.is_ready(topic)):
            self._begin_apart(topic, body, options)
            return
        self._topic, self._body = topic, body

    @property
    def _parts(self):
        """The messages that are stored."""
        if self._all_parts is None:
            self._all_parts = [] if self._topic is None else [
                self._shared._part(self._topic, self._queue_offset, self._physical_offset)]
        return self._all_parts

    def __aenter__(self):
        if self._body is None or self._is_entered:
            return self._enter()
        self._is_entered = True
        self._shared._put(self._shared._beginning, self._topic, self)
        self._awaited = self._shared._awaited(self)
        return self._awaited

    def __aexit__(self, kind, error, traceback):
        if kind is None and self._ended is None and not self._failed and self._id:
            return self._end_now(True)
        return self._leave(error)

    def _end_now(self, bint commit):
        """Have its end sent, which is awaited."""
        self._ended = commit
        self._deadline = monotonic_ns() / 1e9 + self._shared._timeout_s
        self._end_again()
        self._awaited = self._shared._awaited(None)
        return self._awaited

    cdef int _go_on(self, error) except -1:
        """Its task does, once."""
        cdef Awaited awaited = self._awaited
        if awaited is not None:
            self._awaited = None
            self._shared.waiting -= 1
            awaited._tell(error)
        return 0

    def _end_again(self):
        """One more attempt."""
        self._attempts += 1
        self._shared._put(self._shared._ending, self._broker, self)


def have_begun(list transactions not None, list ids not None, Py_ssize_t index, str broker not None,
          str topic not None, int64_t queue_offset, list physical_offsets not None):
    """The first messages of these are stored, from `index` of a batch on.

    Raises ValueError where an id or a place is missing.
    """
    cdef TaskTransaction each
    cdef Py_ssize_t end = index + len(transactions)
    if index < 0 or end > len(ids) or end > len(physical_offsets):
        raise ValueError(f"messages {index} to {end}, but {len(ids)} ids and "
                         f"{len(physical_offsets)} places")
    for each in transactions:
        each._id, each._broker, each._topic = ids[index], broker, topic
        each._bytes, each._body = len(each._body), None
        each._queue_offset, each._physical_offset = queue_offset + index, physical_offsets[index]
        index += 1


def bodies_of(list transactions not None):
    """Of their first messages, which have not left yet."""
    cdef TaskTransaction each
    return [each._body for each in transactions]


def end_columns(list transactions not None, Py_ssize_t parts_max):
    """How many of these ends fit into a command, and its columns. The first one always does."""
    cdef TaskTransaction each
    cdef Py_ssize_t taken = 0, parts
    cdef list ids = [], commits = [], counts = [], topic_of = [], numbers = [], places = []
    cdef dict topics = {}
    for each in transactions:
        parts = 1 if each._all_parts is None else len(each._all_parts)
        if taken and len(numbers) + parts > parts_max:
            break
        taken += 1
        ids.append(each._id)
        commits.append(each._ended)
        if each._all_parts is None:
            counts.append(1)
            topic_of.append(topics.setdefault(each._topic, len(topics)))
            numbers.append(each._queue_offset)
            places.append(each._physical_offset)
            continue
        counts.append(len(each._all_parts))
        for part in each._all_parts:
            topic_of.append(topics.setdefault(part.topic, len(topics)))
            numbers.append(part.queue_offset)
            places.append(part.physical_offset)
    return taken, (ids, commits, counts, list(topics), topic_of, numbers, places)


def are_over(list transactions not None):
    """Nothing more is tried with these ends."""
    cdef TaskTransaction each
    for each in transactions:
        PySet_Discard(each._shared.open, each._id)


def let_go_on(list transactions not None, Py_ssize_t start, Py_ssize_t stop, error=None):
    """The tasks that wait for these go on: in the event loop, and in no task."""
    cdef Py_ssize_t index
    cdef TaskTransaction each
    cdef TaskTransactions shared
    for index in range(max(start, 0), min(stop, len(transactions))):
        each = transactions[index]
        shared = each._shared
        shared._telling += 1
        try:
            each._go_on(error)
        finally:
            shared._telling -= 1
