"""How much file space is kept ready ahead of the log's tail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LEAST_BYTES: Final = 48 * 1_048_576
SMALLEST_BYTES: Final = 16 * 1_048_576
PERIOD_S: Final = 1.0
HORIZON_S: Final = 2
QUIET_S: Final = 10.0
STEPS: Final = 8  # it is taken in so many


class Demand:
    """What the writer takes in two seconds, by the fastest second of late, and never below a least
    that is as much as the hot window wants, from 16 to 48 MiB.

    It is halved for each 10 s without such a second. How many of them have passed is found out at
    the next look.

    Args:
        hot_window_bytes: pages are made ready so far ahead, for which there has to be space.
        clock: seconds.
    """

    def __init__(
        self, hot_window_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.least_bytes = min(LEAST_BYTES, max(SMALLEST_BYTES, hot_window_bytes))
        self._clock = clock
        self._since: float | None = None  # the begin of this period
        self._begin = 0  # the tail at that time
        self._peak = 0.0  # bytes in one second

    def look(self, tail: int) -> int:
        """The bytes from now on, beyond a tail that is there now; in whole steps."""
        now = self._clock()
        if self._since is None:
            self._since, self._begin = now, tail
        passed_s, written = now - self._since, tail - self._begin
        if passed_s >= PERIOD_S:
            self._peak = max(self._peak / 2 ** (passed_s / QUIET_S), written / passed_s)
            self._since, self._begin, written = now, tail, 0
        return max(self.least_bytes, int(HORIZON_S * max(self._peak, written)))
