"""Verification of a store: `cometmq store verify`, records a second.

Canonical load: records of 200 bytes in 16 queues; the page cache is warm, one core. Before it was
native it did 39,000 records/s on the machine of docs/performance.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import Report

from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.os.files import make_store_folders
from cometmq.shm.tools.repair import recover_store
from cometmq.shm.tools.verify import verify_store

RECORD_BYTES = 200
QUEUE_SEGMENT = 6_000_000
QUEUES = 16


def write_store(store: Path, count: int, segment_bytes: int) -> None:
    make_store_folders(store)
    log = CommitLog(
        store, segment_bytes=segment_bytes, physical_offset=0, store_host=bytes(8),
        max_message_bytes=4 << 20,
    )  # fmt: skip
    queues = [QueueCursor("bench", number) for number in range(QUEUES)]
    log.append_many(queues[0], [b""])
    overhead = log.physical_offset
    bodies = [bytes(RECORD_BYTES - overhead)] * 64
    for number in range(count // 64):
        log.append_many(queues[number % QUEUES], bodies)
    log.close()
    recover_store(store, segment_bytes, QUEUE_SEGMENT)


def test_verify(tmp_path: Path, full: bool, report: Report) -> None:
    count = 10_000_000 if full else 50_000
    write_store(tmp_path, count, 1 << 30 if full else 4 << 20)
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        found = verify_store(tmp_path)
        best = max(best, found.records / (time.perf_counter() - began))
        assert found.findings == []
        assert found.records == count // 64 * 64 + 1
    report("records verified", best, "a second")
