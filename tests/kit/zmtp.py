"""A client that speaks ZeroMQ's protocol over a plain socket, as it likes. No tests here."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from patience import patient

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
PING, PONG = b"\x04PING", b"\x04PONG"


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = MORE * more | COMMAND * command
    if len(body) < 256:
        return struct.pack(">BB", flags, len(body)) + body
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def ready() -> bytes:
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b"")):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return frame(body, command=True)


class RawClient:
    """A DEALER by hand.

    Args:
        endpoint: tcp://host:port
        handshake: False leaves it silent.
    """

    def __init__(
        self, endpoint: str, *, handshake: bool = True, timeout_s: float = patient(60)
    ) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(timeout_s)
        self._was_refused = False
        try:
            self.socket.connect((host, int(port)))
        except ConnectionError:  # ended before it was told that it is there
            if handshake:
                raise
            self._was_refused = True
        self.port = self.socket.getsockname()[1]
        if handshake:
            self.socket.sendall(GREETING + ready())
            self._read(len(GREETING))
            self.receive_frame()  # READY

    def send(self, parts: Sequence[bytes]) -> None:
        last = len(parts) - 1
        self.socket.sendall(
            b"".join(frame(part, more=index < last) for index, part in enumerate(parts))
        )

    def receive_frame(self) -> tuple[int, bytes]:
        """Return (flags, body) of the next frame. Answer heartbeats."""
        while True:
            (flags,) = self._read(1)
            size = struct.unpack(">Q", self._read(8))[0] if flags & LONG else self._read(1)[0]
            body = self._read(size)
            if not (flags & COMMAND and body.startswith(PING)):
                return flags, body
            self.socket.sendall(frame(PONG + body[len(PING) + 2 :], command=True))

    def show_alive(self) -> None:
        """Answer the heartbeats that were not read yet."""
        self.socket.sendall(frame(PONG, command=True))

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            if not more:
                raise ConnectionError("the other side has ended it")
            found += more
        return found

    def has_ended(self) -> bool:
        """Waits for the end."""
        if self._was_refused:
            return True
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65_536):
                pass
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
