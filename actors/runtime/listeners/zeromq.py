"""A listener of an actor by ZeroMQ: a ROUTER, what comes through it, and the way back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.access import ANYBODY, FAMILY, Doorman
from cometmq.actors.runtime.listeners.connections import (
    ConnectionLimits,
    Connections,
    Traffic,
    wire_bytes,
)
from cometmq.actors.runtime.listeners.listener import (
    DRAIN_COUNT,
    FramedRequest,
    Listener,
    request_from,
)
from cometmq.actors.runtime.request import Frames, Payload, Request
from cometmq.protocol import frames
from cometmq.protocol.commands import Command
from cometmq.protocol.wire import liveness
from cometmq.protocol.wire.addresses import allow_ipv6
from cometmq.protocol.wire.dealer import ZERO_COPY_BYTES

log = logging.getLogger(__name__)

BACKLOG: Final = 512
LINGER_MS: Final = 1_000  # for the last answers, on a busy machine as well
MAILBOX_COUNT: Final = 1_000  # commands waiting in a socket before it stops reading
DRAIN_BYTES: Final = 8 * 1_048_576

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


class RouterRequest(FramedRequest):
    """It came through a ROUTER; from a client, whose connections are watched, through a door."""

    __slots__ = ("_identity", "_router", "_traffic")

    def __init__(
        self,
        router: ZeroMQListener,
        identity: bytes,
        traffic: Traffic | None,
        request_id: int,
        command: Command,
        payload: Frames,
    ) -> None:
        super().__init__(request_id, command, payload, router.principal)
        self._router = router
        self._identity = identity
        self._traffic = traffic

    def _send(self, head: bytes, payload: Payload) -> None:
        socket, last = self._router.socket, len(payload)
        self._router.touched(socket)
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
        door = self._router.door
        if door is None or self._traffic is None:
            return True
        return door.has_room(self._traffic)


class ZeroMQListener(Listener):
    """A ROUTER. All that come by one have the same principal, until there are users of CURVE.

    Args:
        endpoint: where it listens.
        is_internal: whether only this broker's own processes may come there.
        touched: is called where the socket may hold something and not tell of it (Sources).
        limits: of the connections of a TCP port of clients.

    Raises zmq.ZMQError.
    """

    def __init__(
        self,
        endpoint: str,
        doorman: Doorman,
        touched: Callable[[zmq.Socket[bytes]], None],
        *,
        is_internal: bool,
        limits: ConnectionLimits,
    ) -> None:
        self.is_internal = is_internal
        self.principal = FAMILY if is_internal else ANYBODY
        self.touched = touched
        self._doorman = doorman
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.set(zmq.LINGER, LINGER_MS)  # answers given just before the end still leave
        socket.set(zmq.BACKLOG, BACKLOG)
        socket.set(zmq.MAXMSGSIZE, frames.FRAME_MAX)
        socket.set(zmq.RCVHWM, MAILBOX_COUNT)
        socket.set(zmq.SNDHWM, MAILBOX_COUNT)
        if is_internal:
            socket.set(zmq.IPC_FILTER_UID, os.getuid())
        socket.set(zmq.HANDSHAKE_IVL, limits.handshake_ms)
        allow_ipv6(socket, endpoint)
        liveness.watch(socket, endpoint)
        self.socket = socket
        self.door: Connections | None = None  # counts what clients have on their way
        if not is_internal and endpoint.startswith("tcp://"):
            self.door = Connections(socket, limits)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))  # a port of 0 is chosen
        if self.door is not None:
            self.door.start(self.address)

    @property
    def source(self) -> zmq.Socket[bytes]:
        return self.socket

    def put_off(self) -> None:
        self.touched(self.socket)

    def statistics(self) -> meters.Figures:
        return {} if self.door is None else self.door.statistics()

    def close(self) -> None:
        """Answers that were given leave within the socket's linger time."""
        if self.door is not None:
            self.socket.disable_monitor()
            self.door.close()
        self.socket.close()

    def drain(self, count_max: int = DRAIN_COUNT) -> list[Request]:
        """Return what the socket holds, up to some limits."""
        socket = self.socket
        messages: list[_Message] = []
        taken_bytes = 0
        self.left_some = False
        while len(messages) < count_max and taken_bytes < DRAIN_BYTES:
            try:
                messages.append(_Message(socket, self.door))
            except zmq.Again:
                break
            taken_bytes += messages[-1].size
            # To ask whether there is more costs less than the exception that says there is not,
            # but more than to take a message: so that is asked once.
            if len(messages) == 1 and not int(socket.getsockopt(_EVENTS)) & _IN:
                break
        else:
            self.left_some = True  # maybe
            self.touched(socket)
        return self._requests_of(messages)

    def _requests_of(self, messages: list[_Message]) -> list[Request]:
        requests: list[Request] = []
        for message in messages:
            make = partial(RouterRequest, self, message.identity, message.traffic)
            request = request_from(
                make, message.head, message.payload, self._doorman, self.principal
            )
            if request is not None:
                requests.append(request)
        return requests
