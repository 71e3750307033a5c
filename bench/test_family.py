"""What a broker costs before the first message: time to ready, processor and memory when idle."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from benchmarks import Report, median_s

from cometmq import Broker

IDLE_S = 10


def test_start_to_ready(tmp_path: Path, full: bool, report: Report) -> None:
    def start() -> None:
        Broker(tmp_path / "store").close()

    report("start, ready, and end in order", median_s(start, 5 if full else 1), "s")


def test_start_of_a_broker_for_tests(tmp_path: Path, full: bool, report: Report) -> None:
    opened: list[Broker] = []

    def start() -> None:
        opened.append(Broker(tmp_path / f"store-{len(opened)}", profile="test"))

    try:
        report("start to ready, new store, profile test", median_s(start, 5 if full else 1), "s")
    finally:
        for broker in opened:
            broker.close()


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
