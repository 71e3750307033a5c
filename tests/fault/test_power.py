"""Power cuts of a running broker. Campaigns of any length: python -m tests.fault power-cuts"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from family import MARK, RUN, SMALL, RunningBroker
from fault import power, service
from fault.disk import Disk, need
from fault.power import PowerCuts, Violation, cut_power
from fault.service_power import ServiceCuts, cut_service
from patience import patient

from cometmq.protocol.commands import (
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import FlushDiskTimeout, StoreError
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

pytestmark = pytest.mark.slow

SEED = 20_261_121


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "sync", "cuts"),
    [("ext4", True, 3), ("ext4", False, 2), ("xfs", True, 2), ("xfs", False, 2)],
)
def test_power_cuts_under_load(kind: str, sync: bool, cuts: int, tmp_path: Path) -> None:
    need(kind, "power cuts of a broker")
    done = cut_power(tmp_path, kind, sync=sync, cuts=cuts, seed=SEED)
    print(f"{done.moments}: {done.acknowledged} acknowledged, {done.lost} lost")
    assert done.acknowledged > 100
    if sync:
        assert not done.lost


@pytest.mark.timeout(200)
def test_a_topic_is_as_safe_as_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first flush both may go, and are made anew."""
    need("ext4", "power cuts of a broker")
    never_ms = 600_000
    settings = {"flushIntervalCommitLog": never_ms, "flushCommitLogThoroughInterval": never_ms}
    monkeypatch.setattr(power, "SETTINGS", power.SETTINGS | settings)
    monkeypatch.setattr(power, "FLUSH_MS", never_ms)
    monkeypatch.setattr(power, "LOAD_S", 0.0)
    done = power.cut_power(tmp_path, "ext4", sync=False, cuts=2, seed=SEED)
    print(f"{done.moments}: {done.acknowledged} acknowledged, {done.lost} lost")
    assert done.lost
    assert done.topics_lost == 2


@pytest.mark.timeout(200)
@pytest.mark.parametrize("sync", [True, False])
def test_power_cuts_of_a_service_that_appends(sync: bool, tmp_path: Path) -> None:
    need("ext4", "power cuts of a service")
    done = cut_service(tmp_path, "ext4", sync=sync, cuts=2, seed=SEED)
    print(done)
    assert done["acknowledged"] > 100
    if sync:
        assert not done["lost"]


@pytest.mark.parametrize("cuts_of", [PowerCuts, ServiceCuts])
def test_a_broker_that_answers_before_it_flushes_is_noticed(
    cuts_of: type[PowerCuts], tmp_path: Path
) -> None:
    """The judge itself."""
    need("ext4", "power cuts of a broker")
    with Disk(tmp_path, "ext4") as disk:
        campaign = cuts_of(disk, sync=True, seed=SEED, logs=tmp_path)
        campaign._settings["flushDiskType"] = "ASYNC_FLUSH"

        def cut_often() -> None:
            for _ in range(8):
                campaign.cycle()

        # A message, or the topic itself, of which nothing was flushed yet.
        with pytest.raises(Violation, match=r"is lost with|is gone, created"):
            cut_often()


def test_who_came_further_than_the_log_is_put_back(tmp_path: Path) -> None:
    """Under ASYNC_FLUSH a cut may take messages that a group has consumed. What is stored in their
    places afterwards is new to the group, and has to reach it."""
    need("ext4", "offsets behind the log's end")
    settings = {"flushIntervalCommitLog": 600_000, "flushConsumerOffsetInterval": 50}
    with Disk(tmp_path, "ext4") as disk:
        store, log_path = disk.folder / "store", tmp_path / "broker.log"
        with RunningBroker(store, settings, log_path=log_path) as broker:
            broker.create_topic("orders", 1)
            broker.send("orders", 0, [b"kept"] * 10)
        with RunningBroker(store, settings, log_path=log_path) as broker:
            assert broker.counter(Counter.FLUSHED) == broker.counter(Counter.WROTE)
            broker.send("orders", 0, [b"lost"] * 10)
            commit(broker, 20)
            commit(broker, 19)
            broker.finish("coordinator")  # which syncs the offsets, as the timer would
            disk.cut()
            broker.kill_all()
            disk.power_on()
        with RunningBroker(store, settings, log_path=log_path) as broker:
            assert len(broker.read_queue("orders", 0)) == 10
            assert committed(broker) == 10
            broker.until_logged("put back in 1 queues")
            broker.until_logged("queue 0 of orders from 19 to 10")
            broker.send("orders", 0, [b"new"] * 10)
        with RunningBroker(store, settings, log_path=log_path) as broker:
            commit(broker, 15)
            broker.kill_all()
        with RunningBroker(store, settings, log_path=log_path) as broker:
            assert committed(broker) == 15  # who has not gone too far stays


def test_pages_that_reach_the_disk_out_of_order_leave_no_hole(tmp_path: Path) -> None:
    """The kernel writes what is not flushed in any order: here the last segment goes first."""
    need("ext4", "writing out of order")
    settings = {
        "mappedFileSizeCommitLog": 96 << 10,
        "maxMessageSize": 16 << 10,
        "flushIntervalCommitLog": 600_000,
    }
    with Disk(tmp_path, "ext4") as disk:
        store, log_path = disk.folder / "store", tmp_path / "broker.log"
        with RunningBroker(store, settings, log_path=log_path) as broker:
            broker.create_topic("orders", 1)
            broker.send("orders", 0, [b"kept"])
        with RunningBroker(store, settings, log_path=log_path) as broker:
            for _ in range(40):
                sent = broker.send("orders", 0, [b"x" * 10_000])
            last = sent[0].physical_offset // (96 << 10) * (96 << 10)
            descriptor = os.open(store / COMMITLOG_DIR / segment_name(last), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            disk.cut()
            broker.kill_all()
            disk.power_on()
        with RunningBroker(store, settings, log_path=log_path) as broker:
            offsets = [message.queue_offset for message in broker.read_queue("orders", 0)]
            assert offsets == list(range(len(offsets)))
            assert offsets


def commit(broker: RunningBroker, queue_offset: int) -> None:
    offsets = [QueueOffset("orders", 0, queue_offset)]
    broker.coordinator.ask(CommitOffsets("readers", offsets), timeout_s=patient(30))


def committed(broker: RunningBroker) -> int:
    command = FetchOffsets("readers", [QueueKey("orders", 0)])
    answer, _ = broker.coordinator.ask(command, timeout_s=patient(30))
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


def test_a_disk_that_is_gone_puts_a_service_s_writer_out_of_service(tmp_path: Path) -> None:
    """An append syncs in its own thread: the service lives, and is told that nothing is sure."""
    need("ext4", "a disk that is gone under a service")
    settings = {**SMALL, "flushDiskType": "SYNC_FLUSH"}
    with Disk(tmp_path, "ext4") as disk:
        store = disk.folder / "store"
        command = [sys.executable, service.__file__, store, json.dumps(settings)]
        environ = {**os.environ, MARK: f"{RUN}/service"}
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            control = ControlFile.open(store / CONTROL_FILE, writable=False)
            assert control.read(Counter.SYNCS).value >= 10
            disk.cut()
            child.stdin.write("\n")
            child.stdin.flush()
            first, second = json.loads(child.stdout.readline())
        assert first[0] == FlushDiskTimeout.__name__
        assert second[0] == StoreError.__name__
        assert all(os.strerror(errno.EIO) in text for _, text in (first, second))
        counters = control.values()
        del control  # or the disk would be busy
        assert counters["flush_errno"] == errno.EIO
        assert counters["flushed"] < counters["wrote"]
        disk.power_on()
        with RunningBroker(store, settings, log_path=tmp_path / "broker.log") as again:
            bodies = [message.body for message in again.read_queue("orders", 0)]
            assert bodies[:10] == [b"%d" % number for number in range(10)]
