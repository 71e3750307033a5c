"""A broker whose clock was ahead for a moment.

Fault 22: store times stayed ahead until a restart, and queries by time found nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cli_process import run
from family import RunningBroker
from fault.test_clock import DAY_NS, S_NS, WallClock
from patience import patient

from cometmq import Admin, Producer
from cometmq.shm.live.control import Counter

YEAR_NS = 365 * DAY_NS
HOUR_MS = 3_600_000


def send(broker: RunningBroker, text: str, count: int = 3, **options: Any) -> list[int]:
    """Send messages and return their store times."""
    with Producer(broker.ready.name_server) as producer:
        receipts = [
            producer.send("t", f"{text} {number}".encode(), keys=text, queue_id=0, **options)
            for number in range(count)
        ]
        return [each.store_timestamp_ms for each in receipts]


def is_now(time_ms: int) -> bool:
    return abs(time_ms - time.time() * 1000) < 600_000


def found_by_key(broker: RunningBroker, key: str, begin_ms: int, end_ms: int) -> set[bytes]:
    end = time.monotonic() + patient(60)
    while broker.counter(Counter.INDEXED) < broker.counter(Counter.WROTE):
        assert time.monotonic() < end
    with Admin(broker.ready.name_server) as admin:
        found = admin.query_messages("t", key, begin=begin_ms, end=end_ms)
        return {each.body for each in found}


@pytest.mark.parametrize("first", [True, False], ids=["after-others", "from-the-first"])
@pytest.mark.parametrize("ahead_ns", [YEAR_NS, 60 * S_NS], ids=["year", "minute"])
def test_store_times_follow_the_clock_back(tmp_path: Path, ahead_ns: int, first: bool) -> None:
    clock = WallClock(tmp_path)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        broker.create_topic("t", 1)
        if first:
            assert all(map(is_now, send(broker, "before")))
        clock.set_ahead(ahead_ns)
        early = send(broker, "ahead", 5)
        assert all(each > time.time() * 1000 + ahead_ns / 2e6 for each in early)
        clock.set_ahead(0)
        began_ms = int(time.time() * 1000)
        late = send(broker, "after")
        assert all(began_ms - 1_100 <= each <= time.time() * 1000 + 1_100 for each in late)
        broker.read_queue("t", 0, 8 + 3 * first)
        now_ms = int(time.time() * 1000)
        wanted = {b"after %d" % number for number in range(3)}
        assert found_by_key(broker, "after", now_ms - HOUR_MS, now_ms + 1_000) == wanted
        if first:
            assert len(found_by_key(broker, "before", now_ms - HOUR_MS, now_ms + 1_000)) == 3
        server = broker.ready.name_server
        tail = run(
            "msg",
            "tail",
            "-t",
            "t",
            "--from",
            "10min",
            "-n",
            str(8 + 3 * first),
            "--name-server",
            server,
        )
        assert tail.stdout.count(b"after ") == 3, tail.stderr
        (line,) = [each for each in broker.log.splitlines() if "the clock was set back" in each]
        assert "WARNING" in line


def test_a_step_of_less_than_a_second_keeps_the_order_of_times(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    clock.set_ahead(S_NS // 2)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        broker.create_topic("t", 1)
        times = send(broker, "ahead")
        clock.set_ahead(0)
        times += send(broker, "after")
        assert times == sorted(times)
        assert not [each for each in broker.log.splitlines() if "the clock was set back" in each]


def test_a_clock_that_was_ahead_before_the_start_is_told(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    clock.set_ahead(YEAR_NS)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        broker.create_topic("t", 1)
        send(broker, "ahead")
    clock.set_ahead(0)
    with RunningBroker(tmp_path / "store", environ=clock.environ) as broker:
        (line,) = [each for each in broker.log.splitlines() if "it was ahead then" in each]
        assert "WARNING" in line
        assert str(time.localtime(time.time() + 365 * 86_400).tm_year) in line
        assert all(map(is_now, send(broker, "after")))
        now_ms = int(time.time() * 1000)
        broker.read_queue("t", 0, 6)
        assert len(found_by_key(broker, "after", now_ms - HOUR_MS, now_ms + 1_000)) == 3
