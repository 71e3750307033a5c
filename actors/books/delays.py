"""Delay levels: when a message that waits is due, and where it goes. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.protocol.errors import MessageIllegal
from cometmq.protocol.names import SYSTEM_TOPICS, check_topic

QUEUE_IDS = range(1 << 16)  # of which RocketMQ's tools make topics


def due_ms(store_timestamp_ms: int, level: int, levels_ms: tuple[int, ...]) -> int:
    """When a message is due that was stored at that level (from 1), in ms since 1970. A level that
    the table has no longer waits as its last one does."""
    return store_timestamp_ms + levels_ms[min(level, len(levels_ms)) - 1]


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
