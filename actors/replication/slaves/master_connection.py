"""A slave's connection to its master: RocketMQ's plain replication, as it is spoken on the wire.

In a group it is the `ha` process of the same broker that speaks so, see log_feed.py.

The slave says how far it is (i64, big-endian): with the first report it asks for what follows on
that, with each later one it acknowledges. The master sends frames (`HA_FRAME`), which the kernel
takes (`LogCopy`). RocketMQ DefaultHAClient, DefaultHAConnection.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from cometmq.protocol.errors import ServiceNotAvailable
from cometmq.protocol.retry import pause_s, spread
from cometmq.protocol.wire.line import abstract, peer_uid
from cometmq.protocol.wire.liveness import watch_plain
from cometmq.shm.kernel.layout import HA_FRAME

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
RECEIVE_BUFFER_BYTES: Final = 4 << 20  # RocketMQ's
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0  # RocketMQ's, always
FIRST_PAUSE_HERE_S: Final = 0.02
LONGEST_PAUSE_HERE_S: Final = 0.2  # whoever is to answer is a process of this machine
REPORT: Final = struct.Struct(">q")
UNIX: Final = "unix:@"  # begins the address of an abstract Unix socket


def address_of_master(text: str) -> tuple[str, int]:
    """Of a checked setting: host:port, an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def is_here(address: str) -> bool:
    """Whether it is an abstract Unix socket: unix:@name."""
    return address.startswith(UNIX)


def connect(address: str) -> socket.socket:
    """Look the master up and connect to it. Blocks. Raises OSError."""
    if is_here(address):
        return _connect_here(address.removeprefix(UNIX))
    made = socket.create_connection(address_of_master(address), CONNECT_TIMEOUT_S)
    watch_plain(made)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return made


def _connect_here(name: str) -> socket.socket:
    """To a process of this user, that listens at that abstract name. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(CONNECT_TIMEOUT_S)
        made.connect(abstract(name))
        if peer_uid(made) != os.getuid():
            raise PermissionError(errno.EPERM, f"user {peer_uid(made)} listens at @{name}")
    except OSError:
        made.close()
        raise
    return made


def _pause_s(address: str, failures: int) -> float:
    first, longest = FIRST_PAUSE_S, LONGEST_PAUSE_S
    if is_here(address):
        first, longest = FIRST_PAUSE_HERE_S, LONGEST_PAUSE_HERE_S
    return spread(pause_s(failures, first_s=first, most_s=longest))


class MasterConnection:
    """One connection after the other, each in the actor's poll once it is there.

    Looking up the master's name and connecting may block, and do so in a thread of their own.

    Args:
        address: host:port, or unix:@name.
        call_soon: has a call made in the actor's thread.
        after: has a call made there after so many seconds.
        on_connected: in the actor's thread; the descriptor to listen to.
        on_failed: nobody answers there, and why.
    """

    def __init__(
        self,
        address: str,
        *,
        call_soon: Callable[[Callable[[], object]], object],
        after: Callable[[float, Callable[[], None]], object],
        on_connected: Callable[[int], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.address = address
        self.failures = 0  # in a row, without a frame in between
        self.reported = -1  # on this connection; -1: nothing yet
        self.reported_at = self.heard_at = 0.0  # time.monotonic()
        self._call_soon = call_soon
        self._after = after
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._socket: socket.socket | None = None
        self._rest = b""  # of a report that the system took a part of
        self._closed = False
        self._attempt = 0

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def fd(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    # --- opening and closing ---

    def open(self) -> None:
        """Connect, in another thread; of one attempt at a time the last counts."""
        self._attempt += 1
        threading.Thread(
            target=self._dial, args=(self._attempt,), name="to the master", daemon=True
        ).start()

    def open_later(self) -> None:
        """After the pause that follows on so many failures."""
        self.failures += 1
        self._after(_pause_s(self.address, self.failures), self._open_unless_closed)

    def _open_unless_closed(self) -> None:
        if not self._closed and self._socket is None:
            self.open()

    def _dial(self, attempt: int) -> None:
        try:
            made = connect(self.address)
        except OSError as error:
            why = str(error)
            self._call_soon(lambda: self._failed(attempt, why))
        else:
            self._call_soon(lambda: self._made(attempt, made))

    def _failed(self, attempt: int, why: str) -> None:
        if attempt == self._attempt and not self._closed:
            self._on_failed(why)

    def _made(self, attempt: int, made: socket.socket) -> None:
        if attempt != self._attempt or self._closed:
            made.close()
            return
        made.setblocking(False)
        self._socket, self._rest, self.reported = made, b"", -1
        self.reported_at = self.heard_at = time.monotonic()
        self._on_connected(made.fileno())

    def hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """For good."""
        self._closed = True
        self.hang_up()

    # --- what is said ---

    def report(self, end: int) -> None:
        """Say how far the log is. What the system does not take now is said with the next report,
        but for a report that it took a part of: its rest comes first. Raises OSError."""
        if self._socket is None:
            return
        wanted = self._rest + REPORT.pack(end)
        try:
            sent = self._socket.send(wanted, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        if sent <= len(self._rest):
            self._rest = self._rest[sent:]
            return
        self._rest = wanted[sent:]
        self.reported, self.reported_at = end, time.monotonic()


def ask_where_it_begins(address: str, *, gone: threading.Event, say: Callable[[str], None]) -> int:
    """The physical offset that the master's log begins at for whoever has nothing of it.

    Waits for the master, as long as it takes. Raises ServiceNotAvailable once `gone` is set.

    Args:
        say: what keeps it waiting, whenever that is another reason.
    """
    failures, said = 0, ""
    while not gone.is_set():
        try:
            with connect(address) as asked:
                return _first_offset(asked)
        except OSError as error:
            failures += 1
            if str(error) != said:
                said = str(error)
                say(said)
        gone.wait(_pause_s(address, failures))
    raise ServiceNotAvailable("the broker has ended")


FIRST_FRAME_TIMEOUT_S: Final = 15.0  # RocketMQ's with nothing to send says so after 5 s


def _first_offset(asked: socket.socket) -> int:
    """Where its first frame begins. Raises OSError."""
    asked.settimeout(FIRST_FRAME_TIMEOUT_S)
    asked.sendall(REPORT.pack(0))
    head = b""
    while len(head) < HA_FRAME.size:
        more = asked.recv(HA_FRAME.size - len(head))
        if not more:
            raise ConnectionResetError("it has closed the connection")
        head += more
    offset = int(HA_FRAME.unpack(head)["physical_offset"])
    if offset < 0:
        raise ConnectionAbortedError(f"its log begins at {offset}")
    with suppress(OSError):
        asked.shutdown(socket.SHUT_RDWR)
    return offset
