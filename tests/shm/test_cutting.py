"""Cutting a replica's log and beginning it anew: the same end, wherever it is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dying
import msgspec
import pytest
from group_log import FIRST_MS, Built, build

from cometmq.protocol.errors import ConfigError, StoreDamaged
from cometmq.shm.live.control import CONTROL_FILE
from cometmq.shm.live.queue_table import QUEUES_BEFORE_FILE, QUEUES_FILE
from cometmq.shm.log import cutting
from cometmq.shm.log.cutting import CUT_FILE, LogCut, begin_log_at, cut_log, finish_cut
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os import durable, files
from cometmq.shm.os.files import Checkpoint

SEED = random.randrange(1 << 32)
WATCHED = frozenset(str(module.__file__) for module in (cutting, durable, files))
PAGE = os.sysconf("SC_PAGE_SIZE")
LEAST = 97  # bytes of a record without a body

Cut = Callable[[Path], object]


def store_of(built: Built, folder: Path) -> Path:
    """With all that a run leaves behind that was killed."""
    store = folder / "store"
    built.write(store, more_segments=2)
    Checkpoint(store).store(
        physic_msg_timestamp=FIRST_MS + 10_000_000,
        logics_msg_timestamp=FIRST_MS + 5,
        index_msg_timestamp=FIRST_MS + 10_000_000,
    )
    for name in (CONTROL_FILE, QUEUES_FILE, QUEUES_BEFORE_FILE):
        (store / name).write_bytes(b"of the last run")
    (store / "consumequeue/orders/0").mkdir(parents=True)
    (store / "consumequeue/orders/0/00000000000000000000").write_bytes(bytes(2_000))
    (store / "index").mkdir()
    (store / "index/20261125000000000").write_bytes(bytes(500))
    return store


def segments(store: Path) -> dict[int, bytes]:
    return {int(path.name): path.read_bytes() for path in sorted((store / "commitlog").iterdir())}


def assert_cut(store: Path, built: Built, to: int) -> None:
    found = segments(store)
    size = built.segment_bytes
    wanted = [start for start in built.starts if start < to or start == built.begin]
    assert list(found) == wanted
    for start, content in found.items():
        kept = built.bytes_of(start, max(start, min(to, start + size)))
        assert content == kept.ljust(size, b"\0"), start
    words = Checkpoint(store).words
    last = built.last_timestamp(to) if to > built.begin else 0
    assert words["physic_msg_timestamp"] == words["index_msg_timestamp"] == last
    assert words["logics_msg_timestamp"] == min(FIRST_MS + 5, last)
    assert not (store / CUT_FILE).exists()
    end = find_end(store, size, clean=False)
    assert end.damages == ()
    assert end.physical_offset == to


def assert_begun(store: Path, segment_bytes: int, at: int) -> None:
    assert segments(store) == {at: bytes(segment_bytes)}
    assert list((store / "consumequeue").iterdir()) == []
    for name in ("index", CUT_FILE, QUEUES_BEFORE_FILE):
        assert not (store / name).exists()
    assert set(Checkpoint(store).words.values()) == {0}
    assert find_end(store, segment_bytes, clean=False).physical_offset == at


# Whole pages and others; records that fill a segment, that leave room for a blank, and many.
SHAPES = {
    "small": (1_000, [50] * 20),
    "page": (PAGE, [PAGE - LEAST, PAGE - LEAST - 8, 100, [10, 20], 3_000, 700, 5]),
    "odd": (PAGE + 1, [PAGE + 1 - LEAST, 100, PAGE - 200, 90, [0], 4_000]),
    "one": (1_000, [50]),
    "none": (1_000, []),
}


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_cut_behind_any_record(shape: str, begin: int, tmp_path: Path) -> None:
    size, writes = SHAPES[shape]
    built = build(writes, size, begin=begin * size)
    ends = {built.begin, *(unit.end for unit in built.units)}
    for to in sorted(ends):
        store = store_of(built, tmp_path)
        cut = cut_log(store, size, to)
        assert cut == LogCut(to, built.last_timestamp(to) if to > built.begin else 0)
        assert not (store / CONTROL_FILE).exists()
        assert_cut(store, built, to)
        assert cut_log(store, size, to) == cut
        assert_cut(store, built, to)
        shutil.rmtree(store)


def test_only_behind_a_record(tmp_path: Path) -> None:
    """Nothing is changed by a cut that cannot be."""
    built = build([50] * 20, 1_000, begin=2_000)
    store = store_of(built, tmp_path)
    before = segments(store)
    ends = {built.begin, *(unit.end for unit in built.units)}
    for to in {-1, 0, 1, 1_999, 10_000, *range(2_000, 2_400), built.end + 1} - ends:
        with pytest.raises(StoreDamaged, match=rf"is to be cut at {to}\b"):
            cut_log(store, 1_000, to)
    assert segments(store) == before
    assert not (store / CUT_FILE).exists()
    assert (store / CONTROL_FILE).exists()


@pytest.mark.parametrize("at", [0, 1_000, 2_000, 50_000])
def test_begin_anew(at: int, tmp_path: Path) -> None:
    store = store_of(build([50] * 20, 1_000, begin=1_000), tmp_path)
    assert begin_log_at(store, 1_000, at) == LogCut(at, 0, begins=True)
    assert_begun(store, 1_000, at)
    assert not (store / CONTROL_FILE).exists()
    assert not (store / QUEUES_FILE).exists()
    begin_log_at(store, 1_000, at)
    assert_begun(store, 1_000, at)


def test_begin_anew_in_an_empty_store(tmp_path: Path) -> None:
    begin_log_at(tmp_path, 1_000, 3_000)
    assert segments(tmp_path) == {3_000: bytes(1_000)}


@pytest.mark.parametrize("at", [1, 999, 1_001, -1_000])
def test_begin_only_where_a_segment_does(at: int, tmp_path: Path) -> None:
    store = store_of(build([50] * 20, 1_000), tmp_path)
    before = segments(store)
    with pytest.raises(ConfigError, match=f"at {at}, where no segment of 1000 bytes begins"):
        begin_log_at(store, 1_000, at)
    assert segments(store) == before


# --- killed ---

LOG = build([50] * 25, 1_000, begin=1_000)
INSIDE = LOG.units[9].end
CUTS: dict[str, tuple[Cut, Callable[[Path], None]]] = {
    "inside": (
        lambda store: cut_log(store, 1_000, INSIDE),
        lambda store: assert_cut(store, LOG, INSIDE),
    ),
    "at a segment": (
        lambda store: cut_log(store, 1_000, 2_000),
        lambda store: assert_cut(store, LOG, 2_000),
    ),
    "all": (
        lambda store: cut_log(store, 1_000, 1_000),
        lambda store: assert_cut(store, LOG, 1_000),
    ),
    "anew": (
        lambda store: begin_log_at(store, 1_000, 7_000),
        lambda store: assert_begun(store, 1_000, 7_000),
    ),
}


def is_untouched(store: Path) -> bool:
    """Whether the cut had not begun."""
    found = segments(store)
    return b"".join(found.values()).startswith(LOG.content) and min(found) == LOG.begin


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUTS)
def test_killed_at_any_line(kind: str, tmp_path: Path) -> None:
    """By the next start, or by the same call once more, it comes to the same end.

    At 30 lines of each kind; with COMETMQ_ALL_LINES at all of them, in a minute.
    """
    cut, check = CUTS[kind]
    store = store_of(LOG, tmp_path)
    lines = dying.lines_of(lambda: cut(store), WATCHED)
    shutil.rmtree(store)
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    begun = 0
    for line, passes in dying.some_of(sorted(lines.items()), 30):
        for nth in {1, chance.randint(1, passes)}:
            store = store_of(LOG, tmp_path)
            assert dying.die_at(partial(cut, store), WATCHED, line, nth) == dying.DIED
            had_begun = (store / CUT_FILE).exists()
            begun += had_begun
            if begun % 2 if had_begun else chance.random() < 0.5:
                assert (finish_cut(store, 1_000) is not None) == had_begun
                assert finish_cut(store, 1_000) is None
                if not had_begun and is_untouched(store):
                    cut(store)
            else:
                cut(store)
            check(store)
            shutil.rmtree(store)
    assert begun > 1  # both ways to go on were taken


SYSTEM_CALLS = (
    "open", "unlink", "replace", "rename", "ftruncate", "fsync", "fdatasync", "pwrite", "pread",
    "mkdir", "rmdir",
)  # fmt: skip


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.slow
def test_any_system_call_fails(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, check = CUTS[kind]
    calls = wanted = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == wanted:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **keywords)

        return call

    failed = 0
    while True:
        store = store_of(LOG, tmp_path)
        calls, wanted = 0, failed + 1
        with monkeypatch.context() as patch:
            for name in SYSTEM_CALLS:
                patch.setattr(os, name, failing(getattr(os, name)))
            with contextlib.suppress(OSError):
                cut(store)
        if calls < wanted:
            break
        cut(store)
        check(store)
        shutil.rmtree(store)
        failed += 1
    assert failed > 10


def test_what_was_zeroed_before_a_kill_is_synced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds zeros there, and cannot know whether they are on the disk."""
    store = store_of(LOG, tmp_path)
    cut_log(store, 1_000, INSIDE)
    synced = set()

    def note(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", note(os.fsync))
    monkeypatch.setattr(os, "fdatasync", note(os.fdatasync))
    cut_log(store, 1_000, INSIDE)
    folder = store / "commitlog"
    assert {str(store), str(folder), str(folder / f"{2_000:020d}")} <= synced


def test_a_start_keeps_the_files_of_its_own_run(tmp_path: Path) -> None:
    """The supervisor has made them when the commitlog process comes to do what was begun."""
    for kind, (cut, check) in CUTS.items():
        store = store_of(LOG, tmp_path)
        cut(store)
        shutil.rmtree(store)
        store = store_of(LOG, tmp_path)
        wanted = LogCut(7_000, 0, begins=True)
        if kind != "anew":
            to = {"inside": INSIDE, "at a segment": 2_000, "all": 1_000}[kind]
            wanted = LogCut(to, LOG.last_timestamp(to) if to > LOG.begin else 0)
        durable.replace_file(store / CUT_FILE, msgspec.json.encode(wanted))
        assert finish_cut(store, 1_000) == wanted
        check(store)
        assert (store / CONTROL_FILE).exists()
        assert (store / QUEUES_FILE).exists()
        shutil.rmtree(store)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"end": "x"}', b"[1, 2]"])
def test_a_file_that_does_not_say_where(content: bytes, tmp_path: Path) -> None:
    store = store_of(LOG, tmp_path)
    (store / CUT_FILE).write_bytes(content)
    with pytest.raises(StoreDamaged, match="does not say where the log is to be cut"):
        finish_cut(store, 1_000)
    assert is_untouched(store)


def test_what_the_counters_still_say() -> None:
    last = LastRun(1_000, 77, 900, 300, 200, 4_096)
    assert LogCut(500, 50).counters(last) == LastRun(500, 50, 500, 300, 200, 4_096)
    assert LogCut(100, 99).counters(last) == LastRun(100, 77, 100, 100, 100, 4_096)
    assert LogCut(1_000, 77).counters(last) == last
    assert LogCut(0, 0, begins=True).counters(last) is None
    assert LogCut(0, 0).counters(None) is None
