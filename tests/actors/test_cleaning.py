"""The cleaner: which segments go, how, who can keep them, and what happens on a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import reference
from cleaning_child import (
    SEGMENT,
    clean_in_child,
    die_at,
    end,
    lines_of_cleaning,
    make_store,
    new_run,
    use_segment,
)
from cli_process import json_of, output_of
from dying import DIED, some_of
from family import SMALL, RunningBroker, Sent, pull
from old_segments import (
    ALL_HOURS,
    FAST,
    MIB,
    WAIT_S,
    log_begins,
    make_old,
    write_segments,
)
from patience import patient
from ports import free_ports
from scripted_slave import ScriptedSlave, log_bytes
from still import stop
from waiting import until

from cometmq.client import Admin
from cometmq.protocol.commands import (
    CommitOffsets,
    DeletedSegments,
    DeleteSegments,
    HoldList,
    PlaceHold,
    PullMessages,
    PullStatus,
    QueueOffset,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    DiskFull,
    NameIllegal,
    StoreDamaged,
)
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.derived.index_file import list_index_files, read_header
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.live.control import Counter
from cometmq.shm.log.references import LogMaps, References
from cometmq.shm.log.retired import RetiredSegments
from cometmq.shm.os.files import RETIRED_DIR, list_segments, segment_name
from cometmq.shm.reading.ledger_log import ledger_needed_from
from cometmq.shm.state.holds import ARCHIVE_HOLD, HOLDS_FILE, read_holds
from cometmq.shm.state.identity import read_identity


def rounds_pass(broker: RunningBroker, count: int = 3) -> dict[str, Any]:
    """Until the cleaner has looked so many times more."""
    wanted = broker.statistics("cleaner")["rounds"] + count
    return until(
        lambda: (now := broker.statistics("cleaner"))["rounds"] >= wanted and now,
        says=lambda: broker.log,
    )


def broker_has(broker: RunningBroker, sent: Sent) -> None:
    """It is its queue's last, whatever has been deleted before it."""
    last = broker.read_queue("t", 0, sent.queue_offset + 1)[-1]
    assert (last.queue_offset, last.body) == (sent.queue_offset, sent.body)


def retired(store: Path) -> list[str]:
    return sorted(os.listdir(store / RETIRED_DIR))


# --- references -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(tmp_path / "store", segments=8, old=5)
    new_run(tmp_path / "store", 8 * SEGMENT - 100)
    return tmp_path / "store"


def test_a_mapped_segment_is_counted_until_the_last_lets_go(store: Path) -> None:
    """Two users in one process do not disturb each other; nor does one who only looks."""
    cleaner = References(store, SEGMENT)
    one, other = LogMaps(store, SEGMENT), LogMaps(store, SEGMENT)
    for user in (one, other):
        user.map(SEGMENT)
        user.map(2 * SEGMENT)
    with (store / "cometmq.references").open("rb"):
        pass  # closing it drops every lock of the classic kind
    one.let_go(SEGMENT)
    assert cleaner.is_used(SEGMENT)
    assert f"process {os.getpid()} " in cleaner.users_of(SEGMENT)
    other.let_go_below(2 * SEGMENT)
    assert not cleaner.is_used(SEGMENT)
    assert cleaner.is_used(2 * SEGMENT)
    one.only(3 * SEGMENT)
    other.close()
    assert [cleaner.is_used(number * SEGMENT) for number in range(5)] == [
        False, False, False, True, False,
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        one.map(99 * SEGMENT)
    assert not cleaner.is_used(99 * SEGMENT)


def test_a_user_that_is_killed_is_forgotten_at_once(store: Path) -> None:
    cleaner = References(store, SEGMENT)
    pid = use_segment(store, SEGMENT, SEGMENT)
    assert cleaner.is_used(SEGMENT)
    assert f"process {pid} " in cleaner.users_of(SEGMENT)
    end(pid)
    assert not cleaner.is_used(SEGMENT)


def test_a_forked_child_keeps_what_it_inherited(store: Path) -> None:
    cleaner = References(store, SEGMENT)
    maps = LogMaps(store, SEGMENT)
    maps.map(0)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent ends it
        os._exit(0)
    maps._references.close()
    assert cleaner.is_used(0)
    end(pid)
    assert not cleaner.is_used(0)
    for descriptor in (read_end, write_end):
        os.close(descriptor)


def test_a_store_that_no_broker_has_opened_needs_no_references(tmp_path: Path) -> None:
    make_store(tmp_path / "store", segments=2, old=0)
    (tmp_path / "store" / "cometmq.references").unlink()
    maps = LogMaps(tmp_path / "store", SEGMENT)
    assert maps.map(SEGMENT)[0] == 2
    maps.close()
    assert not (tmp_path / "store" / "cometmq.references").exists()


# --- the way of a segment -------------------------------------------------------------------------


def retire(store: Path, *numbers: int, force_after_s: float = 60) -> RetiredSegments:
    found = RetiredSegments(store, SEGMENT, force_after_s=force_after_s, step_bytes=SEGMENT // 4)
    found.begin()
    for number in numbers:
        found.take_in(number * SEGMENT)
    found.settle()
    return found


def test_released_in_small_steps(store: Path) -> None:
    found = retire(store, 0, 1, 2)
    names = [segment_name(number * SEGMENT) for number in range(3)]
    assert retired(store) == [f"{name}.held" for name in names]
    sizes = []
    while found.has_work(keep=1):
        found.step(keep=1)
        sizes.append(sum(path.stat().st_size for path in (store / RETIRED_DIR).iterdir()))
    assert [
        before - after for before, after in zip([3 * SEGMENT, *sizes], sizes, strict=False)
    ] == [SEGMENT // 4] * 8
    assert retired(store) == names[:1]
    assert (store / RETIRED_DIR / names[0]).read_bytes() == b"\1" * SEGMENT
    found.step(keep=0)
    assert retired(store) == [f"{names[0]}.releasing"]


def test_the_allocator_may_be_faster(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a free segment between the cleaner's look and its rename."""
    found = retire(store, 0)
    found.step(keep=1)
    path = store / RETIRED_DIR / segment_name(0)
    real = os.rename

    def slow(before: Path, after: Path) -> None:
        real(path, store / "taken")
        real(before, after)

    monkeypatch.setattr(os, "rename", slow)
    found.step(keep=0)
    monkeypatch.undo()
    assert (store / "taken").stat().st_size == SEGMENT
    assert retired(store) == []
    assert not found.has_work(keep=0)


def test_a_used_segment_waits_and_is_then_only_unlinked(store: Path) -> None:
    user = LogMaps(store, SEGMENT)
    memory = user.map(0)
    found = retire(store, 0, 1, force_after_s=60)
    found.step(keep=2)
    assert retired(store) == [f"{segment_name(0)}.held", segment_name(SEGMENT)]
    found._force_after_s = 0
    found.step(keep=2)
    assert retired(store) == [segment_name(SEGMENT)]
    assert memory[:] == b"\1" * SEGMENT  # cut, this would be a SIGBUS
    assert found.counts()["forced_segments"] == 1
    with pytest.raises(FileNotFoundError):
        LogMaps(store, SEGMENT).map(0)
    user.close()


def test_foreign_files_in_the_folder_are_left_alone(store: Path) -> None:
    (store / RETIRED_DIR).mkdir()
    (store / RETIRED_DIR / "notes.txt").write_text("mine")
    found = retire(store, 0)
    while found.has_work(0):
        found.step(0)
    assert retired(store) == ["notes.txt"]


# --- killed ---------------------------------------------------------------------------------------

SEED = 20_261_121


@pytest.mark.parametrize("of", ["the cleaner", "the broker"])
@pytest.mark.slow
def test_killed_at_any_line(of: str, store: Path, tmp_path: Path) -> None:
    """The next cleaner ends where an undisturbed one does: five old segments are gone, no more.

    At 15 lines; with COMETMQ_ALL_LINES at all of them.
    """
    kept = {segment_name(number * SEGMENT): number + 1 for number in range(5, 8)}

    def check(at: Path, what: object) -> None:
        found = {path.name: path.read_bytes() for path in (at / "commitlog").iterdir()}
        assert found == {name: bytes([value]) * SEGMENT for name, value in kept.items()}, what
        left = retired(at)
        assert len(left) <= 1, (what, left)
        assert all(name.isdigit() for name in left), (what, left)
        with RunningCounters(at) as counters:
            assert counters[Counter.MIN_OFFSET] == 5 * SEGMENT, what

    def copy() -> Path:
        target = tmp_path / "copy"
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(store, target))

    lines = lines_of_cleaning(copy())
    check(tmp_path / "copy", "undisturbed")
    assert len(lines) > 60
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    for line, passes in some_of(sorted(lines.items()), 15):
        for nth in sorted({1, chance.randint(1, passes)}):
            at = copy()
            assert die_at(at, line, nth) == DIED, (line, nth)
            starts = list_segments(at / "commitlog", SEGMENT)  # a broker could open it
            assert starts == list(range(starts[0], 8 * SEGMENT, SEGMENT)), (line, nth)
            if of == "the broker":
                new_run(at, 8 * SEGMENT - 100)
            assert clean_in_child(at) == 0, (line, nth)
            check(at, (line, nth))


class RunningCounters:
    def __init__(self, store: Path) -> None:
        from cometmq.shm.live.control import CONTROL_FILE, ControlFile

        self._control = ControlFile.open(store / CONTROL_FILE, writable=False)

    def __enter__(self) -> RunningCounters:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getitem__(self, counter: Counter) -> int:
        return self._control.read(counter).value


def test_a_cleaner_that_is_killed_in_a_broker(tmp_path: Path) -> None:
    """While it waits for a user and while it releases; the next one goes on."""
    settings = FAST | {"recycledSegmentsMax": 0}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        sent = write_segments(broker, 6)
        user = use_segment(broker.store, MIB, MIB)
        make_old(broker, 4)
        broker.ask("coordinator", DeleteSegments())
        until(
            lambda: retired(broker.store) == [f"{segment_name(MIB)}.held"], says=lambda: broker.log
        )
        broker.kill("cleaner")
        rounds_pass(broker)
        assert retired(broker.store) == [f"{segment_name(MIB)}.held"]
        end(user)
        until(lambda: retired(broker.store) == [], says=lambda: broker.log)
        log_begins(broker, 4 * MIB)
        broker_has(broker, sent[-1])
        assert broker.close() == 0
    assert not (tmp_path / "store" / RETIRED_DIR).exists()
    assert reference.check_store(tmp_path / "store") == []


def test_a_broker_that_is_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    settings = FAST | {"recycledSegmentsMax": 2}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 6)
        use = use_segment(broker.store, MIB, MIB)
        make_old(broker, 4)
        broker.ask("coordinator", DeleteSegments())
        until(lambda: broker.statistics("cleaner")["free_segments"] == 2, says=lambda: broker.log)
        broker.kill_all()
    with RunningBroker(tmp_path / "store", settings) as broker:
        until(
            lambda: retired(broker.store) == [f"{segment_name(MIB)}.held"], says=lambda: broker.log
        )
        end(use)
        until(lambda: retired(broker.store) == [segment_name(MIB)])  # free, to be used again
        log_begins(broker, 4 * MIB)
        assert broker.close() == 0
    assert not (tmp_path / "store" / RETIRED_DIR).exists()
    assert reference.check_store(tmp_path / "store") == []


# --- by time --------------------------------------------------------------------------------------


def test_old_segments_go_in_the_hours_of_delete_when(tmp_path: Path) -> None:
    """Not in others; young ones, the last one, and all behind a young one stay."""
    with RunningBroker(tmp_path / "store", FAST) as broker:
        broker.create_topic("t")
        write_segments(broker, 6)
        make_old(broker, 2)
        make_old(broker, 2, first=3)
        rounds_pass(broker)
        assert broker.counter(Counter.MIN_OFFSET) == 0
        assert broker.close() == 0
    with RunningBroker(tmp_path / "store", FAST | {"deleteWhen": ALL_HOURS}) as broker:
        log_begins(broker, 2 * MIB)
        rounds_pass(broker)
        log_begins(broker, 2 * MIB)
        make_old(broker, 5, first=2)  # all that there is, the last one too
        log_begins(broker, broker.counter(Counter.WROTE) // MIB * MIB)
        rounds_pass(broker)
        (sent,) = broker.send("t", 0, [b"last"])
        broker_has(broker, sent)
        assert broker.close() == 0
    assert reference.check_store(tmp_path / "store") == []


@pytest.mark.slow
def test_at_most_delete_file_batch_max_at_a_time(tmp_path: Path) -> None:
    settings = FAST | {
        "deleteWhen": ALL_HOURS, "deleteFileBatchMax": 2, "cleanResourceInterval": 600_000,
    }  # fmt: skip
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 5)
        make_old(broker, 5)
        answer = broker.ask("coordinator", DeleteSegments())
        assert isinstance(answer, DeletedSegments)
        assert answer.segments == [number * MIB for number in range(5)]  # 20 rounds at once
    with RunningBroker(tmp_path / "other", settings | {"cleanResourceInterval": 1000}) as broker:
        broker.create_topic("t")
        write_segments(broker, 5)
        before = broker.statistics("cleaner")["rounds"]
        make_old(broker, 5)

        def deleted() -> int:
            """It is told while a round is under way, too."""
            begins = broker.counter(Counter.MIN_OFFSET)
            found = broker.statistics("cleaner")
            assert begins <= found["deleted_segments"] * MIB, broker.log
            assert found["deleted_segments"] <= 2 * (found["rounds"] + 1 - before), broker.log
            return int(found["deleted_segments"])

        until(lambda: deleted() == 5, says=lambda: broker.log)
        log_begins(broker, 5 * MIB)


# --- users ----------------------------------------------------------------------------------------


def test_readers_let_go_by_themselves(tmp_path: Path) -> None:
    """They have read everything; nothing waits for them, and nothing stays mapped."""
    settings = FAST | {"deleteWhen": ALL_HOURS, "recycledSegmentsMax": 0}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        sent = write_segments(broker, 6)
        broker.assert_stored(sent)
        pids = broker.pids()
        reader, dispatcher = pids["reader-0"], pids["dispatcher"]

        def mapped(pid: int) -> list[str]:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            return [line for line in lines if "/commitlog/" in line or RETIRED_DIR in line]

        def gone(pid: int) -> list[str]:
            last = segment_name(broker.counter(Counter.MIN_OFFSET))
            return [line for line in mapped(pid) if not line.endswith(last)]

        assert len(mapped(reader)) >= 6
        make_old(broker, 6)
        log_begins(broker, broker.counter(Counter.WROTE) // MIB * MIB)
        until(lambda: retired(broker.store) == [], says=lambda: broker.log)
        assert broker.statistics("cleaner")["forced_segments"] == 0
        for pid in (reader, dispatcher):
            until(lambda pid=pid: not gone(pid), says=lambda pid=pid: gone(pid))
        assert broker.pids() == pids
        assert broker.close() == 0


@pytest.mark.parametrize("how", ["by force", "killed"])
@pytest.mark.slow
def test_a_segment_that_is_used_is_waited_for(how: str, tmp_path: Path) -> None:
    settings = FAST | {
        "destroyMapedFileIntervalForcibly": 500 if how == "by force" else 120_000,
        "recycledSegmentsMax": 1,
    }
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 3)
        pid = use_segment(broker.store, MIB, 0)
        make_old(broker, 2)
        began = time.monotonic()
        segment_bytes = SMALL["mappedFileSizeConsumeQueue"]
        until(lambda: ledger_needed_from(broker.store, segment_bytes) is None)
        broker.ask("coordinator", DeleteSegments())
        until(lambda: retired(broker.store) == [f"{segment_name(0)}.held", segment_name(MIB)])
        answer, _ = pull(broker.reader, PullMessages("t", 0, 0))
        assert answer.status == PullStatus.OFFSET_MOVED  # for readers it is gone already
        if how == "by force":
            until(lambda: retired(broker.store) == [segment_name(MIB)])
            assert time.monotonic() - began >= 0.5
            broker.until_logged(f"is removed by force: process {pid} ")
        else:
            rounds_pass(broker)
            assert f"{segment_name(0)}.held" in retired(broker.store)
        end(pid)
        wanted = segment_name(MIB) if how == "by force" else segment_name(0)
        until(lambda: retired(broker.store) == [wanted], says=lambda: retired(broker.store))
        assert broker.close() == 0


def test_deleted_segments_are_used_again(tmp_path: Path) -> None:
    """By the allocator, under other names; what is read is what was written last."""
    settings = FAST | {"deleteWhen": ALL_HOURS}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        names: dict[int, set[str]] = defaultdict(set)  # of one file, by its inode
        sent: list[Sent] = []
        for count in range(2, 12):
            sent += write_segments(broker, count)
            broker.read_queue("t", 0, sent[-1].queue_offset + 1)  # the reader has all of it mapped
            make_old(broker, 1, first=count - 2)
            log_begins(broker, (count - 1) * MIB)
            for entry in os.scandir(broker.store / "commitlog"):
                names[entry.inode()].add(entry.name)
        assert any(len(each) > 1 for each in names.values())
        left = broker.read_queue("t", 0, sent[-1].queue_offset + 1)
        bodies = {one.queue_offset: one.body for one in sent}
        assert [message.queue_offset for message in left] == sorted(bodies)[-len(left) :]
        assert all(message.body == bodies[message.queue_offset] for message in left)
        assert broker.statistics("cleaner")["forced_segments"] == 0
        assert broker.close() == 0
    assert reference.check_store(tmp_path / "store") == []


# --- holds ----------------------------------------------------------------------------------------


def test_a_hold_outlives_the_broker(tmp_path: Path) -> None:
    settings = FAST | {"deleteWhen": ALL_HOURS}
    with RunningBroker(tmp_path / "store", FAST) as broker:
        broker.create_topic("t")
        write_segments(broker, 5)
        with Admin(broker.ready.name_server) as admin:
            (hold,) = admin.place_hold("archive", 2 * MIB + 77)
        assert (hold.name, hold.physical_offset, hold.expires) == ("archive", 2 * MIB + 77, None)
        broker.kill_all()
    with RunningBroker(tmp_path / "store", settings) as broker:
        make_old(broker, 5)
        log_begins(broker, 2 * MIB)
        rounds_pass(broker)
        log_begins(broker, 2 * MIB)
        statistics = broker.statistics("cleaner")
        assert statistics["holds"] == f"archive at {2 * MIB + 77}"
        shown = json_of("stat", "--store", str(broker.store), "-o", "json")
        assert shown["holds"] == {"archive": 2 * MIB + 77}
        with Admin(broker.ready.name_server) as admin:
            (gone,) = admin.delete_expired()
            assert (gone.segments, gone.held_by) == ([], ["archive"])
            (moved,) = admin.place_hold("archive", 3 * MIB)
            assert moved.physical_offset == 3 * MIB
            log_begins(broker, 3 * MIB)
            (late,) = (each for each in admin.place_hold("late", 5) if each.name == "late")
            assert late.physical_offset == 3 * MIB  # what is gone cannot be held
            assert not late.overridden
            assert [each.name for each in admin.drop_hold("archive")] == ["late"]
            rounds_pass(broker)
            log_begins(broker, 3 * MIB)
            assert admin.drop_hold("late") == []
        log_begins(broker, broker.counter(Counter.WROTE) // MIB * MIB)


@pytest.mark.slow
def test_the_archive_is_waited_for(tmp_path: Path) -> None:
    """From the first start on, and up to what it said, whatever else is dropped."""
    settings = FAST | {"deleteWhen": ALL_HOURS, "archiveHold": True}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 5)
        make_old(broker, 5)
        rounds_pass(broker)
        log_begins(broker, 0)
        store_id = read_identity(broker.store).store_id
        with Admin(broker.ready.name_server) as admin:
            (gone,) = admin.delete_expired()
            assert (gone.segments, gone.held_by) == ([], [ARCHIVE_HOLD])
            with pytest.raises(BadRequest, match=f"is for store another, this one is {store_id}"):
                admin.place_hold(ARCHIVE_HOLD, 3 * MIB, store_id="another")
            admin.place_hold(ARCHIVE_HOLD, 2 * MIB, store_id=store_id)
            log_begins(broker, 2 * MIB)
            (hold,) = admin.drop_hold(ARCHIVE_HOLD)  # nothing is known of it any more: all stays
            assert (hold.name, hold.physical_offset) == (ARCHIVE_HOLD, 2 * MIB)
            rounds_pass(broker)
            log_begins(broker, 2 * MIB)
            admin.place_hold(ARCHIVE_HOLD, 3 * MIB)
        broker.kill_all()
    with RunningBroker(tmp_path / "store", settings) as broker:
        log_begins(broker, 3 * MIB)
        rounds_pass(broker)
        log_begins(broker, 3 * MIB)


def test_what_a_connected_slave_needs_is_kept(tmp_path: Path) -> None:
    """Until it has it, or is gone."""
    settings = FAST | {"deleteWhen": ALL_HOURS, "haListenPort": free_ports()}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 6)
        with ScriptedSlave(settings["haListenPort"]) as slave:
            slave.report(0)
            slave.read_frame()
            until(lambda: broker.counter(Counter.SLAVES_FROM) == 1)
            make_old(broker, 4)
            rounds_pass(broker)
            assert broker.counter(Counter.MIN_OFFSET) == 0
            answer = broker.ask("cleaner", DeleteSegments())
            assert isinstance(answer, DeletedSegments)
            assert answer.held_by == ["(slaves)"]
            slave.report()
            slave.follow(3 * MIB)
            copy = bytes(slave.copy)
            log_begins(broker, 3 * MIB)
            rounds_pass(broker)
            end = broker.counter(Counter.WROTE)
            slave.follow(end, acknowledge=False)  # what it acknowledges may go at once
            assert slave.copy[3 * MIB :] == log_bytes(broker.store, 3 * MIB, slave.end)
            assert slave.copy[: len(copy)] == copy
            assert broker.counter(Counter.MIN_OFFSET) == 3 * MIB
            slave.report()
            log_begins(broker, 4 * MIB)
        with ScriptedSlave(settings["haListenPort"]) as other:
            other.report(0)
            other.follow(end)
            assert other.begin == 4 * MIB
            assert other.copy == log_bytes(broker.store, other.begin, other.end)
        with ScriptedSlave(settings["haListenPort"]) as late:
            late.report(4 * MIB - 1)
            late.wait_closed()
        wanted = f"ours begins at {4 * MIB}, what lies between is deleted"
        until(lambda: wanted in broker.log, says=lambda: broker.log)


@pytest.mark.slow
def test_a_lease_ends(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", FAST | {"deleteWhen": ALL_HOURS}) as broker:
        broker.create_topic("t")
        write_segments(broker, 2)
        with Admin(broker.ready.name_server) as admin:
            (hold,) = admin.place_hold("backup", lease_s=1.5)
            assert hold.expires is not None
            make_old(broker, 2)
            rounds_pass(broker)
            if datetime.now() < hold.expires:  # else the machine was too slow to see it
                assert broker.counter(Counter.MIN_OFFSET) == 0
            until(lambda: broker.counter(Counter.MIN_OFFSET))
            assert datetime.now() >= hold.expires
            assert admin.holds() == []


def test_illegal_holds(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        for name in ("", "x" * 200, "a/b", "a\nb"):
            with pytest.raises(NameIllegal):
                broker.coordinator.ask(PlaceHold(name))
        answer, _ = broker.coordinator.ask(PlaceHold("h", -5, 1 << 62))
        assert isinstance(answer, HoldList)
        assert [hold.physical_offset for hold in answer.holds] == [0]
        with pytest.raises(CometError, match="does not take PlaceHold"):
            broker.commitlog.ask(PlaceHold("h"))
    (tmp_path / "store" / "config" / HOLDS_FILE).write_bytes(b'{"holds":')
    with pytest.raises(StoreDamaged, match=r"holds\.json"):
        read_holds(tmp_path / "store")
    with pytest.raises(StoreDamaged, match=r"holds\.json"):
        RunningBroker(tmp_path / "store").close()


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_manual_deletion_and_holds_on_the_command_line(tmp_path: Path) -> None:
    settings = FAST
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 4)
        make_old(broker, 3)
        at = {"COMETMQ_NAME_SERVER": broker.ready.name_server}
        (hold,) = json_of("store", "hold", "backup", "--from", str(2 * MIB), "-o", "json", **at)
        assert (hold["name"], hold["physical_offset"]) == ("backup", 2 * MIB)
        gone = json_of("store", "clean", "-o", "json", **at)
        assert [row["segment"] for row in gone] == [segment_name(0), segment_name(MIB)]
        assert b"backup" in output_of("store", "holds", **at)
        assert json_of("store", "release", "backup", "-o", "json", **at) == []
        gone = json_of("store", "clean", "-o", "json", **at)
        assert [row["segment"] for row in gone] == [segment_name(2 * MIB)]
        log_begins(broker, 3 * MIB)
        assert json_of("store", "clean", "-o", "json", **at) == []


# --- queues and index -----------------------------------------------------------------------------


def oldest_index_end(store: Path) -> int:
    header = read_header(store / "index" / list_index_files(store)[0])
    return -1 if header is None else header.end_physical_offset


def test_queues_and_index_follow(tmp_path: Path) -> None:
    settings = FAST | {"deleteWhen": ALL_HOURS, "maxHashSlotNum": 50, "maxIndexNum": 60}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        sent = []
        while broker.counter(Counter.WROTE) <= 6 * MIB:
            for queue_id in range(2):
                number = len(sent)
                bodies = [b"x" * 10_000] * 10
                sent += broker.send("t", queue_id, bodies, keys=f"k{number}")
        wrote = broker.counter(Counter.WROTE)
        for counter in (Counter.FLUSHED, Counter.DISPATCHED, Counter.INDEXED):
            until(lambda counter=counter: broker.counter(counter) >= wrote)
        stored = broker.assert_stored(sent)
        files = [QueueFiles(broker.store, "t", queue_id, 2_000) for queue_id in range(2)]
        assert all(len(each.starts()) > 2 for each in files)
        indexes = len(list_index_files(broker.store))
        assert indexes > 4
        make_old(broker, 4)
        log_begins(broker, 4 * MIB)
        for queue_id, queue in enumerate(files):
            first = next(
                message for message in stored["t", queue_id] if message.physical_offset >= 4 * MIB
            )
            wanted = first.queue_offset // 100 * 2_000
            until(lambda f=queue, at=wanted: f.starts()[0] == at, says=lambda: broker.log)
            command = PullMessages("t", queue_id, 0)
            answer = until(
                lambda c=command, m=first: (
                    (got := pull(broker.reader, c)[0]).min_queue_offset == m.queue_offset and got
                )
            )
            assert answer.status == PullStatus.OFFSET_MOVED
            assert answer.next_queue_offset == first.queue_offset
            left = broker.read_queue("t", queue_id, len(stored["t", queue_id]))
            assert [message.queue_offset for message in left] == [
                message.queue_offset for message in stored["t", queue_id][first.queue_offset :]
            ]
        until(lambda: oldest_index_end(broker.store) >= 4 * MIB)
        assert len(list_index_files(broker.store)) < indexes
        assert broker.close() == 0
    assert reference.check_store(tmp_path / "store") == []


def test_a_dispatcher_that_dies_during_a_deletion(tmp_path: Path) -> None:
    """The next one brings the queues to where the log begins now."""
    settings = FAST
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 4)
        stored = broker.read_queue("t", 0)
        make_old(broker, 2)
        stop(broker.pids()["dispatcher"])
        broker.ask("coordinator", DeleteSegments())
        log_begins(broker, 2 * MIB)
        broker.kill("dispatcher")
        first = next(message for message in stored if message.physical_offset >= 2 * MIB)
        answer, _ = pull(broker.reader, PullMessages("t", 0, 0))
        assert answer.min_queue_offset == first.queue_offset
        assert broker.close() == 0


def test_a_filler_at_the_end_does_not_give_a_queue_segment_away(tmp_path: Path) -> None:
    """A damaged record's filler stands last; the entries before it are still in the log."""
    queue = QueueFiles(tmp_path, "t", 0, 60)
    queue.folder.mkdir(parents=True)
    filler = CONSUME_QUEUE_UNIT.pack(physical_offset=0, size=0x7FFFFFFF, tags_code=0)
    entry = CONSUME_QUEUE_UNIT.pack(physical_offset=5_000, size=100, tags_code=0)
    queue.path(0).write_bytes(entry + entry + filler)
    assert queue.last_physical_offset(0) == 5_000
    queue.path(0).write_bytes(filler * 3)
    assert queue.last_physical_offset(0) == -1


# --- disks ----------------------------------------------------------------------------------------

DISK_BYTES = 64 * MIB


# What is full is the same for the cleaner on either; test_limits.py has both, too.
either = pytest.mark.parametrize("disk", ["tmpfs", "ext4"], indirect=True)


@pytest.fixture(params=["ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, so that the operating system says how full it is."""
    folder = tmp_path / "disk"
    folder.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "cometmq-test", str(folder)]]
    if request.param == "ext4":
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        commands = [
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(folder)],
        ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            why_not = done.stderr.strip() if done.returncode else ""
        except FileNotFoundError:
            why_not = f"there is no {command[0]}"
        if why_not:
            pytest.skip(f"a full disk, which needs {command[0]}: {why_not}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_to(disk: Path, percent: float) -> Path:
    """Other people's bytes, until the disk is so full."""
    filler = disk / "filler"
    with filler.open("ab") as file:
        status = os.statvfs(disk)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        total = used + status.f_bavail * status.f_frsize
        begin = file.tell()
        os.posix_fallocate(file.fileno(), begin, max(1, int(total * percent / 100) - used))
    return filler


MARKS: dict[str, Any] = {
    "diskMaxUsedSpaceRatio": 60,
    "diskSpaceCleanForciblyRatio": 75,
    "diskSpaceWarningLevelRatio": 90,
    "recycledSegmentsMax": 0,
}


@either
@pytest.mark.slow
def test_past_each_mark(disk: Path) -> None:
    """Old ones first, then young ones as far as needed, then writes are refused; and back."""
    settings = FAST | MARKS
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 20)
        make_old(broker, 3)
        used = rounds_pass(broker)["disk_used_percent"]
        assert used < 60
        assert broker.counter(Counter.MIN_OFFSET) == 0
        filler = fill_to(disk, 63)
        log_begins(broker, 3 * MIB)  # the old ones, at any hour
        filler.unlink()
        filler = fill_to(disk, 70)
        rounds_pass(broker)
        log_begins(broker, 3 * MIB)  # and no others
        fill_to(disk, 80)
        until(
            lambda: (
                broker.counter(Counter.MIN_OFFSET) > 3 * MIB
                and broker.statistics("cleaner")["disk_used_percent"] <= 75
            ),
            says=lambda: broker.log,
        )
        rounds_pass(broker)
        gone = broker.counter(Counter.MIN_OFFSET) // MIB - 3
        # 5 % of 64 MiB are a bit more than 3 MiB; the old segments may still have counted as used
        # when the disk was filled, if a reader let go of them later.
        assert 1 <= gone <= 5, "as far as needed, and not everything"
        assert broker.statistics("cleaner")["writable"] == "yes"
        (one,) = broker.send("t", 0, [b"still"])
        broker_has(broker, one)
        filler.unlink()
        assert broker.close() == 0
    assert reference.check_store(disk / "store") == []


@either
@pytest.mark.parametrize("forcibly", [True, False])
@pytest.mark.slow
def test_over_the_warning_level_writes_are_refused(forcibly: bool, disk: Path) -> None:
    settings = FAST | MARKS | {
        "cleanFileForciblyEnable": forcibly,
    }  # fmt: skip
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        sent = write_segments(broker, 8)

        def is_refused() -> bool:  # what the cleaner deletes while the disk fills is filled again
            with contextlib.suppress(OSError):  # the allocator may just have taken the rest
                fill_to(disk, 98)
            return broker.statistics("cleaner")["writable"] == "no"

        until(is_refused, says=lambda: broker.log)
        with pytest.raises(
            DiskFull, match=r"diskSpaceWarningLevelRatio = 90 .*: writes are taken again at 75 %"
        ):
            # What comes before the writer has heard of it is taken, and shown like the others.
            until(lambda: sent.extend(broker.send("t", 0, [b"no"])))
        newest = sent[-1].queue_offset
        _, messages = pull(broker.reader, PullMessages("t", 0, newest, suspend_ms=WAIT_S * 1000))
        assert [message.queue_offset for message in messages] == [newest]  # reads go on
        if forcibly:  # all that may go has gone, and the last segment stays
            log_begins(broker, broker.counter(Counter.WROTE) // MIB * MIB)
        else:
            rounds_pass(broker)
            assert broker.counter(Counter.MIN_OFFSET) == 0
        (disk / "filler").unlink()
        until(lambda: broker.statistics("cleaner")["writable"] == "yes", says=lambda: broker.log)
        later = until(lambda: send_if_taken(broker))
        broker_has(broker, later[0])
        assert broker.close() == 0
    assert reference.check_store(disk / "store") == []


def send_if_taken(broker: RunningBroker) -> list[Sent]:
    try:
        return broker.send("t", 0, [b"yes"])
    except DiskFull:
        return []


@pytest.mark.slow
def test_only_a_disk_that_is_too_full_cuts_off_a_slave(disk: Path) -> None:
    settings = FAST | MARKS | {"deleteWhen": ALL_HOURS, "haListenPort": free_ports()}
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 12)
        with ScriptedSlave(settings["haListenPort"], receive_bytes=4_096) as slave:
            slave.report(0)  # and reads nothing
            until(lambda: broker.counter(Counter.SLAVES_FROM) == 1)
            make_old(broker, 6)
            filler = fill_to(disk, 70)
            rounds_pass(broker)
            assert broker.counter(Counter.MIN_OFFSET) == 0

            def is_past_what_is_on_its_way() -> bool:
                """A sender's system takes up to 4 MiB (tcp_wmem), as much as it finds time for."""
                fill_to(disk, 80)
                return broker.counter(Counter.MIN_OFFSET) >= 5 * MIB

            until(is_past_what_is_on_its_way, says=lambda: broker.log)
            broker.until_logged("hold (slaves) at 0 IS OVERRIDDEN: the disk is")
            slave.wait_closed()
            wanted = f"slave {slave.address} is refused: it has the log up to 0, and the disk had"
            until(lambda: wanted in broker.log, says=lambda: broker.log)
        filler.unlink()


@pytest.mark.slow
def test_only_a_disk_that_is_too_full_overrides_a_hold(disk: Path) -> None:
    settings = FAST | MARKS | {"deleteWhen": ALL_HOURS}
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 12)
        with Admin(broker.ready.name_server) as admin:
            admin.place_hold("archive")
            make_old(broker, 6)
            filler = fill_to(disk, 70)
            rounds_pass(broker)
            assert broker.counter(Counter.MIN_OFFSET) == 0
            assert "OVERRIDDEN" not in broker.log
            fill_to(disk, 80)
            until(lambda: broker.counter(Counter.MIN_OFFSET), says=lambda: broker.log)
            until(lambda: broker.statistics("cleaner")["disk_used_percent"] <= 75)
            broker.until_logged("hold archive at 0 IS OVERRIDDEN: the disk is")
            (hold,) = admin.holds()
            assert hold.overridden
            at = broker.counter(Counter.MIN_OFFSET)
            assert at < 6 * MIB  # not more than was needed, although old
            rounds_pass(broker)
            assert broker.counter(Counter.MIN_OFFSET) == at
        filler.unlink()


@pytest.mark.parametrize("overflow", ["refuse-writes", "delete"])
@pytest.mark.slow
def test_a_full_disk_and_an_archive_that_is_behind(overflow: str, disk: Path) -> None:
    settings = FAST | MARKS | {
        "archiveHold": True, "archiveOverflow": overflow,
    }  # fmt: skip
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 8)
        filler = fill_to(disk, 80)
        if overflow == "delete":
            until(lambda: broker.counter(Counter.MIN_OFFSET), says=lambda: broker.log)
            broker.until_logged("hold archive at 0 IS OVERRIDDEN")
            filler.unlink()
            return
        until(lambda: "waits for its archive, which has all below 0" in broker.log)
        fill_to(disk, 98)
        until(lambda: broker.statistics("cleaner")["writable"] == "no", says=lambda: broker.log)
        rounds_pass(broker)
        log_begins(broker, 0)
        with Admin(broker.ready.name_server) as admin:
            admin.place_hold(ARCHIVE_HOLD, 3 * MIB)
        log_begins(broker, 3 * MIB)  # what it has goes, and no more
        rounds_pass(broker)
        log_begins(broker, 3 * MIB)
        filler.unlink()
        until(lambda: send_if_taken(broker), says=lambda: broker.log)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_no_group_has_read(keeps: bool, disk: Path) -> None:
    """Said for each topic when it goes by force, or kept until a group has read it."""
    settings = FAST | MARKS | {"neverDeleteUnread": keeps}
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        sent = write_segments(broker, 8)
        filler = fill_to(disk, 80)
        if not keeps:
            until(lambda: "messages of topic t are DELETED UNREAD by every group" in broker.log)
            assert broker.counter(Counter.MIN_OFFSET) > 0
            filler.unlink()
            return
        until(lambda: "messages of topic t below 1048576 stay, which no group" in broker.log)
        rounds_pass(broker)
        assert broker.counter(Counter.MIN_OFFSET) == 0
        read = sum(1 for one in sent if one.physical_offset < 2 * MIB)
        for group, queue_offset in (("slow", 0), ("fast", read)):
            offsets = [QueueOffset("t", 0, queue_offset)]
            broker.coordinator.ask(CommitOffsets(group, offsets), timeout_s=patient(30))
        log_begins(broker, 2 * MIB)
        rounds_pass(broker)
        log_begins(broker, 2 * MIB)
        assert "DELETED UNREAD" not in broker.log
        fill_to(disk, 98)
        until(lambda: broker.statistics("cleaner")["writable"] == "no", says=lambda: broker.log)
        log_begins(broker, 2 * MIB)
        filler.unlink()


@pytest.mark.slow
def test_a_user_does_not_have_more_deleted_than_is_needed(disk: Path) -> None:
    """What is held counts as on its way out, until it is removed by force."""
    settings = FAST | MARKS
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        write_segments(broker, 12)
        users = [use_segment(broker.store, MIB, number * MIB) for number in range(12)]
        fill_to(disk, 78)
        until(lambda: broker.counter(Counter.MIN_OFFSET), says=lambda: broker.log)
        rounds_pass(broker, 10)
        assert broker.statistics("cleaner")["disk_used_percent"] > 75
        assert broker.counter(Counter.MIN_OFFSET) <= 4 * MIB
        for pid in users:
            end(pid)
        until(lambda: broker.statistics("cleaner")["disk_used_percent"] <= 75)
        assert broker.counter(Counter.MIN_OFFSET) <= 4 * MIB
        assert broker.close() == 0


@pytest.mark.slow
def test_a_cleaner_that_comes_back_tells_whether_the_disk_is_full(disk: Path) -> None:
    """The one before it had writes refused; it was killed, and then there was room again."""
    settings = FAST | MARKS | {"cleanFileForciblyEnable": False}
    with RunningBroker(disk / "store", settings) as broker:
        broker.create_topic("t")
        filler = fill_to(disk, 95)
        until(lambda: broker.statistics("cleaner")["writable"] == "no")
        pid = broker.pids()["cleaner"]
        stop(pid)  # it does not see that there is room
        filler.unlink()
        with pytest.raises(DiskFull):
            broker.send("t", 0, [b"no"])
        broker.kill("cleaner")
        until(lambda: send_if_taken(broker), says=lambda: broker.log)
