"""GroupLog: the log of a replica by whole records, compared with a walk in Python."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from group_log import Built, Write, build
from hypothesis import given
from hypothesis import strategies as st

from cometmq.actors.replication.core.frames import Mark
from cometmq.actors.replication.group import log_view
from cometmq.actors.replication.group.log_view import GroupLog
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.kernel.codec import records_before, scan
from cometmq.shm.log.references import References, create_references

SEGMENT = 1_000
LEAST = 91 + len("orders")  # bytes of a record without a body

# A body of SEGMENT - LEAST fills a segment by itself; one of 8 bytes less leaves room for a blank.
SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from([SEGMENT - LEAST - 8, SEGMENT - LEAST - 9, 400])
)
WRITES = st.lists(st.one_of(SIZES, st.lists(st.integers(0, 90), max_size=3)), max_size=25)


@contextmanager
def viewed(built: Built) -> Iterator[GroupLog]:
    with TemporaryDirectory() as folder:
        built.write(Path(folder))
        view = GroupLog(Path(folder), built.segment_bytes)
        yield view
        view.close()


def expected_end(built: Built, offset: int, end: int, bytes_max: int) -> int:
    """As `whole_records` says it, from piece to piece."""
    start = offset // built.segment_bytes * built.segment_bytes
    found = offset
    for begin, piece_end in built.pieces:
        if begin < offset:
            continue
        is_far = begin > offset and piece_end > offset + bytes_max
        if piece_end > min(end, start + built.segment_bytes) or is_far:
            break
        found = piece_end
        if found >= offset + bytes_max:
            break
    return found


@given(WRITES, st.integers(0, 3))
@pytest.mark.slow
def test_any_log_as_a_walk_finds_it(writes: list[Write], first: int) -> None:
    built = build(writes, SEGMENT, begin=first * SEGMENT)
    with viewed(built) as view:
        assert view.begins_at() == built.begin
        ends = {each.end: each for each in built.units}
        for end in range(built.begin, built.end + 1):
            wanted = None
            if unit := ends.get(end):
                wanted = Mark(end, unit.begin, zlib.crc32(built.bytes_of(unit.begin, end)))
            assert view.last_record(end) == wanted
        for at, (offset, _) in enumerate(built.pieces):
            limits = {end - offset for _, end in built.pieces[at : at + 6]}
            for bytes_max in {1, SEGMENT, 1 << 30, *limits, *(limit - 1 for limit in limits)}:
                for _, end in built.pieces[at : at + 4]:
                    found = view.whole_records(offset, end, bytes_max)
                    assert found == expected_end(built, offset, end, bytes_max)
                    assert offset < found <= end
                    assert view.read(offset, found) == built.bytes_of(offset, found)


@given(WRITES, st.integers(1, 1_500))
def test_frames_put_together_are_the_log(writes: list[Write], bytes_max: int) -> None:
    built = build(writes, SEGMENT)
    ends = {end for _, end in built.pieces}
    with viewed(built) as view:
        at, copied = 0, b""
        while at < built.end:
            to = view.whole_records(at, built.end, bytes_max)
            assert to in ends
            copied += view.read(at, to)
            at = to
        assert copied == built.content


def test_where_nothing_is_kept(tmp_path: Path) -> None:
    view = GroupLog(tmp_path, SEGMENT)
    assert view.begins_at() == 0
    for end in (0, 1, SEGMENT, SEGMENT + 1):
        assert view.last_record(end) is None
    with pytest.raises(FileNotFoundError):
        view.whole_records(0, 100, 100)
    view.close()


def test_a_derived_write_that_is_not_whole_is_never_sent(tmp_path: Path) -> None:
    built = build([50, [20, 20, 20], 30], SEGMENT)
    built.write(tmp_path)
    view = GroupLog(tmp_path, SEGMENT)
    begin, end = built.pieces[1]
    for unit in built.units[1:4]:
        assert view.whole_records(0, unit.end, SEGMENT) == begin
        with pytest.raises(
            StoreDamaged, match=f"{begin}: of the derived write there not all lies before"
        ):
            view.whole_records(begin, unit.end, SEGMENT)
    assert view.whole_records(begin, built.units[4].end, 1) == end
    with pytest.raises(StoreDamaged, match="no record that ends at or before 40 begins there"):
        view.whole_records(0, 40, SEGMENT)
    view.close()


@pytest.mark.parametrize("at", [0, 4, 8, 30, 95, -1])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_what_does_not_hold_is_never_sent(at: int, number: int, tmp_path: Path) -> None:
    """Size, magic, CRC, place, body and the last byte of a record, which is the properties' length
    or the topic's; named by file and offset."""
    built = build([50] * 12, SEGMENT)
    unit = built.units[number]
    where = unit.begin + at if at >= 0 else unit.end - 1
    built.content[where] ^= 0x55
    built.write(tmp_path)
    view = GroupLog(tmp_path, SEGMENT)
    file = f"{unit.begin // SEGMENT * SEGMENT:020d}"
    segment_end = unit.begin // SEGMENT * SEGMENT + SEGMENT
    with pytest.raises(StoreDamaged, match=f"{file}: damaged at physical offset {unit.begin}"):
        view.read(unit.begin, unit.end)
    with pytest.raises(StoreDamaged, match=f"{file}: damaged at physical offset {unit.begin}"):
        view.last_record(unit.end)
    if at in (0, 4):
        with pytest.raises(StoreDamaged, match=f"{file}: damaged at physical offset {unit.begin}"):
            view.whole_records(unit.begin, segment_end, SEGMENT)
    view.close()


def test_a_mark_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    built = build([[20]], SEGMENT)
    body = built.content.index(b"\x92\x01")
    built.content[body : body + 2] = b"\xc1\xc1"
    built.write(tmp_path)
    view = GroupLog(tmp_path, SEGMENT)
    with pytest.raises(StoreDamaged, match="damaged at physical offset 0: a record of rmq_sys_"):
        view.whole_records(0, built.end, SEGMENT)
    view.close()


def test_the_cleaner_sees_what_is_in_use(tmp_path: Path) -> None:
    built = build([800] * 3, SEGMENT)
    built.write(tmp_path)
    create_references(tmp_path)
    others = References(tmp_path, SEGMENT)
    view = GroupLog(tmp_path, SEGMENT)

    def used() -> list[int]:
        return [start for start in (0, 1_000, 2_000) if others.is_used(start)]

    assert used() == []
    ends = [unit.end for unit in built.units if unit.timestamp]
    looked_at = view.read(0, ends[0])
    view.last_record(ends[1])
    view.last_record(ends[2])
    assert used() == [0, 1_000, 2_000]
    view.keep([2_500])
    assert used() == [0, 2_000]  # somebody looks at the first one
    looked_at.release()
    view.keep([2_500])
    assert used() == [2_000]
    view.close()
    assert used() == []
    others.close()


def test_a_segment_that_was_cut_and_came_again_is_another_file(tmp_path: Path) -> None:
    old, new = build([800] * 3, SEGMENT), build([800, 700, 600], SEGMENT)
    old.write(tmp_path)
    view = GroupLog(tmp_path, SEGMENT)
    begin, end = old.units[2].begin, old.units[2].end
    seen = view.read(begin, end)
    for start in (1_000, 2_000):
        (tmp_path / "commitlog" / f"{start:020d}").unlink()
    new.write(tmp_path)
    view.forget_from(old.units[1].begin)
    assert seen == old.bytes_of(begin, end)  # under way to somebody
    assert view.read(begin, new.units[2].end) == new.bytes_of(begin, new.units[2].end)
    seen.release()
    view.close()


def test_what_was_found_once_is_not_walked_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk through a segment of 1 GiB may take longer than a follower waits for its master, which
    it then asks again: walked each time, neither would ever come to an end."""
    built = build([40, 50, 60, 70], SEGMENT)
    built.write(tmp_path)
    view = GroupLog(tmp_path, SEGMENT)
    walks = []

    def counted(*arguments: object) -> object:
        walks.append(arguments)
        return scan(*arguments)

    monkeypatch.setattr(log_view, "scan", counted)
    ends = [unit.end for unit in built.units]
    first = [view.last_record(end) for end in ends]
    assert None not in first
    count = len(walks)
    assert [view.last_record(end) for end in ends] == first
    assert len(walks) == count
    view.forget_from(built.units[1].end)  # cut there: what comes next may be another record
    built = build([40, 50, 30, 70], SEGMENT)
    with (tmp_path / "commitlog" / f"{0:020}").open("r+b") as segment:
        segment.write(built.content.ljust(SEGMENT, b"\0"))
    assert [view.last_record(unit.end) for unit in built.units[:2]] == first[:2]
    assert len(walks) == count
    assert view.last_record(ends[2]) is None
    found = view.last_record(built.units[2].end)
    assert found is not None
    assert found.start == first[2].start
    assert found.crc != first[2].crc
    view.close()


def test_only_so_many_are_remembered(tmp_path: Path) -> None:
    built = build([8] * 900, 200_000)
    built.write(tmp_path)
    view = GroupLog(tmp_path, 200_000)
    for unit in built.units:
        mark = view.last_record(unit.end)
        assert mark is not None
        assert (mark.start, mark.end) == (unit.begin, unit.end)
        assert len(view._marks) <= log_view.REMEMBERED_MAX
    view.close()


def test_the_kernel_looks_at_nothing_outside(tmp_path: Path) -> None:
    content = bytes(build([10, 20], SEGMENT).content)
    for bad in ((-1, 5), (0, len(content) + 1), (9, 8)):
        with pytest.raises(ValueError, match="not inside"):
            records_before(content, 0, *bad, 100, b"t")
    assert records_before(content, 0, len(content), len(content), 100, b"t") == (
        len(content), -1, 0,
    )  # fmt: skip
    first = LEAST + 10
    assert records_before(content, 0, 0, len(content), 100, b"orders")[0] == 0
    assert records_before(content, 0, 0, first + 7, 1_000, b"t") == (first, -1, 0)


def test_a_frame_s_end_is_found_from_where_it_begins(tmp_path: Path) -> None:
    """Not from the segment's beginning: as fast at its end."""
    built = build([100] * 40_000, 16 << 20)
    built.write(tmp_path)
    view = GroupLog(tmp_path, 16 << 20)
    offsets = [begin for begin, _ in built.pieces]

    def seconds(some: list[int]) -> float:
        began = time.thread_time()
        for offset in some:
            view.whole_records(offset, built.end, 1)
        return time.thread_time() - began

    first, last = offsets[:10_000], offsets[-10_000:]
    assert min(seconds(last) for _ in range(3)) < 50 * min(seconds(first) for _ in range(3))
    view.close()
