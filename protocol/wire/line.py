"""A line: a Unix socket between a client and an actor of the same machine, without ZeroMQ between.

What travels is the same (frames.py), a packet each (SOCK_SEQPACKET). A request and its answer then
cost two wake-ups instead of six, as no thread of ZeroMQ's takes part on either side.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from typing import Final

from cometmq.protocol.errors import NotLocal
from cometmq.protocol.frames import PACKET_MAX

NO_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # a plain number is quicker
_TIME: Final = struct.Struct("@ll")
_CREDENTIALS: Final = struct.Struct("@3i")  # pid, uid, gid


def peer_uid(line: socket.socket) -> int:
    """The user at the other end, as the system knows it."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def abstract(name: str) -> bytes:
    """The address of that name: it lies in no file system, and ends with who listens there."""
    return b"\0" + name.encode()


class Line:
    """A client's end. Any thread may send; one at a time receives.

    It is closed when nobody has it any more, so that no thread ever sends into a descriptor that
    has become another's.
    """

    def __init__(self, name: str, uid: int) -> None:
        """Raises NotLocal when nobody of that user listens there, or this process is not let in."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close).atexit = False
        if os.getuid() not in (0, uid):
            raise NotLocal(f"the broker runs as user {uid}, this process as {os.getuid()}")
        try:
            self._socket.connect(abstract(name))
            found = peer_uid(self._socket)
        except OSError as error:
            raise NotLocal(f"@{name}: {error.strerror}") from None
        if found != uid:
            raise NotLocal(f"@{name}: user {found} listens there, not {uid}")
        self._timeout_s = -1.0
        self._packet = bytearray(PACKET_MAX)
        self.answered = False  # something has come from there

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def send(self, packet: bytes) -> bool:
        """False when the other side has not kept up. Raises OSError when it is gone."""
        try:
            self._socket.send(packet, NO_WAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self, timeout_s: float) -> memoryview | None:
        """The next packet, good until the next call; None after the time.

        Raises EOFError when the other side is gone, after everything that it had sent before.
        """
        if timeout_s <= 0:
            return self._receive(NO_WAIT)
        if timeout_s != self._timeout_s:
            seconds = int(timeout_s)
            value = _TIME.pack(seconds, int((timeout_s - seconds) * 1e6) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._timeout_s = timeout_s
        return self._receive(0)

    def _receive(self, flags: int) -> memoryview | None:
        try:
            size = self._socket.recv_into(self._packet, 0, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # It ended with packets of ours unread, of which the system tells before it hands out
            # what was sent before.
            return self._receive(flags)
        if not size:
            raise EOFError
        self.answered = True
        return memoryview(self._packet)[:size]

    def shut(self) -> None:
        """Whoever sleeps in it is woken by its end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already
