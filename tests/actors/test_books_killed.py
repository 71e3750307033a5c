"""Killed at any line of replay, snapshot and mark: a start finds what was confirmed, and the
cleaner has kept what it needs for that."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import dying
import msgspec
import pytest

from cometmq.actors.coordination import files as coordination_files
from cometmq.actors.coordination import snapshots
from cometmq.actors.coordination.files import (
    GroupsFile,
    HoldsFile,
    MembersFile,
    OffsetsFile,
    Shown,
    TopicsFile,
)
from cometmq.actors.coordination.ledger import Ledger
from cometmq.actors.coordination.snapshots import Snapshots
from cometmq.actors.tables.group_share import GroupRecord
from cometmq.protocol.commands import Hold
from cometmq.protocol.configs import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.ledger import (
    LEDGER_QUEUE,
    LEDGER_TOPIC,
    Change,
    GroupPut,
    GroupRemoved,
    HoldDropped,
    HoldPut,
    MemberJoined,
    OffsetSet,
    OffsetsForgotten,
    Place,
    QueueOwned,
    Subscribed,
    TopicPut,
    TopicRemoved,
    entry_of,
    pack_change,
)
from cometmq.shm.derived.consume_queue import queue_folder
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.os import durable
from cometmq.shm.reading import resuming
from cometmq.shm.reading.ledger_log import LedgerLog, ledger_needed_from
from cometmq.shm.reading.resuming import resume
from cometmq.shm.state import config_files, ledger_mark
from cometmq.shm.state import holds as state_holds
from cometmq.shm.state.ledger_mark import read_mark

WATCHED = frozenset(
    str(module.__file__)
    for module in (
        snapshots,
        coordination_files,
        resuming,
        ledger_mark,
        config_files,
        state_holds,
        durable,
    )
)
EPOCH = 7
CHANGES: list[list[Change]] = [
    [TopicPut(TopicConfig(topic_name="t")), GroupPut(SubscriptionGroupConfig(group_name="g"))],
    [OffsetSet("g", "t", 0, 1), MemberJoined("g", "m"), Subscribed("g", "m", "t", "*"),
     HoldPut("gone", 1, 0)],
    [TopicPut(TopicConfig(topic_name="u")), OffsetSet("g", "u", 0, 5), HoldPut("h", 5, 0)],
    [QueueOwned("g", "t", 0, "m", 11), OffsetSet("g", "t", 0, 2)],
    [OffsetsForgotten("u"), TopicRemoved("u"), HoldDropped("gone")],
    [GroupPut(SubscriptionGroupConfig(group_name="gone")), OffsetSet("gone", "t", 0, 9),
     MemberJoined("gone", "n"), Subscribed("gone", "n", "t", "*")],
    [GroupRemoved("gone"), OffsetSet("g", "t", 1, 3), HoldPut("h", 7, 9)],
]  # fmt: skip
FIRST = 3  # so many entries are in the snapshot that is there
EXPECTED: tuple[Any, ...] = (
    {"t"},
    {"g"},
    {"t@g": {0: 2, 1: 3}},
    {"g": GroupRecord(members={"m": {"t": "*"}}, owners={"t": {0: "m"}}, epochs={"t": {0: 11}})},
    {"h": Hold("h", 7, 9)},
)


class Log:
    """The ledger as the log has it, from some entry on."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end

    def entries(self, position: int) -> Iterator[tuple[int, bytes]]:
        assert position >= self.begin, (
            f"{position} is needed, and the ledger begins at {self.begin}"
        )
        for number in range(position, self.end):
            changes = [pack_change(change) for change in CHANGES[number]]
            yield number, entry_of(Place(EPOCH, number + 1), changes)


class Inline:
    """A thread of its own, but now."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


class Covered:
    """A ledger of which everything is in the log."""

    is_settled = True
    undone = 0

    def __init__(self, last: Place, position: int) -> None:
        self.covered = self.given = last
        self.position = position


class Start:
    """A coordinator's books, as a start has them."""

    def __init__(self, store: Path, end: int, *, knows_holds: bool = True) -> None:
        config = store / "config"
        self.topics, self.groups = TopicsFile(config, 100), GroupsFile(config, 100)
        self.members, self.offsets = MembersFile(config), OffsetsFile(config)
        shown: list[Shown] = [self.topics, self.groups, self.members, self.offsets]
        if knows_holds:
            self.holds = HoldsFile(store)
            shown.append(self.holds)
        begin = read_mark(store).needed_from() or 0  # the cleaner was here
        log = cast(LedgerLog, Log(begin, end))
        resumed = resume(store, [(each.file, each.book.apply) for each in shown], log)
        ledger = cast(Ledger, Covered(resumed.last, end))
        self.snapshots = Snapshots(cast(Any, None), store, ledger, shown, resumed.mark)
        self.snapshots.close()
        self.snapshots._thread = cast(Any, Inline())

    @property
    def state(self) -> tuple[Any, ...]:
        offsets = self.offsets.book
        return (
            {topic for topic, _ in self.topics.book.items()},
            set(self.groups.book.configs),
            {key: dict(offsets.queues(key)) for key in offsets.every_key()},
            dict(self.members.book.records()),
            dict(self.holds.book.all()),
        )


def run(store: Path, end: int, *, knows_holds: bool = True) -> Start:
    start = Start(store, end, knows_holds=knows_holds)
    if start.snapshots.is_due:
        start.snapshots.write_now()
    return start


@pytest.mark.slow
@pytest.mark.parametrize("before", [[0], [0, 1, 2, FIRST]])
def test_killed_at_any_line(before: list[int], tmp_path: Path) -> None:
    """
    Args:
        before: how far the ledger was at each of the snapshots that are there already.
    """
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    for end in before:
        run(base, end)
    killed_everywhere(base, work, len(CHANGES), EXPECTED)


OLD_HOLDS = {"old": Hold("old", 5, 0), "h": Hold("h", 1, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("began", [False, True])
def test_a_store_of_before_killed_at_any_line(began: bool, tmp_path: Path) -> None:
    """Its holds stand in a file of their own, which goes when they are in a snapshot.

    Args:
        began: a start of this release had made its mark before the first of the changes that the
            killed one finds; else there are none, and the killed one is the first.
    """
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    for end in (0, FIRST):
        run(base, end, knows_holds=False)
    old = [list(msgspec.structs.astuple(hold)) for hold in OLD_HOLDS.values()]
    (base / state_holds.OLD_HOLDS_FILE).write_bytes(msgspec.json.encode(old))
    if began:
        Start(base, FIRST)
        expected = {"old": Hold("old", 5, 0), "h": Hold("h", 7, 9)}
        killed_everywhere(base, work, len(CHANGES), (*EXPECTED[:-1], expected))
    else:
        whole = Start(shutil.copytree(base, tmp_path / "other"), FIRST).state
        assert whole[-1] == OLD_HOLDS
        killed_everywhere(base, work, FIRST, whole)
    assert not (work / state_holds.OLD_HOLDS_FILE).exists()


def killed_everywhere(base: Path, work: Path, end: int, expected: tuple[Any, ...]) -> None:
    """A run up to that entry on a copy of a store."""
    shutil.copytree(base, work)
    lines = dying.lines_of(partial(run, work, end), WATCHED)
    assert Start(work, end).state == expected
    assert len(lines) > 100
    for place, (line, passes) in dying.some_of(enumerate(lines.items()), 40):
        nth = passes if place % 2 else 1  # the first time that it is passed, or the last
        shutil.rmtree(work)
        shutil.copytree(base, work)
        status = dying.die_at(partial(run, work, end), WATCHED, line, nth)
        assert status == dying.DIED, (line, nth)
        assert Start(work, end).state == expected, (line, nth)
        assert run(work, end).state == expected, (line, nth)
        again = Start(work, end)
        assert again.state == expected, (line, nth)
        assert not again.snapshots.is_due
        assert read_mark(work).needed_from() == end


# --- what a start may make again ---


class Late(Log):
    """One that begins later than a store looks for."""

    def entries(self, position: int) -> Iterator[tuple[int, bytes]]:
        return super().entries(max(position, self.begin))


def resumed(store: Path, log: Log) -> resuming.Resumed:
    config = store / "config"
    files = [TopicsFile(config, 100), OffsetsFile(config)]
    return resume(store, [(each.file, each.book.apply) for each in files], cast(LedgerLog, log))


def mark_at(store: Path, *snapshots: tuple[int, int]) -> None:
    """
    Args:
        snapshots: position, and the number of the last entry, of topics.json and the offsets.
    """
    mark = ledger_mark.Mark()
    for name, (position, number) in zip(
        ("topics.json", "consumerOffset.json"), snapshots, strict=True
    ):
        found = ledger_mark.Snapshot(ledger_mark.NO_CONTENT, position, Place(EPOCH, number))
        mark = mark.with_file(name, ledger_mark.Marked(contents=[found]))
    ledger_mark.write_mark(store, mark)


@pytest.mark.parametrize(
    ("begin", "numbers", "missing"),
    [
        (3, (3, 3), False),  # the first that is there is the next one
        (3, (5, 4), False),  # it counts already
        (3, (2, 5), True),  # one of them does not know the one before
        (7, (7, 7), True),  # nothing is there that would tell
    ],
)
def test_what_is_missing_is_told_by_places(
    begin: int,
    numbers: tuple[int, int],
    missing: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store whose log was begun later looks for queue offsets that its ledger never had."""
    mark_at(tmp_path, *((0, number) for number in numbers))
    found = resumed(tmp_path, Late(begin, 7))
    assert ("is not known any more" in caplog.text) is missing
    assert found.common == found.last == Place(EPOCH, 7)


def test_up_to_where_every_book_has_all(tmp_path: Path) -> None:
    """Of a log that has nothing of the ledger yet: snapshots of different moments."""
    mark_at(tmp_path, (40, 9), (30, 5))
    found = resumed(tmp_path, Late(0, 0))
    assert (found.common, found.last) == (Place(EPOCH, 5), Place(EPOCH, 9))
    assert [each.contents[0].last.number for each in read_mark(tmp_path).files.values()] == [9, 5]


def test_a_copy_that_nobody_has_looked_at(tmp_path: Path) -> None:
    """Its first coordinator was killed before it left a mark, and the log came meanwhile."""
    tmp_path.joinpath("config").mkdir()
    start = Start(tmp_path, len(CHANGES))
    assert start.state == EXPECTED


def test_what_the_cleaner_keeps_for_a_copy_that_begins_later(tmp_path: Path) -> None:
    """Its snapshots look for what was never there: nothing goes until there are others."""
    folder = queue_folder(tmp_path, LEDGER_TOPIC, LEDGER_QUEUE)
    folder.mkdir(parents=True)
    filler = {"physical_offset": 0, "size": 0x7FFFFFFF, "tags_code": 0}
    units = [filler] * 3 + [
        {"physical_offset": 1_000 + at, "size": 100, "tags_code": 0} for at in range(3)
    ]
    content = b"".join(CONSUME_QUEUE_UNIT.pack(**unit) for unit in units)
    (folder / "0".zfill(20)).write_bytes(content.ljust(2_000, b"\0"))
    wanted = {5: 1_002, 4: 1_001, 6: None, 9: None}
    for position, physical_offset in wanted.items():
        mark_at(tmp_path, (position, 1), (9, 2))
        assert ledger_needed_from(tmp_path, 2_000) == physical_offset
    (folder / "0".zfill(20)).rename(folder / "2000".zfill(20))  # it begins with record 100
    for position in (0, 99):
        mark_at(tmp_path, (position, 1), (105, 2))
        assert ledger_needed_from(tmp_path, 2_000) == 0
