"""What the benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from cometmq.bench.embedded import Counters

__all__ = ["Counters", "Report", "median_s"]

Report = Callable[[str, float, str], None]  # takes a figure: what, how much, unit


def median_s(run: Callable[[], object], rounds: int) -> float:
    """The median of the seconds that each of so many rounds takes."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took)
