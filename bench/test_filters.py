"""SQL92 filters: records examined on a warm backlog, beside a tag filter that chooses the same."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[Path, int]:
    """A store with one queue of 100-byte bodies and four properties, and how many."""
    store = tmp_path_factory.mktemp("filters") / "store"
    count = 300_000 if full else 20_000
    with Broker(store) as broker, broker.producer(linger_ms=5) as producer:
        for number in range(count):
            properties = {"amount": str(number % EACH), "region": "eu"}
            tag = "other" if number % EACH else "wanted"
            producer.send("t", b"x" * 100, tags=tag, properties=properties, queue_id=0)
    return store, count


@pytest.mark.parametrize("name", CHOICES)
def test_examine(counted: tuple[Path, int], full: bool, report: Report, name: str) -> None:
    store, count = counted
    much = 1 << 40
    limits = ReadLimits(
        scan_bytes=much, hot_bytes=much, hot_count=count, cold_bytes=much, cold_count=count
    )
    reader = StoreReader.open_closed(store, limits)
    tags, filter = selection_of(*CHOICES[name])

    def run() -> None:
        found = reader.get_message("t", 0, 0, count, max_bytes=much, tags=tags, filter=filter)
        assert found.next_queue_offset == count
        assert found.count == (0 if "none" in name else count // EACH)

    median = median_s(run, 5 if full else 2)
    report(name, count / median / 1e6, "M records/s")
    reader.close()
