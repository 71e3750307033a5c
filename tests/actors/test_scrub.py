"""A log in use is read again: damage in segments that are full is found, once in each."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from group_log import Built, build

from cometmq.actors.maintenance import scrub as scrub_module
from cometmq.actors.maintenance.scrub import Scrub, read_past_cache
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

SEGMENT = 8_192
STEP = 1_000
RATE = 500  # bytes a second
SEED = 20_261_125


class Rig:
    """A scrub whose timers run as soon as they are asked for, and are counted."""

    def __init__(self, store: Path, built: Built, *, rate: int = RATE) -> None:
        self.folder = store / COMMITLOG_DIR
        self.low, self.high = built.begin, built.end
        self.found: list[str] = []
        self.waited_s = 0.0
        self._timers: deque[tuple[float, Callable[[], None]]] = deque()
        self.scrub = Scrub(
            store, SEGMENT, bytes_per_s=rate, interval_s=3_600,
            range_of=lambda: (self.low, self.high), on_damage=self.found.append,
            after=lambda delay_s, call: self._timers.append((delay_s, call)),
        )  # fmt: skip

    def one_pass(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.scrub.begin()
        while self.scrub.passes == 0:
            delay_s, call = self._timers.popleft()
            self.waited_s += delay_s
            call()
            meanwhile()

    @property
    def pause_s(self) -> float:
        """Until the next pass."""
        ((delay_s, _),) = self._timers
        return delay_s


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_module, "STEP_BYTES", STEP)


def some_log(begin: int = 0) -> Built:
    """Records below a step, of one, and above; segments with a blank at their end, and without."""
    sizes = [10, 300, STEP - 91, STEP, 3_000, [20, 30, 40], 7_000, 500, 5_000, 100]
    full = SEGMENT - 91 - len("orders")  # nothing is left behind it
    return build([*sizes, full, *sizes[:6], 2_000, 7_900, 60], SEGMENT, begin=begin)


def flip(folder: Path, at: int, bit: int) -> None:
    with (folder / segment_name(at - at % SEGMENT)).open("r+b") as file:
        file.seek(at % SEGMENT)
        (byte,) = file.read(1)
        file.seek(at % SEGMENT)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_whole_log_is_read_once_and_slowly(tmp_path: Path) -> None:
    built = some_log(begin=3 * SEGMENT)
    built.write(tmp_path)
    rig = Rig(tmp_path, built)
    rig.one_pass()
    full = len(built.content) // SEGMENT
    assert full >= 4
    assert rig.found == []
    end = built.begin + full * SEGMENT
    covered = sum(
        each.end - each.begin for each in built.units if each.timestamp and each.end <= end
    )
    assert rig.scrub.read_bytes >= covered
    # But for the last step, which may look at a large record twice.
    assert rig.waited_s >= (rig.scrub.read_bytes - 2 * SEGMENT) / RATE
    assert 3_500 < rig.pause_s <= 3_600


def test_every_place_that_a_checksum_or_a_size_covers_is_judged(tmp_path: Path) -> None:
    """Size, magic, and body of every record; size and magic of every blank."""
    built = some_log()
    built.write(tmp_path)
    chance = random.Random(SEED)
    end = len(built.content) // SEGMENT * SEGMENT
    for unit in built.units:
        if unit.begin >= end:
            continue
        places = [unit.begin + chance.randrange(8)]
        if unit.timestamp:  # a record
            length = int.from_bytes(built.bytes_of(unit.begin + 84, unit.begin + 88), "big")
            places.append(unit.begin + 88 + chance.randrange(length))
        for place in places:
            bit = chance.randrange(8)
            flip(tmp_path / COMMITLOG_DIR, place, bit)
            rig = Rig(tmp_path, built)
            rig.one_pass()
            flip(tmp_path / COMMITLOG_DIR, place, bit)
            assert len(rig.found) == 1, (SEED, unit, place, bit)
            (found,) = rig.found
            start = unit.begin - unit.begin % SEGMENT
            said = f"{segment_name(start)}: damaged at {unit.begin - start}, physical offset "
            assert f"{said}{unit.begin}: " in found, (SEED, unit, place, bit, found)
            assert rig.scrub.damages == 1


def test_each_segment_tells_its_first_damage(tmp_path: Path) -> None:
    built = some_log()
    built.write(tmp_path)
    records = [unit for unit in built.units if unit.timestamp]
    firsts = {unit.begin // SEGMENT: unit for unit in reversed(records)}
    full = len(built.content) // SEGMENT
    for unit in firsts.values():
        flip(tmp_path / COMMITLOG_DIR, unit.begin + 4, 0)
    rig = Rig(tmp_path, built)
    rig.one_pass()
    assert len(rig.found) == full


def test_what_is_not_full_yet_is_not_looked_at(tmp_path: Path) -> None:
    built = some_log()
    built.write(tmp_path)
    for start in built.starts:
        flip(tmp_path / COMMITLOG_DIR, start, 7)
    for high, count in ((SEGMENT - 1, 0), (SEGMENT, 1), (SEGMENT + 1, 1), (3 * SEGMENT, 3)):
        rig = Rig(tmp_path, built)
        rig.high = high
        rig.scrub.begin() if high < SEGMENT else rig.one_pass()
        assert len(rig.found) == count, high


def test_segments_that_go_meanwhile_are_passed_over(tmp_path: Path) -> None:
    built = some_log()
    built.write(tmp_path)
    rig = Rig(tmp_path, built)

    def clean() -> None:
        if rig.low == 0:
            rig.low = 2 * SEGMENT
            (rig.folder / segment_name(0)).unlink()
            (rig.folder / segment_name(SEGMENT)).write_bytes(bytes(SEGMENT))  # is on its way out

    rig.one_pass(clean)
    assert rig.found == []


@pytest.mark.parametrize("left", [None, 0, 5])
def test_a_segment_that_was_cut_off_or_is_missing_is_damaged(
    left: int | None, tmp_path: Path
) -> None:
    built = some_log()
    built.write(tmp_path)
    path = tmp_path / COMMITLOG_DIR / segment_name(SEGMENT)
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    rig = Rig(tmp_path, built)
    rig.one_pass()
    (found,) = rig.found
    assert segment_name(SEGMENT) in found


def test_a_disk_that_cannot_be_read_is_damaged_and_a_lack_of_descriptors_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = some_log()
    built.write(tmp_path)
    for number, count in ((5, len(built.content) // SEGMENT), (24, 0)):  # EIO, EMFILE

        def fails(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(scrub_module, "read_past_cache", fails)
            rig = Rig(tmp_path, built)
            rig.one_pass()
        assert len(rig.found) == count


def test_nothing_is_read_where_that_is_not_wanted_or_there_is_nothing(tmp_path: Path) -> None:
    built = build([10], SEGMENT)
    built.write(tmp_path)
    rig = Rig(tmp_path, built)
    rig.scrub.begin()
    assert (rig.scrub.read_bytes, rig.scrub.passes, rig.pause_s) == (0, 0, 60)
    rig = Rig(tmp_path, built, rate=0)
    rig.scrub.begin()
    assert not rig._timers


@pytest.mark.parametrize("size", [0, 1, 4_095, 4_096, 10_000])
def test_a_stretch_is_read_as_it_is(size: int, tmp_path: Path) -> None:
    content = random.Random(size).randbytes(10_000)
    path = tmp_path / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for cold in (False, True):
            if cold:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = 10_000 - size
            assert read_past_cache(descriptor, begin, size) == content[begin:]
    finally:
        os.close(descriptor)
