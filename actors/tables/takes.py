"""Takes of groups that have their messages in order: at most one of each queue. Pure: no I/O.

A change sets the whole of it, so that it may come a second time, on top of a later one: what
follows sets it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cometmq.actors.tables.book import Book
from cometmq.actors.tables.popped import Key
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    OffsetsForgotten,
    PopsForgotten,
    QueueTaken,
)
from cometmq.protocol.takes import Take

_Undo = tuple[Key, Take | None]  # what stood there


class TakeBook(Book):
    """All takes.

    Args:
        takes: to begin with; they are the book's from now on.
    """

    kinds = (QueueTaken, PopsForgotten, OffsetsForgotten, GroupRemoved)

    def __init__(self, takes: dict[Key, Take]) -> None:
        self._takes = takes

    def __len__(self) -> int:
        return len(self._takes)

    def get(self, key: Key) -> Take | None:
        return self._takes.get(key)

    def items(self) -> Iterator[tuple[Key, Take]]:
        """May be changed meanwhile."""
        return iter(list(self._takes.items()))

    def of_group(self, group: str) -> list[tuple[Key, Take]]:
        return [each for each in self._takes.items() if each[0][0] == group]

    def beyond(self, ends: Mapping[tuple[str, int], int]) -> list[Key]:
        """Queues of which more was taken than there is now."""
        return [key for key, take in self._takes.items() if take.end > ends.get(key[1:], 0)]

    # --- changing ---

    def apply(self, change: Change) -> list[_Undo]:
        """Make the change; what `undo` wants to take it back."""
        if isinstance(change, QueueTaken):
            key = (change.group, change.topic, change.queue_id)
            return [self._set(key, change.take if change.take.left else None)]
        if isinstance(change, PopsForgotten):
            keys = [(change.group, change.topic, change.queue_id)]
        elif isinstance(change, OffsetsForgotten):
            keys = [key for key in self._takes if key[1] == change.topic]
        elif isinstance(change, GroupRemoved):
            keys = [key for key in self._takes if key[0] == change.group]
        else:
            return []
        return [self._set(key, None) for key in keys if key in self._takes]

    def undo(self, undo: Iterable[_Undo]) -> None:
        """Take a change back; the last one first."""
        for each in undo:
            self._set(*each)

    def _set(self, key: Key, take: Take | None) -> _Undo:
        self.changes += 1
        before = self._takes.pop(key, None) if take is None else self._takes.get(key)
        if take is not None:
            self._takes[key] = take
        return key, before
