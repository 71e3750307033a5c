"""The mailbox of an actor: sockets, doorbell, timers, and what comes from its own process.

It waits for everything an actor can be woken by and hands each on as a message. Whatever the
sockets hold is drained in one go and handed over as one `Drained`, so that a hot actor can work
through a group of commands at once. What the doorman (access.py) refuses no actor ever sees.

An actor may post work to itself without end. So between two looks at its sockets and timers it is
handed no more than what was there at the first: whoever asks is heard after one step of its work.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import zmq
from pykka._envelope import Envelope

from cometmq.actors.runtime.access import ANYBODY, FAMILY, NO_TAG, CommitRun, Doorman, Principal
from cometmq.actors.runtime.connections import ConnectionLimits, Connections, Traffic, wire_bytes
from cometmq.actors.runtime.lines import LineListener
from cometmq.actors.runtime.request import (
    RUN_BYTES,
    Frames,
    Payload,
    Request,
    RequestRun,
    request_from,
)
from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.dealer import ZERO_COPY_BYTES
from cometmq.shm.kernel._kernel import run_length

log = logging.getLogger(__name__)

DRAIN_COUNT: Final = 256  # commands taken from the sockets before they are worked on
DRAIN_BYTES: Final = 8 * 1_048_576
BACKLOG: Final = 512
LINGER_MS: Final = 1_000  # for the last answers, on a busy machine as well
MAILBOX_COUNT: Final = 1_000  # commands waiting in a socket before it stops reading

# Plain numbers: pyzmq's enumerations take their time, and so does what it has around `send`:
# for a small frame as much as the sending.
_NO_WAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_IN: Final = int(zmq.POLLIN)
_SOURCE: Final = int(zmq.SRCFD)
_send: Final = zmq.backend.Socket.send


class _Message:
    """One that lies in a ROUTER. Raises zmq.Again where there is none.

    Args:
        door: where it counts as taken up; None: nowhere.
    """

    __slots__ = ("head", "identity", "payload", "size", "traffic")

    def __init__(self, socket: zmq.Socket[bytes], door: Connections | None) -> None:
        self.identity: bytes = socket.recv(_NO_WAIT)
        head: zmq.Frame = socket.recv(_NO_WAIT, copy=False)  # what follows the first is there
        self.head = head.bytes
        self.payload: Frames = ()
        self.traffic: Traffic | None = None
        parts = [head]
        if head.more:
            while parts[-1].more:
                parts.append(socket.recv(_NO_WAIT, copy=False))
            self.payload = parts[1:]
        self.size = wire_bytes(parts)
        if door is not None:
            self.traffic = door.traffic_of(head.get(_SOURCE))
            self.traffic.handed += self.size


class RouterRequest(Request):
    """It came through a ROUTER; from a client, whose connections are watched, through a door."""

    __slots__ = ("_door", "_identity", "_socket", "_traffic")

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        identity: bytes,
        principal: Principal,
        door: Connections | None,
        traffic: Traffic | None,
        request_id: int,
        command: Command,
        payload: Frames,
    ) -> None:
        super().__init__(request_id, command, payload, principal)
        self._socket = socket
        self._identity = identity
        self._door = door
        self._traffic = traffic

    def _send(self, head: bytes, payload: Payload) -> None:
        socket, last = self._socket, len(payload)
        if self._traffic is not None:
            self._traffic.given += wire_bytes((head, *payload))
        try:
            _send(socket, self._identity, _MORE)
            _send(socket, head, _MORE if last else _NO_WAIT)
            for index, frame in enumerate(payload, 1):
                copy = len(frame) < ZERO_COPY_BYTES
                socket.send(frame, _MORE if index < last else _NO_WAIT, copy=copy)
        except zmq.ZMQError as error:
            log.debug("an answer was not sent: %s", error)

    @property
    def sender(self) -> bytes:
        return self._identity

    def has_room(self) -> bool:
        if self._door is None or self._traffic is None:
            return True
        return self._door.has_room(self._traffic)


_DONE_BYTES: Final = wire_bytes((frames.done_head(bytes(frames.HEAD.size)),))


class RouterRun(RequestRun):
    """Commits that came through a ROUTER, by any connections."""

    __slots__ = ("_door", "_doorman", "_messages", "_socket")

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        messages: list[_Message],
        principal: Principal,
        door: Connections | None,
        doorman: Doorman,
    ) -> None:
        super().__init__(0, CommitRun([each.head for each in messages], 0), (), principal)
        self._socket = socket
        self._messages = messages
        self._door = door
        self._doorman = doorman

    def one(self, index: int) -> Request | None:
        message = self._messages[index]
        make = partial(self._way_to, message)
        return request_from(make, message.head, (), self._doorman, self.principal)

    def _way_to(
        self, message: _Message, request_id: int, command: Command, payload: Frames
    ) -> Request:
        return RouterRequest(
            self._socket, message.identity, self.principal, self._door, message.traffic,
            request_id, command, payload,
        )  # fmt: skip

    def conclude_some(self, start: int, end: int, error: CometError | None) -> None:
        for message in self._messages[start:end]:
            if error is None:
                self._done(message)
            else:
                request_id = frames.request_id_of(message.head)
                self._way_to(message, request_id, self.command, ()).fail(error)

    def _done(self, message: _Message) -> None:
        """As `reply` would, for less: it is done for each of many."""
        answer = frames.done_head(message.head)
        if message.traffic is not None:
            message.traffic.given += _DONE_BYTES
        try:
            _send(self._socket, message.identity, _MORE)
            _send(self._socket, answer, _NO_WAIT)
        except zmq.ZMQError as error:
            log.debug("an answer was not sent: %s", error)

    @property
    def sender(self) -> bytes:
        return self._messages[0].identity

    @property
    def senders(self) -> Iterable[bytes]:
        return [message.identity for message in self._messages]


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

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action


class SocketInbox:
    """A pykka inbox that sleeps in zmq_poll."""

    def __init__(self) -> None:
        self._local: deque[Envelope[Any]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.doorman = Doorman("an inbox", ())  # the actor sets its own
        self._routers: dict[zmq.Socket[bytes], Principal] = {}  # who comes there
        self._doors: dict[zmq.Socket[bytes], Connections] = {}  # of those where clients come
        self.lines: LineListener | None = None
        self._lines_fd = -1
        self._others: dict[Any, object] = {}
        self._poll_list: list[tuple[Any, int]] = [(self._wake, zmq.POLLIN)]
        self._turn = 0  # messages to hand out before the sockets are looked at again
        self._rest: list[Request] = []  # of a drain; until they are done clients have to wait
        self.wake_at: float | None = None  # time.monotonic() of the next TimerDue
        self.heard_all_at = time.monotonic()  # then nothing was left waiting in a ROUTER
        self._left_some = False

    # --- what it listens to; called in the actor's thread or before it starts ---

    def bind(self, endpoint: str, *, internal: bool, limits: ConnectionLimits | None = None) -> str:
        """Open a ROUTER there; the address as it became (a port of 0 is chosen).

        Args:
            limits: of a TCP port of clients, if not the defaults.
        """
        limits = limits or ConnectionLimits()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.linger = LINGER_MS  # answers given just before the end still leave
        socket.backlog = BACKLOG
        socket.maxmsgsize = frames.FRAME_MAX
        socket.rcvhwm = MAILBOX_COUNT
        socket.sndhwm = MAILBOX_COUNT
        if internal:
            socket.set(zmq.IPC_FILTER_UID, os.getuid())
        socket.handshake_ivl = limits.handshake_ms
        door = None
        if not internal and endpoint.startswith("tcp://"):
            door = Connections(socket, limits)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            _shut(socket, door)
            raise
        address = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if door is not None:
            self._doors[socket] = door
            door.start(address)
        self._routers[socket] = FAMILY if internal else ANYBODY
        self._poll_list.append((socket, zmq.POLLIN))
        return address

    def listen_for_lines(self, name: str) -> None:
        """Also take clients of this machine who come to that address; see lines.py."""
        self.lines = LineListener(name, self.doorman)
        self._lines_fd = self.lines.fd
        self._poll_list.append((self._lines_fd, zmq.POLLIN))

    def listen_to_doorbell(self, fd: int) -> None:
        self._others[fd] = DoorbellRang()
        self._poll_list.append((fd, zmq.POLLIN))

    def listen_to(self, source: Any) -> None:
        """A socket or a descriptor; `on_readable` is called when it can be read."""
        self._others[source] = Readable(source)
        self._poll_list.append((source, zmq.POLLIN))

    def is_listening_to(self, source: Any) -> bool:
        return source in self._others

    def forget(self, source: Any) -> None:
        self._others.pop(source, None)
        self._poll_list = [entry for entry in self._poll_list if entry[0] != source]

    def close(self) -> None:
        for socket in self._routers:
            _shut(socket, self._doors.pop(socket, None))
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
        while not self._turn:
            self._look()
        self._turn -= 1
        return self._local.popleft()

    # --- looking around ---

    def hold_back(self, requests: list[Request]) -> None:
        """Hand these over again after a look at everything but clients, who have to wait."""
        self._rest += requests

    def take_rest(self) -> list[Request]:
        rest, self._rest = self._rest, []
        return rest

    def _look(self) -> None:
        """At what has come; sleeps while there is nothing to be done."""
        requests: list[Request] = []
        polled = self._without_clients() if self._rest else self._poll_list
        self._left_some = bool(self._rest)
        for source, _ in zmq.zmq_poll(polled, self._sleep_ms()):
            self._take(source, requests)
        if not self._left_some:
            self.heard_all_at = time.monotonic()
        if self._rest:
            requests = self._not_ahead_of_their_own(requests)
        if requests:
            self._local.append(Envelope(Drained(requests)))
        if self._rest:
            self._local.append(Envelope(Drained(self.take_rest())))
        if self.wake_at is not None and time.monotonic() >= self.wake_at:
            self.wake_at = None
            self._local.append(Envelope(TimerDue()))
        self._turn = len(self._local)

    def _not_ahead_of_their_own(self, requests: list[Request]) -> list[Request]:
        """Those of others; whoever waits with a request waits with later ones behind it."""
        waiting = {sender for request in self._rest for sender in request.senders}
        others: list[Request] = []
        for request in requests:
            if waiting.isdisjoint(request.senders):
                others.append(request)
            else:
                self._rest.append(request)
                waiting.update(request.senders)
        return others

    def _sleep_ms(self) -> int:
        if self._local or self._rest:
            return 0
        if self.wake_at is None:
            return -1
        return max(0, int((self.wake_at - time.monotonic()) * 1000 + 0.999))

    def _without_clients(self) -> list[tuple[Any, int]]:
        return [
            (source, events)
            for source, events in self._poll_list
            if source != self._lines_fd and self._routers.get(source, FAMILY).is_family
        ]

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

    def statistics(self) -> dict[str, int]:
        """Of the connections of clients."""
        return {key: n for door in self._doors.values() for key, n in door.statistics().items()}

    def _drain(self, socket: zmq.Socket[bytes], principal: Principal) -> list[Request]:
        """What the socket holds; it has been polled, so there is at least one message."""
        door = self._doors.get(socket)
        messages: list[_Message] = []
        taken_bytes = 0
        while len(messages) < DRAIN_COUNT and taken_bytes < DRAIN_BYTES:
            try:
                messages.append(_Message(socket, door))
            except zmq.Again:
                break
            taken_bytes += messages[-1].size
            # To ask whether there is more costs less than the exception that says there is not,
            # but more than to take a message: so that is asked once.
            if len(messages) == 1 and not int(socket.getsockopt(_EVENTS)) & _IN:
                break
        else:
            self._left_some = True  # maybe
        return self._requests_of(messages, socket, principal, door)

    def _requests_of(
        self,
        messages: list[_Message],
        socket: zmq.Socket[bytes],
        principal: Principal,
        door: Connections | None,
    ) -> list[Request]:
        requests: list[Request] = []
        tag = NO_TAG if principal.is_family else self.doorman.run_tag
        heads = [message.head for message in messages]
        at = 0
        while at < len(messages):
            run = tag != NO_TAG and run_length(heads, at, 0, tag, RUN_BYTES)
            if run:
                some = messages[at : at + run]
                requests.append(RouterRun(socket, some, principal, door, self.doorman))
                at += run
                continue
            message = messages[at]
            make = partial(RouterRequest, socket, message.identity, principal, door)
            make = partial(make, message.traffic)
            at += 1
            request = request_from(make, message.head, message.payload, self.doorman, principal)
            if request is not None:
                requests.append(request)
        return requests


def _shut(socket: zmq.Socket[bytes], door: Connections | None) -> None:
    """Answers that were given leave within the socket's linger time."""
    if door is not None:
        socket.disable_monitor()
        door.close()
    socket.close()
