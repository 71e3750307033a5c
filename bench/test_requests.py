"""Requests and their replies, one in flight, beside plain sends in turns: how many of the one come
for one of the other."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from benchmarks import Report

from cometmq import Broker, Consumer, Message

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


def p50_us(call: Callable[[], object], count: int) -> float:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


@pytest.mark.timeout(600)
def test_one_in_flight(broker: Broker, full: bool, report: Report) -> None:
    count, rounds = (3_000, ROUNDS) if full else (50, 1)
    worker = subprocess.Popen(
        [sys.executable, __file__, broker.name_server], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    with worker, broker.producer() as producer:
        assert worker.stdout.readline() == "ready\n"
        producer.request("questions", BODY, timeout_s=60)
        sends, requests = [], []
        for _ in range(rounds):
            sends.append(p50_us(lambda: producer.send("plain", BODY), count))
            requests.append(p50_us(lambda: producer.request("questions", BODY), count))
        producer.send("questions", b"end")
    assert worker.returncode == 0
    report("plain send", statistics.median(sends), "us p50")
    report("request and reply", statistics.median(requests), "us p50")
    ratios = [request / send for request, send in zip(requests, sends, strict=True)]
    report("a request, of a send", statistics.median(ratios), "times as long")


if __name__ == "__main__":
    answer_all(sys.argv[1])
