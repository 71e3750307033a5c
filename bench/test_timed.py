"""Messages for later beside plain ones, by each way of sending, in turns: how many of the one come
for one of the other. And both in one producer, one after the other."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from benchmarks import Report

from cometmq import Broker

BODY = b"x" * 100
IN_FLIGHT = 64
ROUNDS = 5
Options = dict[str, Any]
# What waits is delivered long after: the rate is that of scheduling.
AFTER_S = 7_200.0
AT = datetime.now(UTC) + timedelta(hours=2)
LEVEL = 18
KINDS: dict[str, Options] = {
    "deliver_after": {"deliver_after": AFTER_S},
    "deliver_at": {"deliver_at": AT},
    "delay_level": {"delay_level": LEVEL},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("timed") / "store") as running:
        yield running


def one_by_one(broker: Broker, count: int, options: Options) -> None:
    with broker.producer() as producer:
        for _ in range(count):
            producer.send("t", BODY, **options)


def in_flight(broker: Broker, count: int, options: Options) -> None:
    async def one(producer: Any) -> None:
        for _ in range(count // IN_FLIGHT):
            await producer.send("t", BODY, **options)

    async def work() -> None:
        async with broker.async_producer() as producer:
            await asyncio.gather(*(one(producer) for _ in range(IN_FLIGHT)))

    asyncio.run(work())


def lingering(broker: Broker, count: int, options: Options) -> None:
    """The argument stands in the call, as in a program: a dict that is passed on costs more than
    half of a plain `send`."""
    with broker.producer(linger_ms=5) as producer:
        send = producer.send
        match [*options]:
            case []:
                for _ in range(count):
                    send("t", BODY)
            case ["deliver_after"]:
                for _ in range(count):
                    send("t", BODY, deliver_after=AFTER_S)
            case ["deliver_at"]:
                for _ in range(count):
                    send("t", BODY, deliver_at=AT)
            case ["delay_level"]:
                for _ in range(count):
                    send("t", BODY, delay_level=LEVEL)


def in_turns(broker: Broker, count: int, options: Options) -> None:
    """Every other one is plain."""
    with broker.producer(linger_ms=5) as producer:
        send = producer.send
        for _ in range(count // 2):
            send("t", BODY)
            send("t", BODY, **options)


def many(broker: Broker, count: int, options: Options) -> None:
    with broker.producer() as producer:
        producer.send_many("t", [BODY] * count, **options)


@pytest.mark.parametrize(
    ("way", "count"),
    [
        (one_by_one, 2_000),
        (in_flight, 20_000),
        (lingering, 400_000),
        (in_turns, 400_000),
        (many, 600_000),
    ],
)
@pytest.mark.slow
def test_scheduling(
    way: Callable[[Broker, int, Options], None],
    count: int,
    broker: Broker,
    full: bool,
    report: Report,
) -> None:
    count = count if full else count // 20
    took_s: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, options in {"plain": {}, **KINDS}.items():
            began = time.perf_counter()
            way(broker, count, options)
            took_s.setdefault(name, []).append(time.perf_counter() - began)
    plain_s = statistics.median(took_s.pop("plain"))
    report("plain", count / plain_s / 1000, "k messages/s")
    for name, each in took_s.items():
        report(name, plain_s / statistics.median(each), "of the plain rate")
