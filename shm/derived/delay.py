"""Delayed messages in the store: the tagsCode of their queue entry is a time of delivery."""

from __future__ import annotations

from typing import Final

from cometmq.conf.delay_levels import DEFAULT_LEVELS, parse_levels
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.shm.kernel._kernel import Message, java_hash

_DIGITS_MAX: Final = 9  # more than there are levels, and no number that takes long to read
LEVELS_MS: Final = parse_levels(DEFAULT_LEVELS)


def tags_code_of(message: Message, levels_ms: tuple[int, ...] = LEVELS_MS) -> int:
    """tagsCode of any record: what its ConsumeQueue entry has."""
    if message.topic == DELAY_TOPIC:
        return delay_tags_code(message, levels_ms)
    return message.tags_code


def delay_tags_code(message: Message, levels_ms: tuple[int, ...] = LEVELS_MS) -> int:
    """tagsCode of a record of SCHEDULE_TOPIC_XXXX (store-format 3.2): when it is due, in ms since
    1970.

    Args:
        levels_ms: how long each level waits.
    """
    text = message.properties.get("DELAY", "")
    digits = text.lstrip("0")[:_DIGITS_MAX] if text.isascii() and text.isdigit() else ""
    level = int(digits or 0)
    if level <= 0:
        return java_hash(message.tags) if message.tags else 0
    level = min(level, len(levels_ms))
    time_ms = message.store_timestamp_ms + levels_ms[level - 1]
    return (time_ms + (1 << 63)) % (1 << 64) - (1 << 63)  # as 64 bits hold it, whatever was stored
