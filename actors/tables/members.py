"""Members of consumer groups and their queues, as another coordinator must know them. Pure: no I/O.

What a group works with is its ConsumerGroup (group_share.py). This book is the image of it that
outlives the process: after each round the differences become changes of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from cometmq.actors.tables.book import Book
from cometmq.actors.tables.group_share import GroupRecord
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    MemberJoined,
    MemberLeft,
    QueueOwned,
    Subscribed,
    TopicAsked,
    TopicRemoved,
    Unsubscribed,
    VersionGiven,
)

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
Undo = Callable[[], object] | None
Owners = dict[tuple[str, int], tuple[str, int]]  # topic, queue id -> member, epoch


class MemberBook(Book):
    """The groups that have, or had, members.

    Args:
        groups: to begin with; they are the book's from now on.
        subscribed: the topics that members of a group ever asked for; so is this.
        highest: version or epoch that any group was ever given.
    """

    kinds = (
        MemberJoined, MemberLeft, Subscribed, Unsubscribed, QueueOwned, VersionGiven, TopicAsked,
        TopicRemoved, GroupRemoved,
    )  # fmt: skip

    def __init__(
        self,
        groups: Mapping[str, GroupRecord],
        subscribed: dict[str, set[str]],
        highest: int,
    ) -> None:
        self._groups = {name: _Group(record) for name, record in groups.items()}
        self.subscribed = subscribed
        self.highest = highest

    # --- changing ---

    def apply(self, change: Change) -> Undo:
        """Make the change; what takes it back, the last one first."""
        self.changes += isinstance(change, self.kinds)
        if isinstance(change, TopicAsked):
            topics = self.subscribed.setdefault(change.group, set())
            if change.topic in topics:
                return None
            topics.add(change.topic)
            return partial(topics.discard, change.topic)
        if isinstance(change, TopicRemoved):
            asking = [each for each in self.subscribed.values() if change.topic in each]
            for topics in asking:
                topics.discard(change.topic)
            return partial(_add_to_all, asking, change.topic)
        if isinstance(change, GroupRemoved):
            take_back = (
                _put(self._groups, change.group, None),
                _put(self.subscribed, change.group, None),
            )
            return lambda: [undo() for undo in take_back]
        return self._apply_to_group(change)

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        self.changes += 1
        if undo is not None:
            undo()

    def _apply_to_group(self, change: Change) -> Undo:
        match change:
            case MemberJoined(name, member):
                return _put(self._group(name).members, member, {})
            case MemberLeft(name, member):
                return _put(self._group(name).members, member, None)
            case Subscribed(name, member, topic, tags):
                return _put(self._group(name).members.setdefault(member, {}), topic, tags)
            case Unsubscribed(name, member, topic):
                return _put(self._group(name).members.setdefault(member, {}), topic, None)
            case QueueOwned(name, topic, queue_id, member, epoch):
                owner = (member, epoch) if member else None
                return _put(self._group(name).owners, (topic, queue_id), owner)
            case VersionGiven(name, version):
                return self._give(self._group(name), version)
        return None

    def _give(self, group: _Group, version: int) -> Undo:
        before, group.version = group.version, version
        # Stays where the group is gone, and is not taken back: it only has to be high enough.
        self.highest = max(self.highest, version)
        return partial(setattr, group, "version", before)

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(GroupRecord())
        return group

    # --- what anybody may know ---

    def records(self) -> Iterator[tuple[str, GroupRecord]]:
        """Of every group that has members. What changes meanwhile may be in it or not."""
        for name, group in list(self._groups.items()):
            if group.members:
                yield name, group.record()

    def asking_for(self, topic: str) -> set[str]:
        """The groups of which a member ever asked for the topic."""
        return {name for name, topics in self.subscribed.items() if topic in topics}

    def differences(self, name: str, record: GroupRecord) -> Iterator[Change]:
        """The changes that make this record of what the book has of the group."""
        group = self._groups.get(name, _NO_GROUP)
        for member in group.members.keys() - record.members.keys():
            yield MemberLeft(name, member)
        for member, subscriptions in record.members.items():
            known = group.members.get(member)
            if known is None:
                yield MemberJoined(name, member)
                known = {}
            for topic in known.keys() - subscriptions.keys():
                yield Unsubscribed(name, member, topic)
            for topic, tags in subscriptions.items():
                if known.get(topic) != tags:
                    yield Subscribed(name, member, topic, tags)
        owners = _owners_of(record)
        for topic, queue_id in group.owners.keys() - owners.keys():
            yield QueueOwned(name, topic, queue_id, "", 0)
        for queue, owner in owners.items():
            if group.owners.get(queue) != owner:
                yield QueueOwned(name, *queue, *owner)
        if group.version != record.version:
            yield VersionGiven(name, record.version)


class _Group:
    """A GroupRecord that changes one by one."""

    __slots__ = ("members", "owners", "version")

    def __init__(self, record: GroupRecord) -> None:
        self.version = record.version
        self.members = {name: dict(topics) for name, topics in record.members.items()}
        self.owners = _owners_of(record)

    def record(self) -> GroupRecord:
        owners: dict[str, dict[int, str]] = {}
        epochs: dict[str, dict[int, int]] = {}
        for (topic, queue_id), (member, epoch) in self.owners.items():
            owners.setdefault(topic, {})[queue_id] = member
            epochs.setdefault(topic, {})[queue_id] = epoch
        members = {name: dict(topics) for name, topics in self.members.items()}
        return GroupRecord(version=self.version, members=members, owners=owners, epochs=epochs)


def _add_to_all(sets: list[set[str]], topic: str) -> None:
    for each in sets:
        each.add(topic)


def _owners_of(record: GroupRecord) -> Owners:
    return {
        (topic, queue_id): (member, record.epochs.get(topic, {}).get(queue_id, record.version + 1))
        for topic, owners in record.owners.items()
        for queue_id, member in owners.items()
    }


def _put(table: dict[KeyT, ValueT], key: KeyT, value: ValueT | None) -> Callable[[], object]:
    """Set or, with None, remove; what takes it back."""
    before = table.get(key)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    return lambda: _put(table, key, before)


_NO_GROUP = _Group(GroupRecord())
