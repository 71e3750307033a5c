"""What the benchmarks of the mapped transport run in processes of their own. No benchmarks here."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from typing import Any

from cometmq import Consumer, Producer

QUIET_S = 0.0002  # what a sleep may be late


def produce_at(name_server: str, topic: str, rate: int, count: int) -> None:
    """An open loop: each message carries when it was meant to be sent, in ns of CLOCK_MONOTONIC.

    The last one is acknowledged, so that all have arrived when this returns.
    """
    filler = random.Random(7).randbytes(108)
    with Producer(name_server) as producer:
        producer.send(topic, bytes(128), queue_id=0)
        due = time.monotonic_ns() + 200_000_000
        for number in range(count):
            while (left_s := (due - time.monotonic_ns()) / 1e9) > 0:
                if left_s > QUIET_S:
                    time.sleep(left_s - QUIET_S)
            send = producer.send if number == count - 1 else producer.send_oneway
            send(topic, b"%020d" % due + filler, queue_id=0)
            due += 1_000_000_000 // rate


def drain(
    name_server: str, group: str, topic: str, count: int, options: dict[str, Any], line: Connection
) -> None:
    """Take a backlog when told to, and tell when the first poll began and the last ended."""
    with Consumer(name_server, group, topic, **options) as consumer:
        while len(consumer.assignment) < 8:
            consumer.poll(0, 0.01)
        line.send(None)
        line.recv()
        began, left = time.monotonic(), count
        while left:
            messages = consumer.poll(8192, timeout_s=10)
            assert messages, f"{left} of {count} messages did not come"
            consumer.ack(messages)
            left -= len(messages)
        line.send((began, time.monotonic()))
