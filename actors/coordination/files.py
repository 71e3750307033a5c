"""The books and the files of config/ that they are kept in, as RocketMQ has these."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from cometmq.actors.tables.book import Book
from cometmq.actors.tables.filters import Filter, FilterBook
from cometmq.actors.tables.group_share import GroupRecord
from cometmq.actors.tables.groups import GroupBook
from cometmq.actors.tables.holds import HoldBook
from cometmq.actors.tables.members import MemberBook
from cometmq.actors.tables.offsets import Moved, OffsetBook
from cometmq.actors.tables.popped import Key, Out, PopBook, PoppedQueue, Stretch, table_of
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.ledger import OffsetSet, PopsForgotten
from cometmq.shm.state.bloom import BIT_COUNT, bit_positions
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.holds import (
    forget_old_holds,
    has_old_holds,
    holds_file,
    holds_text,
    load_holds,
)
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import (
    BloomFilterData,
    ConsumerFilterData,
    ConsumerFilterTable,
    ConsumerOffsetTable,
    DataVersion,
    SubscriptionGroupTable,
    TopicTable,
)
from cometmq.shm.state.tables_text import (
    filters_pieces,
    groups_pieces,
    member_pieces,
    offsets_pieces,
    topics_pieces,
)

log = logging.getLogger(__name__)

OFFSET_VERSION_STEP: Final = 500  # commits for one step of the data version; RocketMQ's
NAMED_MAX: Final = 5  # queues in a line of the log


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Shown(Protocol):
    """A book, and the file that it is kept in."""

    @property
    def file(self) -> ConfigFile[Any]: ...
    @property
    def book(self) -> Book: ...
    def pieces(self) -> Iterator[str]:
        """The file's text, piece by piece. What changes meanwhile may be in it or not."""


class _Version:
    """The data version of a file: so many steps above what it was."""

    def __init__(self, found: DataVersion) -> None:
        self._version = found
        self._steps = 0

    def after(self, steps: int) -> DataVersion:
        """After so many steps since the file was loaded."""
        more = steps - self._steps
        if more > 0:
            found = self._version
            counter = found.counter + more - 1
            before = DataVersion(found.state_version, counter, found.timestamp)
            self._version = before.next(now_ms(), found.state_version)
            self._steps = steps
        return self._version


class TopicsFile:
    """topics.json"""

    def __init__(self, config_dir: Path, topics_max: int) -> None:
        self.file = ConfigFile(config_dir / "topics.json", TopicTable)
        table = self.file.load() or TopicTable()
        self.book = TopicBook(table.topic_config_table, topics_max, time.time_ns())
        self._version = _Version(table.data_version)

    def pieces(self) -> Iterator[str]:
        return topics_pieces(self._version.after(self.book.changes), self.book.items())


class GroupsFile:
    """subscriptionGroup.json"""

    def __init__(self, config_dir: Path, groups_max: int) -> None:
        self.file = ConfigFile(config_dir / "subscriptionGroup.json", SubscriptionGroupTable)
        table = self.file.load() or SubscriptionGroupTable()
        self.book = GroupBook(table.subscription_group_table, groups_max)
        self._forbidden = table.forbidden_table
        self._version = _Version(table.data_version)

    def pieces(self) -> Iterator[str]:
        table = SubscriptionGroupTable(
            data_version=self._version.after(self.book.changes), forbidden_table=self._forbidden
        )
        return groups_pieces(table, list(self.book.configs.items()))


class MemberTable(msgspec.Struct, kw_only=True, rename="camel"):
    """consumerMembers.json, which RocketMQ does not have: the groups' members and their queues.

    Without it a coordinator that was killed and comes back would give queues away that others
    still work on. Its time of change is the coordinator's last sign of life.
    """

    groups: dict[str, GroupRecord] = {}
    subscribed: dict[str, list[str]] = {}  # group -> topics that it ever asked for
    highest: int = 0  # version or epoch that any group was ever given


class MembersFile:
    """consumerMembers.json; if it is damaged the groups start anew."""

    def __init__(self, config_dir: Path) -> None:
        self.file = ConfigFile(config_dir / "consumerMembers.json", MemberTable)
        table, self.silent_s = MemberTable(), 0.0  # since that sign of life
        try:
            found = self.file.load()
            if found is not None:
                self.silent_s = time.time() - self.file.path.stat().st_mtime
                table = found
        except (StoreDamaged, OSError) as error:
            log.warning("the groups start anew: %s", error)
        subscribed = {name: set(topics) for name, topics in table.subscribed.items()}
        self.book = MemberBook(table.groups, subscribed, table.highest)

    def note_life(self) -> None:
        """So far this coordinator has lived."""
        with contextlib.suppress(OSError):
            os.utime(self.file.path)

    def pieces(self) -> Iterator[str]:
        book = self.book
        return member_pieces(
            book.highest,
            book.records(),
            [(name, sorted(topics)) for name, topics in book.subscribed.items() if topics],
        )


class HoldsFile:
    """holds.json, which RocketMQ does not have. In a store of before it there may be another file:
    that is what the book begins with until the first snapshot has taken its place."""

    def __init__(self, store: Path) -> None:
        self.file = holds_file(store)
        self.book = HoldBook(load_holds(store, self.file))
        if self.file.loaded_from is not None:
            forget_old_holds(store)
        elif has_old_holds(store):
            self.book.changes += 1  # in no snapshot yet

    def pieces(self) -> Iterator[str]:
        yield holds_text(self.book.all().values())


class OffsetsFile:
    """consumerOffset.json"""

    def __init__(self, config_dir: Path) -> None:
        self.file = ConfigFile(config_dir / "consumerOffset.json", ConsumerOffsetTable)
        table = self.file.load() or ConsumerOffsetTable()
        self.book = OffsetBook(table.offset_table)
        self._version = _Version(table.data_version)

    def pieces(self) -> Iterator[str]:
        book = self.book
        return offsets_pieces(
            self._version.after(book.commits // OFFSET_VERSION_STEP),
            ((group, sorted(book.topics_of(group))) for group in book.group_names()),
            ((key, book.queues(key)) for key in book.every_key()),
        )

    def put_back(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Move what lies behind the end of its queue back to that end; whether there was any."""
        moves = self.book.behind(ends)
        by_group: dict[str, list[Moved]] = defaultdict(list)
        for move in moves:
            group, topic, queue_id, offset, end = move
            self.book.apply(OffsetSet(group, topic, queue_id, end))
            by_group[group].append(move)
            text = "group %s: queue %d of %s ends at %d now: its progress there was %d"
            log.info(text, group, queue_id, topic, end, offset)
        for group, moved in by_group.items():
            log.warning(_lost_progress(group, moved))
        return bool(moves)


def _lost_progress(group: str, moves: list[Moved]) -> str:
    """A line for the log; what was lost is read and committed again once it is sent again."""
    shown = [
        f"queue {queue_id} of {topic} from {offset} to {end}"
        for _, topic, queue_id, offset, end in moves[:NAMED_MAX]
    ]
    if len(moves) > NAMED_MAX:
        shown.append(f"{len(moves) - NAMED_MAX} more, each in a line of level INFO")
    messages = sum(offset - end for _, _, _, offset, end in moves)
    return (
        f"group {group}: its progress was put back in {len(moves)} queues, whose last {messages} "
        f"messages were lost with the end before this start: {', '.join(shown)}"
    )


class FiltersFile:
    """consumerFilter.json; if it is damaged, members register their filters anew."""

    def __init__(self, config_dir: Path) -> None:
        self.file = ConfigFile(config_dir / "consumerFilter.json", ConsumerFilterTable)
        table = ConsumerFilterTable()
        try:
            table = self.file.load() or table
        except (StoreDamaged, OSError) as error:
            log.warning("the filters of groups start anew: %s", error)
        filters: dict[str, dict[str, Filter]] = {}
        for topic, of_topic in table.filter_data_by_topic.items():
            for group, each in of_topic.group_filter_data.items():
                filters.setdefault(group, {})[topic] = Filter(
                    each.expression, each.client_version, each.born_time, each.dead_time
                )
        self.book = FilterBook(filters)

    def pieces(self) -> Iterator[str]:
        return filters_pieces(
            (topic, ((group, _filter_data(topic, group, each)) for group, each in filters.items()))
            for topic, filters in self.book.by_topic().items()
        )


def _filter_data(topic: str, group: str, registered: Filter) -> ConsumerFilterData:
    return ConsumerFilterData(
        consumer_group=group,
        topic=topic,
        expression=registered.expression,
        born_time=registered.born_ms,
        dead_time=registered.dead_ms,
        dead=registered.is_dead,
        client_version=registered.version,
        bloom_filter_data=BloomFilterData(BIT_COUNT, bit_positions(group, topic)),
    )


class _OutRow(msgspec.Struct, array_like=True):
    """Row of the file for an `Out`."""

    handle: int
    first: int
    end: int
    until_ms: int
    attempt: str = ""
    released: tuple[Stretch, ...] = ()


class _PoppedRow(msgspec.Struct, array_like=True):
    """Row of the file for a `PoppedQueue`."""

    group: str
    topic: str
    queue_id: int
    floor: int
    top: int
    acked: list[Stretch]
    outs: list[_OutRow]
    free: list[Stretch] = []


class PopTable(msgspec.Struct, kw_only=True):
    """popped.json, which RocketMQ does not have: what queue-less groups have out."""

    queues: list[_PoppedRow] = []


class PoppedFile:
    """popped.json; if it is damaged, what was out comes again."""

    def __init__(self, config_dir: Path) -> None:
        self.file = ConfigFile(config_dir / "popped.json", PopTable)
        table = PopTable()
        try:
            table = self.file.load() or table
        except (StoreDamaged, OSError) as error:
            log.warning("what queue-less groups have out comes again: %s", error)
        queues: dict[Key, PoppedQueue] = {}
        for row in table.queues:
            queue = queues[row.group, row.topic, row.queue_id] = PoppedQueue(row.floor, row.top)
            queue.acked, queue.free = row.acked, row.free
            queue.out = {
                each.handle: Out(each.first, each.end, each.until_ms, each.attempt, each.released)
                for each in row.outs
            }
        self.book = PopBook(queues)

    def put_back(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Forget what was popped where the queue has lost its end; whether there was any. From the
        group's offset on it comes again."""
        lost = self.book.beyond(ends)
        for group, topic, queue_id in lost:
            self.book.apply(PopsForgotten(group, topic, queue_id))
            log.warning(
                "group %s: queue %d of %s has lost messages that were popped; what is there and "
                "was not acknowledged comes again", group, queue_id, topic,
            )  # fmt: skip
        return bool(lost)

    def pieces(self) -> Iterator[str]:
        yield dumps(PopTable(queues=table_of(self.book)))
