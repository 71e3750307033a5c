"""What the benchmarks share."""

from collections.abc import Callable

Report = Callable[[str, float, str], None]  # takes a figure: what, how much, unit
