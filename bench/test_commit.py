"""A commit under SYNC_FLUSH: append, and wait until it is on the disk.

Canonical load: 512-byte bodies, one queue, a service that has its broker's writer inside, where an
append returns once it is on the disk. The control is a bare pwrite and fdatasync of as many bytes,
into a file that was written before, in the same run on the same file system.

A second table shows what the state of the file does to a commit: device bytes each, and time.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import Report

from cometmq import Broker
from cometmq.shm.log.segments import SegmentMaker
from cometmq.shm.os.files import COMMITLOG_DIR, RETIRED_DIR, segment_name

BODY = random.Random(7).randbytes(512)
POPULATE_WRITE = 23
PAGE, MIB = 4096, 1 << 20


def device_bytes(path: Path) -> int:
    """Written so far to the device that holds this path, by anybody; 0 where nobody tells."""
    device = path.stat().st_dev
    try:
        text = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    except OSError:
        return 0
    return int(text.split()[6]) * 512


def measure(commit: Callable[[], None], count: int, path: Path) -> tuple[list[float], float]:
    """(seconds of each, sorted; device bytes of each)."""
    os.sync()
    before = device_bytes(path)
    took = []
    for _ in range(count):
        began = time.perf_counter()
        commit()
        took.append(time.perf_counter() - began)
    return sorted(took), (device_bytes(path) - before) / count


def bare(path: Path, record_bytes: int, size: int) -> Callable[[], None]:
    """pwrite and fdatasync, of a file that was written in pages."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    for at in range(0, size, PAGE):
        os.pwrite(descriptor, bytes(PAGE), at)
    os.fsync(descriptor)
    at, record = 0, bytes(record_bytes)

    def commit() -> None:
        nonlocal at
        os.pwrite(descriptor, record, at)
        os.fdatasync(descriptor)
        at = (at + record_bytes) % (size - record_bytes)

    return commit


@pytest.mark.parametrize("in_flight", [1, 64])
@pytest.mark.slow
def test_sync_flush(in_flight: int, tmp_path: Path, full: bool, report: Report) -> None:
    """The public way; 64 in flight are 64 appends of which the last one waits for all."""
    settings = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 1 << (30 if full else 26)}
    rounds, count = (8, 1000) if full else (1, 50)
    control = bare(tmp_path / "control", (91 + len("bench") + len(BODY)) * in_flight, 16 * MIB)
    ours, theirs = [], []
    with Broker(tmp_path / "store", settings=settings, writer="here") as broker:
        append = broker.appender("bench").append

        def commit() -> None:
            for _ in range(in_flight - 1):
                append(BODY, wait=False)
            append(BODY)

        for _ in range(rounds):
            theirs.append(measure(control, count, tmp_path))
            ours.append(measure(commit, count, tmp_path))
    best, control_best = min(ours), min(theirs)
    for name, (took, device) in (("commit", best), ("pwrite + fdatasync", control_best)):
        report(f"{name}, p50", took[count // 2] * 1e6, "us")
        report(f"{name}, p99", took[count * 99 // 100] * 1e6, "us")
        report(f"{name}, device", device / 1024, "KiB")
    ratio = best[0][count // 2] / control_best[0][count // 2]
    report("commit against pwrite + fdatasync", ratio, "times its p50")
    report("messages", in_flight * count / sum(best[0]), "/s")


def recycled(store: Path, size: int) -> Path:
    """A segment that was full, as the allocator makes a new one of it."""
    for folder in (COMMITLOG_DIR, RETIRED_DIR):
        (store / folder).mkdir()
    (store / RETIRED_DIR / segment_name(0)).write_bytes(b"\xda" * size)
    maker = SegmentMaker(store, size, small_pages=True)
    maker.begin()
    assert maker.take_retired()
    while not maker.step():
        pass
    maker.publish(size)
    return store / COMMITLOG_DIR / segment_name(size)


STATES = (
    "sparse",
    "reserved",
    "populated",
    "zeros by 1 MiB",
    "zeros by 4 KiB",
    "as prepared",
    "recycled",
)


@pytest.mark.parametrize("record_bytes", [512, PAGE])
@pytest.mark.parametrize("state", STATES)
def test_state_of_the_file(
    state: str, record_bytes: int, tmp_path: Path, full: bool, report: Report
) -> None:
    """Commits all over a file: what large folios cost does not show at its beginning."""
    size, places, each = (64 * MIB, 40, 50) if full else (4 * MIB, 4, 5)
    path = recycled(tmp_path, size) if state == "recycled" else tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, size)
    if state != "sparse":
        os.posix_fallocate(descriptor, 0, size)
    if state.startswith("zeros"):
        piece = MIB if state.endswith("MiB") else PAGE
        for at in range(0, size, piece):
            os.pwrite(descriptor, bytes(piece), at)
    with mmap.mmap(descriptor, size) as memory:
        if state == "as prepared":
            memory.madvise(mmap.MADV_RANDOM)
        if state in ("populated", "as prepared"):
            memory.madvise(POPULATE_WRITE)
        if state != "populated":
            os.fsync(descriptor)
        starts = iter([size // places // PAGE * PAGE * n + record_bytes * i for n in range(places)
                       for i in range(each)])  # fmt: skip

        def commit() -> None:
            at = next(starts)
            memory[at : at + record_bytes] = bytes(record_bytes)
            os.fdatasync(descriptor)

        took, device = measure(commit, places * each, tmp_path)
    os.close(descriptor)
    report(f"{state}, {record_bytes} bytes, p50", took[len(took) // 2] * 1e6, "us")
    report(f"{state}, {record_bytes} bytes, p99", took[len(took) * 99 // 100] * 1e6, "us")
    report(f"{state}, {record_bytes} bytes, device", device / 1024, "KiB")
