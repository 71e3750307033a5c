"""Ready again after kill -9 of every process, against the start of an empty store beside it.

The difference is what the store costs: the interpreter's start is in both. The last segment is as
full as it can be, 1 GiB with --full, and the log has 4 and 20 GB where half the disk has the room.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from benchmarks import Report
from test_recovery import BODY, GIB, write_log

from cometmq import Broker
from cometmq.shm.os.files import ABORT_FILE

ROUNDS = 5


@pytest.mark.slow
@pytest.mark.parametrize("gib", [4, 20])
def test_restart_after_kill(gib: int, tmp_path: Path, full: bool, report: Report) -> None:
    segment_bytes = GIB if full else 1 << 21
    total = gib * segment_bytes
    if full:
        total = min(total, shutil.disk_usage(tmp_path).free // 2 // GIB * GIB)
    settings = {"mappedFileSizeCommitLog": segment_bytes}
    if not full:
        settings["maxMessageSize"] = 1 << 18
    store = tmp_path / "store"
    end = write_log(store, total - segment_bytes // 64, segment_bytes)
    (store / ABORT_FILE).unlink()
    with Broker(store, settings=settings) as broker, broker.producer() as producer:
        producer.send("more", BODY)
    empty, ours = [], []
    for number in range(ROUNDS if full else 1):
        empty.append(start_and_kill(tmp_path / f"empty-{number}", settings))
        start_and_kill(store, settings)
        ours.append(start_and_kill(store, settings))
    report("size of the log", end / GIB, "GiB")
    report("start of an empty store", statistics.median(empty), "s")
    report("start after kill -9", statistics.median(ours), "s")
    report(
        "what the store costs", 1000 * (statistics.median(ours) - statistics.median(empty)), "ms"
    )


def start_and_kill(store: Path, settings: Mapping[str, object]) -> float:
    """Start, send something, and kill everything at once; how long the start took."""
    began = time.perf_counter()
    broker = Broker(store, settings=settings)
    took = time.perf_counter() - began
    with broker.producer() as producer:
        producer.send("more", BODY)
    supervisor = psutil.Process(broker.pid)
    victims = [supervisor, *supervisor.children(recursive=True)]
    for process in victims:
        process.suspend()  # so that nobody sees another one's end
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims)
    broker.close()
    return took
