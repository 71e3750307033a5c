"""Delayed messages in the store: the tagsCode of their queue entry is a time of delivery."""

from __future__ import annotations

from typing import Final

from cometmq.protocol.names import DELAY_TOPIC
from cometmq.shm.kernel._kernel import Message, java_hash

_DIGITS_MAX: Final = 9  # more than there are levels, and no number that takes long to read

# RocketMQ messageDelayLevel; level 1 is the first.
DELAY_LEVELS_S: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip


def tags_code_of(message: Message) -> int:
    """tagsCode of any record: what its ConsumeQueue entry has."""
    return delay_tags_code(message) if message.topic == DELAY_TOPIC else message.tags_code


def delay_tags_code(message: Message) -> int:
    """tagsCode of a record of SCHEDULE_TOPIC_XXXX (store-format 3.2), ms since 1970."""
    text = message.properties.get("DELAY", "")
    digits = text.lstrip("0")[:_DIGITS_MAX] if text.isascii() and text.isdigit() else ""
    level = int(digits or 0)
    if level <= 0:
        return java_hash(message.tags) if message.tags else 0
    level = min(level, len(DELAY_LEVELS_S))
    time_ms = message.store_timestamp_ms + DELAY_LEVELS_S[level - 1] * 1000
    return (time_ms + (1 << 63)) % (1 << 64) - (1 << 63)  # as 64 bits hold it, whatever was stored
