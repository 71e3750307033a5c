"""What every actor of the family is built on: a pykka actor whose mailbox is made of sockets.

There is one loop, pykka's own. Its inbox waits for everything an actor can be woken by (commands
on its ROUTER sockets, pykka messages from its own process, its doorbell, answers on sockets of its
own, a timer) and hands each on as a message. Whatever the sockets hold is drained in one go and
handed over as one `Drained`, so that a hot actor can work through a group of commands at once.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import pykka
import zmq
from pykka._envelope import Envelope

from cometmq.actors.lines import LineListener
from cometmq.actors.request import Frames, Payload, Request, request_from
from cometmq.protocol import frames
from cometmq.protocol.channel import ZERO_COPY_BYTES
from cometmq.protocol.commands import (
    Command,
    Done,
    Failed,
    Finish,
    GetStatistics,
    Ping,
    Pong,
    Statistics,
)
from cometmq.protocol.errors import BadRequest, CometError, UnknownCommand

log = logging.getLogger(__name__)

VERSION: Final = "0.1.0"
DRAIN_COUNT: Final = 256  # commands taken from the sockets before they are worked on
DRAIN_BYTES: Final = 8 * 1_048_576
BACKLOG: Final = 512
MAILBOX_COUNT: Final = 1_000  # commands waiting in a socket before it stops reading

_MORE: Final = zmq.NOBLOCK | zmq.SNDMORE


class RouterRequest(Request):
    """It came through a ROUTER."""

    __slots__ = ("_identity", "_socket")

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        identity: zmq.Frame,
        internal: bool,
        request_id: int,
        command: Command,
        payload: Frames,
    ) -> None:
        super().__init__(request_id, command, payload, internal)
        self._socket = socket
        self._identity = identity

    def _send(self, head: bytes, payload: Payload) -> None:
        send, last = self._socket.send, len(payload)
        try:
            send(self._identity, zmq.NOBLOCK | zmq.SNDMORE)
            send(head, _MORE if last else zmq.NOBLOCK)
            for index, frame in enumerate(payload, 1):
                copy = len(frame) < ZERO_COPY_BYTES
                send(frame, _MORE if index < last else zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            log.debug("an answer was not sent: %s", error)

    @property
    def sender(self) -> bytes:
        return bytes(self._identity.buffer)


class Drained:
    """What the sockets held: the requests, oldest first."""

    __slots__ = ("requests",)

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests


class DoorbellRang:
    """A counter this process waits for has moved (or a sleeper was woken for nothing)."""


class TimerDue:
    """The inbox's time has come."""


class Readable:
    """A socket or descriptor that the actor registered has something to read."""

    __slots__ = ("source",)

    def __init__(self, source: Any) -> None:
        self.source = source


class Call:
    """Something to do in the actor's thread: how a result comes home from another thread."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action


class Timer:
    """Something to do in the actor's thread when its time has come."""

    __slots__ = ("action", "due", "interval_s")

    def __init__(self, due: float, interval_s: float | None, action: Callable[[], None]) -> None:
        self.due = due  # time.monotonic()
        self.interval_s = interval_s  # None: once
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It will not be called; its place is cleared when its time comes."""
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due


class SocketInbox:
    """A pykka inbox that sleeps in zmq_poll."""

    def __init__(self) -> None:
        self._local: deque[Envelope[Any]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._routers: dict[zmq.Socket[bytes], bool] = {}  # whether only the family may come
        self.lines: LineListener | None = None
        self._lines_fd = -1
        self._others: dict[Any, object] = {}
        self._poll_list: list[tuple[Any, int]] = [(self._wake, zmq.POLLIN)]
        self.wake_at: float | None = None  # time.monotonic() of the next TimerDue

    # --- what it listens to; called in the actor's thread or before it starts ---

    def bind(self, endpoint: str, *, internal: bool) -> str:
        """Open a ROUTER there; the address as it became (a port of 0 is chosen)."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.linger = 200  # answers given just before the end still leave
        socket.backlog = BACKLOG
        socket.maxmsgsize = frames.FRAME_MAX
        socket.rcvhwm = MAILBOX_COUNT
        socket.sndhwm = MAILBOX_COUNT
        if internal:
            socket.set(zmq.IPC_FILTER_UID, os.getuid())
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._routers[socket] = internal
        self._poll_list.append((socket, zmq.POLLIN))
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def listen_for_lines(self, name: str) -> None:
        """Also take clients of this machine who come to that address; see lines.py."""
        self.lines = LineListener(name)
        self._lines_fd = self.lines.fd
        self._poll_list.append((self._lines_fd, zmq.POLLIN))

    def listen_to_doorbell(self, fd: int) -> None:
        self._others[fd] = DoorbellRang()
        self._poll_list.append((fd, zmq.POLLIN))

    def listen_to(self, source: Any) -> None:
        """A socket or a descriptor; `on_readable` is called when it can be read."""
        self._others[source] = Readable(source)
        self._poll_list.append((source, zmq.POLLIN))

    def forget(self, source: Any) -> None:
        self._others.pop(source, None)
        self._poll_list = [entry for entry in self._poll_list if entry[0] is not source]

    def close(self) -> None:
        for socket in self._routers:
            socket.close()
        self._routers.clear()
        if self.lines is not None:
            self.lines.close()
            self.lines = None
        self._poll_list = [(self._wake, zmq.POLLIN)]

    def __del__(self) -> None:
        os.close(self._wake)  # not before: somebody may still put something in

    # --- pykka's interface ---

    def put(self, envelope: Envelope[Any]) -> None:
        self._local.append(envelope)
        os.eventfd_write(self._wake, 1)

    def empty(self) -> bool:
        return not self._local

    def get(self) -> Envelope[Any]:
        """The next message; sleeps until there is one."""
        while True:
            if self._local:
                return self._local.popleft()
            timeout_ms = -1
            if self.wake_at is not None:
                timeout_ms = max(0, int((self.wake_at - time.monotonic()) * 1000 + 0.999))
            requests: list[Request] = []
            for source, _ in zmq.zmq_poll(self._poll_list, timeout_ms):
                self._take(source, requests)
            if requests:
                self._local.append(Envelope(Drained(requests)))
            if self.wake_at is not None and time.monotonic() >= self.wake_at:
                self.wake_at = None
                self._local.append(Envelope(TimerDue()))

    def _take(self, source: Any, requests: list[Request]) -> None:
        if source == self._lines_fd and self.lines is not None:
            requests += self.lines.drain(DRAIN_COUNT)
            return
        if source == self._wake:
            os.eventfd_read(self._wake)
            return
        other = self._others.get(source)
        if other is None:
            requests += self._drain(source, self._routers[source])
            return
        if isinstance(other, DoorbellRang):
            os.eventfd_read(source)
        self._local.append(Envelope(other))

    def _drain(self, socket: zmq.Socket[bytes], internal: bool) -> list[Request]:
        """What the socket holds; it has been polled, so there is at least one message."""
        requests: list[Request] = []
        taken_bytes = 0
        while len(requests) < DRAIN_COUNT and taken_bytes < DRAIN_BYTES:
            try:
                parts: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            head = parts[1].buffer if len(parts) > 1 else memoryview(b"")
            make = partial(RouterRequest, socket, parts[0], internal)
            request = request_from(make, head, parts[2:])
            if request is not None:
                requests.append(request)
                taken_bytes += sum([len(frame) for frame in request.payload])
            # Cheaper than to be told by an exception that there is no more.
            if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
        return requests


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class ServiceActor(pykka.ThreadingActor):
    """A command `XyzAbc` is handled by `on_xyz_abc(command, request)`.

    The handler returns the answer, or None if it answers later through `request.reply`. A
    CometError that it raises becomes the answer. Any other exception is answered as an error of
    ours, logged with its traceback, and the actor lives on; but an AssertionError, a broken
    invariant, ends the process, and the supervisor starts it again.

    Writes, wakes on: see each actor.

    Args:
        bind: where it listens from the start: (address, whether only the family may come there).
            What became of them (a port of 0 or * is chosen) stands in `addresses`, in order.
    """

    role: ClassVar[str] = "service"
    # What only the family itself may say; from elsewhere it is an UnknownCommand.
    internal_commands: ClassVar[tuple[type[Command], ...]] = (Finish,)
    # What may be answered later, through the request: not to be asked within the process.
    answered_later: ClassVar[tuple[type[Command], ...]] = ()

    inbox: SocketInbox

    def __init__(self, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__()
        self.inbox = self.actor_inbox  # type: ignore[assignment]  # our own, from below
        self._handlers: dict[type[Command], Callable[[Any, Request], Command | None]] = {}
        self._timers: list[Timer] = []  # a heap
        self.started = threading.Event()  # on_start has returned, or failed with `start_error`
        self.start_error: Exception | None = None
        self.ended = threading.Event()  # the loop is over, its sockets are closed
        self.addresses = tuple(
            self.inbox.bind(endpoint, internal=internal) for endpoint, internal in bind
        )

    @staticmethod
    def _create_actor_inbox() -> Any:
        return SocketInbox()

    def _actor_loop(self) -> None:
        try:
            super()._actor_loop()
        finally:
            self.ended.set()

    def _actor_loop_setup(self) -> None:
        try:
            self.on_start()
        except Exception as error:
            self.start_error = error
            self.actor_stopped.set()
        finally:
            self.started.set()

    # --- for subclasses ---

    def every(self, interval_s: float, action: Callable[[], None]) -> Timer:
        """Call `action` in this actor's thread again and again."""
        return self._add(Timer(time.monotonic() + interval_s, interval_s, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Call `action` once, unless the timer is cancelled before."""
        return self._add(Timer(time.monotonic() + delay_s, None, action))

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call `action` in this actor's thread; any thread may ask for it. Nothing if it ended."""
        with contextlib.suppress(pykka.ActorDeadError):
            self.actor_ref.tell(Call(action))

    def on_doorbell(self) -> None:
        """A counter that this actor armed a wake-up for has moved."""

    def on_readable(self, source: Any) -> None:
        """What was registered with `inbox.listen_to` can be read."""

    def on_requests(self, requests: list[Request]) -> None:
        """Everything the sockets held. The default handles one after the other."""
        for request in requests:
            self.handle(request)

    def statistics(self) -> dict[str, int | float | str]:
        return {}

    def settle(self) -> None:
        """Bring the work to its orderly end; called on Finish, before it is answered."""

    def on_broken_invariant(self) -> None:
        """Nothing that this actor knows can be relied on: it ends at once, with its process."""
        os._exit(70)

    # --- the loop's side ---

    def on_receive(self, message: Any) -> Any:
        try:
            return self._receive(message)
        except AssertionError:
            log.critical("%s: broken invariant\n%s", self.role, traceback.format_exc())
            self.on_broken_invariant()

    def _receive(self, message: Any) -> Any:
        if isinstance(message, Drained):
            self.on_requests(message.requests)
        elif isinstance(message, DoorbellRang):
            self.on_doorbell()
        elif isinstance(message, TimerDue):
            self._run_timers()
        elif isinstance(message, Readable):
            self.on_readable(message.source)
        elif isinstance(message, Call):
            self._run(message.action)
        elif isinstance(message, self.answered_later):
            raise UnknownCommand(f"{type(message).__name__} is taken through a socket only")
        elif isinstance(message, Finish):
            self.settle()
            self.stop()
            return Done()
        elif isinstance(message, Command):
            return self._answer(message, None)
        else:
            kind = type(message).__name__
            raise UnknownCommand(f"{type(self).__name__} takes commands, not {kind}")
        return None

    def handle(self, request: Request) -> None:
        """Carry out one request and answer it."""
        try:
            if isinstance(request.command, self.internal_commands) and not request.internal:
                raise UnknownCommand(f"{type(request.command).__name__} is not taken from outside")
            answer = self._answer(request.command, request)
        except CometError as error:
            log.debug("%s refused: %s", type(request.command).__name__, error)
            request.fail(error)
        except AssertionError:
            raise
        except Exception as error:
            log.exception("%s failed in %s", type(request.command).__name__, self.role)
            request.reply(Failed(CometError.code, f"{type(error).__name__}: {error}"))
        else:
            if answer is not None:
                request.reply(answer)

    def _answer(self, command: Command, request: Request | None) -> Command | None:
        kind = type(command)
        handler = self._handlers.get(kind)
        if handler is None:
            handler = getattr(self, f"on_{_snake(kind.__name__)}", None)
            if handler is None:
                raise UnknownCommand(f"{self.role} does not take {kind.__name__}")
            self._handlers[kind] = handler
        return handler(command, request)  # type: ignore[arg-type]  # None: asked in-process

    def _add(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, timer)
        self._set_alarm()
        return timer

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            timer = heapq.heappop(self._timers)
            action = timer.action
            if action is None:
                continue
            if timer.interval_s is not None:
                timer.due = now + timer.interval_s
                heapq.heappush(self._timers, timer)
            self._run(action)
        self._set_alarm()

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CometError as error:
            log.warning("%s: %s", self.role, error)

    def _set_alarm(self) -> None:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        self.inbox.wake_at = self._timers[0].due if self._timers else None

    # --- what every actor answers ---

    def on_ping(self, _command: Ping, _request: Request) -> Command:
        return Pong(self.role, os.getpid(), VERSION)

    def on_get_statistics(self, _command: GetStatistics, _request: Request) -> Command:
        return Statistics(self.role, self.statistics())

    def on_finish(self, _command: Finish, _request: Request) -> Command:
        try:
            self.settle()
        finally:
            self.stop()  # also when it could not be settled: nobody waits for a second try
        return Done()

    def on_stop(self) -> None:
        """pykka's hook, in the actor's thread, after the last message."""
        self.inbox.close()

    def on_failure(self, kind: Any, error: Any, trace: Any) -> None:
        """pykka's hook: an exception that nobody was there to be told of ends the actor."""
        log.critical("%s dies of an exception", self.role, exc_info=(kind, error, trace))
        self.inbox.close()


__all__ = ["VERSION", "BadRequest", "Payload", "Request", "ServiceActor", "SocketInbox", "Timer"]
