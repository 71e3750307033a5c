"""File space ahead of the tail: as much as the writer takes, given back when nobody needs it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import reference
from family import RunningBroker, Sent
from fault.disk import need, small_disk
from patience import patient
from waiting import until

from cometmq import Broker
from cometmq.actors.maintenance.reserve import LEAST_BYTES, QUIET_S, Demand
from cometmq.protocol.commands import GetStatistics, Statistics
from cometmq.protocol.errors import DiskFull
from cometmq.shm import kernel as shm_kernel
from cometmq.shm.kernel.layout import BLANK
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender
from cometmq.shm.live.control import Counter
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.os.files import segment_name

MIB = 1 << 20
GIB = 1 << 30
WAIT_S = patient(60)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_slow_writer_has_the_least() -> None:
    clock = Clock()
    demand = Demand(64 * MIB, clock=clock)
    for second in range(60):
        clock.now_s += 1
        assert demand.look(second * 24 * MIB) == LEAST_BYTES


def test_a_fast_writer_has_what_it_takes_in_two_seconds_at_once() -> None:
    clock = Clock()
    demand = Demand(64 * MIB, clock=clock)
    demand.look(0)
    clock.now_s += 0.1
    assert demand.look(200 * MIB) == 400 * MIB
    clock.now_s += 0.9
    assert demand.look(2_000 * MIB) == 4_000 * MIB
    clock.now_s += QUIET_S
    assert demand.look(2_000 * MIB) == 2_000 * MIB
    clock.now_s += 10 * QUIET_S
    assert demand.look(2_000 * MIB) == LEAST_BYTES


def disk_bytes(folder: Path) -> int:
    """File space of everything in a folder, whatever the sizes of the files say."""
    return sum(
        path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()
    )  # fmt: skip


def test_an_idle_broker_is_small_and_a_closed_one_smaller(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Broker(store) as broker:
        with broker.producer() as producer:
            producer.send("t", b"one")
        log = store / "commitlog"
        assert {path.stat().st_size for path in log.iterdir()} == {GIB}
        assert disk_bytes(log) <= LEAST_BYTES + 16 * 4096
    assert [path.name for path in log.iterdir()] == [segment_name(0)]
    assert (log / segment_name(0)).stat().st_size == GIB, "RocketMQ's size"
    assert disk_bytes(log) <= MIB
    assert disk_bytes(store) <= 32 * MIB
    assert reference.check_store(store) == []
    with Broker(store) as broker, broker.consumer("g", "t", start="earliest") as consumer:
        assert [message.body for message in consumer.poll(1, WAIT_S)] == [b"one"]


LARGE: dict[str, object] = {"mappedFileSizeCommitLog": 256 << 20, "hotWindowBytes": 4 << 20}


@pytest.mark.slow
def test_a_burst_takes_more_and_gives_it_back(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {**LARGE, "mappedFileSizeCommitLog": GIB, "hotWindowMaxBytes": 0}
    with Broker(store, settings=settings, writer="here") as broker:
        appender = broker.appender("t")
        bodies = [bytes(MIB)] * 16
        count = 0

        allocator = broker.actor("allocator")

        def ahead() -> int:
            answer = allocator.ask(GetStatistics(), timeout=WAIT_S)
            assert isinstance(answer, Statistics)
            return int(answer.values["reserved_bytes"])

        while ahead() < 2 * LEAST_BYTES:
            count += len(appender.append_many(bodies))
            assert count < 2_000, "the space ahead has not grown with the rate"
        until(lambda: ahead() <= LEAST_BYTES)
        most = count * (MIB + 4096) + LEAST_BYTES + MIB
        until(lambda: disk_bytes(store / "commitlog") <= most)
        for _ in range(20):  # and it is there again when it is needed
            count += len(appender.append_many(bodies))
        allocator.stop()
    assert reference.check_store(store) == []
    assert len(reference.messages(store)) == count


@pytest.mark.slow
def test_one_batch_beyond_what_is_reserved(tmp_path: Path) -> None:
    """The writer says what it needs: a batch larger than the space ahead waits for no timeout."""
    store = tmp_path / "store"
    with Broker(store, settings=LARGE, writer="here") as broker:
        appender = broker.appender("t")
        appender.append(b"first")
        began = time.monotonic()
        appender.append_many([bytes(MIB)] * 180)
        appender.append_many([bytes(MIB)] * 180)  # in the next segment
        assert time.monotonic() - began < WAIT_S
    assert reference.check_store(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_processes_die_while_space_is_taken_and_given_back(flush: str, tmp_path: Path) -> None:
    settings = {**LARGE, "flushDiskType": flush}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t", 1)
        sent: list[Sent] = []
        for turn in range(6):
            for _ in range(12):
                sent += broker.send("t", 0, [bytes(250_000)] * 14)
            broker.kill("allocator" if turn % 2 else "commitlog")
        sent += broker.send("t", 0, [b"after"])
        assert broker.counter(Counter.WROTE) <= broker.counter(Counter.SPACE_WANTED)
        broker.assert_stored(sent)
        broker.kill_all()
        with RunningBroker(tmp_path / "store", settings) as again:
            until(lambda: again.counter(Counter.ALLOCATED) > 0)
            again.assert_stored(sent)


def test_a_volume_below_one_segment(tmp_path: Path) -> None:
    """It serves until it is full, refuses by name, and nobody dies of a store into nothing."""
    need("ext4", "a small volume")
    with small_disk(tmp_path, 160 * MIB) as disk:
        settings = {"diskMaxUsedSpaceRatio": 75, "mappedFileSizeCommitLog": GIB}
        log_path = tmp_path / "broker.log"
        with RunningBroker(disk.folder / "store", settings, log_path=log_path) as broker:
            broker.create_topic("t", 1)
            sent: list[Sent] = []

            def fill() -> None:
                for _ in range(400):
                    sent.extend(broker.send("t", 0, [bytes(100_000)] * 4))

            with pytest.raises(DiskFull):
                fill()
            assert len(sent) * 100_000 > 80 * MIB
            broker.assert_stored(sent)
            assert broker.statistics()["restarts"] == 0


# --- the writer's side ---


def test_nothing_is_stored_beyond_what_is_ready(tmp_path: Path) -> None:
    """Every append in turn: what the log stores lies below what it was told."""
    told: list[int] = []
    steps = 700

    def ready(end: int) -> int:
        start = (end - 1) // 8192 * 8192
        log._make_segment(end)
        told.append(min(start + 8192, end + len(told) % steps))
        return told[-1]

    (tmp_path / "commitlog").mkdir()
    log = CommitLog(
        tmp_path,
        segment_bytes=8192,
        physical_offset=0,
        store_host=bytes(8),
        max_message_bytes=4096,
        ready=ready,
    )
    queue = QueueCursor("t", 0, 0)
    for number in range(400):
        log.append(queue, bytes(1 + number * 37 % 3000))
        assert log.physical_offset + BLANK.size <= max(told)
    log.append_all(queue, [bytes(700)] * 9)
    log.close()
    assert len(told) > 300


def test_an_appender_keeps_room_for_the_blank() -> None:
    memory = bytearray(4096)
    appender = LogAppender(bytes(8), 4096)
    queue = QueueCursor("t", 0, 0)
    appender.attach(memory, 0, 0, 200)
    assert appender.append(queue, bytes(60)) == 0
    at = appender.physical_offset
    assert appender.append(queue, bytes(60)) == -1
    assert appender.wanted == at + BLANK.size
    appender.reserve_to(at + appender.wanted - 1)
    assert appender.append(queue, bytes(60)) == -1
    appender.reserve_to(at + appender.wanted)
    assert appender.append(queue, bytes(60)) == at


def test_what_lies_behind_the_hole_is_zeros(tmp_path: Path) -> None:
    """As RocketMQ and our recovery read it."""
    store = tmp_path / "store"
    with RunningBroker(store, LARGE) as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"x" * 1000])
        assert broker.close() == 0
    path = store / "commitlog" / segment_name(0)
    with path.open("rb") as file:
        assert os.lseek(file.fileno(), MIB, os.SEEK_HOLE) == MIB
    done = subprocess.run(["du", "-k", str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) <= 128


def test_every_append_of_the_kernel_asks_for_room() -> None:
    """By `_has_room`, which knows where file space ends; not by the segment's size."""
    folder = Path(shm_kernel.__file__).parent
    for path in folder.glob("*.p[xy][ixd]"):
        for line in path.read_text().splitlines():
            assert "_segment_bytes - self._at:" not in line, (path, line)
            # A copy looks how much of a record its segment could hold; room is asked for before.
            if path.name != "copying.pxi":
                assert "_segment_bytes - log._at" not in line, (path, line)
