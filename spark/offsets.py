"""Positions of a source: for each queue the next offset, and of which store.

As JSON, canonical because Spark compares the text:

    {"q": {"broker-a": {"orders": {"0": 1200}}}, "s": {"broker-a": "<store id>"}, "v": 1}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cometmq.protocol.errors import CometError
from cometmq.spark.options import OptionError

VERSION: Final = 1
UNKNOWN_STORE: Final = "-"  # one that only RocketMQ had open says not who it is
EARLIEST: Final = -2
LATEST: Final = -1
OFFSET_MAX: Final = (1 << 63) - 1


class Queue(NamedTuple):
    broker: str
    topic: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.broker}/{self.topic}/{self.queue_id}"


class StoreChanged(CometError):
    """The positions belong to another store, or to one that reached further than this one does."""

    code = 9044


class MessagesMissing(CometError):
    """What is to be read has expired, or its topic is not there."""

    code = 9045


@dataclass(frozen=True)
class Offsets:
    """The next offset of each queue, and the id of each broker's store."""

    queues: Mapping[Queue, int]
    stores: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, dict[str, dict[str, int]]] = {}
        for queue in sorted(self.queues):
            topics = found.setdefault(queue.broker, {})
            topics.setdefault(queue.topic, {})[str(queue.queue_id)] = self.queues[queue]
        return {"q": found, "s": dict(sorted(self.stores.items())), "v": VERSION}

    @classmethod
    def from_json(cls, given: Any) -> Offsets:
        """Raises OptionError for what this source has not written."""
        if not isinstance(given, dict) or given.get("v") != VERSION:
            raise OptionError(f"{str(given)[:200]} are no offsets of version {VERSION}")
        stores, brokers = given.get("s"), given.get("q")
        if not isinstance(stores, dict) or not isinstance(brokers, dict):
            raise OptionError(f"{str(given)[:200]} are no offsets of this source")
        queues = {
            Queue(broker, topic, queue_id): offset
            for broker, topics in brokers.items()
            for topic, queue_id, offset in _of_topics(topics, "offsets")
        }
        return cls(queues, {str(broker): str(store) for broker, store in stores.items()})


def _of_topics(topics: Any, name: str) -> Iterator[tuple[str, int, int]]:
    if not isinstance(topics, dict):
        raise OptionError(f"{name}: an object of topics is wanted, not {str(topics)[:80]}")
    for topic, queues in topics.items():
        if not isinstance(queues, dict):
            raise OptionError(f"{name}: topic {topic}: an object of queues is wanted")
        for number, offset in queues.items():
            yield topic, _queue_id(number, name), _offset(offset, name)


def _queue_id(number: Any, name: str) -> int:
    text = str(number)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise OptionError(f"{name}: {text[:40]!r} is no queue id")
    return int(text)


def _offset(offset: Any, name: str) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not offset >= EARLIEST:
        raise OptionError(f"{name}: {str(offset)[:40]!r} is no queue offset")
    if offset > OFFSET_MAX:
        raise OptionError(f"{name}: {offset} is no queue offset")
    return offset


def by_queue(given: Mapping[str, Any], name: str) -> dict[Queue, int]:
    """Of `startingOffsets`: topic -> broker -> queue -> offset."""
    found = {}
    for topic, brokers in given.items():
        for broker, queue_id, offset in _of_topics(brokers, name):
            found[Queue(broker, topic, queue_id)] = offset
    return found


def assigned(given: Mapping[str, Any]) -> Iterable[tuple[str, str | None, int]]:
    """Of `assign`: (topic, broker or None for all, queue id)."""
    for topic, brokers in given.items():
        by_broker = brokers if isinstance(brokers, dict) else {None: brokers}
        for broker, numbers in by_broker.items():
            if not isinstance(numbers, list) or not numbers:
                raise OptionError(f"assign: topic {topic}: a list of queue ids is wanted")
            for number in numbers:
                yield topic, broker, _queue_id(number, "assign")


def check_stores(known: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raises StoreChanged when a broker has another store than the positions are of."""
    for broker, store_id in known.items():
        now = found.get(broker)
        if now is None:
            raise StoreChanged(
                f"positions of store {store_id} of broker {broker}, which is not there; "
                f"there are {', '.join(sorted(found)) or 'none'}. If one of these has the store "
                f"now, start it with brokerName={broker}"
            )
        if UNKNOWN_STORE not in (store_id, now) and store_id != now:
            raise StoreChanged(
                f"broker {broker}: the positions are of store {store_id}, it has store {now} now: "
                "they mean nothing there. Begin anew with another checkpoint"
            )


def check_reaches(known: Offsets, ends: Mapping[Queue, int], stores: Mapping[str, str]) -> None:
    """Raises StoreChanged when a queue ends before a position in it: the store was cut."""
    for queue, offset in known.queues.items():
        end = ends.get(queue)
        if end is not None and offset > end:
            was, now = known.stores.get(queue.broker, "-"), stores.get(queue.broker, "-")
            raise StoreChanged(
                f"{queue}: read up to {offset} of store {was}, but store {now} ends at {end} "
                "there: it was replaced or cut. Begin anew with another checkpoint"
            )
