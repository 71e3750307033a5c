"""A store that RocketMQ opened between two runs of CometMQ: its acknowledged messages stay.

Fault 1. `cometmq.control` of a killed run has the end of the log at that time, without later
writes; so it is valid only while no other program has opened the store.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from family import SMALL, RunningBroker, Sent
from interop import rocketmq
from interop.rocketmq import append_messages

from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.live.queue_table import QUEUES_BEFORE_FILE, QUEUES_FILE
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.last_run import LastRun, life_of
from cometmq.shm.log.recovery import LAST_RUN_ENDED, cut, find_end, recover_log, zero_behind
from cometmq.shm.os.files import ABORT_FILE, LOCK_FILE, Checkpoint
from cometmq.shm.os.locks import StoreLock
from cometmq.shm.state.identity import keep_identity, was_opened_by_others

SEGMENT = int(str(SMALL["mappedFileSizeCommitLog"]))
TOPIC, QUEUES = "t", 2
SETTINGS = {
    key: SMALL[key]
    for key in ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize")
} | {"maxHashSlotNum": 10_000, "maxIndexNum": 40_000}
GOES_ON = f"stopped at: {LAST_RUN_ENDED}"


def beside_rocketmq(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (
        pytest.mark.jvm,
        pytest.mark.slow,
        pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 300),
    ):
        test = mark(test)
    return test


killed_runs_count = pytest.mark.skipif(
    life_of(Path(__file__).parent) is None, reason="this kernel has no unique mount ids"
)


def run_ours(store: Path, name: str, *, kill: bool, layout: Path | None = None) -> list[Sent]:
    with RunningBroker(layout or store) as broker:
        broker.create_topic(TOPIC, QUEUES)
        sent = [
            one for n in range(20) for one in broker.send(TOPIC, n % QUEUES, [name.encode()] * 5)
        ]
        if kill:
            broker.kill_all()
    return sent


def run_theirs(
    store: Path, name: str, *, kill: bool, topic: str = TOPIC, repeat: int = 9
) -> list[Sent]:
    bodies = [b"%s %d" % (name.encode(), number) * repeat for number in range(200)]
    told = append_messages(store, SETTINGS, topic, bodies, queues=QUEUES, leave_open=kill)
    return [
        Sent(line["topic"], line["queueId"], line["queueOffset"], body)
        for line, body in zip(told, bodies, strict=True)
    ]


def assert_ours_has(store: Path, sent: list[Sent]) -> None:
    """Assert that all messages are stored, and that new ones do not replace any of them."""
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)
        sent += broker.send(TOPIC, 0, [b"more"] * 3)
        broker.assert_stored(sent)


@beside_rocketmq
@pytest.mark.parametrize("ours", ["killed", "closed"])
@pytest.mark.parametrize(
    "theirs", [["killed"], ["killed", "killed"], ["closed", "killed"], ["closed"]], ids="-".join
)
def test_what_a_rocketmq_acknowledged_in_between_stays(
    ours: str, theirs: Sequence[str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    sent = run_ours(store, "first", kill=ours == "killed")
    for number, how in enumerate(theirs):
        sent += run_theirs(store, f"theirs {number}", kill=how == "killed")
    assert (store / ABORT_FILE).exists() == (theirs[-1] == "killed")
    assert_ours_has(store, sent)


@beside_rocketmq
@pytest.mark.parametrize("ours", ["killed", "closed"])
def test_a_power_cut_after_a_rocketmq(ours: str, tmp_path: Path) -> None:
    """All messages stay after a power cut that kept the synced log and lost the queue of a new
    topic, with a checkpoint as new as the log. The set of queues is unknown then."""
    sent = run_ours(tmp_path / "store", "first", kill=ours == "killed")
    sent += run_theirs(tmp_path / "store", "theirs", kill=True, topic="new")
    sent += run_theirs(tmp_path / "store", "more", kill=True, repeat=2_000)
    store = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))  # of another life
    shutil.rmtree(store / "consumequeue" / "new")
    newest = find_end(store, SEGMENT, clean=False).last_store_timestamp + 3_000
    Checkpoint(store).store(physic_msg_timestamp=newest, logics_msg_timestamp=newest)
    assert find_end(store, SEGMENT, clean=False).scanned_from > 0
    assert_ours_has(store, sent)


@beside_rocketmq
def test_a_log_on_another_disk(tmp_path: Path) -> None:
    """RocketMQ's run is detected if the store and commitlog/ are links; `lock` is beside one."""
    store, disk = tmp_path / "store", tmp_path / "disk"
    (disk / "commitlog").mkdir(parents=True)
    (disk / "root").mkdir()
    (disk / "root" / "commitlog").symlink_to(disk / "commitlog")
    store.symlink_to(disk / "root")
    sent = run_ours(store, "first", kill=True)
    sent += run_theirs(store.resolve(), "theirs", kill=True)
    assert_ours_has(store, sent)


# --- the same without a JVM ---


def open_as_rocketmq(store: Path) -> None:
    """Do to a store what RocketMQ's start does: take the lock, and rewrite its four bytes."""
    descriptor = os.open(store / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    before = os.stat(descriptor).st_mtime_ns
    while os.stat(descriptor).st_mtime_ns == before:  # file times advance in ticks
        os.pwrite(descriptor, b"lock", 0)
    os.close(descriptor)


def append_as_rocketmq(store: Path, count: int) -> list[Sent]:
    """Append records to the log without queue entries, as if RocketMQ's dispatcher was behind."""
    open_as_rocketmq(store)
    (store / ABORT_FILE).write_text("4711")
    end = find_end(store, SEGMENT, clean=False).physical_offset
    log = CommitLog(
        store, segment_bytes=SEGMENT, physical_offset=end, store_host=bytes(8),
        max_message_bytes=SEGMENT,
    )  # fmt: skip
    queue, body = QueueCursor(TOPIC, 0, 50), b"theirs" * 50
    for _ in range(count):
        log.append(queue, body)
    log.close()
    return [Sent(TOPIC, 0, 50 + number, body) for number in range(count)]


@killed_runs_count
@pytest.mark.parametrize("count", [1, 4_000], ids=["one", "segments"])
def test_the_counters_of_a_killed_run_do_not_count_once_another_had_the_store(
    count: int, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    sent = run_ours(store, "first", kill=True)
    assert LastRun.read(store, SEGMENT) is not None
    sent += append_as_rocketmq(store, count)
    assert LastRun.read(store, SEGMENT) is None
    assert_ours_has(store, sent)


@killed_runs_count
def test_a_start_that_is_killed_does_not_make_them_count_again(tmp_path: Path) -> None:
    """Files of an older run stay invalid after a killed start that has recorded the new `lock`."""
    store = tmp_path / "store"
    sent = run_ours(store, "first", kill=True)
    old = {name: (store / name).read_bytes() for name in (CONTROL_FILE, QUEUES_FILE)}
    sent += append_as_rocketmq(store, 5)
    assert was_opened_by_others(store)
    with RunningBroker(store, wait=False) as broker:
        while was_opened_by_others(store):
            assert broker.pid
        assert (
            not (store / CONTROL_FILE).exists()
            or (store / CONTROL_FILE).read_bytes() != old[CONTROL_FILE]
        )
        assert not (store / QUEUES_BEFORE_FILE).exists()
        broker.kill_all()
    assert_ours_has(store, sent)


@killed_runs_count
def test_a_killed_run_of_ours_leaves_lock_as_it_was(tmp_path: Path) -> None:
    """Neither a start nor a restart of the commitlog process writes `lock`."""
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic(TOPIC, QUEUES)
        sent = broker.send(TOPIC, 0, [b"one"])
        broker.kill("commitlog")
        sent += broker.send(TOPIC, 0, [b"two"])
        broker.kill_all()
    assert not was_opened_by_others(store)
    with RunningBroker(store) as broker:
        assert GOES_ON in broker.log
        broker.assert_stored(sent)
    assert (store / LOCK_FILE).read_bytes() == b"lock"


def test_the_identity_says_who_had_the_store_last(tmp_path: Path) -> None:
    assert was_opened_by_others(tmp_path)  # unknown counts as opened
    StoreLock(tmp_path, 1).release()
    keep_identity(tmp_path, "ours")
    assert not was_opened_by_others(tmp_path)
    StoreLock(tmp_path, 0).release()
    assert not was_opened_by_others(tmp_path)
    open_as_rocketmq(tmp_path)
    assert was_opened_by_others(tmp_path)


# --- whole records that are removed ---


def laid(store: Path, count: int) -> list[int]:
    """Append `count` records and return their ends."""
    (store / "commitlog").mkdir()
    log = CommitLog(
        store, segment_bytes=SEGMENT, physical_offset=0, store_host=bytes(8),
        max_message_bytes=SEGMENT,
    )  # fmt: skip
    ends = []
    for _ in range(count):
        log.append(QueueCursor(TOPIC, 0, 0), b"x" * 300_000)
        ends.append(log.physical_offset)
    log.close()
    return ends


@pytest.mark.parametrize("how", ["zero_behind", "cut", "last_run"])
def test_whole_records_do_not_go_without_a_warning(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = laid(tmp_path, 7)  # three in a segment
    caplog.set_level(logging.WARNING)
    if how == "zero_behind":
        zero_behind(tmp_path, SEGMENT, ends[1], SEGMENT)
    elif how == "cut":
        cut(tmp_path, SEGMENT, ends[1])
    else:
        (tmp_path / ABORT_FILE).touch()
        last = LastRun(ends[1], 0, ends[0], 0, 0, max_message_bytes=SEGMENT)
        recover_log(tmp_path, SEGMENT, clean=False, last_run=last)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"5 whole records behind {ends[1]} are removed, ")
    assert find_end(tmp_path, SEGMENT, clean=False, whole_log=True).physical_offset == ends[1]


def test_what_is_not_whole_goes_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = laid(tmp_path, 2)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as segment:
        segment.seek(ends[0] + 1_000)
        segment.write(b"damage")
    caplog.set_level(logging.WARNING)
    assert zero_behind(tmp_path, SEGMENT, ends[0], SEGMENT)
    assert not caplog.records


def test_the_control_file_of_a_run_is_left_by_a_kill_alone(tmp_path: Path) -> None:
    """Only a killed run leaves its control file, so that an existing one is known to be valid."""
    store = tmp_path / "store"
    run_ours(store, "first", kill=True)
    assert ControlFile.open(store / CONTROL_FILE, writable=False).read(Counter.WROTE).value
    with RunningBroker(store):
        pass
    assert not (store / CONTROL_FILE).exists()
