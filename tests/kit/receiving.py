"""Messages that a test waits for, however long they take. No tests here."""

from __future__ import annotations

import time

from patience import patient

from cometmq import Consumer, Message, PopConsumer


def take(
    consumer: Consumer | PopConsumer,
    count: int,
    at_once: int | None = None,
    *,
    ack: bool = False,
) -> list[Message]:
    """Poll until `count` messages are received.

    Args:
        at_once: messages of one poll, so that more than `count` may be returned; None: exactly
            `count` are.
        ack: acknowledge them.
    """
    found: list[Message] = []
    deadline = time.monotonic() + patient(60)
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        messages = consumer.poll(at_once or count - len(found), 1)
        if ack and isinstance(consumer, PopConsumer):
            consumer.ack(*messages)
        elif ack:
            consumer.ack(messages)
        found += messages
    return found


def take_and_ack(consumer: Consumer, count: int, at_once: int = 1024) -> list[Message]:
    """Poll until at least `count` messages are received, and acknowledge them."""
    return take(consumer, count, at_once, ack=True)
