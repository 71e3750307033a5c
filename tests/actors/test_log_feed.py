"""The `ha` process's end of the socket that the log comes by, alone."""

from __future__ import annotations

import math
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import patient

from cometmq.actors.replication.group import log_feed as log_line
from cometmq.actors.replication.group.log_feed import LogFeed
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.wire.line import abstract
from cometmq.shm.kernel.layout import HA_FRAME
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter

SEED = random.randrange(1 << 32)
TIMEOUT_S = patient(30)


class Rig:
    """A LogFeed, with a counter that the test moves as the commitlog process would."""

    def __init__(self, folder: Path) -> None:
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        self.control = ControlFile.create(folder / CONTROL_FILE, {}, [self.doorbell])
        self.wrote = self.control.own(Counter.WROTE)
        self.laid_down: list[int] = []
        self.name = f"cometmq-test-{random.randrange(1 << 62)}"
        self.line = self.listen()

    def listen(self) -> LogFeed:
        cell = self.control.sleep_on(Counter.WROTE, 0)
        return LogFeed(f"unix:@{self.name}", cell, self.laid_down.append)

    def connect(self, *, end: int | None = None) -> socket.socket:
        """As a commitlog process whose log ends there."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(TIMEOUT_S)
        made.connect(abstract(self.name))
        self.turn()
        if end is not None:
            made.sendall(struct.pack(">q", end))
            self.turn()
        return made

    def turn(self) -> None:
        """What has come is looked at."""
        while select.select([self.line], [], [], 0)[0]:
            self.line.on_readable()

    def read(self, other_end: socket.socket, count: int) -> bytes:
        """While the line sends."""
        found = bytearray()
        while len(found) < count:
            self.turn()
            found += other_end.recv(min(65_536, count - len(found)))
        return bytes(found)

    def read_frame(self, other_end: socket.socket) -> tuple[int, bytes]:
        head = HA_FRAME.unpack(self.read(other_end, HA_FRAME.size))
        return int(head["physical_offset"]), self.read(other_end, int(head["size"]))

    def write(self, end: int) -> None:
        """The log has come to there; whether that rang."""
        self.wrote.reset(end)
        self.wrote.wake()

    def rang(self) -> bool:
        try:
            return bool(os.eventfd_read(self.doorbell))
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.line.close()
        os.close(self.doorbell)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def frame_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", [1, 200, 65_536, 1 << 20, 1 << 26])
def test_a_frame_is_sent_and_known_to_be_laid_down(size: int, rig: Rig) -> None:
    content = frame_of(size)
    with rig.connect(end=0) as other_end:
        assert rig.line.is_idle
        rig.line.lay_down(0, memoryview(content))
        assert not rig.line.is_idle
        assert rig.read_frame(other_end) == (0, content)
        rig.write(size - 1)
        rig.line.look()
        assert rig.laid_down == []
        assert rig.rang()  # it is asleep on the counter
        rig.write(size)
        assert rig.rang()
        rig.line.look()
        assert rig.laid_down == [size]
        assert rig.line.is_idle
        assert rig.line.end == size


def test_a_frame_waits_for_somebody_to_take_it(rig: Rig) -> None:
    rig.line.lay_down(0, memoryview(b"a frame"))
    with rig.connect() as other_end:
        other_end.sendall(struct.pack(">q", 0)[:3])  # its report comes in pieces
        rig.turn()
        other_end.sendall(struct.pack(">q", 0)[3:])
        assert rig.read_frame(other_end) == (0, b"a frame")


def test_reports_between_frames_change_nothing(rig: Rig) -> None:
    with rig.connect(end=10) as other_end:
        for end in (10, 15, 12, 1 << 40):
            other_end.sendall(struct.pack(">q", end))
        other_end.sendall(bytes(100_000))
        rig.turn()
        rig.line.lay_down(10, memoryview(b"a frame"))
        assert rig.read_frame(other_end) == (10, b"a frame")


@pytest.mark.parametrize("taken", [0, 5, 12, 100_000])
@pytest.mark.parametrize("written", [0, 1, 150_000, 299_999, 300_000])
def test_the_rest_comes_again(taken: int, written: int, rig: Rig) -> None:
    """The one before has read some, and its log ends somewhere in the frame when it dies."""
    begin, content = 1_000, frame_of(300_000)
    first = rig.connect(end=begin)
    rig.line.lay_down(begin, memoryview(content))
    rig.read(first, taken)
    first.close()
    rig.turn()
    rig.write(begin + written)
    with rig.connect(end=begin + written) as second:
        if written < len(content):
            assert rig.read_frame(second) == (begin + written, content[written:])
            assert rig.laid_down == []
            rig.write(begin + len(content))
            rig.line.look()
        assert rig.laid_down == [begin + len(content)]
        rig.line.lay_down(begin + len(content), memoryview(b"next"))
        assert rig.read_frame(second) == (begin + len(content), b"next")


def test_a_later_one_takes_the_place(rig: Rig) -> None:
    """The system may tell of the end of the one before only afterwards."""
    content = frame_of(1 << 20)
    with rig.connect(end=0) as first:
        rig.line.lay_down(0, memoryview(content))
        rig.read(first, 1_000)
        with rig.connect(end=0) as second:
            assert rig.read_frame(second) == (0, content)
            while first.recv(65_536):  # what it had been sent, and then the end
                pass


@pytest.mark.parametrize("end", [99, 111, -1, 1 << 62])
def test_a_log_that_ends_elsewhere(end: int, rig: Rig) -> None:
    rig.line.lay_down(100, memoryview(b"0123456789"))
    with rig.connect() as other_end:
        other_end.sendall(struct.pack(">q", end))
        with pytest.raises(StoreDamaged, match=f"ends at {end}: .* lies from 100 to 110"):
            rig.turn()


def test_another_run(rig: Rig, tmp_path: Path) -> None:
    """What was under way is dropped, and its memory is free."""
    content = bytearray(frame_of(1 << 20))
    with rig.connect(end=0):
        rig.line.lay_down(0, memoryview(content))
        control = ControlFile.create(tmp_path / "again", {}, [rig.doorbell])
        rig.line.begin_run(control.sleep_on(Counter.WROTE, 0))
        content.clear()  # nobody looks at it
        assert rig.line.is_idle
    rig.write(1 << 20)  # of the run before
    rig.line.look()
    assert rig.laid_down == []
    assert rig.line.end == 0
    with rig.connect(end=0) as other_end:
        rig.line.lay_down(0, memoryview(b"a frame"))
        assert rig.read_frame(other_end) == (0, b"a frame")
        control.own(Counter.WROTE).reset(7)
        rig.line.look()
        assert rig.laid_down == [7]


def test_one_listener_at_a_time(rig: Rig) -> None:
    with pytest.raises(OSError, match="in use"):
        rig.listen()
    rig.line.close()
    rig.line = rig.listen()
    with rig.connect(end=0) as other_end:
        rig.line.lay_down(0, memoryview(b"a frame"))
        assert rig.read_frame(other_end) == (0, b"a frame")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_sent_away(rig: Rig) -> None:
    with rig.connect(end=0) as other_end:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.setuid(65_534)
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(abstract(rig.name))
            os.write(told, b"x")
            os._exit(0 if stranger.recv(1) == b"" else 1)
        os.read(ready, 1)
        rig.turn()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(ready)
        os.close(told)
        rig.line.lay_down(0, memoryview(b"a frame"))
        assert rig.read_frame(other_end) == (0, b"a frame")


def test_a_little_frame_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is called back, and nothing rings later."""
    monkeypatch.setattr(log_line, "LITTLE_S", TIMEOUT_S)
    with rig.connect(end=0) as other_end:

        def lay_down() -> None:
            other_end.recv(HA_FRAME.size + 7, socket.MSG_WAITALL)
            rig.wrote.reset(3)  # a part of it
            rig.wrote.reset(7)

        process = threading.Thread(target=lay_down)
        process.start()
        assert rig.line.lay_down(0, memoryview(b"a frame"))
        process.join()
        assert rig.line.is_ready
        rig.line.look()
        assert rig.laid_down == []
        assert not rig.rang()


@pytest.mark.parametrize("is_there", [False, True])
def test_what_takes_longer_is_not_waited_for(
    is_there: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has connected, or it is much."""
    monkeypatch.setattr(log_line, "LITTLE_S", math.inf)
    size = log_line.LITTLE_BYTES + 1 if is_there else 1
    with rig.connect(end=0 if is_there else None):
        assert not rig.line.lay_down(0, memoryview(bytes(size)))
        rig.write(size)
        assert rig.rang()
        rig.line.look()
        assert rig.laid_down == [size]


def test_any_course(rig: Rig) -> None:
    """Frames of any sizes, connections that break anywhere: the log comes whole."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    log, copied = frame_of(3_000_000), b""
    other_end = rig.connect(end=0)
    at = 0
    while at < len(log):
        end = min(len(log), at + chance.choice([1, 50, 3_000, 200_000, 700_000]))
        rig.line.lay_down(at, memoryview(log)[at:end])
        while not rig.line.is_idle:
            offset = HA_FRAME.unpack(rig.read(other_end, HA_FRAME.size))["physical_offset"]
            assert offset == len(copied)
            count = end - len(copied)
            if chance.random() < 0.3:
                count = chance.randrange(count + 1)
            copied += rig.read(other_end, count)
            rig.write(len(copied))
            if count < end - offset:
                other_end.close()
                rig.turn()
                other_end = rig.connect(end=len(copied))
            rig.line.look()
        at = end
        assert rig.laid_down[-1] == at
    other_end.close()
    assert copied == log
