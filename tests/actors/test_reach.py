"""How far ahead of the tail pages are brought into memory: it follows what the writer does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from allocator_child import Allocator, begin_run

from cometmq.actors.maintenance import allocator, hot_window
from cometmq.actors.maintenance.hot_window import HotWindow
from cometmq.actors.maintenance.reach import PERIOD_S, Reach
from cometmq.conf import BrokerSettings
from cometmq.shm.os import memory
from cometmq.shm.os.files import Pages, segment_name
from cometmq.shm.os.memory import memory_has_room, memory_of

MIB = 1 << 20
FILE_SPACE = 1 << 60  # everywhere


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reach_(clock: Clock) -> Reach:
    """64 MiB to 2 GiB, looked at once while the tail was at 0."""
    made = Reach(64 * MIB, 2048 * MIB, has_room=lambda _bytes: True, clock=clock)
    assert made.look(0, 64 * MIB) == 64 * MIB
    return made


def write(reach: Reach, begin: int, end: int, *, step: int = 4 * MIB, ready: int = 0) -> int:
    """Looks while the tail moves on and nobody follows it; the bytes after the last."""
    for tail in range(begin, end + 1, step):
        reach.look(tail, ready)
    return reach.bytes


def test_a_writer_that_is_followed_does_not_make_it_grow(reach_: Reach) -> None:
    for tail in range(0, 10_000 * MIB, 4 * MIB):
        assert reach_.look(tail, tail + 60 * MIB) == 64 * MIB


def test_half_of_it_used_up_doubles_it(reach_: Reach) -> None:
    assert reach_.look(32 * MIB, 64 * MIB) == 64 * MIB
    assert reach_.look(36 * MIB, 64 * MIB) == 128 * MIB


def test_it_becomes_as_large_as_a_burst_or_twice(reach_: Reach) -> None:
    assert write(reach_, 0, 220 * MIB) == 256 * MIB
    assert write(reach_, 224 * MIB, 476 * MIB) == 512 * MIB
    assert write(reach_, 480 * MIB, 1500 * MIB) == 2048 * MIB
    assert write(reach_, 1500 * MIB, 9000 * MIB) == 2048 * MIB  # never more


def test_it_is_not_doubled_again_before_it_could_be_filled(reach_: Reach) -> None:
    assert reach_.look(36 * MIB, 64 * MIB) == 128 * MIB
    for ready in range(64, 164, 4):
        assert reach_.look(36 * MIB, ready * MIB) == 128 * MIB


def test_what_a_start_finds_is_no_burst(clock: Clock) -> None:
    """The log may be long, and nothing of it is in memory."""
    made = Reach(64 * MIB, 2048 * MIB, has_room=lambda _bytes: True, clock=clock)
    assert made.look(50_000 * MIB, 0) == 64 * MIB
    assert made.look(50_004 * MIB, 0) == 64 * MIB


def test_it_shrinks_by_half_in_each_slow_period(reach_: Reach, clock: Clock) -> None:
    tail = 400 * MIB
    assert write(reach_, 0, tail) == 512 * MIB
    found = []
    for _ in range(6):
        for _ in range(10):
            clock.now_s += PERIOD_S / 10
            tail += 4 * MIB
            reach_.look(tail, tail + reach_.bytes - 4 * MIB)
        found.append(reach_.bytes // MIB)
    assert found == [512, 256, 128, 64, 64, 64]  # much was used in the first


def test_it_stays_while_bursts_come_back(reach_: Reach, clock: Clock) -> None:
    assert write(reach_, 0, 400 * MIB) == 512 * MIB
    for number in range(1, 20):
        clock.now_s += PERIOD_S - 1
        tail = number * 1000 * MIB
        reach_.look(tail, tail + 512 * MIB)
        assert reach_.look(tail + 130 * MIB, tail + 512 * MIB) == 512 * MIB


def test_nobody_needs_to_look_for_it_to_shrink(reach_: Reach, clock: Clock) -> None:
    assert write(reach_, 0, 400 * MIB) == 512 * MIB
    clock.now_s += 2 * PERIOD_S
    assert reach_.look(400 * MIB, 912 * MIB) == 256 * MIB
    clock.now_s += 1e9
    assert reach_.look(400 * MIB, 912 * MIB) == 64 * MIB


def test_it_does_not_grow_where_memory_is_short(clock: Clock) -> None:
    asked: list[int] = []

    def has_room(wanted_bytes: int) -> bool:
        asked.append(wanted_bytes // MIB)
        return wanted_bytes < 128 * MIB

    made = Reach(64 * MIB, 2048 * MIB, has_room=has_room, clock=clock)
    assert write(made, 0, 512 * MIB) == 128 * MIB
    assert asked == [64] + [128] * 7  # once for each half of it that is written


@pytest.mark.parametrize("most", [0, 10 * MIB, 64 * MIB])
def test_one_that_may_not_grow(most: int, clock: Clock) -> None:
    made = Reach(64 * MIB, most, has_room=lambda _bytes: True, clock=clock)
    assert write(made, 0, 2000 * MIB) == 64 * MIB


def test_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert memory_of("MemTotal") == os.sysconf("SC_PHYS_PAGES") * page
    assert memory_of("MemTotal", tmp_path / "none") == 0
    monkeypatch.setattr(memory, "memory_of", {"MemAvailable": 200 * MIB}.__getitem__)
    assert memory_has_room(100 * MIB)
    assert not memory_has_room(101 * MIB)


# --- on files ---

SEGMENT = 4 * MIB  # as much as a step here


def make_segments(store: Path, *numbers: int) -> None:
    (store / "commitlog").mkdir(exist_ok=True)
    for number in numbers:
        with (store / "commitlog" / segment_name(number * SEGMENT)).open("wb") as segment:
            os.posix_fallocate(segment.fileno(), 0, SEGMENT)


def memory_kib(store: Path, number: int) -> tuple[int, int]:
    """Of this process's mapping of a segment: what is in memory, and what of it is dirty."""
    mappings = Path("/proc/self/smaps").read_text()
    _, found, mapping = mappings.partition(
        str(store / "commitlog" / segment_name(number * SEGMENT))
    )
    if not found:
        return 0, 0
    figures = {
        what: int(mapping.partition(f"\n{what}:")[2].split()[0])
        for what in ("Rss", "Shared_Dirty", "Private_Dirty")
    }
    return figures["Rss"], figures["Shared_Dirty"] + figures["Private_Dirty"]


@pytest.fixture
def hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HotWindow:
    monkeypatch.setattr(hot_window, "LARGE_STEP_BYTES", SEGMENT)

    def fail(_what: str, text: str) -> None:
        raise AssertionError(text)

    return HotWindow(
        tmp_path,
        SEGMENT,
        reach=Reach(SEGMENT, 4 * SEGMENT, has_room=lambda _bytes: True),
        pages=Pages.AROUND,
        lock=False,
        say=fail,
        on_locked=lambda _count: None,
    )


def follow(hot: HotWindow, tail: int) -> int:
    """Until it is there; how many rounds it took."""
    rounds = 1
    while not hot.follow(tail, FILE_SPACE):
        rounds += 1
        assert rounds < 100
    return rounds


@pytest.mark.alone  # another's sync cleans what is dirty
def test_a_writer_that_overtakes_the_window(tmp_path: Path, hot: HotWindow) -> None:
    """The window doubles and goes on in front of him; what is far is in memory and clean."""
    make_segments(tmp_path, *range(12))
    follow(hot, 0)
    assert hot.state == "4 MiB ahead, populated, 0 MiB locked"
    assert memory_kib(tmp_path, 0) == (SEGMENT >> 10, SEGMENT >> 10)
    assert memory_kib(tmp_path, 1) == (0, 0)
    follow(hot, 2 * SEGMENT)
    assert hot.state == "8 MiB ahead (4 MiB at least), populated, 0 MiB locked"
    assert memory_kib(tmp_path, 1) == (0, 0), "it is behind the writer"
    assert memory_kib(tmp_path, 2) == (SEGMENT >> 10, 0), "in haste"
    assert memory_kib(tmp_path, 3) == (SEGMENT >> 10, 0)
    assert memory_kib(tmp_path, 4) == (0, 0)
    assert follow(hot, 6 * SEGMENT) == 1
    assert hot.state == "16 MiB ahead (4 MiB at least), populated, 0 MiB locked"
    assert memory_kib(tmp_path, 9) == (SEGMENT >> 10, 0)
    assert memory_kib(tmp_path, 10) == (0, 0)
    follow(hot, 7 * SEGMENT)
    assert memory_kib(tmp_path, 7) == (SEGMENT >> 10, SEGMENT >> 10), "near by now"
    hot.close()


def test_a_window_that_ends_with_the_segments(tmp_path: Path, hot: HotWindow) -> None:
    """It is there until the next is made, and goes on then."""
    make_segments(tmp_path, 0, 1, 2, 3, 4)
    for tail in (0, 2 * SEGMENT, 4 * SEGMENT):
        assert follow(hot, tail) == 1
    assert hot.state == "16 MiB ahead (4 MiB at least), populated, 0 MiB locked"
    assert memory_kib(tmp_path, 4) == (SEGMENT >> 10, 0)
    make_segments(tmp_path, 5, 6)
    assert follow(hot, 4 * SEGMENT) == 1
    assert [memory_kib(tmp_path, number)[0] for number in (5, 6, 7)] == [4096, 4096, 0]
    hot.close()


@pytest.mark.alone  # another's sync cleans what is dirty
def test_a_start_at_the_end_of_a_long_log(tmp_path: Path, hot: HotWindow) -> None:
    """There is no haste: nobody was overtaken."""
    make_segments(tmp_path, 7, 8)
    follow(hot, 7 * SEGMENT)
    assert hot.state == "4 MiB ahead, populated, 0 MiB locked"
    assert memory_kib(tmp_path, 7) == (SEGMENT >> 10, SEGMENT >> 10)
    hot.close()


def test_a_writer_beyond_all_segments(tmp_path: Path, hot: HotWindow) -> None:
    make_segments(tmp_path, 0)
    assert hot.follow(0, FILE_SPACE)
    assert hot.follow(9 * SEGMENT, FILE_SPACE)
    make_segments(tmp_path, 9)
    assert hot.follow(9 * SEGMENT, FILE_SPACE)
    assert memory_kib(tmp_path, 9) == (SEGMENT >> 10, 0)
    hot.close()


def test_commands_come_in_between(tmp_path: Path, hot: HotWindow) -> None:
    make_segments(tmp_path, *range(12))
    assert follow(hot, 0) == 1
    follow(hot, 2 * SEGMENT)
    hot._reach.bytes = 6 * SEGMENT
    assert follow(hot, 3 * SEGMENT) == 2
    hot.close()


# --- in the allocator ---


def bounds_of(store: Path, **values: int) -> tuple[int, int]:
    settings = BrokerSettings.from_keys({"storePathRootDir": str(store), **values})
    actor = Allocator(replace(begin_run(store), settings=settings))
    made = actor._reach(settings)
    actor.close()
    return made.bytes // MIB, made._most // MIB


def test_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_mib = [65536]
    monkeypatch.setattr(allocator, "memory_limit_bytes", lambda: None)
    monkeypatch.setattr(allocator, "memory_of", lambda _what: memory_mib[0] * MIB)
    assert bounds_of(tmp_path) == (48, 2048)
    assert bounds_of(tmp_path, hotWindowMaxBytes=100 * MIB) == (48, 100)
    assert bounds_of(tmp_path, hotWindowMaxBytes=0) == (48, 48)
    assert bounds_of(tmp_path, hotWindowBytes=0, hotWindowMaxBytes=0) == (0, 0)
    assert bounds_of(tmp_path, mappedFileSizeCommitLog=256 * MIB) == (48, 512)
    memory_mib[0] = 4096
    assert bounds_of(tmp_path) == (48, 512)
    memory_mib[0] = 0
    assert bounds_of(tmp_path) == (48, 48)


def test_its_bounds_in_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_mib = [0]
    monkeypatch.setattr(allocator, "memory_limit_bytes", lambda: limit_mib[0] * MIB)
    monkeypatch.setattr(allocator, "memory_of", lambda _what: 65536 * MIB)
    limit_mib[0] = 8192
    assert bounds_of(tmp_path) == (48, 2048)
    assert caplog.messages == []
    limit_mib[0] = 1024
    assert bounds_of(tmp_path) == (48, 256)
    assert "the hot window grows to 268435456 bytes instead of 2147483648" in caplog.messages[0]
    limit_mib[0] = 128
    assert bounds_of(tmp_path) == (32, 32)
    assert "the hot window is 33554432 bytes instead of 50331648" in caplog.messages[-1]
