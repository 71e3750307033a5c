"""Recovery: time to ready after kill -9, and a forced scan of the whole log against a plain read.

Canonical load: 1 KiB bodies, 4 queues, batches of 64; --full: stores of 4 and 20 GB where the disk
has the room, else what half of it takes. The start is measured with a
warm page cache, as after kill -9; scan and read without one.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from benchmarks import Report

from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os.files import (
    ABORT_FILE,
    COMMITLOG_DIR,
    CONSUME_QUEUE_DIR,
    Checkpoint,
    make_store_folders,
)
from cometmq.shm.tools.repair import recover_store

BODY = bytes(range(256)) * 4
QUEUE_SEGMENT = 6_000_000
GIB = 1 << 30


def write_log(store: Path, total: int, segment_bytes: int) -> int:
    """A log of about `total` bytes; its end."""
    make_store_folders(store)
    log = CommitLog(
        store, segment_bytes=segment_bytes, physical_offset=0, store_host=bytes(8),
        max_message_bytes=4 << 20,
    )  # fmt: skip
    queues = [QueueCursor("bench", number) for number in range(4)]
    number = 0
    while log.physical_offset < total:
        log.append_many(queues[number % 4], [BODY] * 64)
        number += 1
    end, timestamp = log.physical_offset, log.last_store_timestamp
    log.close()
    (store / ABORT_FILE).touch()
    # As if the last records were 3 s old, the slack of the checkpoint: one segment is scanned.
    safe = timestamp + 3000
    Checkpoint(store).store(physic_msg_timestamp=safe, logics_msg_timestamp=safe)
    return end


@pytest.mark.parametrize("gib", [4, 20])
def test_recovery(gib: int, tmp_path: Path, full: bool, report: Report) -> None:
    total = gib * GIB if full else gib << 21
    segment_bytes = GIB if full else 1 << 21
    if full:
        total = min(total, shutil.disk_usage(tmp_path).free // 2)
    end = write_log(tmp_path, total, segment_bytes)
    first = timed_recovery(tmp_path, segment_bytes, end)
    report("size of the log", end / GIB, "GiB")
    report("all queues built from the log", first, "s")
    report("ready after kill -9", 1000 * timed_recovery(tmp_path, segment_bytes, end), "ms")
    forget(tmp_path)
    read_s = timed_read(tmp_path)
    forget(tmp_path)
    began = time.perf_counter()
    found = find_end(tmp_path, segment_bytes, clean=True, whole_log=True)
    scan_s = time.perf_counter() - began
    assert found.physical_offset == end
    report("forced scan of the whole log", end / scan_s / GIB, "GiB/s")
    report("of a plain read, both from the disk", 100 * read_s / scan_s, "%")
    shutil.rmtree(tmp_path / CONSUME_QUEUE_DIR)


def timed_recovery(store: Path, segment_bytes: int, end: int) -> float:
    began = time.perf_counter()
    recovered = recover_store(store, segment_bytes, QUEUE_SEGMENT)
    assert recovered.log.physical_offset == end
    return time.perf_counter() - began


def forget(store: Path) -> None:
    """Drop the log from the page cache."""
    for path in (store / COMMITLOG_DIR).iterdir():
        with path.open("rb") as segment:
            os.fdatasync(segment.fileno())
            os.posix_fadvise(segment.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_read(store: Path) -> float:
    """read(2) of every segment into one buffer, nothing done with it."""
    buffer = bytearray(1 << 20)
    began = time.perf_counter()
    for path in sorted((store / COMMITLOG_DIR).iterdir()):
        with path.open("rb", buffering=0) as segment:
            os.posix_fadvise(segment.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while segment.readinto(buffer):
                pass
    return time.perf_counter() - began
