"""What it costs that producers number their attempts, what a producer_id and storing each key once
cost beside a plain producer: in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from benchmarks import Report

from cometmq import Broker, Producer
from cometmq.bench.crew import cpu_seconds
from cometmq.client.sending.outgoing import Target

BODY = b"x" * 100
Way = Callable[[Producer, int], Callable[[], None]]
_keys = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("named") / "store") as running:
        yield running


def ratio(
    plain: Callable[[], None], other: Callable[[], None], rounds: int, clock: Callable[[], float]
) -> float:
    """How many times as long the other takes: the median over pairs, one after the other."""
    pairs = []
    for _ in range(rounds):
        took = []
        for run in (plain, other):
            began = clock()
            run()
            took.append(clock() - began)
        pairs.append(took[1] / took[0])
    return statistics.median(pairs)


def one_by_one(producer: Producer, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            producer.send("t", BODY, keys=f"k{next(_keys)}")

    return run


def lingering(producer: Producer, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            producer.send("t", BODY, keys=f"k{next(_keys)}")
        producer.flush()

    return run


def in_bulk(producer: Producer, count: int) -> Callable[[], None]:
    bodies = [BODY] * count

    def run() -> None:
        producer.send_many("t", bodies)

    return run


def processor_s(broker: Broker) -> Callable[[], float]:
    """Of the commitlog process."""
    (found,) = (
        each
        for each in psutil.Process(broker.pid).children(recursive=True)
        if each.name() == "cmq-commitlog"
    )

    def read() -> float:
        times = found.cpu_times()
        return times.user + times.system

    return read


OTHERS = {"producer_id": {"producer_id": "bench"}, "dedup": {"dedup": "keys"}}


def unnumbered(producer: Producer) -> Producer:
    """As it would be if producers did not number what they send."""
    sender = producer._sender
    sender.delivery.identity.sender = 0  # type: ignore[misc]
    for lane in sender.learn(Target("t", None, None)).all():
        lane.numbers = itertools.repeat(0)
    return producer


WAYS: dict[str, tuple[Way, float, int]] = {
    "send": (one_by_one, 0, 4_000),
    "send with linger": (lingering, 5, 300_000),
    "send_many": (in_bulk, 0, 500_000),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_numbering(broker: Broker, full: bool, report: Report, way: str) -> None:
    """The embedded appender has no attempts to number: it has no answer that could be lost."""
    run, linger_ms, count = WAYS[way]
    rounds = 15
    if not full:
        count, rounds = 50, 3

    def processors_s() -> float:
        return time.process_time() + cpu_seconds([broker.pid])

    with (
        broker.producer(linger_ms=linger_ms) as plain,
        broker.producer(linger_ms=linger_ms) as numbering,
    ):
        runs = run(unnumbered(plain), count), run(numbering, count)
        report(f"{way}: time", ratio(*runs, rounds, time.perf_counter), "times as long")
        if full:
            report(
                f"{way}: all processes", ratio(*runs, rounds, processors_s), "times the CPU time"
            )


@pytest.mark.parametrize("what", OTHERS)
def test_send(broker: Broker, full: bool, report: Report, what: str) -> None:
    count, rounds = (2_000, 15) if full else (50, 3)
    with broker.producer() as plain, broker.producer(**OTHERS[what]) as other:
        found = ratio(one_by_one(plain, count), one_by_one(other, count), rounds, time.perf_counter)
    report(f"{what}, send", found, "times as long")


@pytest.mark.parametrize("what", OTHERS)
def test_lingering_send(broker: Broker, full: bool, report: Report, what: str) -> None:
    count, rounds = (100_000, 9) if full else (500, 3)
    with (
        broker.producer(linger_ms=5) as plain,
        broker.producer(linger_ms=5, **OTHERS[what]) as other,
    ):
        runs = lingering(plain, count), lingering(other, count)
        report(f"{what}, linger", ratio(*runs, rounds, time.perf_counter), "times as long")
        if full:
            report(
                f"{what}, linger: commitlog process",
                ratio(*runs, rounds, processor_s(broker)),
                "times the processor time",
            )


def test_send_many(broker: Broker, full: bool, report: Report) -> None:
    count, rounds = (200_000, 15) if full else (500, 3)
    with broker.producer() as plain, broker.producer(producer_id="bench-many") as other:
        found = ratio(in_bulk(plain, count), in_bulk(other, count), rounds, time.perf_counter)
    report("producer_id, send_many", found, "times as long")


def test_copies(broker: Broker, full: bool, report: Report) -> None:
    """Messages that are all there already: each is found, read, and answered."""
    count = 20_000 if full else 200
    with broker.producer(linger_ms=5, dedup="keys") as producer:
        for again in (False, True):
            began = time.perf_counter()
            sent = [producer.send("copies", BODY, keys=f"c{number}") for number in range(count)]
            producer.flush()
            took_s = time.perf_counter() - began
            assert sent[-1].duplicate is again
    report("copies", count / took_s / 1000, "k messages/s")
