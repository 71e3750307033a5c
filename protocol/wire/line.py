"""A local connection: a stream between a client and an actor of the same machine, without ZeroMQ.

The same frames travel as by ZeroMQ (stream.py says in which form). A request and its answer then
cost two wake-ups instead of six, as no thread of ZeroMQ's takes part on either side.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import weakref
from typing import Final

from cometmq.protocol.errors import NotLocal
from cometmq.protocol.wire.stream import NO_WAIT, Message, Payload, StreamReader, StreamWriter

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
    """A client's end. Any thread may send; one at a time receives, and flushes.

    It is closed when nobody has it any more, so that no thread ever sends into a descriptor that
    has become another's.
    """

    def __init__(self, name: str, uid: int) -> None:
        """Raises NotLocal when nobody of that user listens there, or this process is not let in."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._close_with_it(self._socket)
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
        self._reader = StreamReader(self._socket)
        self._writer = StreamWriter(self._socket)
        self._sending = threading.Lock()  # guards the writer
        self._writable: select.epoll | None = None
        self.answered = False  # something has come from there

    def _close_with_it(self, owned: socket.socket | select.epoll) -> None:
        weakref.finalize(self, owned.close).atexit = False

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    # --- sending ---

    def send(self, head: bytes, payload: Payload = ()) -> None:
        """Send; what the other side does not take yet leaves by `flush`. Raises OSError when it is
        gone, and has not received all of this."""
        with self._sending:
            self._writer.send(head, payload)

    @property
    def unsent_fd(self) -> int | None:
        """A descriptor that can be read once `flush` has something to do; None: all has left."""
        if not self._writer.unsent_bytes:
            return None
        with self._sending:
            if self._writable is None:
                try:
                    self._writable = select.epoll()
                except OSError:  # no descriptor is left to wait by
                    self._end()
                    return None
                self._writable.register(self._socket, select.EPOLLOUT)
                self._close_with_it(self._writable)
        return self._writable.fileno()

    def _end(self) -> None:
        """End the connection: the receiver finds that, and requests go by ZeroMQ."""
        self._writer.drop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Send what is unsent, as far as the other side takes it."""
        if not self._writer.unsent_bytes:
            return
        with self._sending:
            try:
                self._writer.flush()
            except OSError:
                self._writer.drop()  # whoever receives finds the end

    # --- receiving ---

    def receive(self, timeout_s: float) -> list[Message] | None:
        """The messages that came next, maybe none yet; None if nothing came within the time.

        Raises EOFError when the other side is gone, after everything that it had sent before, and
        BadRequest for what is no message.
        """
        flags = 0
        if timeout_s <= 0:
            flags = NO_WAIT
        elif timeout_s != self._timeout_s:
            seconds = int(timeout_s)
            value = _TIME.pack(seconds, int((timeout_s - seconds) * 1e6) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._timeout_s = timeout_s
        try:
            came = self._reader.fill(flags)
        except ConnectionResetError:
            # It ended with requests of ours unread, of which the system tells before it hands out
            # what was sent before.
            came = self._reader.fill(flags)
        if not came:
            return None
        self.answered = True
        return self._reader.messages(sys.maxsize)

    def shut(self) -> None:
        """Whoever sleeps in it is woken by its end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already
