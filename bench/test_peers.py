"""The line between two replicas of a group: TLS over loopback, each in a process of its own."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import statistics
import time
from collections.abc import Iterator

import pytest
from benchmarks import Report, median_s

from cometmq.actors.replication.core.frames import Ack, AnyFrame, Bytes
from cometmq.actors.replication.peers.peers import Peers
from cometmq.actors.runtime.event_log import EventLog

MIB = 1 << 20
WINDOW = 16  # frames on their way, as a master has at most
CONTENT = memoryview(random.Random(7).randbytes(MIB))


class End:
    """A replica that acknowledges all that it is sent."""

    def __init__(self, name: str) -> None:
        self.acknowledged = 0
        self.peers = Peers(
            group="bench",
            own=name,
            secret=bytes(32),
            bind="127.0.0.1:0",
            on_frame=self._on_frame,
            said=EventLog(),
        )

    def _on_frame(self, sender: str, frame: AnyFrame, _: memoryview | None) -> None:
        if isinstance(frame, Bytes):
            self.peers.send(sender, Ack("bench", 1, 1, frame.offset, 0))
        else:
            self.acknowledged += 1

    def listen(self) -> None:
        select.select([self.peers], [], [], 0.02)
        while self.peers.receive():
            pass
        self.peers.tend()

    def send(self, content: memoryview) -> bool:
        return self.peers.send("n1", Bytes("bench", 1, 1, 0, len(content), 0, 0), content)

    def send_all(self, count: int, content: memoryview) -> None:
        """Until all of them are acknowledged."""
        sent = self.acknowledged = 0
        while self.acknowledged < count:
            while sent < min(count, self.acknowledged + WINDOW):
                assert self.send(content)
                sent += 1
            self.listen()


@pytest.fixture
def end() -> Iterator[End]:
    """With another one in a process of its own."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        other = End("n1")
        theirs.send(other.peers.address.encode())
        other.peers.replace({"n0": theirs.recv(100).decode()})
        while True:
            other.listen()
    found = End("n0")
    try:
        found.peers.replace({"n1": ours.recv(100).decode()})
        ours.send(found.peers.address.encode())
        while not found.send(CONTENT[:1]):
            found.listen()
        while not found.acknowledged:
            found.send(CONTENT[:1])  # the other one may not have had a way back
            found.listen()
        yield found
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.peers.close()
        ours.close()
        theirs.close()


def test_frames_of_a_mebibyte(end: End, full: bool, report: Report) -> None:
    count = 1_000 if full else 30
    median = median_s(lambda: end.send_all(count, CONTENT), 5 if full else 1)
    report("1 MiB frames, acknowledged", count * MIB / median / 1e6, "MB/s")


def test_round_trip_of_small_frames(end: End, full: bool, report: Report) -> None:
    taken = []
    for _ in range(10_000 if full else 200):
        start = time.perf_counter()
        end.send_all(1, CONTENT[:200])
        taken.append(time.perf_counter() - start)
    report("200 bytes and the answer, p50", statistics.median(taken) * 1e6, "us")
