"""What the benchmarks of the mapped transport run in processes of their own. No benchmarks here."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from typing import Any

from patience import patient

from cometmq import Consumer, Producer
from cometmq.shm.os.libc import set_timer_slack


def produce_at(name_server: str, topic: str, rate: int, count: int) -> None:
    """An open loop: each message carries when it was meant to be sent and when it was, in ns of
    CLOCK_MONOTONIC. Sleeps in between: a producer that spins takes a processor from the others.

    The last one is acknowledged, so that all have arrived when this returns.
    """
    set_timer_slack(1)  # else a sleep may be 50 us late
    filler = random.Random(7).randbytes(88)
    with Producer(name_server) as producer:
        due = time.monotonic_ns() + 200_000_000
        for number in range(count):
            left_s = (due - time.monotonic_ns()) / 1e9
            if left_s > 0:
                time.sleep(left_s)  # the pace
            send = producer.send if number == count - 1 else producer.send_oneway
            send(topic, b"%020d%020d" % (due, time.monotonic_ns()) + filler, queue_id=0)
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
            messages = consumer.poll(8192, timeout_s=patient(10))
            assert messages, f"{left} of {count} messages did not come"
            consumer.ack(messages)
            left -= len(messages)
        line.send((began, time.monotonic()))
