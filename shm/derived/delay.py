"""Delayed messages in the store: the tagsCode of their queue entry is a time of delivery."""

from __future__ import annotations

from array import array
from typing import Final

from cometmq.conf.delay_levels import DEFAULT_LEVELS, parse_levels
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.shm.kernel.codec import Message, delayed_code

LEVELS_MS: Final = parse_levels(DEFAULT_LEVELS)


def tags_code_of(message: Message, levels_ms: tuple[int, ...] = LEVELS_MS) -> int:
    """tagsCode of any record: what its ConsumeQueue entry has.

    Args:
        levels_ms: how long each delay level waits.
    """
    if message.topic == DELAY_TOPIC:
        return delayed_code(message.record, array("q", levels_ms))
    return message.tags_code
