"""Dispatching and indexing: what the dispatcher does for each message.

Canonical load: messages of 128 bytes whose one key is the UNIQ_KEY that the producer makes; an
index file of RocketMQ's size, new at the start, so that its pages are faulted in as it fills.
"""

from __future__ import annotations

import mmap
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from benchmarks import Report, median_s

from cometmq.shm.derived.consume_queue import UNIT
from cometmq.shm.derived.index_file import IndexFiles, IndexReader, IndexShape, list_index_files
from cometmq.shm.kernel.codec import BatchEncoder, decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import Dispatcher
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name

SEGMENT = 1 << 30
BODY = random.Random(7).randbytes(128)


@dataclass(frozen=True)
class Log:
    store: Path
    memory: mmap.mmap
    count: int
    end: int


@pytest.fixture
def log(tmp_path: Path, full: bool) -> Iterator[Log]:
    (tmp_path / COMMITLOG_DIR).mkdir()
    count = 2_000_000 if full else 20_000
    size = SEGMENT if full else SEGMENT // 64
    writer = CommitLog(
        tmp_path,
        segment_bytes=size,
        physical_offset=0,
        store_host=bytes([127, 0, 0, 1, 0, 0, 42, 159]),
        max_message_bytes=4 << 20,
    )
    queue = QueueCursor("bench", 0)
    encoder = BatchEncoder()
    for done in range(0, count, 500):
        encoder.add_many([BODY] * min(500, count - done))
        writer.append_batch(queue, encoder.take(), min(500, count - done))
    end = writer.physical_offset
    writer.close()
    with map_segment(tmp_path / COMMITLOG_DIR / segment_name(0), size, writable=False) as memory:
        yield Log(tmp_path, memory, count, end)


def dispatch(log: Log) -> None:
    units = mmap.mmap(-1, UNIT * log.count)
    dispatcher = Dispatcher(array("q"))
    dispatcher.add_queue("bench", 0, 0, bytearray(64), 0)
    dispatcher.attach(0, units, 0, log.count)
    assert dispatcher.dispatch(log.memory, 0, 0, log.end)[0] == log.end


def index(log: Log) -> None:
    for name in list_index_files(log.store):
        (log.store / "index" / name).unlink()
    files = IndexFiles(log.store, IndexShape())
    at = 0
    while at < log.end:
        at, _ = files.index(log.memory, 0, at, log.end, 8192)
    files.close()


def test_dispatch_with_and_without_the_index(log: Log, full: bool, report: Report) -> None:
    def both() -> None:
        dispatch(log)
        index(log)

    began = time.perf_counter()
    dispatch(log)
    alone = time.perf_counter() - began
    together = median_s(both, 5 if full else 1)
    report("dispatch alone", log.count / alone / 1e6, "M messages/s")
    report("dispatch and index", log.count / together / 1e6, "M messages/s")


def test_query(log: Log, full: bool, report: Report) -> None:
    """One message by its UNIQ_KEY, as often as a second has room for."""
    index(log)
    reader = IndexReader(log.store, IndexShape())
    (message,) = decode(log.memory[: int.from_bytes(log.memory[:4], "big")])

    def run() -> None:
        for _ in range(1000):
            assert list(islice(reader.offsets("bench", message.msg_id), 2)) == [0]

    report("queries by key", 1 / median_s(run, 5 if full else 1), "thousand/s")
    reader.close()
