"""A consumer on the broker's machine: the mapped store against ZeroMQ, in the same run, in turns.

Canonical load: 128-byte bodies, ASYNC_FLUSH, one Python process a consumer. Latency is until `poll`
has returned; the way in is ZeroMQ in all cases, and on it three of five wake-ups.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import statistics
import time
from typing import Any

import pytest
from benchmarks import Report
from mapped_load import drain, produce_at
from patience import patient

from cometmq import Broker

WAYS: dict[str, dict[str, Any]] = {
    "zmq": {"transport": "zmq"},
    "mapped": {"transport": "mapped"},
    "mapped, spinning": {"transport": "mapped", "spin_us": 1_000},
}
SPAWN = multiprocessing.get_context("spawn")
_groups = (f"group{number}" for number in itertools.count())


def latencies_us(
    broker: Broker, topic: str, rate: int, count: int, way: str
) -> tuple[list[float], list[float]]:
    """One round, sorted: from the intended sending, and from the sending.

    The first fifth does not count.
    """
    bodies: list[tuple[int, bytes]] = []
    with broker.consumer(next(_groups), topic, start="latest", **WAYS[way]) as consumer:
        while consumer.poll(1, 0.05) or len(consumer.assignment) < 8:
            pass
        producer = SPAWN.Process(target=produce_at, args=(broker.name_server, topic, rate, count))
        producer.start()
        while len(bodies) < count:
            messages = consumer.poll(1024, patient(30))
            now = time.monotonic_ns()
            assert messages, f"{len(bodies)} of {count} messages came"
            bodies += [(now, message.body) for message in messages]
            consumer.ack(messages)
        producer.join()
    counted = bodies[count // 5 :]
    intended = sorted((now - int(body[:20])) / 1e3 for now, body in counted)
    return intended, sorted((now - int(body[20:40])) / 1e3 for now, body in counted)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [1_000, 10_000])
def test_end_to_end(broker: Broker, full: bool, report: Report, rate: int) -> None:
    count = 4 * rate if full else 200
    found: dict[str, list[tuple[list[float], list[float]]]] = {way: [] for way in WAYS}
    for _ in range(5 if full else 1):
        for way in WAYS:
            found[way].append(latencies_us(broker, f"latency{rate}", rate, count, way))
    for way, rounds in found.items():
        for kind, since in enumerate(("intended", "sent")):
            p50 = [each[kind][len(each[kind]) // 2] for each in rounds]
            p99 = [each[kind][len(each[kind]) * 99 // 100] for each in rounds]
            report(f"{way}, since {since}: p50", statistics.median(p50), "us")
            report(f"{way}, since {since}: p50, best round", min(p50), "us")
            report(f"{way}, since {since}: p99", statistics.median(p99), "us")
            report(f"{way}, since {since}: p99, best round", min(p99), "us")
            report(f"{way}, since {since}: p99, worst round", max(p99), "us")


def drained(broker: Broker, topic: str, count: int, groups: int, way: str) -> float:
    """Messages delivered a second, all groups together."""
    lines, children = [], []
    for _ in range(groups):
        ours, theirs = SPAWN.Pipe()
        arguments = (broker.name_server, next(_groups), topic, count, WAYS[way], theirs)
        children.append(SPAWN.Process(target=drain, args=arguments))
        children[-1].start()
        lines.append(ours)
    for line in lines:
        line.recv()
    for line in lines:
        line.send(None)
    times = [line.recv() for line in lines]
    for child in children:
        child.join()
    return groups * count / (max(end for _, end in times) - min(begin for begin, _ in times))


@pytest.fixture(scope="module")
def backlog(broker: Broker, full: bool) -> int:
    count = 2_000_000 if full else 20_000
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with broker.producer() as producer:
        producer.send_many("backlog", bodies * (count // 1_000))
    return count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.slow
def test_warm_backlog(
    broker: Broker, backlog: int, full: bool, report: Report, groups: int
) -> None:
    found: dict[str, list[float]] = {"zmq": [], "mapped": []}
    for _ in range(5 if full else 1):
        for way, rates in found.items():
            rates.append(drained(broker, "backlog", backlog, groups, way))
    for way, rates in found.items():
        report(f"{way}: {groups} groups", statistics.median(rates) / 1e6, "M messages/s")
    ratios = [ours / theirs for ours, theirs in zip(found["mapped"], found["zmq"], strict=True)]
    report(f"mapped against zmq, {groups} groups", statistics.median(ratios), "times")
