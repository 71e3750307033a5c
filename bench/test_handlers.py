"""Handlers that do nothing: how many messages a second `run` hands out and acknowledges.

Canonical load: a warm backlog of 128-byte bodies in 8 queues, ASYNC_FLUSH, concurrency 20, one
process. From the first message's handler to the last one's.
"""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from benchmarks import Report
from loads import by_pops, by_tasks, by_threads

from cometmq import Broker

GOALS = {"threads": 400_000, "tasks": 250_000, "popped": 200_000}  # messages a second
_groups = (f"handlers{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def backlog(broker: Broker, full: bool) -> int:
    count = 2_000_000 if full else 20_000
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with broker.producer() as producer:
        producer.send_many("handled", bodies * (count // 1_000))
    return count


@pytest.mark.timeout(600)
def test_no_op_handlers(broker: Broker, backlog: int, full: bool, report: Report) -> None:
    for way, run in {"threads": by_threads, "tasks": by_tasks, "popped": by_pops}.items():
        rates = [run(broker, next(_groups), "handled", backlog) for _ in range(5 if full else 1)]
        report(f"run, {way}, concurrency 20", statistics.median(rates) / 1e3, "k messages/s")
        if full:
            assert statistics.median(rates) >= GOALS[way]
