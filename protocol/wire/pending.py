"""Pending requests: those of a channel that have not been answered yet."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError
from cometmq.protocol.frames import Frame
from cometmq.protocol.wire.line import Line

log = logging.getLogger(__name__)


class Asked(Protocol):
    """The channel that a request went by."""

    @property
    def name(self) -> str: ...
    def wait(self, pending: Pending, timeout_s: float, *, keep: bool = False) -> bool: ...
    def forget(self, pending: Pending) -> bool: ...
    def give_up(self, pending: Pending, what: str, timeout_s: float) -> CometError: ...


class Limit(NamedTuple):
    """Time limit of a request without an answer.

    Args:
        what: the command's name, for the error.
        timeout_s: the time limit in seconds.
        due: end of the time limit, by time.monotonic().
        connect_s: part of the time that may pass before it is handed to a connection.
        connect_by: end of that part, by time.monotonic().
    """

    what: str
    timeout_s: float
    due: float
    connect_s: float
    connect_by: float

    @classmethod
    def of(
        cls, command: Command, timeout_s: float | None, connect_s: float | None = None
    ) -> Self | None:
        """Return a limit that begins now; None without `timeout_s`."""
        if timeout_s is None:
            return None
        connect_s = timeout_s if connect_s is None else min(connect_s, timeout_s)
        now = time.monotonic()
        what = type(command).__name__
        return cls(what, timeout_s, now + timeout_s, connect_s, now + connect_s)


class Pending:
    """What a channel knows of one request. Its fields are set before `done` is."""

    __slots__ = (
        "_event",
        "_on_done",
        "answer",
        "channel",
        "done",
        "error",
        "handed_over",
        "limit",
        "line",
        "never_sent",
        "payload",
        "request_id",
    )

    def __init__(
        self,
        channel: Asked,
        request_id: int,
        on_done: Callable[[Pending], None] | None,
        limit: Limit | None = None,
    ) -> None:
        self.channel = channel
        self.request_id = request_id
        self.answer: Command | None = None
        self.payload: Sequence[Frame] = ()
        self.error: CometError | None = None
        self.line: Line | None = None  # that the answer will come by
        self.handed_over = False  # to a connection; set under the channel's lock
        self.never_sent = False  # and given up
        self.done = False
        self.limit = limit
        self._event: threading.Event | None = None
        self._on_done = on_done

    @property
    def due(self) -> float:
        """Time.monotonic() at which it is given up, as of now. Only for one with a limit."""
        assert self.limit is not None
        return self.limit.due if self.is_sent else self.limit.connect_by

    @property
    def is_sent(self) -> bool:
        """Whether the other side may have received it."""
        return self.handed_over or self.line is not None

    def event(self) -> threading.Event:
        event = self._event
        if event is None:
            event = self._event = threading.Event()
        if self.done:  # settled in between
            event.set()
        return event

    def settle(
        self, answer: Command | None, payload: Sequence[Frame], error: CometError | None
    ) -> None:
        """Never raises: the thread that receives has others to settle as well."""
        self.answer, self.payload, self.error = answer, payload, error
        self.done = True
        if self._event is not None:
            self._event.set()
        on_done, self._on_done = self._on_done, None  # it usually refers to this object
        if on_done is not None:
            try:
                on_done(self)
            except Exception:
                log.exception("what was to be done with an answer of %s failed", self.channel.name)

    def result(self) -> tuple[Command, Sequence[Frame]]:
        """The answer and its payload; raises the error that was answered."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return frames.raise_if_failed(self.answer), self.payload


Settled = tuple[Pending, Command | None, Sequence[Frame], CometError | None]


class PendingRequests:
    """Unanswered requests by id. Only the thread that removes a request settles it.

    Few have a limit: those that the other side holds.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Pending] = {}
        self._limited: dict[int, Pending] = {}  # those with a limit
        self._limited_lock = threading.Lock()  # guards the next field
        self._next_due = math.inf  # no limit ends before this time

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def add(self, pending: Pending) -> None:
        self._by_id[pending.request_id] = pending
        if pending.limit is not None:
            self._limited[pending.request_id] = pending

    def take(self, request_id: int) -> Pending | None:
        self._limited.pop(request_id, None)
        return self._by_id.pop(request_id, None)

    def watch(self, pending: Pending) -> bool:
        """Return whether this request's limit ends before all others: then a thread that sleeps
        until the next limit has to be woken."""
        if pending.limit is None:
            return False
        with self._limited_lock:
            is_first = pending.due < self._next_due
            self._next_due = min(self._next_due, pending.due)
        return is_first

    @property
    def has_overdue(self) -> bool:
        """Whether `give_up_overdue` may have something to do."""
        return self._next_due <= time.monotonic()

    def look_in_s(self, other_s: float | None) -> float | None:
        """Return the seconds until `give_up_overdue` is due, at most `other_s`; None: never."""
        if self._next_due == math.inf:
            return other_s
        due_in_s = max(0.0, self._next_due - time.monotonic())
        return due_in_s if other_s is None else min(other_s, due_in_s)

    def give_up_overdue(self) -> None:
        """Settle requests whose limit has ended. The caller holds no lock."""
        now = time.monotonic()
        if now < self._next_due:
            return
        with self._limited_lock:
            dues = [(each.due, each) for each in list(self._limited.values())]
            self._next_due = min((due for due, _ in dues if due > now), default=math.inf)
        for due, pending in dues:
            limit = pending.limit
            if due > now or limit is None or self.take(pending.request_id) is None:
                continue  # not overdue, or answered by now
            timeout_s = limit.timeout_s if pending.is_sent else limit.connect_s
            error = pending.channel.give_up(pending, limit.what, timeout_s)
            pending.settle(None, (), error)

    def take_all(self, wanted: Callable[[Pending], bool]) -> list[Pending]:
        """Those that are wanted, but for what another thread takes in this moment."""
        found = [each for each in list(self._by_id.values()) if wanted(each)]
        return [each for each in found if self.take(each.request_id) is not None]

    def match(
        self, head: bytes | memoryview, payload: Sequence[Frame], settled: list[Settled]
    ) -> None:
        """Add what an answer settles; nothing if that timed out meanwhile, or was told and not
        asked."""
        pending = self.take(frames.request_id_of(head))
        if pending is None:
            return
        try:
            settled.append((pending, frames.unpack(head)[1], payload, None))
        except CometError as error:
            settled.append((pending, None, [], error))


def settle_all(settled: Iterable[Settled]) -> None:
    """Not under a lock: what is called then may ask again."""
    for pending, answer, payload, error in settled:
        pending.settle(answer, payload, error)
