"""A slave of RocketMQ's plain replication, move by move. No tests here.

with ScriptedSlave(port) as slave:
    slave.report(0)
    slave.follow(until=broker.counter(Counter.WROTE))
    assert slave.copy == log_bytes(broker.store)[slave.begin :]
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path
from types import TracebackType

from patience import patient

from cometmq.shm.os.files import COMMITLOG_DIR

HEADER = struct.Struct(">qi")
TIMEOUT_S = patient(30)


class Disconnected(Exception):
    """The master has closed the connection."""


class ScriptedSlave:
    """One connection, and the log as it came by it. It refuses what RocketMQ's slave refuses: a
    frame that does not begin where its log ends.

    Args:
        copy: the log that it has already, from physical offset `begin` on.
        receive_bytes: that the system takes for it while it does not read; 0: as much as it likes.
    """

    def __init__(
        self, port: int, copy: bytes = b"", begin: int = 0, *, receive_bytes: int = 0
    ) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self.address = "{}:{}".format(*self.socket.getsockname()[:2])
        self.copy = bytearray(copy)
        self.begin = begin
        self.frames: list[tuple[int, int]] = []  # offset and size
        self.acknowledged = 0
        self._thread: threading.Thread | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.copy) if self.copy else 0

    def report(self, offset: int | None = None) -> None:
        """Say where its log ends, or something else."""
        offset = self.end if offset is None else offset
        self.acknowledged = offset  # first: the master may act on it before this thread goes on
        self.socket.sendall(struct.pack(">q", offset))

    def read_frame(self) -> tuple[int, int]:
        """Apply one. Raises Disconnected, TimeoutError."""
        offset, size = HEADER.unpack(self._read(HEADER.size))
        if self.copy:
            assert offset == self.end, f"a frame at {offset}, the copy ends at {self.end}"
        else:
            self.begin = offset
        self.copy += self._read(size)
        self.frames.append((offset, size))
        return offset, size

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                more = self.socket.recv(min(count - len(data), 1 << 20))
            except ConnectionError as error:
                raise Disconnected(str(error)) from None
            if not more:
                raise Disconnected(f"after {len(data)} of {count} bytes")
            data += more
        return bytes(data)

    def follow(self, until: int, *, acknowledge: bool = True) -> None:
        """Apply frames until its log ends there, acknowledging each."""
        while self.end < until:
            self.read_frame()
            if acknowledge:
                self.report()

    def follow_on(self) -> None:
        """Apply and acknowledge in a thread of its own, until the connection ends."""

        def run() -> None:
            try:
                while True:
                    self.read_frame()
                    self.report()
            except (Disconnected, OSError, ValueError):
                return

        self.socket.settimeout(None)
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait_end(self, at_least: int) -> None:
        """Of `follow_on`."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.end < at_least:
            assert time.monotonic() < deadline, (self.end, at_least)
            time.sleep(0.002)  # its thread has no event for it

    def wait_closed(self) -> None:
        """Whatever comes before is read and dropped."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass

    def wait_ended(self) -> None:
        """Until the connection of `follow_on` has."""
        assert self._thread is not None
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)

    def __enter__(self) -> ScriptedSlave:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FaithfulSlave:
    """Follows a master in a thread of its own, and connects again whenever it is lost."""

    def __init__(self, port: int) -> None:
        self.copy = bytearray()
        self.connections = 0
        self._port = port
        self._over = threading.Event()
        self._now: ScriptedSlave | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError, Disconnected):
                self._follow()
            self._over.wait(0.01)

    def _follow(self) -> None:
        with ScriptedSlave(self._port) as slave:
            slave.copy = self.copy
            self._now = slave
            self.connections += 1
            slave.report()
            while not self._over.is_set():
                slave.read_frame()
                slave.report()

    def close(self) -> None:
        self._over.set()
        if self._now is not None:
            with contextlib.suppress(OSError):
                self._now.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)

    def __enter__(self) -> FaithfulSlave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_bytes(store: Path, begin: int = 0, end: int | None = None) -> bytes:
    """[begin, end) of the log as its files have it."""
    names = sorted((store / COMMITLOG_DIR).iterdir())
    first = int(names[0].name)
    assert begin >= first, (begin, first)
    data = b"".join(name.read_bytes() for name in names)
    return data[begin - first : None if end is None else end - first]
