"""Steps of the wall clock: somebody, or a time daemon, has set it.

CLOCK_REALTIME and CLOCK_BOOTTIME go on together: slewing moves both, and neither stands still while
the machine sleeps. Only to set the wall clock changes how far it is ahead of the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Final

STEP_MS: Final = 1_000  # what is less, as a leap second, is no step before it adds up to more
TRIES: Final = 5
CLOSE_NS: Final = 1_000_000
REMEMBERED: Final = 16


def shown_ms(time_ms: int) -> str:
    """Format a wall clock time for people, in the time zone of this machine."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):  # a record can contain any number
        return f"{time_ms} ms"


def ahead_ms() -> int:
    """How far the wall clock is ahead of CLOCK_BOOTTIME, to a millisecond unless this process is
    held up again and again between two readings."""
    found: list[tuple[int, int]] = []
    for _ in range(TRIES):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall = time.time_ns()
        took = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before
        found.append((took, wall - before - took // 2))
        if took <= CLOSE_NS:
            break
    return min(found)[1] // 1_000_000


class ClockSteps:
    """Tells of each step once.

    Args:
        ahead: the function above; a test's own.
    """

    def __init__(self, ahead: Callable[[], int] = ahead_ms) -> None:
        self._ahead = ahead
        self._known = ahead()

    def look(self) -> int:
        """By how many ms the wall clock was stepped since the last look, forward above 0; 0: it was
        not, or by STEP_MS at most."""
        step = self._ahead() - self._known
        if abs(step) <= STEP_MS:
            return 0
        self._known += step
        return step


class StepsForward:
    """The last steps forward: what was stored before them bears a time that seems long ago.

    Args:
        steps: their source; a test's own.
    """

    def __init__(self, steps: ClockSteps | None = None) -> None:
        self._steps = steps or ClockSteps()
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)  # time.monotonic(), ms

    def within_ms(self, age_ms: int) -> int:
        """By how many ms the clock was stepped forward in so many ms until now. What happened since
        the last look counts as just now: when it was, nobody knows."""
        now = time.monotonic()
        step = self._steps.look()
        if step > 0:
            self._seen.append((now, step))
        return sum(step for at, step in self._seen if (now - at) * 1000 <= age_ms)
