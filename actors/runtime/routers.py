"""A ROUTER of an actor's inbox: what comes through it, and the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from cometmq.actors.runtime.access import Doorman, Principal
from cometmq.actors.runtime.connections import Connections, Traffic, wire_bytes
from cometmq.actors.runtime.request import Frames, Payload, Request, request_from
from cometmq.protocol.commands import Command
from cometmq.protocol.wire.dealer import ZERO_COPY_BYTES

log = logging.getLogger(__name__)

DRAIN_COUNT: Final = 256  # commands taken from the sockets before they are worked on
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


class RouterRequest(Request):
    """It came through a ROUTER; from a client, whose connections are watched, through a door."""

    __slots__ = ("_identity", "_router", "_traffic")

    def __init__(
        self,
        router: Router,
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


class Router:
    """
    Args:
        principal: who comes there.
        door: to count what clients have on their way; None: it is the family that comes.
        touched: is called where the socket may hold something and not tell of it (Sources).
    """

    __slots__ = ("door", "left_some", "principal", "socket", "touched")

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        principal: Principal,
        door: Connections | None,
        touched: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        self.socket = socket
        self.principal = principal
        self.door = door
        self.touched = touched
        self.left_some = False  # the last `drain` has not taken all, maybe

    def drain(self, doorman: Doorman) -> list[Request]:
        """What the socket holds, up to some limits."""
        socket = self.socket
        messages: list[_Message] = []
        taken_bytes = 0
        self.left_some = False
        while len(messages) < DRAIN_COUNT and taken_bytes < DRAIN_BYTES:
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
        return self._requests_of(messages, doorman)

    def _requests_of(self, messages: list[_Message], doorman: Doorman) -> list[Request]:
        requests: list[Request] = []
        for message in messages:
            make = partial(RouterRequest, self, message.identity, message.traffic)
            request = request_from(make, message.head, message.payload, doorman, self.principal)
            if request is not None:
                requests.append(request)
        return requests
