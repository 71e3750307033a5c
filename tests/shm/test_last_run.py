"""Going on from the counters that a killed broker left behind; and when not to."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from family import Load, RunningBroker, Sent

from cometmq.protocol.errors import StoreLocked
from cometmq.shm.kernel.live import OwnedCell, QueueCursor
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.last_run import LastRun, life_of
from cometmq.shm.log.recovery import find_end_of_last_run
from cometmq.shm.os.files import ABORT_FILE
from cometmq.shm.os.locks import lock_for_family

SEGMENT = 1 << 20
GOES_ON = "stopped at: the killed run had come to here"

pytestmark = pytest.mark.skipif(
    life_of(Path(__file__).parent) is None, reason="this kernel has no unique mount ids"
)


def killed(store: Path, count: int = 300) -> list[Sent]:
    """A store whose broker was killed after so many messages."""
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        sent = [one for _ in range(count // 10) for one in broker.send("t", 0, [b"x" * 9_000] * 10)]
        broker.kill_all()
    return sent


def test_a_start_goes_on_where_the_killed_run_was(tmp_path: Path) -> None:
    store = tmp_path / "store"
    sent = killed(store)
    last = LastRun.read(store, SEGMENT)
    assert last is not None
    assert last.wrote > 300 * 9_000
    with RunningBroker(store) as broker:
        assert GOES_ON in broker.log
        assert broker.counter(Counter.CONTINUED) == 1
        broker.assert_stored(sent)
        sent += broker.send("t", 0, [b"more"])
        broker.assert_stored(sent)


@pytest.mark.parametrize("flushed", [1, 2, 3])
def test_behind_a_record_that_could_not_be_sent_any_more(flushed: int, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    log = CommitLog(
        tmp_path, segment_bytes=SEGMENT, physical_offset=0, store_host=bytes(8),
        max_message_bytes=SEGMENT,
    )  # fmt: skip
    ends = [0]
    for size in (10, 700_000, 10):
        log.append(QueueCursor("t", 0, 0), b"x" * size)
        ends.append(log.physical_offset)
    log.close()
    last = LastRun(ends[-1], 0, ends[flushed], 0, 0, max_message_bytes=4096)
    found = find_end_of_last_run(tmp_path, SEGMENT, last)
    assert found is not None
    assert found.physical_offset == ends[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_that_was_not_acknowledged_is_there_whole_or_not_at_all(
    seed: int, tmp_path: Path
) -> None:
    store, chance, size = tmp_path / "store", random.Random(seed), 200
    with RunningBroker(store, {"mappedFileSizeCommitLog": 8 << 20}) as broker:
        broker.create_topic("t")
        with Load(broker, "t", seed=seed, batch_count=size, body_bytes_max=2_000) as load:
            load.wait_for_more(chance.randrange(1, 4_000))
            broker.kill_all()
    with RunningBroker(store, {"mappedFileSizeCommitLog": 8 << 20}) as broker:
        assert GOES_ON in broker.log
        for queue in range(4):
            assert len(broker.read_queue("t", queue)) % size == 0
        load.broker = broker
        load.check()


def copied(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy"))


def without_control(store: Path, _tmp_path: Path) -> Path:
    (store / CONTROL_FILE).unlink()
    return store


def with_rubbish(store: Path, _tmp_path: Path) -> Path:
    control = store / CONTROL_FILE
    control.write_bytes(random.Random(1).randbytes(control.stat().st_size))
    return store


def with_damaged_tail(store: Path, _tmp_path: Path) -> Path:
    """The last record below `wrote`: whatever the counters say, the log decides."""
    last = LastRun.read(store, SEGMENT)
    assert last is not None
    path = store / "commitlog" / f"{(last.wrote - 1) // SEGMENT * SEGMENT:020d}"
    with path.open("r+b") as segment:
        segment.seek((last.wrote - 100) % SEGMENT)
        segment.write(b"damage")
    return store


def with_counters_too_high(store: Path, _tmp_path: Path) -> Path:
    """As if the log had been replaced by an older copy of itself."""
    control = ControlFile.open(store / CONTROL_FILE, writable=True)
    for counter in (Counter.WROTE, Counter.FLUSHED, Counter.DISPATCHED):
        control.own(counter).reset(control.read(Counter.WROTE).value + 5_000)
    return store


@pytest.mark.parametrize(
    "change", [copied, without_control, with_rubbish, with_damaged_tail, with_counters_too_high]
)
@pytest.mark.slow
def test_what_does_not_hold_is_not_believed(
    change: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    sent = killed(tmp_path / "store")
    store = change(tmp_path / "store", tmp_path)
    if change is with_damaged_tail:
        sent = sent[:-1]
    with RunningBroker(store) as broker:
        broker.until_logged("commitlog recovered after a bad end")
        assert GOES_ON not in broker.log
        broker.assert_stored(sent)


@pytest.mark.parametrize("writer", [ControlFile.own, ControlFile.own_second])
def test_counters_of_a_run_that_could_not_flush_are_not_believed(
    writer: Callable[[ControlFile, Counter], OwnedCell], tmp_path: Path
) -> None:
    """fdatasync fails: the pages may be gone although nobody was killed."""
    store = tmp_path / "store"
    sent = killed(store)
    writer(ControlFile.open(store / CONTROL_FILE, writable=True), Counter.FLUSH_ERRNO).reset(5)
    assert LastRun.read(store, SEGMENT) is None
    with RunningBroker(store) as broker:
        broker.assert_stored(sent)


def test_an_orderly_end_leaves_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        broker.send("t", 0, [b"one"])
    assert not (store / ABORT_FILE).exists()
    assert LastRun.read(store, SEGMENT) is None


@pytest.mark.slow
def test_a_start_waits_for_the_children_of_a_killed_supervisor(tmp_path: Path) -> None:
    """They may still be at work, and acknowledge what the counters did not say before."""
    store = tmp_path / "store"
    with RunningBroker(store) as first:
        first.create_topic("t")
        with Load(first, "t") as load:
            load.wait_for_more(500)
            first.kill_supervisor()
            second = RunningBroker(store)
        with second:
            load.broker = second
            load.check()
        first.wait_ended()


def test_the_family_lock_is_held_while_a_broker_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        RunningBroker(store) as broker,
        pytest.raises(StoreLocked, match=f"process {broker.pid}"),
    ):
        lock_for_family(store, 0.1)
