"""Transactions: commits with 64 in flight, and one after the other beside plain sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from benchmarks import Report, median_s

from cometmq import AsyncProducer, Broker

IN_FLIGHT = 64


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("transactions") / "store") as running:
        yield running


def test_64_in_flight(broker: Broker, full: bool, report: Report) -> None:
    each = 400 if full else 20

    async def one(producer: AsyncProducer) -> None:
        for _ in range(each):
            async with producer.transaction("t", b"x" * 100):
                pass

    async def work() -> None:
        async with broker.async_producer(name="bench") as producer:
            await asyncio.gather(*(one(producer) for _ in range(IN_FLIGHT)))

    median = median_s(lambda: asyncio.run(work()), 3)
    report("64 in flight", IN_FLIGHT * each / median / 1000, "k commits/s")


def test_one_in_flight(broker: Broker, full: bool, report: Report) -> None:
    count = 2_000 if full else 100
    with broker.producer(name="bench") as producer:

        def commit() -> None:
            for _ in range(count):
                with producer.transaction("t", b"x" * 100):
                    pass

        def send() -> None:
            for _ in range(count):
                producer.send("t", b"x" * 100)

        commits_s, sends_s = median_s(commit, 5), median_s(send, 5)
    report("one in flight", commits_s / count * 1e6, "us a commit")
    report("beside a plain send", commits_s / sends_s, "times as long")
