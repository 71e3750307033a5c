"""Puts while old segments go: embedded appends with and without a cleaner beside them.

Canonical load: 1 KiB bodies, 2,000 puts in a burst every 50 ms (48 MB/s), page-cache durability.
Every 10 s a segment of 1 GiB is retired and released, as the cleaner process does it: a rename,
then cuts of 64 MiB every 100 ms. Measured A-B-A in one run (without, with, without), and once more
with one plain unlink a segment, which is what RocketMQ does.

A put counts as *during a step* when it overlaps one of the cleaner's own calls. Where it is allowed
the putting process runs with SCHED_FIFO: it then waits for memory and disk, but not for other
people's work on the processor.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benchmarks import Report

from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.references import create_references
from cometmq.shm.log.retired import RetiredSegments
from cometmq.shm.os.files import COMMITLOG_DIR, make_store_folders, segment_name

BODY = bytes(range(256)) * 4
POPULATE_WRITE = 23
BURST, BURST_S = 2_000, 0.05
PAUSE_S = 0.1  # deleteCommitLogFilesInterval
SLOW_NS = 5_000_000
Span = tuple[int, int]  # time.monotonic_ns() of begin and end


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_puts_beside_the_cleaner(tmp_path: Path, full: bool, report: Report) -> None:
    segment_bytes = (1 << 30) if full else (1 << 24)
    seconds = 25.0 if full else 1.0
    every_s = 10.0 if full else 0.5
    before = run(tmp_path / "a1", segment_bytes, seconds, every_s, None)
    cleaning = run(tmp_path / "b", segment_bytes, seconds, every_s, release)
    after = run(tmp_path / "a2", segment_bytes, seconds, every_s, None)
    unlinking = run(tmp_path / "c", segment_bytes, seconds, every_s, unlink)
    for name, puts in (
        ("without", before), ("cleaning", cleaning), ("without again", after),
        ("one unlink instead", unlinking),
    ):  # fmt: skip
        latencies = sorted(end - begin for begin, end in puts.spans)
        report(f"{name}: p99.99", latencies[int(len(latencies) * 0.9999) - 1] / 1000, "us")
        report(f"{name}: max", latencies[-1] / 1000, "us")
        if puts.steps:
            worst = max((end - begin for begin, end in puts.during_steps()), default=0)
            report(f"{name}: max during a step", worst / 1000, "us")
            longest = max(end - begin for begin, end in puts.steps)
            report(f"{name}: longest step", longest / 1000, "us")
    assert cleaning.steps
    if full:  # 5 ms, unless this machine's disk makes puts wait longer by itself
        limit = max(SLOW_NS, before.worst(), after.worst())
        assert all(end - begin <= limit for begin, end in cleaning.during_steps())


class Puts:
    def __init__(self, spans: list[Span], steps: list[Span]) -> None:
        self.spans, self.steps = spans, steps

    def worst(self) -> int:
        return max(end - begin for begin, end in self.spans)

    def during_steps(self) -> list[Span]:
        found, at = [], 0
        for begin, end in self.spans:  # both ascend
            while at < len(self.steps) and self.steps[at][1] < begin:
                at += 1
            if at < len(self.steps) and self.steps[at][0] <= end:
                found.append((begin, end))
        return found


Cleaner = Callable[[Path, int, int, list[Span]], None]


def run(
    store: Path, segment_bytes: int, seconds: float, every_s: float, cleaner: Cleaner | None
) -> Puts:
    """One phase on a store of its own, of which nothing is left."""
    rounds = max(1, int(seconds / every_s))
    make_store_folders(store)
    create_references(store)
    for number in range(rounds):  # on the disk and in the page cache, as a segment of yesterday
        write_segment(store / COMMITLOG_DIR / segment_name(number * segment_bytes), segment_bytes)
    log = CommitLog(
        store, segment_bytes=segment_bytes, physical_offset=rounds * segment_bytes,
        store_host=bytes(8), max_message_bytes=4 << 20,
    )  # fmt: skip
    wanted = int(seconds / BURST_S) * BURST * 1_200
    for number in range(rounds, rounds + 2 + wanted // segment_bytes):
        log._make_segment(number * segment_bytes)
    log.open_segment()
    assert log.segment is not None
    log.segment[0].advise(POPULATE_WRITE)  # what the allocator does ahead of the tail
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=clean_beside, args=(theirs, store, segment_bytes, rounds, every_s, cleaner)
    )
    process.start()
    with first_on_the_processor():
        spans = put_for(log, seconds)
    steps = ours.recv()
    process.join()
    log.close()
    for path in (store / COMMITLOG_DIR).iterdir():
        path.unlink()
    return Puts(spans, steps)


@contextlib.contextmanager
def first_on_the_processor() -> Iterator[None]:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        print("SCHED_FIFO is not allowed: the figures hold other people's load too")
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def put_for(log: CommitLog, seconds: float) -> list[Span]:
    queue = QueueCursor("bench", 0)
    now, append = time.monotonic_ns, log.append
    spans: list[Span] = []
    began = time.monotonic()
    for burst in range(int(seconds / BURST_S)):
        time.sleep(max(0.0, began + burst * BURST_S - time.monotonic()))  # the pace
        for _ in range(BURST):
            begin = now()
            append(queue, BODY)
            spans.append((begin, now()))
    return spans


def clean_beside(
    pipe: Connection,
    store: Path,
    segment_bytes: int,
    rounds: int,
    every_s: float,
    cleaner: Cleaner | None,
) -> None:
    """The other process: one segment a round. Sends when each of its calls began and ended."""
    steps: list[Span] = []
    began = time.monotonic()
    for number in range(rounds if cleaner else 0):
        assert cleaner is not None
        time.sleep(max(0.0, began + (number + 0.25) * every_s - time.monotonic()))
        cleaner(store, segment_bytes, number * segment_bytes, steps)
    pipe.send(steps)


def release(store: Path, segment_bytes: int, start: int, steps: list[Span]) -> None:
    retired = RetiredSegments(store, segment_bytes, force_after_s=120)
    retired.begin()
    timed(steps, lambda: retired.take_in(start))
    timed(steps, retired.settle)
    while retired.has_work(0):
        timed(steps, lambda: retired.step(0))
        time.sleep(PAUSE_S)


def unlink(store: Path, _segment_bytes: int, start: int, steps: list[Span]) -> None:
    timed(steps, (store / COMMITLOG_DIR / segment_name(start)).unlink)


def timed(steps: list[Span], action: Callable[[], object]) -> None:
    begin = time.monotonic_ns()
    action()
    steps.append((begin, time.monotonic_ns()))


def write_segment(path: Path, count: int) -> None:
    block = bytes(range(256)) * 4096
    with path.open("wb", buffering=0) as file:
        for _ in range(count // len(block)):
            file.write(block)
        os.fdatasync(file.fileno())
