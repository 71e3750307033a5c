"""SQL92 filters: records examined on a warm backlog, beside a tag filter that chooses the same.

In one queue, whose records lie one behind the other, and in several, between whose records those of
the others lie, so that each is a place of its own in memory. And by consumers of a broker, in
turns: a tag filter, and the equivalent SQL92 filter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from benchmarks import Report, median_s
from patience import patient

from cometmq import Broker, Consumer
from cometmq.shm.reading.selection import selection_of
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader

pytestmark = pytest.mark.slow

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
    tags, filter = selection_of(*CHOICES[name])

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


# --- by consumers, in turns ---

SQL = "amount = 0 AND region IN ('eu', 'us')"
TURNS = {
    "tag": {"tags": "wanted"},
    "SQL92": {"sql": SQL},
}


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
@pytest.mark.parametrize("queues", [1, 8])
def test_consumers_in_turns(
    tmp_path: Path, full: bool, report: Report, transport: str, queues: int
) -> None:
    """2 % of a warm backlog, by a consumer without a group that goes back to its beginning."""
    count = (400_000 if full else 40_000) // queues
    store, *_ = backlog(tmp_path / "store", queues, count, 100)
    with Broker(store) as broker:
        consumers = {
            name: broker.consumer(None, "t", transport=transport, **how)
            for name, how in TURNS.items()
        }
        reader = processor_s(broker, "cmq-reader")
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in TURNS}
        for number in range(12 if full else 3):
            for name, consumer in consumers.items():
                began, cpu = time.perf_counter(), time.process_time() + reader()
                drain(consumer, queues * count // EACH)
                cpu = time.process_time() + reader() - cpu
                if number:  # else it connects, and its pages are new to it
                    took[name].append((time.perf_counter() - began, cpu))
        for consumer in consumers.values():
            consumer.close()
    for at, what in enumerate(("time", "processor time")):
        medians = {name: statistics.median(each[at] for each in took[name]) for name in TURNS}
        what = f"{transport}, {queues} queues, {what}"
        report(f"{what}, tag", medians["tag"] / (queues * count) * 1e9, "ns/record")
        for name in list(TURNS)[1:]:
            report(f"{what}, {name}", medians[name] / medians["tag"], "times the tag's")


def processor_s(broker: Broker, name: str) -> Callable[[], float]:
    """Of a process of the broker."""
    (found,) = (
        each
        for each in psutil.Process(broker.pid).children(recursive=True)
        if each.name().startswith(name)
    )
    tasks = Path(f"/proc/{found.pid}/task")

    def read() -> float:
        ran_ns = 0
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                ran_ns += int((task / "schedstat").read_text().split()[0])
        return ran_ns / 1e9

    return read


def drain(consumer: Consumer, count: int) -> None:
    consumer.seek("earliest")
    found = 0
    while found < count:
        found += len(consumer.poll(4096, patient(30)))
    assert found == count
