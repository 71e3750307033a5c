"""What runs out: the disk, descriptors, memory. Refused by name or ended with a text; nothing that
was acknowledged is lost, and it goes on when there is room again."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from family import CHILDREN, RunningBroker, Sent
from fault.disk import need, small_disk
from patience import patient

from cometmq import Consumer
from cometmq.protocol.commands import CommitOffsets, QueueOffset
from cometmq.protocol.errors import CometError, DiskFull, ServiceNotAvailable
from cometmq.shm.live.control import Counter
from cometmq.shm.tools.verify import verify_store

pytestmark = pytest.mark.slow

SPACE = 48 << 20
SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 1 << 20,
    "fileReservedTime": 72,
    "cleanResourceInterval": 3_600_000,  # nothing is deleted: no room must not cost a message
}
BODIES = [b"x" * 50_000] * 4
AGAIN_TIMEOUT_S = patient(60)


@contextlib.contextmanager
def full_soon(kind: str, tmp_path: Path) -> Iterator[Path]:
    if kind == "ext4":
        need("ext4", "a full disk")
        with small_disk(tmp_path, SPACE) as disk:
            yield disk.folder
        return
    if os.geteuid() != 0:
        pytest.skip("a full disk on tmpfs: only root may mount a file system")
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", str(folder)]
    subprocess.run(command, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Somebody else takes all the room there is; to the last block."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return ballast


def send_until_refused(broker: RunningBroker, sent: list[Sent]) -> CometError:
    for _ in range(400):
        try:
            sent += broker.send("orders", 0, BODIES)
        except CometError as error:
            return error
    raise AssertionError("80 MB went onto a full disk")


def send_until_taken(broker: RunningBroker, sent: list[Sent]) -> None:
    deadline = time.monotonic() + AGAIN_TIMEOUT_S
    while True:
        try:
            sent += broker.send("orders", 0, BODIES)
            return
        except ServiceNotAvailable:
            assert time.monotonic() < deadline, broker.log[-4000:]
            time.sleep(0.1)  # the allocator tries once a second; nobody tells us


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_the_disk_is_full_and_freed_again(kind: str, tmp_path: Path) -> None:
    log_path = tmp_path / "broker.log"
    sent: list[Sent] = []
    with full_soon(kind, tmp_path) as folder:
        store = folder / "store"
        with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
            broker.create_topic("orders", 3)
            for turn in range(2):
                sent += broker.send("orders", 0, BODIES)
                broker.assert_stored(sent)
                before = list(sent)
                ballast = fill(folder)
                # A queue that is new: there is no room for its entries, nor for its name.
                sent += broker.send("orders", 1 + turn, [b"in a segment that was there already"])
                refusal = send_until_refused(broker, sent)
                assert isinstance(refusal, DiskFull), refusal
                # Reading goes on. What went into segments that were there already may have to wait
                # for room for its ConsumeQueue entries.
                broker.assert_stored(before)
                with contextlib.suppress(ServiceNotAvailable):
                    offsets = [QueueOffset("orders", 0, len(sent))]
                    broker.coordinator.ask(CommitOffsets("readers", offsets), timeout_s=patient(30))
                ballast.unlink()
                send_until_taken(broker, sent)
                broker.assert_stored(sent)
            broker.until_logged("no segment ahead")
            assert "Traceback" not in broker.log
            assert broker.statistics()["restarts"] == 0
        assert not verify_store(store).findings
        with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
            broker.assert_stored(sent)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_start_on_a_full_disk(end: str, kind: str, tmp_path: Path) -> None:
    """It serves what it has and refuses what is sent; afterwards everything goes on."""
    log_path = tmp_path / "broker.log"
    with full_soon(kind, tmp_path) as folder:
        store = folder / "store"
        broker = RunningBroker(store, SETTINGS, log_path=log_path)
        broker.create_topic("orders", 8)
        sent = [one for queue in range(8) for one in broker.send("orders", queue, BODIES)]
        if end == "closed":
            assert broker.close() == 0
        else:
            broker.kill_all()
        ballast = fill(folder)
        for _ in range(2):  # and what it needs for that, the second start needs as well
            with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
                broker.assert_stored(sent)
                with Consumer(
                    broker.ready.name_server, "g", "orders", start="earliest"
                ) as consumer:
                    assert len(consumer.poll(1, patient(20))) == 1
                refusal = send_until_refused(broker, sent)
                assert isinstance(refusal, DiskFull), refusal
                assert "Traceback" not in broker.log, broker.log
                assert broker.statistics()["restarts"] == 0
            del consumer
            gc.collect()  # counters that it has mapped here would keep the disk busy
        ballast.unlink()
        with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
            send_until_taken(broker, sent)
            broker.assert_stored(sent)
        assert not verify_store(store).findings


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_processes_that_die_on_a_full_disk_are_started_again(kind: str, tmp_path: Path) -> None:
    """Fault 37. Several deaths of each process: the broker serves, and dispatching is pending."""
    log_path = tmp_path / "broker.log"
    with full_soon(kind, tmp_path) as folder:
        store = folder / "store"
        with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
            broker.create_topic("orders", 3)
            sent = broker.send("orders", 0, BODIES)
            broker.assert_stored(sent)
            before = list(sent)
            ballast = fill(folder)
            sent += broker.send("orders", 1, [b"a queue that is new"])  # no room for its entries
            with contextlib.suppress(DiskFull):
                for _ in range(400):
                    sent += broker.send("orders", 0, [b"x"] * 2_000)
            assert broker.counter(Counter.DISPATCHED) < broker.counter(Counter.WROTE)
            for role in ("dispatcher", "allocator", "flush", "dispatcher", "reader-0"):
                broker.kill(role)
                broker.assert_stored(before)
                fill_more(ballast)
            # These serve only once all queues reach the log's end, which needs free space.
            for role in ("scheduler", "commitlog", "coordinator"):
                broker.end(broker.pids()[role])
            broker.assert_stored(before)
            assert broker._process.poll() is None
            assert broker.counter(Counter.DISPATCHED) < broker.counter(Counter.WROTE)
            ballast.unlink()
            send_until_taken(broker, sent)
            broker.assert_stored(sent)
            assert "Traceback" not in broker.log, broker.log
        with RunningBroker(store, SETTINGS, log_path=log_path) as broker:
            broker.assert_stored(sent)
        assert not verify_store(store).findings


def fill_more(ballast: Path) -> None:
    """Fill the space that a dead process has freed."""
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def limit(pid: int, what: str) -> None:
    """Hardly any more than the process has now."""
    process = psutil.Process(pid)
    if what == "descriptors":
        value, name = process.num_fds() + 2, resource.RLIMIT_NOFILE
    else:
        value, name = process.memory_info().vms + (1 << 20), resource.RLIMIT_AS
    resource.prlimit(pid, name, (value, value))


@pytest.mark.parametrize("what", ["descriptors", "memory"])
@pytest.mark.parametrize("roles", [CHILDREN[at::3] for at in range(3)], ids=" ".join)
def test_a_process_runs_out(roles: Sequence[str], what: str, tmp_path: Path) -> None:
    """One process may not have more of it than it has; of each role. The broker goes on, perhaps by
    starting that process again, or ends and says why; clients get errors by name; nothing is
    lost, as the next one sees."""
    store = tmp_path / "store"
    sent: list[Sent] = []
    for role in roles:
        broker = RunningBroker(store, {"mappedFileSizeCommitLog": 1 << 20})
        try:
            broker.assert_stored(sent)
            sent = run_out(broker, role, what)
            if broker._process.poll() is not None:
                broker.until_logged("CRITICAL")
        finally:
            broker.kill_all()
    with RunningBroker(store, {"mappedFileSizeCommitLog": 1 << 20}) as broker:
        broker.assert_stored(sent)
    assert not verify_store(store).findings


def run_out(broker: RunningBroker, role: str, what: str) -> list[Sent]:
    """What was stored nevertheless."""
    broker.create_topic(role, 1)
    sent = broker.send(role, 0, [b"before"])
    limit(broker.pids()[role], what)
    for number in range(12):
        topic = f"{role}-{number}"
        with contextlib.suppress(CometError):
            broker.create_topic(topic, 4)
        for queue_id in range(4):
            with contextlib.suppress(CometError):
                sent += broker.send(topic, queue_id, [b"y" * 20_000] * 4, timeout_s=2)
        if broker._process.poll() is not None:
            break
    with contextlib.suppress(CometError):
        sent += broker.send(role, 0, [b"after"], timeout_s=2)
    return sent
