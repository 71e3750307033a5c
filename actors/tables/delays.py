"""Delay levels: when a message that waits is due, and where it goes. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cometmq.protocol.errors import MessageIllegal
from cometmq.protocol.names import SYSTEM_TOPICS, check_topic
from cometmq.protocol.uptime import Uptime

QUEUE_IDS = range(1 << 16)  # of which RocketMQ's tools make topics


class Now(NamedTuple):
    """By the wall clock, in ms since 1970, and by the one that nobody sets."""

    wall_ms: int
    up: Uptime

    def waited_ms(self, stored_ms: int, up: Uptime | None) -> int:
        """How long ago a record was stored: as it says itself, if that was in this boot; else by
        the wall clock, below 0 where that has been set back since."""
        passed = None if up is None else self.up.since(up.clock, up.ms)
        return self.wall_ms - stored_ms if passed is None else passed


def delay_ms(level: int, levels_ms: tuple[int, ...]) -> int:
    """How long a message waits at that level (from 1). A level that the table has no longer waits
    as its last one does."""
    return levels_ms[min(level, len(levels_ms)) - 1]


def destination(properties: Mapping[str, str]) -> tuple[str, int]:
    """The topic and queue that a delayed message is meant for. Raises MessageIllegal, NameIllegal
    where there can be none: no broker ever stores such a one."""
    topic, queue = properties.get("REAL_TOPIC", ""), properties.get("REAL_QID", "")
    check_topic(topic)
    if topic in SYSTEM_TOPICS:
        raise MessageIllegal(f"REAL_TOPIC = {topic}: it is the broker's own")
    if not (queue.isascii() and queue.isdigit() and len(queue) < 6 and int(queue) in QUEUE_IDS):
        raise MessageIllegal(f"REAL_QID = {queue!r:.40}: it is no queue of {topic}")
    return topic, int(queue)


def level_for(wait_ms: int, levels_ms: tuple[int, ...]) -> int:
    """The level that waits at least so long, and the shortest of those; the longest, if none
    does."""
    enough = [(each, level) for level, each in enumerate(levels_ms, 1) if each >= wait_ms]
    if enough:
        return min(enough)[1]
    return levels_ms.index(max(levels_ms)) + 1
