"""What `store repair` leaves is a closed store: for every tool, and for the next broker."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path

import dying
import golden
import pytest
import reference
from click.testing import CliRunner
from family import RunningBroker, Sent
from patience import patient

from cometmq.cli.store import store as store_command
from cometmq.protocol.commands import (
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueryMessages,
    QueryResult,
    QueueKey,
    QueueOffset,
)
from cometmq.shm.log import marks
from cometmq.shm.os.files import ABORT_FILE, COMMITLOG_DIR, zero_tail
from cometmq.shm.reading import resuming
from cometmq.shm.reading.column_reader import ClosedPositions
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.tools import repair
from cometmq.shm.tools.repair import repair_store
from cometmq.shm.tools.verify import store_files, verify_store

WATCHED = frozenset({str(module.__file__) for module in (repair, marks, resuming)})


def run_repair(store: Path) -> dict[str, int]:
    done = CliRunner().invoke(store_command, ["repair", "-o", "json", str(store)])
    assert done.exit_code == 0, done.output
    found: dict[str, int] = json.loads(done.stdout)
    return found


def assert_closed(store: Path) -> None:
    """As Spark and the other tools look at it."""
    assert not (store / ABORT_FILE).exists()
    left = {path.name for path in store.iterdir() if path.name.startswith("cometmq.")}
    assert left.isdisjoint({"cometmq.control", "cometmq.queues", "cometmq.sleepers", "cometmq.tmp"})
    assert ClosedPositions(store, *file_sizes(store)).distrust == ""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, list[Sent]]:
    """A store whose broker was killed, with messages, keys and a group's offset."""
    store = tmp_path / "store"
    offsets = store / "config" / "consumerOffset.json"
    with RunningBroker(store, {"flushConsumerOffsetInterval": 50}) as broker:
        broker.create_topic("t", 1)
        sent = [
            one
            for number in range(30)
            for one in broker.send("t", 0, [b"x" * 9_000] * 10, keys=f"key-{number}")
        ]
        commit(broker, 290)
        while not offsets.exists():
            time.sleep(0.01)
        broker.kill_all()
    return store, sent


def commit(broker: RunningBroker, queue_offset: int) -> None:
    offsets = [QueueOffset("t", 0, queue_offset)]
    broker.coordinator.ask(CommitOffsets("group", offsets), timeout_s=patient(30))


def committed(broker: RunningBroker) -> int:
    answer, _ = broker.coordinator.ask(
        FetchOffsets("group", [QueueKey("t", 0)]), timeout_s=patient(30)
    )
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


@pytest.mark.parametrize("name", [*golden.ABORT, *golden.DAMAGED])
def test_a_store_of_a_halted_rocketmq(name: str, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path)
    run_repair(store)
    assert_closed(store)
    again = run_repair(store)
    assert again["queue_faults"] == again["offsets_put_back"] == again["index_files_dropped"] == 0


def test_a_killed_broker_s_store(killed: tuple[Path, list[Sent]]) -> None:
    store, sent = killed
    assert run_repair(store)["offsets_put_back"] == 0
    assert_closed(store)
    assert verify_store(store).findings == []
    assert reference.check_store(store) == []
    with RunningBroker(store) as broker:
        broker.until_logged("after an orderly end")
        broker.assert_stored(sent)
        assert committed(broker) == 290
        broker.send("t", 0, [b"more"])
        assert_found_by_keys(broker)


def assert_found_by_keys(broker: RunningBroker) -> None:
    """The index files that were dropped are built again."""
    for number in (0, 17, 29):
        while True:
            answer, _ = broker.reader.ask(
                QueryMessages("t", f"key-{number}"), timeout_s=patient(30)
            )
            assert isinstance(answer, QueryResult)
            if answer.indexed_physical_offset >= answer.end_physical_offset:
                break
        assert answer.count == 10


def test_offsets_behind_the_end_of_a_cut_log_are_put_back(killed: tuple[Path, list[Sent]]) -> None:
    """A power cut has taken the log's end, and a group had consumed it."""
    store, sent = killed
    size = file_sizes(store)[0]
    cut_at = sent[200].physical_offset
    for path in sorted((store / COMMITLOG_DIR).iterdir()):
        if int(path.name) + size > cut_at:
            zero_tail(path, max(0, cut_at - int(path.name)))
    assert run_repair(store)["offsets_put_back"] == 1
    assert_closed(store)
    with RunningBroker(store) as broker:
        kept = broker.assert_stored(sent[:200])["t", 0]
        assert committed(broker) == len(kept) == 200


@pytest.mark.slow
def test_killed_at_any_line(killed: tuple[Path, list[Sent]], tmp_path: Path) -> None:
    """It is not taken for closed before it is, and another repair ends the same."""
    store, _ = killed
    copy = tmp_path / "copy"
    files = store_files(store)

    def work() -> None:
        repair_store(copy, files.segment_bytes, files.queue_segment_bytes)

    shutil.copytree(store, copy)
    lines = dying.lines_of(work, WATCHED)
    assert len(lines) > 40
    for line in dying.some_of(sorted(lines), 25):
        shutil.rmtree(copy)
        shutil.copytree(store, copy)
        assert dying.die_at(partial(work), WATCHED, line, 1) == dying.DIED
        if not (copy / ABORT_FILE).exists():
            assert_closed(copy)
        work()
        assert_closed(copy)
        assert verify_store(copy).findings == []


def test_queues_that_were_never_there_are_made_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a log that comes from an archive: nothing is wrong with it."""
    store = golden.unpack("loghub-clean", tmp_path)
    sizes = file_sizes(store)
    alone = tmp_path / "alone"
    shutil.copytree(store / COMMITLOG_DIR, alone / COMMITLOG_DIR)
    with caplog.at_level("WARNING"):
        repair.recover_store(alone, *sizes, rebuild=True)
    assert caplog.messages == []
    assert verify_store(alone).findings == []
    assert ClosedPositions(alone, *sizes).distrust == ""
