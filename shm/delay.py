"""The delay topic's one difference in the store: its tagsCode is a time of delivery."""

from __future__ import annotations

from typing import Final

from cometmq.shm._kernel import Message, java_hash

# RocketMQ messageDelayLevel; level 1 is the first.
DELAY_LEVELS_S: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip


def delay_tags_code(message: Message) -> int:
    """tagsCode of a record of SCHEDULE_TOPIC_XXXX (store-format 3.2), ms since 1970."""
    text = message.properties.get("DELAY", "")
    level = int(text) if text.isascii() and text.isdigit() else 0
    if level <= 0:
        return java_hash(message.tags) if message.tags else 0
    level = min(level, len(DELAY_LEVELS_S))
    return message.store_timestamp_ms + DELAY_LEVELS_S[level - 1] * 1000
