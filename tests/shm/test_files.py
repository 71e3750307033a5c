"""Segments, the lock, the checkpoint, and cutting what must not be found again."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference

from cometmq.protocol.errors import StoreLocked, StoreNotOurs
from cometmq.shm.derived.consume_queue import UNIT, QueueFiles
from cometmq.shm.log import recovery, torn
from cometmq.shm.os.files import (
    Checkpoint,
    check_store_folder,
    create_segment,
    list_segments,
    zero_tail,
)
from cometmq.shm.os.locks import StoreLock
from cometmq.shm.reading.column_reader import log_end

SEGMENT = 65_536
MESSAGE = {"topic": "t", "queue_id": 0, "store_timestamp": 1_700_000_000_000}


def test_a_segment_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    path = create_segment(tmp_path / "log", SEGMENT, SEGMENT, staging, reserve_bytes=SEGMENT)
    assert path.name == "00000000000000065536"
    assert path.stat().st_size == SEGMENT
    assert path.stat().st_blocks * 512 >= SEGMENT  # its space is taken
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("00000000000000000000", 10, "10 bytes, segments here have 65536"),
        ("notes.txt", SEGMENT, "not the start offset"),
        ("00000000000000000001", SEGMENT, "not the start offset"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, size: int, text: str) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "zzz").mkdir()
    with pytest.raises(StoreNotOurs, match=text):
        list_segments(tmp_path, SEGMENT)


def test_an_empty_last_file_and_folders_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000").write_bytes(bytes(SEGMENT))
    (tmp_path / "00000000000000065536").touch()
    (tmp_path / "a folder").mkdir()
    assert list_segments(tmp_path, SEGMENT) == [0]


def test_zero_tail_counts_and_removes_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"x" * 100 + bytes(3_000_000) + b"y" + bytes(500))
    assert zero_tail(path, 100) == 3_000_001
    assert path.read_bytes() == b"x" * 100 + bytes(3_000_501)
    assert zero_tail(path, 100) == 0


LOCKER = """
import fcntl, sys
f = open(sys.argv[1], "r+b")
fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    """The record lock on byte 0 that RocketMQ takes, held by somebody else."""
    (tmp_path / "lock").touch()
    command = [sys.executable, "-c", LOCKER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid} "):
            StoreLock(tmp_path, 0)
        assert holder.stdin is not None
        holder.stdin.close()
    lock = StoreLock(tmp_path, 0)
    assert (tmp_path / "lock").read_bytes() == b"lock"
    lock.release()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        StoreLock(tmp_path, 0)
        os._exit(0)
    os.waitpid(child, 0)
    StoreLock(tmp_path, 0).release()


def test_flock_does_not_conflict(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        StoreLock(tmp_path, 0).release()


def test_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.min_timestamp == 0
    checkpoint.store(physic_msg_timestamp=9_000, logics_msg_timestamp=8_000)
    again = Checkpoint(tmp_path)
    assert again.min_timestamp == 5_000
    assert (tmp_path / "checkpoint").stat().st_size == 4096


def test_a_checkpoint_that_was_only_just_made(tmp_path: Path) -> None:
    """Killed, or failed, between its name and its bytes: that keeps nobody from starting."""
    (tmp_path / "checkpoint").touch()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.min_timestamp == 0
    checkpoint.store(physic_msg_timestamp=9_000)
    assert Checkpoint(tmp_path).words["physic_msg_timestamp"] == 9_000


def test_a_folder_of_other_things_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreNotOurs, match=r"thesis\.tex"):
        check_store_folder(tmp_path)
    with pytest.raises(StoreNotOurs, match="is a file"):
        check_store_folder(tmp_path / "thesis.tex")


# --- recovery -------------------------------------------------------------------------------------


def write_store(store: Path, count: int) -> list[reference.Record]:
    messages = [MESSAGE | {"body": b"%06d" % number * 20} for number in range(count)]
    return reference.write_store(store, messages, segment_size=SEGMENT, queue_segment_size=2000)


def last_segment(store: Path) -> Path:
    return max((store / "commitlog").iterdir())


@pytest.mark.parametrize("clean", [True, False])
def test_recovery_finds_the_end(tmp_path: Path, clean: bool) -> None:
    records = write_store(tmp_path, 1000)
    end = records[-1].lies_at + records[-1].total_size
    found = recovery.recover_log(tmp_path, SEGMENT, clean=clean)
    assert found.physical_offset == end
    assert found.last_store_timestamp == records[-1].store_timestamp


@pytest.mark.parametrize("stale", [b"rubbish behind the end", "a record", "torn"])
def test_recovery_cuts_what_is_behind_the_end(tmp_path: Path, stale: bytes | str) -> None:
    """Also a whole record that says it lies elsewhere, which RocketMQ takes into the log."""
    records = write_store(tmp_path, 1000)
    last = records[-1]
    end = last.lies_at + last.total_size
    tail = {"a record": records[5].raw, "torn": last.raw[:50]}.get(str(stale), stale)
    assert isinstance(tail, bytes)
    path = last_segment(tmp_path)
    with path.open("r+b") as segment:
        segment.seek(end - int(path.name))
        segment.write(tail)
    found = recovery.recover_log(tmp_path, SEGMENT, clean=False)
    assert found.physical_offset == end
    assert set(path.read_bytes()[end - int(path.name) :]) == {0}
    assert recovery.recover_log(tmp_path, SEGMENT, clean=False).physical_offset == end


@pytest.mark.parametrize("number", [20, 300, 301, 700])
@pytest.mark.parametrize("since", ["the record's page", "the next page", "two pages"])
def test_the_log_ends_in_front_of_pages_that_were_lost(
    tmp_path: Path, number: int, since: str
) -> None:
    """A power cut: later pages were written and these were not. Nothing may follow the gap."""
    records = write_store(tmp_path, 1000)
    page, first = mmap.PAGESIZE, records[number].lies_at
    begin = first if since == "the record's page" else -(-first // page) * page
    end = (begin // page + (2 if since == "two pages" else 1)) * page
    with (tmp_path / "commitlog" / f"{begin // SEGMENT * SEGMENT:020d}").open("r+b") as segment:
        segment.seek(begin % SEGMENT)
        segment.write(bytes(end - begin))
    found = recovery.recover_log(tmp_path, SEGMENT, clean=False)
    hit = [r for r in records if r.lies_at < end and r.lies_at + r.total_size > begin]
    assert found.physical_offset == hit[0].lies_at
    assert found.reason == recovery.PAGES_LOST
    again = recovery.recover_log(tmp_path, SEGMENT, clean=False)
    assert again.physical_offset == found.physical_offset
    assert not again.damages


def write_over_a_page(store: Path, tail: int, properties: bytes) -> reference.Record:
    """Two records, of which the second ends so many bytes behind a page's end; these are zeros, as
    the page was never written."""
    page = mmap.PAGESIZE
    messages = [MESSAGE | {"body": b"first"}, MESSAGE | {"body": b"x", "properties": properties}]
    sizes = [len(reference.encode_record(**each)) for each in messages]
    messages[0]["body"] = b"f" * (len(b"first") + page + tail - sum(sizes))
    *_, last = reference.write_store(store, messages, segment_size=SEGMENT, queue_segment_size=2000)
    assert last.lies_at + last.total_size == page + tail
    with last_segment(store).open("r+b") as segment:
        segment.seek(page)
        segment.write(bytes(page))
    return last


@pytest.mark.parametrize("tail", [1, 2, 3, 18, 60])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_record_that_lost_its_properties_with_a_page(
    tmp_path: Path, tail: int, flushed: bool
) -> None:
    """The body's CRC holds. After a power cut nobody is shown half of a message; what was flushed
    is as its sender made it."""
    last = write_over_a_page(tmp_path, tail, b"KEYS\x01" + b"k" * 60 + b"\x02")
    flushed_ms = last.store_timestamp + (60_000 if flushed else -60_000)
    Checkpoint(tmp_path).store(physic_msg_timestamp=flushed_ms)
    end = last.lies_at + (last.total_size if flushed else 0)
    assert log_end(tmp_path) == end  # for who reads it as it is
    for _ in range(2):
        found = recovery.recover_log(
            tmp_path, SEGMENT, clean=False, without_torn=torn.without_torn_end
        )
        assert found.physical_offset == end


@pytest.mark.parametrize(("tail", "is_whole"), [(1, True), (2, True), (3, False)])
def test_a_record_without_properties_at_a_page_s_end(
    tmp_path: Path, tail: int, is_whole: bool
) -> None:
    """It ends in two zeros, their size; the topic is before them."""
    last = write_over_a_page(tmp_path, tail, b"")
    found = recovery.recover_log(tmp_path, SEGMENT, clean=False, without_torn=torn.without_torn_end)
    assert found.physical_offset == last.lies_at + (last.total_size if is_whole else 0)


def test_pages_that_are_zeros_and_were_flushed_are_damage(tmp_path: Path) -> None:
    """No power cut takes them: the disk has failed, and what follows is not hidden."""
    records = write_store(tmp_path, 1000)
    flushed = records[-1].store_timestamp + 10_000
    Checkpoint(tmp_path).store(physic_msg_timestamp=flushed)
    page = records[300].lies_at // mmap.PAGESIZE * mmap.PAGESIZE
    with (tmp_path / "commitlog" / f"{page // SEGMENT * SEGMENT:020d}").open("r+b") as segment:
        segment.seek(page % SEGMENT)
        segment.write(bytes(mmap.PAGESIZE))
    found = recovery.recover_log(tmp_path, SEGMENT, clean=False)
    assert found.physical_offset == records[-1].lies_at + records[-1].total_size
    assert len(found.damages) == 1


def test_unfinished_bytes_of_a_dead_writer_are_zeroed(tmp_path: Path) -> None:
    records = write_store(tmp_path, 1000)
    keep = records[700].lies_at
    before = {path.name: path.read_bytes() for path in (tmp_path / "commitlog").iterdir()}
    assert recovery.zero_behind(tmp_path, SEGMENT, keep, 4096) > 0
    for path in (tmp_path / "commitlog").iterdir():
        start = int(path.name)
        kept = max(0, min(SEGMENT, keep - start))
        assert path.read_bytes() == before[path.name][:kept] + bytes(SEGMENT - kept)


def test_an_unfinished_copy_is_zeroed_that_is_larger_than_what_may_be_sent(tmp_path: Path) -> None:
    """What was stored is copied, whatever maxMessageSize says by now."""
    segment = 2 << 20
    (tmp_path / "commitlog").mkdir()
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.write_bytes(b"x" * 100 + bytes(segment - 200) + b"y" * 100)
    assert recovery.zero_behind(tmp_path, segment, 50, 4096) == segment - 50
    assert path.read_bytes() == b"x" * 50 + bytes(segment - 50)


@pytest.mark.parametrize("keep", [0, 1, 99, 100, 101, 250, 999, 1000])
def test_a_queue_is_cut_to_the_log(tmp_path: Path, keep: int) -> None:
    records = write_store(tmp_path, 1000)
    end = records[keep].lies_at if keep < 1000 else records[-1].lies_at + records[-1].total_size
    files = QueueFiles(tmp_path, "t", 0, 2000)
    assert files.find_end().next_index == 1000
    cut = files.cut(end)
    assert cut.next_index == keep
    assert files.find_end() == cut
    content = b"".join(path.read_bytes() for path in sorted(files.folder.iterdir()))
    assert set(content[keep * UNIT :]) <= {0}
