"""Requests and their replies, one in flight, beside plain sends in turns: how many of the one come
for one of the other, and the processor time of everybody who takes part."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from benchmarks import Report
from paths import SEARCH
from patience import patient

from cometmq import Broker, Consumer, Message
from cometmq.bench.crew import cpu_seconds

BODY = b"x" * 100
ROUNDS = 5


def answer_all(server: str) -> None:
    """The work of a process of its own, until its input ends."""
    with Consumer(server, "answers", "questions") as consumer:
        print("ready", flush=True)

        def handle(message: Message) -> None:
            if message.body == b"end":
                consumer.close()
            else:
                message.reply(message.body)

        consumer.run(handle, concurrency=1)


class Cost(NamedTuple):
    """Of one call."""

    p50_us: float
    cpu_us: float  # of all processes


def cost_of(call: Callable[[], object], count: int, cpu_s: Callable[[], float]) -> Cost:
    took = []
    cpu = cpu_s()
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return Cost(statistics.median(took) * 1e6, (cpu_s() - cpu) / count * 1e6)


@pytest.mark.timeout(600)
def test_one_in_flight(broker: Broker, full: bool, report: Report) -> None:
    count, rounds = (3_000, ROUNDS) if full else (50, 1)
    worker = subprocess.Popen(
        [sys.executable, __file__, broker.name_server],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SEARCH},
    )
    assert worker.stdout is not None
    with worker, broker.producer() as producer:
        assert worker.stdout.readline() == "ready\n"
        producer.request("questions", BODY, timeout_s=patient(60))
        sends, requests = [], []

        def cpu_s() -> float:
            return time.process_time() + cpu_seconds([broker.pid, worker.pid])

        for _ in range(rounds):
            sends.append(cost_of(lambda: producer.send("plain", BODY), count, cpu_s))
            requests.append(
                cost_of(
                    lambda: producer.request("questions", BODY, timeout_s=patient(60)), count, cpu_s
                )
            )
        producer.send("questions", b"end")
    assert worker.returncode == 0
    for what, costs in (("plain send", sends), ("request and reply", requests)):
        report(what, statistics.median(each.p50_us for each in costs), "us p50")
        report(f"{what}: all processes", statistics.median(each.cpu_us for each in costs), "us CPU")
    ratios = [request.p50_us / send.p50_us for request, send in zip(requests, sends, strict=True)]
    report("a request, of a send", statistics.median(ratios), "times as long")


if __name__ == "__main__":
    answer_all(sys.argv[1])
