"""Retries and dead letters: what becomes of a message that was given back. Pure: no I/O.

Source: RocketMQ AbstractSendMessageProcessor (consumerSendMsgBack).
"""

from __future__ import annotations

from typing import Final

import msgspec

from cometmq.actors.tables.delays import level_for
from cometmq.protocol.commands import GivenBack, StoreRetries
from cometmq.protocol.names import DLQ_PREFIX, POP_RETRY_SIGNS, RETRY_PREFIX, pop_retry_topic
from cometmq.protocol.uptime import Uptime

FIRST_LEVEL: Final = 3  # after the first attempt
_DOUBLINGS_MAX: Final = 62


class Retry(msgspec.Struct, frozen=True):
    """Where a copy goes: at once (level 0), or by a delay level. Dead letters go at once."""

    topic: str
    level: int
    is_dead: bool = False


def retry_topic(
    group: str, entry: GivenBack, *, popped: bool, sign: str = POP_RETRY_SIGNS[0]
) -> str:
    """Return the topic from which a message is redelivered. Popped messages have one retry topic
    for each topic, since a consumer of a group without queues reads only one topic.

    Args:
        sign: see pop_retry_topic.
    """
    if not popped or entry.topic == RETRY_PREFIX + group:
        return RETRY_PREFIX + group
    named = pop_retry_topic(group, "", POP_RETRY_SIGNS[0])
    if entry.topic.startswith(named):  # the message was popped from a retry topic
        return pop_retry_topic(group, entry.topic.removeprefix(named), sign)
    older = pop_retry_topic(group, "", POP_RETRY_SIGNS[1])
    return pop_retry_topic(group, entry.topic.removeprefix(older), sign)


def retry_of(
    command: StoreRetries,
    entry: GivenBack,
    reconsume_times: int,
    levels_ms: tuple[int, ...],
    topic: str = "",
) -> Retry:
    """Return where the copy of a message goes.

    Args:
        reconsume_times: how often it was given back before.
        levels_ms: delay of each level.
        topic: its retry topic; empty: derived from the names of group and topic.
    """
    if entry.delay_level < 0 or reconsume_times >= command.max_reconsume_times:
        return Retry(DLQ_PREFIX + command.group, 0, True)
    popped = command.at_once or entry.handle != 0
    topic = topic or retry_topic(command.group, entry, popped=popped)
    if command.at_once:
        return Retry(topic, 0)
    if entry.after_ms >= 0:
        return Retry(topic, level_for(entry.after_ms, levels_ms))
    if entry.delay_level > 0:
        return Retry(topic, min(entry.delay_level, len(levels_ms)))
    if command.first_wait_ms > 0:
        power = min(reconsume_times, _DOUBLINGS_MAX)
        wait_ms = command.first_wait_ms * command.wait_multiplier**power
        return Retry(topic, level_for(min(wait_ms, command.most_wait_ms), levels_ms))
    return Retry(topic, min(FIRST_LEVEL + reconsume_times, len(levels_ms)))


def retry_tail(retry: Retry, queue_id: int, now: Uptime) -> bytes:
    """The properties that a copy has anew, as they stand in its record.

    Args:
        queue_id: of the retry topic.
        now: when it begins to wait, if it does.
    """
    tail = b"WAIT\1false\2"
    if retry.level or retry.is_dead:
        tail += b"DELAY\1%d\2" % retry.level
    if retry.level:
        tail += b"REAL_TOPIC\1%b\2REAL_QID\1%d\2" % (retry.topic.encode(), queue_id)
        tail += now.as_property()
    return tail


def bare_properties(properties: bytes, topic: bytes, bytes_max: int) -> bytes:
    """The properties of a copy that has no room for more: as they were, and where it was sent to
    if that fits. It cannot wait, as nothing would say for what."""
    place = b"RETRY_TOPIC\1%b\2" % topic
    known = b"\2RETRY_TOPIC\1" in b"\2" + properties
    return properties if known or len(place + properties) > bytes_max else place + properties
