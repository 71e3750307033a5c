"""The recovery of a replica's log: torn ends are cut, and nothing that was there may be missing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from group_log import Built, Write, build
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.log.cutting import CUT_FILE, begin_log_at, cut_log
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.log.recovery import LAST_RUN_ENDED, LogEnd
from cometmq.shm.log.replica import recover_replica
from cometmq.shm.os.files import Checkpoint
from cometmq.shm.state.damage import REPLACE_IT

SEGMENT = 1_000
WRITES = st.lists(
    st.one_of(st.integers(0, 300), st.lists(st.integers(0, 90), max_size=3)), max_size=12
)


def counters(wrote: int, *, flushed: int = 0, dispatched: int = 0) -> LastRun:
    return LastRun(wrote, 5, flushed, dispatched, 0, SEGMENT)


def recover(
    store: Path, last_run: LastRun | None = None, *, clean: bool = False
) -> tuple[LogEnd, LastRun | None]:
    return recover_replica(store, SEGMENT, clean=clean, check_crc=True, last_run=last_run)


def log_of(store: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))


def assert_holds(store: Path, built: Built, end: int) -> None:
    """The log up to there, and nothing behind it."""
    wanted = bytes(built.content[:end])
    assert log_of(store).rstrip(b"\0") == wanted.rstrip(b"\0")


def whole_end(built: Built, end: int) -> int:
    """The end of the last piece before `end`: where no derived write is torn."""
    return max((piece for _, piece in built.pieces if piece <= end), default=built.begin)


@given(WRITES, st.data())
def test_torn_anywhere(writes: list[Write], data: st.DataObject) -> None:
    """What came to the disk ends at any byte."""
    built = build(writes, SEGMENT)
    at = data.draw(st.integers(0, built.end))
    # What is missing may be zeros: so ends a record without properties, and a blank.
    ends = [unit.end for unit in built.units if not any(built.content[at : unit.end])]
    wanted = whole_end(built, max(ends, default=0))
    with TemporaryDirectory() as folder:
        store = Path(folder)
        Built(SEGMENT, 0, built.content[:at]).write(store, more_segments=1)
        for _ in range(2):
            end, last_run = recover(store)
            assert (end.physical_offset, last_run) == (wanted, None)
            assert_holds(store, built, wanted)


def test_a_killed_run_is_gone_on_with(tmp_path: Path) -> None:
    built = build([50, [20, 20], 30], SEGMENT)
    built.write(tmp_path)
    last = counters(built.end, flushed=built.units[0].end, dispatched=built.units[0].end)
    end, found = recover(tmp_path, last)
    assert (end.physical_offset, end.reason, found) == (built.end, LAST_RUN_ENDED, last)


@pytest.mark.parametrize("units", [2, 3])
def test_a_killed_run_had_part_of_a_derived_write(units: int, tmp_path: Path) -> None:
    """The follower publishes a frame as it comes, and the queues know nothing of it yet."""
    built = build([50, [20, 20, 20], 30], SEGMENT)
    at = built.units[units].end
    Built(SEGMENT, 0, built.content[:at]).write(tmp_path, more_segments=2)
    last = counters(at, flushed=at, dispatched=built.units[0].end)
    end, found = recover(tmp_path, last)
    assert (end.physical_offset, found) == (built.units[0].end, last)
    assert_holds(tmp_path, built, end.physical_offset)
    assert len(list((tmp_path / "commitlog").iterdir())) == 3  # made ahead: they stay


def test_the_log_ends_before_what_the_killed_run_had(tmp_path: Path) -> None:
    """It is said before anything is cut."""
    built = build([50, 60, [20, 20]], SEGMENT)
    missing = Built(SEGMENT, 0, built.content[: built.units[2].end])  # and half of a write
    missing.write(tmp_path, more_segments=1)
    before = log_of(tmp_path)
    last = counters(built.end, flushed=built.end, dispatched=built.end)
    with pytest.raises(StoreDamaged, match=REPLACE_IT) as refused:
        recover(tmp_path, last)
    assert f"ends at {missing.end} " in str(refused.value)
    assert f"had come to {built.end}" in str(refused.value)
    assert log_of(tmp_path) == before


def test_an_orderly_end_in_the_middle_of_a_derived_write(tmp_path: Path) -> None:
    """The follower publishes a frame as it comes, and ends in order before it has come whole."""
    built = build([50, [20, 20, 20], 30], SEGMENT)
    Built(SEGMENT, 0, built.content[: built.units[2].end]).write(tmp_path)
    assert recover(tmp_path, clean=True)[0].physical_offset == built.units[0].end
    assert_holds(tmp_path, built, built.units[0].end)


@pytest.mark.parametrize("number", [0, 2, 4, 7])
def test_a_hole_in_the_log(number: int, tmp_path: Path) -> None:
    built = build([50] * 12, SEGMENT)
    built.content[built.units[number].begin + 95] ^= 1
    built.write(tmp_path)
    before = log_of(tmp_path)
    for last in (None, counters(built.end)):
        with pytest.raises(StoreDamaged, match=f"offset {built.units[number].begin}.*{REPLACE_IT}"):
            recover(tmp_path, last)
    assert log_of(tmp_path) == before


@pytest.mark.parametrize("at", [0, 5_000])
def test_an_empty_log_begins_where_it_was_begun(at: int, tmp_path: Path) -> None:
    begin_log_at(tmp_path, SEGMENT, at)
    for _ in range(2):
        assert recover(tmp_path)[0].physical_offset == at
        assert [path.name for path in (tmp_path / "commitlog").iterdir()] == [f"{at:020d}"]
    built = build([50], SEGMENT, begin=at)
    built.write(tmp_path)
    assert recover(tmp_path)[0].physical_offset == built.end


def test_a_store_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert recover(tmp_path)[0].physical_offset == 0


def test_a_cut_goes_on_without_a_scan(tmp_path: Path) -> None:
    built = build([50] * 12, SEGMENT)
    built.write(tmp_path)
    to = built.units[8].end
    last = cut_log(tmp_path, SEGMENT, to).counters(counters(built.end, flushed=built.end))
    end, found = recover(tmp_path, last)
    assert (end.physical_offset, end.reason, found) == (to, LAST_RUN_ENDED, last)


def test_a_cut_that_was_killed_is_done_first(tmp_path: Path) -> None:
    """And the counters of the run before it tell of more: they are of the log as it was."""
    built = build([50] * 12, SEGMENT)
    built.write(tmp_path)
    Checkpoint(tmp_path).store(physic_msg_timestamp=1 << 40, logics_msg_timestamp=1 << 40)
    to, last = built.units[8].end, counters(built.end, flushed=built.end)
    cut = cut_log(tmp_path, SEGMENT, to)
    built.write(tmp_path)  # as if nothing had been done
    (tmp_path / CUT_FILE).write_text(f'{{"end": {to}, "last_store_timestamp": 9}}')
    end, found = recover(tmp_path, last)
    assert end.physical_offset == cut.end
    assert found is not None
    assert (found.wrote, found.flushed) == (to, to)
    assert_holds(tmp_path, built, to)
    assert Checkpoint(tmp_path).min_timestamp == 0


def test_a_killed_run_had_begun_the_log_anew(tmp_path: Path) -> None:
    built = build([50] * 12, SEGMENT)
    built.write(tmp_path)
    wanted = '{"end": 9000, "last_store_timestamp": 0, "begins": true}'
    (tmp_path / CUT_FILE).write_text(wanted)
    end, found = recover(tmp_path, counters(built.end, flushed=built.end))
    assert (end.physical_offset, found) == (9_000, None)
