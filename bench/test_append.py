"""Embedded append: the log alone, and a service that has its broker's writer inside.

Canonical load: 128-byte bodies, one queue, page-cache durability. The log alone lies in one segment
whose pages are in memory, and its control is a memcpy of the same bytes into such a mapping. The
service is `Broker(..., writer="here")`, the way that users go: whole family, published with every
call, dispatched beside it, over segments as the allocator has them.
"""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import Counters, Report, median_s

from cometmq import Broker
from cometmq.shm.kernel.codec import scan
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name

SEGMENT = 1 << 30
BODY = random.Random(7).randbytes(128)
POPULATE_WRITE = 23


@pytest.fixture
def log(tmp_path: Path, full: bool) -> Iterator[CommitLog]:
    (tmp_path / COMMITLOG_DIR).mkdir()
    segment_bytes = SEGMENT if full else SEGMENT // 64
    opened = CommitLog(
        tmp_path,
        segment_bytes=segment_bytes,
        physical_offset=0,
        store_host=bytes([127, 0, 0, 1, 0, 0, 42, 159]),
        max_message_bytes=4 << 20,
    )
    opened.open_segment()
    assert opened.segment is not None
    opened.segment[0].advise(POPULATE_WRITE)  # what the allocator does ahead of the tail
    yield opened
    end = opened.physical_offset
    opened.close()
    path = tmp_path / COMMITLOG_DIR / segment_name(0)
    with map_segment(path, segment_bytes, writable=False) as memory:
        reached, reason, count, _, _ = scan(memory, 0, 0, min(end, segment_bytes))
    assert reason in (0, 1), "what was stored cannot be read back"
    assert count
    assert reached


def test_append_one_call_a_message(log: CommitLog, full: bool, report: Report) -> None:
    queue = QueueCursor("bench", 0)
    count = 1_000_000 if full else 10_000

    def run() -> None:
        append = log.append
        for _ in range(count):
            append(queue, BODY)

    median = median_s(run, 3 if full else 1)
    report("one call a message", count / median / 1e6, "M messages/s")


def test_append_many(log: CommitLog, full: bool, report: Report) -> None:
    queue = QueueCursor("bench", 0)
    bodies = [BODY] * 256
    rounds = 4_000 if full else 100

    def run() -> None:
        for _ in range(rounds):
            log.append_many(queue, bodies)

    median = median_s(run, 3 if full else 1)
    report("append_many(256)", rounds * 256 / median / 1e6, "M messages/s")
    report("of a memcpy of the same records", memcpy_seconds(rounds) / median, "times its speed")


def measure_service(
    store: Path,
    full: bool,
    report: Report,
    per_call: int,
    append: Callable[[Broker], tuple[Callable[[Any], object], Any]],
) -> None:
    """Short rounds, of which the best one is little disturbed by others on the machine. The next
    begins when everything is dispatched: a burst. Then one long round: what is sustained."""
    settings = {} if full else {"mappedFileSizeCommitLog": 1 << 24, "maxMessageSize": 1 << 20}
    rounds, calls = (60, 100_000 // per_call) if full else (3, 2_000 // per_call + 1)
    took, processor = [], []
    with Broker(store, settings=settings, writer="here") as broker:
        counters, (call, what) = Counters(store), append(broker)

        def run(count: int) -> tuple[float, float]:
            began, processor_began = time.perf_counter_ns(), time.thread_time_ns()
            for _ in range(count):
                call(what)
            messages = count * per_call
            now = time.perf_counter_ns(), time.thread_time_ns()
            return (now[0] - began) / messages, (now[1] - processor_began) / messages

        for _ in range(rounds):
            wall, used = run(calls)
            took.append(wall)
            processor.append(used)
            counters.wait_dispatched()
        began = time.perf_counter()
        run(calls * rounds // 2)
        appended = time.perf_counter() - began
        counters.wait_dispatched()
        dispatched = time.perf_counter() - began
        messages = calls * rounds // 2 * per_call
    report("burst, best round", 1e3 / min(took), "M messages/s")
    report("burst, median round", 1e3 / statistics.median(took), "M messages/s")
    report("processor of the caller, median", statistics.median(processor), "ns a message")
    report("sustained", messages / appended / 1e6, "M messages/s")
    report("sustained and dispatched", messages / dispatched / 1e6, "M messages/s")


def test_service_append_one_call_a_message(tmp_path: Path, full: bool, report: Report) -> None:
    measure_service(
        tmp_path / "store", full, report, 1, lambda broker: (broker.appender("bench").append, BODY)
    )


def test_service_append_many(tmp_path: Path, full: bool, report: Report) -> None:
    bodies = [BODY] * 256
    measure_service(
        tmp_path / "store", full, report, 256,
        lambda broker: (broker.appender("bench").append_many, bodies),
    )  # fmt: skip


def memcpy_seconds(rounds: int) -> float:
    """What the bytes alone cost: 256 records of this load at a time, into resident memory."""
    records = bytes(256 * (91 + len("bench") + len(BODY)))
    with mmap.mmap(-1, len(records) * 64) as memory:
        memory.madvise(POPULATE_WRITE)
        began = time.perf_counter()
        for number in range(rounds):
            at = number % 64 * len(records)
            memory[at : at + len(records)] = records
        return time.perf_counter() - began
