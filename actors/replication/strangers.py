"""Those who come to the port of a replica: what one costs who is none of the group.

A stranger does not know the replica's public key, without which the handshake of CurveZMQ ends with
its first frame. Until then it costs a descriptor, and the memory of what it sends. So there are few
places; for a further one who comes the stranger that came first has to go, and a replica, which
needs a millisecond for its handshake, is let in however many strangers there are. A stranger that
sends more than a handshake is ended.

Which connection has come through its handshake ZeroMQ does not tell. But it answers more than its
greeting only to who knows its key, and the system counts what the other side has confirmed.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import zmq

from cometmq.actors.replication.said import Said
from cometmq.actors.runtime.connections import (
    Connection,
    ConnectionLimits,
    Connections,
    tcp_counts,
)

MIB: Final = 1_048_576
HANDSHAKE_MS: Final = 1_000
LIMITS: Final = ConnectionLimits(
    connections=128, in_flight_bytes=64 * MIB, handshake_ms=HANDSHAKE_MS
)
STRANGER_BYTES: Final = 4_096  # the whole handshake of a replica has some 600

_GREETING_BYTES: Final = 64  # ZMTP 3; what follows, a CURVE WELCOME, has 170
_WHY: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key was not let in",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak CurveZMQ, or has another secret",
}


def why_handshake_failed(event: int, code: int) -> str:
    """What a socket's monitor has told of it."""
    return _WHY.get(event) or f"it ended before its handshake did: {os.strerror(code)}"


class Strangers(Connections):
    """The connections of a replica's ROUTER."""

    in_flight_bound = "much more than a master sends to a follower that does not acknowledge"

    def __init__(self, router: zmq.Socket[bytes], limits: ConnectionLimits) -> None:
        super().__init__(router, limits)
        self._own_said = Said()  # of this thread
        self._latest = "nobody"
        self._unwanted: set[int] = set()

    def end_soon(self, fd: int) -> None:
        """Of who is a replica no more. Any thread may call it."""
        self._unwanted.add(fd)

    # --- the thread ---

    def _take_in(self, fd: int) -> None:
        self._latest = _peer_of(fd) or self._latest
        super()._take_in(fd)

    def _handshake_failed(self, event: int, code: int) -> None:
        super()._handshake_failed(event, code)
        self._own_said.warn(
            ("handshake", event),
            "at the port of replicas a connection came to nothing: %s. The latest to come was %s",
            why_handshake_failed(event, code), self._latest,
        )  # fmt: skip

    def _has_place(self) -> bool:
        if super()._has_place():
            return True
        for connection in list(self._known.values()):  # the first to come is the first
            if _is_stranger(connection):
                break
        else:
            return False
        self._refuse(connection, f"others come, and {self._limits.connections} are there")
        return True

    def _refuse(self, connection: Connection, why: str) -> None:
        self._counts["connections_refused"] += 1
        self._known.pop(connection.traffic.fd, None)
        peer = self._end(connection)
        self._own_said.warn(
            "refused", "at the port of replicas the connection of %s is ended: %s", peer, why
        )

    def _look(self) -> bool:
        while self._unwanted:
            found = self._known.pop(self._unwanted.pop(), None)
            if found is not None:
                self._end(found)
        for connection in list(self._known.values()):
            if _is_stranger(connection, STRANGER_BYTES):
                self._refuse(connection, f"over {STRANGER_BYTES} bytes came before its handshake")
        return super()._look()


def _is_stranger(connection: Connection, more_than_bytes: int = -1) -> bool:
    """Whether it has not shown by now that it knows our public key, and how much it has sent all
    the same. One that has gone is a stranger that has sent nothing."""
    acknowledged, received = tcp_counts(connection.traffic.fd) or (0, 0)
    return acknowledged < 2 * _GREETING_BYTES and received > more_than_bytes


def _peer_of(fd: int) -> str:
    """Whose connection that is; "" once it is gone."""
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            host, port = found.getpeername()[:2]
            return f"{host}:{port}"
    except (OSError, ValueError, TypeError):
        return ""
