"""Selection of ranges: which queues are read, and from where to where."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cometmq.protocol.errors import TopicNotExist
from cometmq.protocol.names import is_internal_topic
from cometmq.shm.live.queue_table import QueueRange
from cometmq.spark.catalog import Catalog
from cometmq.spark.offsets import EARLIEST, LATEST, MessagesMissing, Queue, assigned, by_queue
from cometmq.spark.options import (
    GroupFallback,
    OnMissing,
    OnNoTimestamp,
    OptionError,
    ReadOptions,
    load_json,
    milliseconds,
)

log = logging.getLogger(__name__)

INTERNAL_PREFIX: Final = "RMQ_SYS_"  # also of RocketMQ topics that clients may write


def is_internal(topic: str) -> bool:
    return is_internal_topic(topic) or topic.startswith(INTERNAL_PREFIX)


def choose(catalog: Catalog, options: ReadOptions) -> list[Queue]:
    """The queues that the options name. Raises TopicNotExist with the nearest names."""
    known = catalog.topics()
    if options.assign:
        return _assigned(known, options)
    if options.subscribe_pattern:
        try:
            pattern = re.compile(options.subscribe_pattern)
        except re.error as error:
            raise OptionError(
                f"subscribePattern = {options.subscribe_pattern!r}: {error}"
            ) from None
        names: Iterable[str] = [
            topic
            for topic in known
            if pattern.fullmatch(topic) and (options.include_internal or not is_internal(topic))
        ]
    else:
        names = [name.strip() for name in options.subscribe.split(",") if name.strip()]
        names = [name for name in names if _is_there(name, known, options)]
    return [queue for name in names for queue in known[name]]


def _is_there(topic: str, known: Mapping[str, Any], options: ReadOptions) -> bool:
    if topic in known:
        return True
    close = difflib.get_close_matches(topic, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are {len(known)} topics"
    if options.on_missing is OnMissing.FAIL:
        raise TopicNotExist(f"topic {topic} does not exist, or nothing was ever sent to it{hint}")
    log.error("topic %s does not exist; it is left out%s", topic, hint)
    return False


def _assigned(known: Mapping[str, Collection[Queue]], options: ReadOptions) -> list[Queue]:
    found: list[Queue] = []
    for topic, broker, queue_id in assigned(load_json(options.assign, "assign")):
        if not _is_there(topic, known, options):
            continue
        matching = [
            queue
            for queue in known[topic]
            if queue.queue_id == queue_id and broker in (None, queue.broker)
        ]
        if not matching:
            where = f" on {broker}" if broker else ""
            raise OptionError(f"assign: topic {topic} has no queue {queue_id}{where}")
        found += matching
    return sorted(set(found))


@dataclass(frozen=True)
class Bounds:
    """How positions are found: through the catalog, or left to a filter on the store time."""

    catalog: Catalog
    options: ReadOptions
    ranges: Mapping[Queue, QueueRange]
    by_filter: bool = False  # of a log whose queues are of no use

    def starts(self, *, default: str) -> dict[Queue, int]:
        """Where each queue is begun; not yet looked at whether that is still there."""
        options = self.options
        if options.starting_timestamp and not self.by_filter:
            return {queue: self._from_time(queue) for queue in self.ranges}
        text = options.starting_offsets or default
        if options.starting_timestamp:
            text = "earliest"
        if text == "group":
            return self._from_group()
        return self._from_text(
            text, "startingOffsets", EARLIEST if default == "earliest" else LATEST
        )

    def ends(self) -> dict[Queue, int]:
        options = self.options
        if options.ending_offsets == "earliest":
            raise OptionError("endingOffsets = earliest: nothing lies before it")
        ends = self._from_text(options.ending_offsets, "endingOffsets", LATEST)
        if options.ending_timestamp and not self.by_filter:
            end_ms = milliseconds(options.ending_timestamp, "endingTimestamp")
            ends = {
                queue: min(end, self.catalog.offset_by_time(queue, end_ms))
                for queue, end in ends.items()
            }
        return ends

    def _from_time(self, queue: Queue) -> int:
        low, high = self.ranges[queue]
        wanted = milliseconds(self.options.starting_timestamp, "startingTimestamp")
        found = min(high, max(low, self.catalog.offset_by_time(queue, wanted)))
        if found == high and self.options.on_no_timestamp is OnNoTimestamp.ERROR:
            raise OptionError(
                f"{queue}: no message was stored at {self.options.starting_timestamp} or later "
                "(onNoTimestamp = latest begins at the end)"
            )
        return found

    def _from_group(self) -> dict[Queue, int]:
        options = self.options
        starts = self.catalog.committed(options.consumer_group, list(self.ranges))
        for queue, offset in starts.items():
            if offset < 0:
                if options.group_fallback is GroupFallback.ERROR:
                    raise OptionError(
                        f"group {options.consumer_group} has committed nothing in {queue}"
                    )
                earliest = options.group_fallback is GroupFallback.EARLIEST
                starts[queue] = self.ranges[queue][0 if earliest else 1]
        return starts

    def _from_text(self, text: str, name: str, otherwise: int) -> dict[Queue, int]:
        """Of earliest, latest, or JSON; `otherwise` for queues that the JSON does not name."""
        given: dict[Queue, int] = {}
        if text.lower() in ("earliest", "latest"):
            otherwise = EARLIEST if text.lower() == "earliest" else LATEST
        elif text.lstrip().startswith("{"):
            given = by_queue(load_json(text, name), name)
            for queue in given:
                if queue not in self.ranges:
                    raise OptionError(f"{name} names {queue}, which is not read")
        else:
            group = ", group" if name == "startingOffsets" else ""
            raise OptionError(f"{name} = {text[:80]!r}: earliest, latest{group} or JSON")
        return {
            queue: self._resolve(queue, given.get(queue, otherwise), name) for queue in self.ranges
        }

    def _resolve(self, queue: Queue, offset: int, name: str) -> int:
        low, high = self.ranges[queue]
        if offset in (EARLIEST, LATEST):
            return low if offset == EARLIEST else high
        if offset > high:
            raise OptionError(f"{name}: {queue} ends at {high}, {offset} is behind that")
        return offset


def present(queue: Queue, begin: int, end: int, low: int, on_missing: OnMissing) -> tuple[int, int]:
    """The part of [begin, end) that has not expired. Raises MessagesMissing, or says it."""
    if begin >= low or begin >= end:
        return begin, max(begin, end)
    text = f"{queue}: messages [{begin}, {min(low, end)}) have expired, it begins at {low}"
    if on_missing is OnMissing.FAIL:
        raise MessagesMissing(f"{text} (onMissing = skip reads on behind them)")
    log.error("%s; they are left out", text)
    return low, max(low, end)
