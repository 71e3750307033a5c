"""SQL92 filters that groups have registered, as they stand in consumerFilter.json. Pure: no I/O.

Whoever is filtered for is told by its own subscription. These are for RocketMQ, which takes a
group's filter from that file until a member of the group has sent it anew. Source: RocketMQ
ConsumerFilterManager, FilterDataMapByTopic.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

from cometmq.actors.tables.book import Book
from cometmq.protocol.ledger import Change, FilterDropped, FilterPut, GroupRemoved
from cometmq.protocol.tags import expression_of

DROPPED_AFTER_MS: Final = 86_400_000  # of being dead
UNHEARD_MS: Final = 30_000  # whose members are gone after a start is dead since that long before


class Topics(Protocol):
    """Which topics there are."""

    def __contains__(self, topic: str, /) -> bool: ...


Undo = Callable[[], object] | None


class Filter(NamedTuple):
    """See FilterPut."""

    expression: str
    version: int
    born_ms: int
    dead_ms: int

    @property
    def is_dead(self) -> bool:
        """Nobody wants it; RocketMQ's own test."""
        return self.dead_ms >= self.born_ms


class FilterBook(Book):
    """The filters by group and topic.

    Args:
        filters: to begin with; they are the book's from now on.
    """

    kinds = (FilterPut, FilterDropped, GroupRemoved)

    def __init__(self, filters: dict[str, dict[str, Filter]]) -> None:
        self._filters = filters

    def apply(self, change: Change) -> Undo:
        """Make the change; what takes it back, the last one first."""
        match change:
            case FilterPut(group, topic, expression, version, born_ms, dead_ms):
                self.changes += 1
                return self._put(group, topic, Filter(expression, version, born_ms, dead_ms))
            case FilterDropped(group, topic):
                self.changes += 1
                return self._put(group, topic, None)
            case GroupRemoved(group) if group in self._filters:
                self.changes += 1
                return partial(self._filters.__setitem__, group, self._filters.pop(group))
        return None

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        if undo is not None:
            self.changes += 1
            undo()

    def _put(self, group: str, topic: str, new: Filter | None) -> Undo:
        filters = self._filters.setdefault(group, {})
        before = filters.pop(topic, None) if new is None else filters.get(topic)
        if new is not None:
            filters[topic] = new
        if not filters:
            del self._filters[group]
        return partial(self._put, group, topic, before)

    # --- what has to change ---

    def differences(self, group: str, wanted: Mapping[str, str], now_ms: int) -> Iterator[Change]:
        """The changes by which the group has registered what its members want.

        Args:
            wanted: topic -> tags and SQL92, as protocol/tags.py joins them.
        """
        known = dict(self._filters.get(group, {}))
        for topic, subscribed in wanted.items():
            expression = expression_of(subscribed)
            if not expression:
                continue
            old = known.pop(topic, None)
            if old is None or old.expression != expression:
                yield FilterPut(group, topic, expression, now_ms, now_ms, 0)
            elif old.is_dead:
                yield FilterPut(group, topic, expression, now_ms, old.born_ms, 0)
        yield from _dying(group, known, now_ms)

    def unheard(self, groups: Container[str], now_ms: int) -> Iterator[Change]:
        """After a start, of groups that have no members.

        Args:
            groups: that have.
        """
        for group, filters in list(self._filters.items()):
            if group not in groups:
                yield from _dying(group, filters, now_ms - UNHEARD_MS)

    def forgotten(self, now_ms: int) -> list[Change]:
        """Those that have been dead for too long."""
        return [
            FilterDropped(group, topic)
            for group, filters in self._filters.items()
            for topic, each in filters.items()
            if each.is_dead and now_ms - each.dead_ms >= DROPPED_AFTER_MS
        ]

    # --- what anybody may know ---

    def by_topic(self) -> dict[str, dict[str, Filter]]:
        """topic -> group -> filter."""
        found: dict[str, dict[str, Filter]] = {}
        for group, filters in self._filters.items():
            for topic, each in filters.items():
                found.setdefault(topic, {})[group] = each
        return found


def _dying(group: str, filters: Mapping[str, Filter], dead_ms: int) -> Iterator[Change]:
    for topic, old in list(filters.items()):
        if not old.is_dead:
            since_ms = max(old.born_ms, dead_ms)
            yield FilterPut(group, topic, old.expression, old.version, old.born_ms, since_ms)
