"""Work that several benchmarks have done: commits, handlers, retries. No benchmarks here."""

from __future__ import annotations

import asyncio
import itertools
import time

from cometmq import AsyncProducer, Broker, Consumer, Message, PopConsumer, Retry

BODY = b"x" * 100  # of a transaction
DELAY_S = 1.0  # what each retry has to wait, at least: brokers here have delay levels of a second


async def commit_all(producer: AsyncProducer, topic: str, in_flight: int, each: int) -> None:
    async def one() -> None:
        for _ in range(each):
            async with producer.transaction(topic, BODY):
                pass

    await asyncio.gather(*(one() for _ in range(in_flight)))


class Stopwatch:
    """Of so many handlers: from the first one's call to the last one's."""

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


def by_threads(broker: Broker, group: str, topic: str, count: int) -> float:
    """Handlers a second, of a backlog of so many messages."""
    return _by_threads(broker.consumer(group, topic), count)


def by_pops(broker: Broker, group: str, topic: str, count: int) -> float:
    """Each acknowledged by itself, in a group without queues."""
    return _by_threads(broker.pop_consumer(group, topic), count)


def _by_threads(consumer: Consumer | PopConsumer, count: int) -> float:
    watch = Stopwatch(count)

    def handle(_message: Message) -> None:
        if watch.is_last():
            consumer.close()

    with consumer:
        consumer.run(handle, concurrency=20)
    return count / watch.took_s


def by_tasks(broker: Broker, group: str, topic: str, count: int) -> float:
    watch = Stopwatch(count)

    async def work() -> None:
        async with broker.async_consumer(group, topic) as consumer:

            async def handle(_message: Message) -> None:
                if watch.is_last():
                    await consumer.close()

            await consumer.run(handle, concurrency=20)

    asyncio.run(work())
    return count / watch.took_s


def fail_each_once(broker: Broker, group: str, topic: str, count: int, *, raises: bool) -> float:
    """Retries a second, from the first message's first handler to the last one's second one, less
    the second that each has to wait."""
    done = itertools.count(1)
    began = ended = 0.0
    with broker.consumer(group, topic) as consumer:

        def handle(message: Message) -> None:
            nonlocal began, ended
            if message.reconsume_times == 0:
                began = began or time.perf_counter()
                if raises:
                    raise ValueError("as every message once")
                raise Retry(after=0)
            if next(done) == count:
                ended = time.perf_counter()
                consumer.close()

        consumer.run(handle, concurrency=20)
    return count / (ended - began - DELAY_S)
