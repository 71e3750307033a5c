"""A consumer on the broker's machine: the mapped store against ZeroMQ, in the same run, in turns.

Canonical load: 128-byte bodies, ASYNC_FLUSH, everything in one Python process a consumer. Latency
is from the intended time of sending until `poll` has returned; the way in is ZeroMQ in all cases.
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

from cometmq import Broker

WAYS: dict[str, dict[str, Any]] = {
    "zmq": {"transport": "zmq"},
    "mapped": {"transport": "mapped"},
    "mapped, spinning": {"transport": "mapped", "spin_us": 1_000},
}
SPAWN = multiprocessing.get_context("spawn")
_groups = (f"group{number}" for number in itertools.count())


def latencies_us(broker: Broker, topic: str, rate: int, count: int, way: str) -> list[float]:
    """One round: what was sent while it began, the first fifth, does not count."""
    found: list[float] = []
    with broker.consumer(next(_groups), topic, start="latest", **WAYS[way]) as consumer:
        while consumer.poll(1, 0.05) or len(consumer.assignment) < 8:
            pass
        producer = SPAWN.Process(target=produce_at, args=(broker.name_server, topic, rate, count))
        producer.start()
        while len(found) < count + 1:
            messages = consumer.poll(1024, 30)
            now = time.monotonic_ns()
            assert messages, f"{len(found)} of {count} messages came"
            found += [
                (now - int(message.body[:20].strip(b"\0") or 0)) / 1e3 for message in messages
            ]
            consumer.ack(messages)
        producer.join()
    return found[1 + count // 5 :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [1_000, 10_000])
def test_end_to_end(broker: Broker, full: bool, report: Report, rate: int) -> None:
    count = 4 * rate if full else 200
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(5 if full else 1):
        for way in WAYS:
            found[way].append(sorted(latencies_us(broker, f"latency{rate}", rate, count, way)))
    for way, rounds in found.items():
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            values = [each[int(len(each) * share)] for each in rounds]
            report(f"{way}: {name}, median of rounds", statistics.median(values), "us")
        best = min(each[len(each) // 2] for each in rounds)
        report(f"{way}: p50, best round", best, "us")


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
