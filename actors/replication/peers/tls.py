"""A TCP connection between two replicas, under TLS 1.3, which nothing waits for.

OpenSSL gets no socket, but memory: what has come is decrypted, and what is said is encrypted, in
the thread that has come by it or says it. So whatever is written may change at once, and what the
system has no room for yet waits encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from itertools import islice
from typing import Any, Final

RECORD_BYTES: Final = 16_384  # RFC 8446, 5.1: at most, of what a record carries
SEALED_AT_ONCE: Final = 8 * RECORD_BYTES  # bytes that one call encrypts: a piece
PIECES_AT_ONCE: Final = 4  # to the system
# What AES-GCM may encrypt with one key, with room to spare (RFC 8446, 5.5: 2^24.5 records). Then
# the connection ends, and another one follows.
KEY_BYTES_MAX: Final = (1 << 24) * RECORD_BYTES
# A machine that is gone says nothing: what it has not confirmed for so long ends the connection.
SILENCE_MS: Final = 2_000
KEEPALIVE_S: Final = 2  # after so much silence the system asks whether the other side is there
HANDSHAKE_S: Final = 2.0  # for all of it; on a machine with time it takes a few milliseconds
ENDED: Final = "the other side has ended it"


class ConnectionLost(Exception):
    """It is over, and why. `is_fault`: something was said that is wrong."""

    def __init__(self, why: str, *, is_fault: bool = False) -> None:
        super().__init__(why)
        self.is_fault = is_fault


class TlsConnection:
    """One connection, in one thread. Most of it raises ConnectionLost, after which there is nothing
    to be done but to close it.

    Args:
        plain: is connected, and belongs to this one from now on.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._socket = plain
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._came, self._goes, server_side=is_server)
        self._waiting: deque[bytes | memoryview] = deque()  # pieces, for room in the socket
        self.waiting_bytes = 0
        self.received_bytes = 0
        self._sealed_bytes = 0
        plain.setblocking(False)
        _watch_over(plain)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting_count(self) -> int:
        """Of pieces, or parts of one, that the system has no room for yet."""
        return len(self._waiting)

    def shake_hands(self) -> bool:
        """As far as it gets with what has come; whether it is over."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._seal_and_flush()
            return False
        except ssl.SSLError as error:
            with contextlib.suppress(ConnectionLost):
                self._seal_and_flush()  # an alert tells the other side why
            raise _lost(error) from None
        self._seal_and_flush()
        return True

    # --- what comes ---

    def fill(self, memory: memoryview) -> bool:
        """Take what has come, encrypted; whether there may be more of it.

        Args:
            memory: for a moment; so much is taken at most.
        """
        try:
            count = self._socket.recv_into(memory)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror}") from None
        if not count:
            raise ConnectionLost(ENDED)
        self.received_bytes += count
        self._came.write(memory[:count])
        return count == len(memory)

    @property
    def holds_some(self) -> bool:
        """Whether there is something to be read; maybe not all of a record."""
        return self._came.pending > 0 or self.tls.pending() > 0

    def read(self) -> bytes:
        """What a record has, or the rest of it; nothing where none has come whole."""
        try:
            plain = self.tls.read(RECORD_BYTES)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise _lost(error) from None
        if not plain:  # an alert that this was all: what follows it is never read
            raise ConnectionLost(ENDED)
        return plain

    def read_into(self, memory: memoryview) -> int:
        """What has come of one record after the other; how many bytes it was."""
        read: Any = self.tls.read  # with a buffer it returns an int, which its stub does not know
        came, at, end = self._came, 0, len(memory)
        try:
            while True:
                count: int = read(end - at, memory[at:])
                if not count:
                    raise ConnectionLost(ENDED)
                at += count
                if at == end or not came.pending:
                    return at
        except ssl.SSLWantReadError:
            return at
        except ssl.SSLError as error:
            raise _lost(error) from None

    # --- what goes ---

    def write(self, *parts: bytes | memoryview) -> None:
        """Encrypt them, and send what there is room for."""
        if self._sealed_bytes > KEY_BYTES_MAX:
            raise ConnectionLost("it has carried as much as one key may")
        encrypt, count = self.tls.write, 0
        try:
            for part in parts:
                at, end = 0, len(part)
                while at < end:
                    at += encrypt(part[at : at + SEALED_AT_ONCE])
                    self._seal()
                    count += 1
                    if count % PIECES_AT_ONCE == 0:
                        self.flush()  # the other side can begin
        except ssl.SSLError as error:
            raise _lost(error) from None
        self.flush()

    def flush(self) -> None:
        """Send of what waits as much as the system takes."""
        waiting = self._waiting
        while waiting:
            try:
                if len(waiting) == 1:
                    count = self._socket.send(waiting[0])
                else:
                    count = self._socket.sendmsg([*islice(waiting, PIECES_AT_ONCE)])
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror}") from None
            self.waiting_bytes -= count
            while count:  # of whole pieces, or of a part of one
                first = waiting.popleft()
                if count < len(first):
                    waiting.appendleft(memoryview(first)[count:])
                    break
                count -= len(first)

    def close(self) -> None:
        """What waits is dropped."""
        self._waiting.clear()
        self._socket.close()

    def _seal_and_flush(self) -> None:
        self._seal()
        self.flush()

    def _seal(self) -> None:
        sealed = self._goes.read()
        if sealed:
            self._waiting.append(sealed)
            self.waiting_bytes += len(sealed)
            self._sealed_bytes += len(sealed)


def _watch_over(connection: socket.socket) -> None:
    """A connection to a machine that has vanished is to end, whichever side speaks. Raises
    OSError."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, SILENCE_MS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _lost(error: ssl.SSLError) -> ConnectionLost:
    """What OpenSSL says, in words."""
    if isinstance(error, ssl.SSLZeroReturnError):
        return ConnectionLost(ENDED)
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionLost(
            f"its certificate is none of this group's: {error.verify_message}", is_fault=True
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return ConnectionLost(f"it breaks TLS, or has another secret: {reason}", is_fault=True)
