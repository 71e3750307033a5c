"""Handlers that do nothing: how many messages a second `run` hands out and acknowledges.

Canonical load: a warm backlog of 128-byte bodies in 8 queues, ASYNC_FLUSH, concurrency 20, one
process. From the first message's handler to the last one's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable

import pytest
from benchmarks import Report

from cometmq import Broker, Message

GOALS = {"threads": 400_000, "tasks": 250_000, "popped": 200_000}  # messages a second
_groups = (f"handlers{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def backlog(broker: Broker, full: bool) -> int:
    count = 2_000_000 if full else 20_000
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with broker.producer() as producer:
        producer.send_many("handled", bodies * (count // 1_000))
    return count


class Stopwatch:
    def __init__(self, count: int) -> None:
        self._numbers = itertools.count(1)
        self._count = count
        self._began = self.took_s = 0.0

    def is_last(self) -> bool:
        number = next(self._numbers)
        if number == 1:
            self._began = time.perf_counter()
        elif number == self._count:
            self.took_s = time.perf_counter() - self._began
            return True
        return False


def by_threads(broker: Broker, count: int) -> float:
    watch = Stopwatch(count)
    with broker.consumer(next(_groups), "handled") as consumer:

        def handle(_message: Message) -> None:
            if watch.is_last():
                consumer.close()

        consumer.run(handle, concurrency=20)
    return count / watch.took_s


def by_pops(broker: Broker, count: int) -> float:
    """Each acknowledged by itself, in a group without queues."""
    watch = Stopwatch(count)
    with broker.pop_consumer(next(_groups), "handled") as consumer:

        def handle(_message: Message) -> None:
            if watch.is_last():
                consumer.close()

        consumer.run(handle, concurrency=20)
    return count / watch.took_s


def by_tasks(broker: Broker, count: int) -> float:
    watch = Stopwatch(count)

    async def work() -> None:
        async with broker.async_consumer(next(_groups), "handled") as consumer:

            async def handle(_message: Message) -> None:
                if watch.is_last():
                    await consumer.close()

            await consumer.run(handle, concurrency=20)

    asyncio.run(work())
    return count / watch.took_s


@pytest.mark.timeout(600)
def test_no_op_handlers(broker: Broker, backlog: int, full: bool, report: Report) -> None:
    ways: dict[str, Callable[[Broker, int], float]] = {
        "threads": by_threads,
        "tasks": by_tasks,
        "popped": by_pops,
    }
    for way, run in ways.items():
        rates = [run(broker, backlog) for _ in range(5 if full else 1)]
        report(f"run, {way}, concurrency 20", statistics.median(rates) / 1e3, "k messages/s")
        if full:
            assert statistics.median(rates) >= GOALS[way]
