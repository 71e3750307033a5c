"""What a roll-over costs the writer: the slowest append of each, with segments of 1 GiB.

Canonical load: 1 KiB bodies, ASYNC_FLUSH, one call a message, in a service that has its broker's
writer inside: every call publishes, all is dispatched. A rate below the disk's own, so that what is
seen is the roll and not a full page cache.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from benchmarks import Counters, Report

from cometmq import Broker

BODY = random.Random(7).randbytes(1024)
GROUP = 64


def test_appends_over_rolls(tmp_path: Path, full: bool, report: Report) -> None:
    segment = 1 << 30 if full else 1 << 24
    rolls, bytes_a_second = (10, 300e6) if full else (3, 100e6)
    settings = {"mappedFileSizeCommitLog": segment, "maxMessageSize": 1 << 20}
    at_rolls: list[int] = []
    others: list[int] = []
    with Broker(tmp_path / "store", settings=settings, writer="here") as broker:
        append, clock = broker.appender("bench").append, time.perf_counter_ns
        wrote = Counters(tmp_path / "store").wrote
        began, last = time.perf_counter(), 0
        while len(at_rolls) < rolls:
            slow = 0
            for _ in range(GROUP):
                before = clock()
                append(BODY)
                took = clock() - before
                others.append(took)
                slow = max(slow, took)
            if wrote.value // segment != last:
                last = wrote.value // segment
                at_rolls.append(slow)
            early = began + wrote.value / bytes_a_second - time.perf_counter()
            if early > 0.002:
                time.sleep(early)  # the pace
    report_latency(report, others, at_rolls)


def report_latency(report: Report, all_ns: list[int], at_rolls_ns: list[int]) -> None:
    all_ns.sort()
    for share in (50, 99, 99.9, 99.99):
        took = all_ns[int(len(all_ns) * share / 100)]
        report(f"append, p{share:g}", took / 1000, "us")
    report("append, max", all_ns[-1] / 1000, "us")
    name = f"slowest append about each of {len(at_rolls_ns)} rolls"
    report(f"{name}, median", _median(at_rolls_ns) / 1000, "us")
    report(f"{name}, max", max(at_rolls_ns) / 1000, "us")


def _median(values: list[int]) -> float:
    return sorted(values)[len(values) // 2]
