"""Predicate pushdown: the filters from Spark that limit a read.

Spark 4.2 and 4.3 keep one read plan for all queries of a DataFrame (PythonDataSourceV2.readInfo).
It still has the filters of one query when the next one reads, and one side of a self-join reads
with the filters of the other. A reader cannot detect that, so with these versions it accepts none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark import __version__ as SPARK_VERSION
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from cometmq.spark.offsets import OFFSET_MAX, Queue
from cometmq.spark.reading import MS_MAX

# Whether Spark keeps a read plan for each scan: added with this method, SPARK-58551.
PER_SCAN: Final = hasattr(DataSourceReader, "pushLimit")
NOT_PUSHED: Final = (
    f"pushdown = true has no effect with Spark {SPARK_VERSION}, which would apply one query's "
    "filters to the next query of the same DataFrame; use tags, where, assign, startingOffsets, "
    "startingTimestamp and endingTimestamp to read less"
)
EXACT: Final = frozenset({"topic", "broker", "queue_id", "queue_offset"})  # never looked at again
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Pushed:
    """All filters together; None is no restriction."""

    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    offset_begin: int = 0
    offset_end: int = OFFSET_MAX  # exclusive
    begin_ms: int = -1
    end_ms: int = MS_MAX  # exclusive
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None

    def takes(self, queue: Queue) -> bool:
        return (
            (self.topics is None or queue.topic in self.topics)
            and all(queue.topic.startswith(prefix) for prefix in self.prefixes)
            and (self.brokers is None or queue.broker in self.brokers)
            and (self.queue_ids is None or queue.queue_id in self.queue_ids)
        )


_SETS: Final = {
    "topic": "topics",
    "broker": "brokers",
    "queue_id": "queue_ids",
    "tags": "tags",
    "keys": "keys",
}


def push(filters: Iterable[Filter]) -> tuple[Pushed, list[Filter]]:
    """(what is taken into account, the filters that Spark has to look at again)."""
    pushed = Pushed()
    left: list[Filter] = []
    for each in filters:
        narrowed = _narrow(pushed, each)
        if narrowed is not None:
            pushed = narrowed
        attribute: Sequence[str] = getattr(each, "attribute", ())
        if narrowed is None or len(attribute) != 1 or attribute[0] not in EXACT:
            left.append(each)
    return pushed, left


def _narrow(pushed: Pushed, given: Filter) -> Pushed | None:
    """With one filter more; None if it says nothing that can be used here."""
    attribute: Sequence[str] = getattr(given, "attribute", ())
    if len(attribute) != 1:
        return None
    column = attribute[0]
    if isinstance(given, IsNotNull):
        return pushed if column in EXACT else None
    if isinstance(given, EqualTo | EqualNullSafe | In):
        values = given.value if isinstance(given, In) else (given.value,)
        if isinstance(given, EqualNullSafe) and given.value is None:
            return None  # the one filter that null passes
        return _one_of(pushed, column, [value for value in values if value is not None])
    if isinstance(given, StringStartsWith) and column == "topic":
        return replace(pushed, prefixes=(*pushed.prefixes, given.value))
    if isinstance(given, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return _range(pushed, column, given)
    return None


def _one_of(pushed: Pushed, column: str, values: list[Any]) -> Pushed | None:
    if column in _SETS:
        name = _SETS[column]
        before = getattr(pushed, name)
        wanted = frozenset(values)
        narrowed: dict[str, Any] = {name: wanted if before is None else before & wanted}
        return replace(pushed, **narrowed)
    if not values:
        return None
    if column == "queue_offset":
        return _offsets(pushed, min(values), max(values) + 1) if len(values) == 1 else None
    if column == "store_ts":
        return _times(pushed, _ms_up(min(values)), _ms_down(max(values)) + 1)
    return None


def _range(
    pushed: Pushed,
    column: str,
    given: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual,
) -> Pushed | None:
    above = isinstance(given, GreaterThan | GreaterThanOrEqual)
    if column == "queue_offset":
        beyond = isinstance(given, GreaterThan | LessThanOrEqual)
        edge = given.value + 1 if beyond else given.value
        return _offsets(pushed, edge, OFFSET_MAX) if above else _offsets(pushed, 0, edge)
    if column == "store_ts":
        if isinstance(given, GreaterThan | LessThanOrEqual):
            edge = _ms_down(given.value) + 1
        else:
            edge = _ms_up(given.value)
        return _times(pushed, edge, MS_MAX) if above else _times(pushed, -1, edge)
    return None


def _offsets(pushed: Pushed, begin: int, end: int) -> Pushed:
    return replace(
        pushed,
        offset_begin=max(pushed.offset_begin, begin),
        offset_end=min(pushed.offset_end, end),
    )


def _times(pushed: Pushed, begin_ms: int, end_ms: int) -> Pushed:
    return replace(
        pushed, begin_ms=max(pushed.begin_ms, begin_ms), end_ms=min(pushed.end_ms, end_ms)
    )


def _microseconds(value: datetime) -> int:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    passed = aware - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _ms_down(value: datetime) -> int:
    return _microseconds(value) // 1000


def _ms_up(value: datetime) -> int:
    return -(-_microseconds(value) // 1000)
