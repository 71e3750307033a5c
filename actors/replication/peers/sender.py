"""What is said to one replica: a connection to it, made again and again."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from typing import Final

from cometmq.actors.replication.peers.certificate import name_of
from cometmq.actors.replication.peers.poller import Arrivals, Poller
from cometmq.actors.replication.peers.receiver import HEAD
from cometmq.actors.replication.peers.tls import (
    ENDED,
    HANDSHAKE_S,
    ConnectionLost,
    TlsConnection,
)
from cometmq.actors.runtime.event_log import EventLog
from cometmq.protocol.retry import pause_s, spread

MIB: Final = 1_048_576
WAITING_COUNT: Final = 8_192  # pieces that the system has no room for yet
WAITING_BYTES: Final = 64 * MIB
JOINED_BYTES: Final = 16_000  # that go with their frame, in one record
CONNECT_S: Final = 1.0
ANSWER_BYTES: Final = 16_384  # of a handshake, at once; later nothing comes
WELCOME: Final = b"\x01"  # is said by who has let somebody in, and nothing else ever

Found = socket.socket | Exception


class PeerSender:
    """To one replica at one address, over one connection after the other. Nothing waits here for a
    connection.

    Args:
        context: of TLS, for who goes to others.
        poller: waits for its connections.
        arrivals: brings them here from the threads that make them.
    """

    def __init__(
        self,
        name: str,
        address: str,
        context: ssl.SSLContext,
        poller: Poller,
        arrivals: Arrivals,
        said: EventLog,
    ) -> None:
        self.address = address
        self.is_connected = False  # it has let us in
        self._name = name
        self._context = context
        self._poller = poller
        self._arrivals = arrivals
        self._said = said
        self._attempt: object | None = None  # the one that is under way
        self._failures = 0  # in a row
        self._retry_at = 0.0  # time.monotonic()
        self._connection: TlsConnection | None = None
        self._until = 0.0  # it has to have let us in by then
        self._wants_room = False
        self._try()

    # --- what is said ---

    def send(self, frame: bytes, content: memoryview | None) -> bool:
        """Whether it is on its way, over a connection that is there."""
        connection = self._connection
        size = 0 if content is None else len(content)
        if connection is None or not self.is_connected or self._is_full(connection, size):
            return False
        head = HEAD.pack(len(frame), size) + frame
        try:
            if content is None:
                connection.write(head)
            elif size <= JOINED_BYTES:
                connection.write(head + content)
            else:
                connection.write(head, content)
        except ConnectionLost as lost:
            self._lose(lost)
            return False
        self._look_at_room(connection)
        return True

    def _is_full(self, connection: TlsConnection, size: int) -> bool:
        waiting = connection.waiting_count
        return waiting > 0 and (
            waiting >= WAITING_COUNT or connection.waiting_bytes + size > WAITING_BYTES
        )

    def _look_at_room(self, connection: TlsConnection) -> None:
        wants_room = connection.waiting_count > 0
        if wants_room != self._wants_room:
            self._wants_room = wants_room
            out = select.EPOLLOUT if wants_room else 0
            self._poller.change(connection.fileno(), select.EPOLLIN | out)

    # --- the connection ---

    def tend(self, now: float) -> None:
        """See to what takes too long, and to what is to be tried again.

        Args:
            now: time.monotonic()
        """
        if self._connection is None:
            if self._attempt is None and now >= self._retry_at:
                self._try()
        elif not self.is_connected and now >= self._until:
            self._lose(ConnectionLost(f"it has not let us in within {HANDSHAKE_S:.0f} s"))

    def try_now(self) -> None:
        """The replica has come to us, so it is there: no need to wait for the next attempt."""
        if self._connection is None and self._attempt is None:
            self._try()

    def close(self) -> None:
        """What waits is dropped."""
        self._attempt = None
        self._drop()

    def _try(self) -> None:
        """Look the address up and connect to it. Both may block, so a thread of its own does it."""
        attempt = self._attempt = object()

        def run() -> None:
            found = _connect(self.address)
            if not self._arrivals.bring(lambda: self._take(attempt, found)):
                _close(found)

        try:
            threading.Thread(target=run, name="connecting", daemon=True).start()
        except RuntimeError as error:  # there can be no more of them
            self._take(attempt, error)

    def _take(self, attempt: object, found: Found) -> None:
        """What an attempt has come to."""
        if attempt is not self._attempt:
            _close(found)
            return
        self._attempt = None
        if isinstance(found, Exception):
            self._lose(ConnectionLost(f"it cannot be connected to: {found}"))
            return
        self._connection = TlsConnection(found, self._context, is_server=False)
        self._until = time.monotonic() + HANDSHAKE_S
        self._poller.add(self._connection.fileno(), self._on_events)
        self._on_events(0)

    def _on_events(self, _events: int) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            self._go_on(connection)
        except ConnectionLost as lost:
            self._lose(lost)

    def _go_on(self, connection: TlsConnection) -> None:
        connection.fill(memoryview(bytearray(ANSWER_BYTES)))
        if not self.is_connected and not self._is_known(connection):
            return
        said = connection.read() if connection.holds_some else b""
        if said and (self.is_connected or said != WELCOME):
            raise ConnectionLost("it answers, where it is to be told things", is_fault=True)
        if said:
            self.is_connected, self._failures = True, 0
        connection.flush()
        self._look_at_room(connection)

    def _is_known(self, connection: TlsConnection) -> bool:
        """Whether the handshake is over, and the other side is who it is to be."""
        if not connection.shake_hands():
            return False
        name = name_of(connection.tls)
        if name != self._name:
            raise ConnectionLost(f"replica {name} has come to be there", is_fault=True)
        return True

    def _lose(self, lost: ConnectionLost) -> None:
        """The connection, or what was to become one."""
        why = str(lost)
        if why == ENDED:
            why = (
                "it ended the handshake, as one does that has another secret or group, or no "
                "replica of our name in its record"
            )
        if lost.is_fault or not self.is_connected:
            self._said.warn(
                (self._name, why), "there is no line to replica %s at %s: %s",
                self._name, self.address, why,
            )  # fmt: skip
        self._drop()
        self._failures += 1
        self._retry_at = time.monotonic() + spread(pause_s(self._failures))

    def _drop(self) -> None:
        if self._connection is not None:
            self._poller.remove(self._connection.fileno())
            self._connection.close()
        self._connection, self.is_connected, self._wants_room = None, False, False


def _connect(address: str) -> Found:
    """To host:port. Blocks."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        return error


def _close(found: Found) -> None:
    if isinstance(found, socket.socket):
        found.close()
