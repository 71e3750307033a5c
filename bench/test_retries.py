"""Retries: every message fails once, and comes again through the schedule.

Canonical load: a backlog of 128-byte bodies in 8 queues, ASYNC_FLUSH, concurrency 20, one process,
delay levels of a second. From the first message's first handler to the last one's second one, less
the second that each has to wait.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from benchmarks import Report
from loads import fail_each_once

from cometmq import Broker

GOAL = 50_000  # retries a second


@pytest.mark.timeout(600)
@pytest.mark.parametrize("raises", [True, False], ids=["an exception", "Retry()"])
@pytest.mark.slow
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
