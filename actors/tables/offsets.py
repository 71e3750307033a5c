"""Consumer offsets: how far each group has come in each queue. Pure: no I/O.

The book is what the ledger's changes come to, one after the other. A change that could not be made
durable is taken back, by what `apply` gave for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cometmq.actors.tables.book import Book
from cometmq.actors.tables.queue_offsets import QueueOffsets
from cometmq.protocol.ledger import Change, GroupRemoved, OffsetSet, OffsetsForgotten
from cometmq.protocol.offsets import OffsetTable, Undo

Moved = tuple[str, str, int, int, int]  # group, topic, queue id, from, to


class OffsetBook(Book):
    """The offsets by `topic@group` and queue id, as they stand in consumerOffset.json.

    Args:
        table: to begin with; what is in it goes to the book.
    """

    kinds = (OffsetSet, OffsetsForgotten, GroupRemoved)

    def __init__(self, table: OffsetTable) -> None:
        self._table: dict[str, QueueOffsets] = {}
        for key in list(table):
            # A key without "@" belongs to the group with the empty name.
            whole = key if "@" in key else f"{key}@"
            self._table[whole] = QueueOffsets(table.pop(key))
        self._topics_of: dict[str, set[str]] = {}  # group -> topics
        self._groups_of: dict[str, set[str]] = {}  # topic -> groups
        for key in self._table:
            self._note(key)
        self.commits = 0  # since then

    # --- changing ---

    def apply(self, change: Change) -> Undo:
        """Make the change; what `undo` wants to take it back. Other books' changes are no change
        of this one."""
        if isinstance(change, OffsetSet):
            self.changes += 1
            self.commits += 1
            key, queue_id = f"{change.topic}@{change.group}", change.queue_id
            offsets = self._table.get(key)
            if offsets is None:
                offsets = self._add(key)
            return ((key, queue_id, offsets.put(queue_id, change.queue_offset)),)
        if isinstance(change, OffsetsForgotten | GroupRemoved):
            self.changes += 1
            if isinstance(change, OffsetsForgotten):
                keys = [f"{change.topic}@{group}" for group in self.groups_of(change.topic)]
            else:
                keys = [f"{topic}@{change.group}" for topic in self.topics_of(change.group)]
            return [
                (key, queue_id, before)
                for key in keys
                for queue_id, before in self._drop(key).items()
            ]
        return ()

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        self.changes += 1
        for key, queue_id, before in reversed(undo):
            if before is not None:
                (self._table.get(key) or self._add(key)).put(queue_id, before)
            else:
                self._remove(key, queue_id)

    def behind(self, ends: Mapping[tuple[str, int], int]) -> list[Moved]:
        """What is committed behind the end of its queue, and where that end is."""
        moves: list[Moved] = []
        for key, offsets in self._table.items():
            topic, _, group = key.partition("@")
            for queue_id, offset in offsets.items():
                if offset > (end := ends.get((topic, queue_id), 0)):
                    moves.append((group, topic, queue_id, offset, end))
        return moves

    # --- what anybody may know ---

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """The next message to consume, -1 if nothing was ever committed."""
        offsets = self._table.get(f"{topic}@{group}")
        found = None if offsets is None else offsets.get(queue_id)
        return -1 if found is None else found

    def groups(self) -> set[str]:
        """Every group that has committed an offset."""
        return set(self._topics_of)

    def groups_of(self, topic: str) -> frozenset[str]:
        """The groups that have committed an offset in the topic."""
        return frozenset(self._groups_of.get(topic, ()))

    def topics_of(self, group: str) -> frozenset[str]:
        """The topics in which the group has committed an offset."""
        return frozenset(self._topics_of.get(group, ()))

    def queue_ids(self, group: str, topic: str) -> Iterable[int]:
        """The queues of the topic in which the group has committed an offset."""
        return self.queues(f"{topic}@{group}").keys()

    # --- for a snapshot, which is made while the book goes on changing ---

    def every_key(self) -> list[str]:
        return list(self._table)

    def group_names(self) -> list[str]:
        return list(self._topics_of)

    def queues(self, key: str) -> QueueOffsets:
        """Queue id -> offset; nothing, if the key is gone meanwhile."""
        return self._table.get(key) or QueueOffsets()

    # --- inside ---

    def _add(self, key: str) -> QueueOffsets:
        offsets = self._table[key] = QueueOffsets()
        self._note(key)
        return offsets

    def _remove(self, key: str, queue_id: int) -> None:
        offsets = self._table[key]
        del offsets[queue_id]
        if not offsets:
            self._drop(key)

    def _drop(self, key: str) -> QueueOffsets:
        offsets = self._table.pop(key)
        self._forget(key)
        return offsets

    def _note(self, key: str) -> None:
        topic, _, group = key.partition("@")
        self._topics_of.setdefault(group, set()).add(topic)
        self._groups_of.setdefault(topic, set()).add(group)

    def _forget(self, key: str) -> None:
        topic, _, group = key.partition("@")
        for index, name, of in (
            (self._topics_of, group, topic),
            (self._groups_of, topic, group),
        ):
            index[name].discard(of)
            if not index[name]:
                del index[name]
