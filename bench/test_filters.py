"""SQL92 filters: records examined on a warm backlog, beside a tag filter that chooses the same.

In one queue, whose records lie one behind the other, and in several, between whose records those of
the others lie, so that each is a place of its own in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from benchmarks import Report, median_s

from cometmq import Broker
from cometmq.shm.reading.selection import selection_of
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader

EACH = 50  # one of so many is wanted: 2 %
CHOICES = {
    "tag, 2 %": ("wanted", ""),
    "SQL92, 2 %": ("*", "amount = 0 AND region IN ('eu', 'us')"),
    "SQL92, none": ("*", "amount > 100 OR missing IS NOT NULL"),
}


class Backlog(NamedTuple):
    store: Path
    queues: int
    count: int  # of each queue


def backlog(store: Path, queues: int, count: int, body_bytes: int) -> Backlog:
    """A store with messages of four properties; those of each turn go to all queues."""
    with Broker(store) as broker, broker.producer(linger_ms=5) as producer:
        for number in range(count):
            properties = {"amount": str(number % EACH), "region": "eu"}
            tag = "other" if number % EACH else "wanted"
            for queue_id in range(queues):
                producer.send(
                    "t", b"x" * body_bytes, tags=tag, properties=properties, queue_id=queue_id
                )
    return Backlog(store, queues, count)


@pytest.fixture(scope="module")
def one_queue(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Backlog:
    store = tmp_path_factory.mktemp("filters") / "store"
    return backlog(store, 1, 300_000 if full else 20_000, 100)


@pytest.fixture(scope="module")
def eight_queues(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Backlog:
    """At full size 200 MB, which no processor's cache holds."""
    store = tmp_path_factory.mktemp("filters") / "store"
    return backlog(store, 8, 32_000 if full else 2_000, 600)


@pytest.mark.parametrize("name", CHOICES)
def test_one_queue(one_queue: Backlog, full: bool, report: Report, name: str) -> None:
    examine(one_queue, full, report, name)


@pytest.mark.parametrize("name", CHOICES)
def test_eight_queues(eight_queues: Backlog, full: bool, report: Report, name: str) -> None:
    examine(eight_queues, full, report, name)


def examine(backlog: Backlog, full: bool, report: Report, name: str) -> None:
    store, queues, count = backlog
    much = 1 << 40
    limits = ReadLimits(
        scan_bytes=much, hot_bytes=much, hot_count=count, cold_bytes=much, cold_count=count
    )
    reader = StoreReader.open_closed(store, limits)
    tags, filter, _ = selection_of(*CHOICES[name])

    def run() -> None:
        for queue_id in range(queues):
            found = reader.get_message(
                "t", queue_id, 0, count, max_bytes=much, tags=tags, filter=filter
            )
            assert found.next_queue_offset == count
            assert found.count == (0 if "none" in name else count // EACH)

    median = median_s(run, 5 if full else 2)
    report(name, queues * count / median / 1e6, "M records/s")
    reader.close()
