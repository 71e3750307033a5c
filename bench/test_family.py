"""What a broker costs before the first message: time to ready, processor and memory when idle."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from benchmarks import Report
from pytest_benchmark.fixture import BenchmarkFixture

from cometmq import Broker

IDLE_S = 10


def test_start_to_ready(
    tmp_path: Path, full: bool, benchmark: BenchmarkFixture, report: Report
) -> None:
    def start() -> None:
        Broker(tmp_path / "store").close()

    benchmark.pedantic(start, rounds=5 if full else 1)
    report("start, ready, and end in order", benchmark.stats.stats.median, "s")


def test_idle(broker: Broker, full: bool, report: Report) -> None:
    processes = [psutil.Process(broker.pid)]
    processes += processes[0].children(recursive=True)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(IDLE_S if full else 0.5)  # idleness is what is measured
    share = (used() - before) / (IDLE_S if full else 0.5)
    resident = sum(process.memory_full_info().pss for process in processes)
    report("processor when idle", 100 * share, "% of a core")
    report("resident when idle, all processes", resident / 1e6, "MB PSS")
