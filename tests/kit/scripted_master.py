"""A master of RocketMQ's plain replication whose bytes a test decides. No tests here.

    with ScriptedMaster(log_of(store)) as master:
        with RunningBroker(tmp_path / "slave", slave_settings(master.address)) as slave:
            master.wait_acknowledged(master.end)

It serves the bytes of a real log. What goes wrong is a test's: a script is called for each
connection, with what the slave has asked for, and sends what it likes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from patience import patient

FRAME = struct.Struct(">qi")
REPORT = struct.Struct(">q")
BATCH_BYTES = 32 << 10  # RocketMQ haTransferBatchSize
WAIT_S = patient(60.0)


class Log:
    """The bytes of a log that lies in segments of one size, as far as a test says."""

    def __init__(self, content: bytes, *, begin: int = 0, segment_bytes: int = 1 << 20) -> None:
        self.content = content
        self.begin = begin
        self.segment_bytes = segment_bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    def bytes_of(self, begin: int, end: int) -> bytes:
        return self.content[begin - self.begin : end - self.begin]

    def pieces(self, begin: int, batch_bytes: int = BATCH_BYTES) -> Iterator[tuple[int, bytes]]:
        """As a master cuts it: never across a segment."""
        while begin < self.end:
            stop = begin // self.segment_bytes * self.segment_bytes + self.segment_bytes
            end = min(begin + batch_bytes, stop, self.end)
            yield begin, self.bytes_of(begin, end)
            begin = end


def log_of(store: Path, end: int, segment_bytes: int = 1 << 20) -> Log:
    """What a store's log holds up to there."""
    files = sorted((store / "commitlog").iterdir(), key=lambda path: path.name)
    begin = int(files[0].name)
    whole = b"".join(path.read_bytes() for path in files)
    return Log(whole[: end - begin], begin=begin, segment_bytes=segment_bytes)


class Connection:
    """One connection of a slave, to the script."""

    def __init__(self, accepted: socket.socket, master: ScriptedMaster) -> None:
        self._socket = accepted
        self._master = master
        self.requested = -1

    def read_report(self) -> int:
        """The next one; raises ConnectionError at the end."""
        held = b""
        while len(held) < REPORT.size:
            more = self._socket.recv(REPORT.size - len(held))
            if not more:
                raise ConnectionResetError("the slave has hung up")
            held += more
        (end,) = REPORT.unpack(held)
        self._master.heard(end)
        return int(end)

    def send(self, offset: int, body: bytes) -> None:
        self.send_raw(FRAME.pack(offset, len(body)) + body)

    def send_raw(self, content: bytes) -> None:
        self._socket.sendall(content)

    def send_log(self, begin: int, batch_bytes: int = BATCH_BYTES) -> None:
        for offset, body in self._master.log.pieces(begin, batch_bytes):
            self.send(offset, body)

    def read_until_closed(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.read_report()


Script = Callable[[Connection], None]


def serve(connection: Connection) -> None:
    """All of the log, a heartbeat, and then whatever is added to it."""
    master = connection._master
    at = connection.requested or master.begin_for_empty
    threading.Thread(target=connection.read_until_closed, daemon=True).start()
    while not master.closed.is_set():
        for offset, body in master.log.pieces(at, master.batch_bytes):
            connection.send(offset, body)
            at = offset + len(body)
        connection.send(at, b"")
        master.grown.wait(1)
        master.grown.clear()


class ScriptedMaster:
    """Listens on a port of its own.

    Args:
        script: for each connection after its first report; the default serves the log.
    """

    def __init__(
        self, log: Log, script: Script = serve, *, batch_bytes: int = BATCH_BYTES, port: int = 0
    ) -> None:
        self.log = log
        self.script = script
        self.batch_bytes = batch_bytes
        self.begin_for_empty = log.begin
        self.requests: list[int] = []  # the first report of each connection
        self.reports: list[int] = []
        self.faults: list[BaseException] = []  # of scripts
        self.closed = threading.Event()
        self.grown = threading.Event()
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def end(self) -> int:
        return self.log.end

    def grow(self, log: Log) -> None:
        self.log = log
        self.grown.set()

    def heard(self, end: int) -> None:
        with self._changed:
            self.reports.append(end)
            self._changed.notify_all()

    def wait_acknowledged(self, end: int, timeout_s: float = WAIT_S) -> None:
        """Until a slave has reported that offset, or one beyond."""
        self.wait_for(lambda: max(self.reports, default=-1) >= end, timeout_s)

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not holds():
                left = deadline - time.monotonic()
                assert left > 0, (self.requests, self.reports[-5:], self.faults)
                self._changed.wait(min(left, 0.2))

    def hang_up(self) -> None:
        """On every slave."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(accepted)
            threading.Thread(target=self._follow, args=(accepted,), daemon=True).start()

    def _follow(self, accepted: socket.socket) -> None:
        connection = Connection(accepted, self)
        try:
            connection.requested = connection.read_report()
            with self._changed:
                self.requests.append(connection.requested)
                self._changed.notify_all()
            self.script(connection)
        except OSError:
            pass
        except BaseException as error:
            self.faults.append(error)
        finally:
            accepted.close()

    def close(self) -> None:
        self.closed.set()
        self.grown.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def __enter__(self) -> ScriptedMaster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not self.faults, self.faults


def slave_settings(master: str, **more: Any) -> Mapping[str, object]:
    """Of a RunningBroker that follows it."""
    return {
        "brokerRole": "SLAVE",
        "brokerId": 1,
        "brokerName": "copied",
        "haMasterAddress": master,
        "haSendHeartbeatInterval": 200,
        **more,
    }
