"""Retries: every message fails once, and comes again through the schedule.

Canonical load: a backlog of 128-byte bodies in 8 queues, ASYNC_FLUSH, concurrency 20, one process,
delay levels of a second. From the first message's first handler to the last one's second one, less
the second that each has to wait.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from pathlib import Path

import pytest
from benchmarks import Report

from cometmq import Broker, Message, Retry

GOAL = 50_000  # retries a second
DELAY_S = 1.0


def fail_each_once(broker: Broker, group: str, topic: str, count: int, *, raises: bool) -> float:
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("raises", [True, False], ids=["an exception", "Retry()"])
def test_retries(
    tmp_path: Path, full: bool, report: Report, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "cometmq.client")
    count = 500_000 if full else 5_000
    bodies = [random.Random(number).randbytes(128) for number in range(1_000)]
    with Broker(tmp_path / "store", settings={"messageDelayLevel": "1s 1s 1s 1s"}) as broker:
        with broker.producer() as producer:
            producer.send_many("failing", bodies * (count // 1_000))
        rate = fail_each_once(broker, "retries", "failing", count, raises=raises)
    report("retries through the schedule", rate / 1e3, "k messages/s")
    if full:
        assert rate >= GOAL
