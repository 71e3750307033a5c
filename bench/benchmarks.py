"""What the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.bench.embedded import Counters

__all__ = ["Counters", "Report"]

Report = Callable[[str, float, str], None]  # takes a figure: what, how much, unit
