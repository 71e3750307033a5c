"""How a job that takes long says how far it is: one style for commands and for the log.

recovering the log: 512 of 2,048 MiB, 3 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

QUIET_S: Final = 2.0  # a job that is over by then says nothing
EVERY_S: Final = 5.0  # between two lines of a log
MIB: Final = 1 << 20


class Progress:
    """Says how far a job is, from two seconds on, now and then.

    Args:
        say: gets a line.
        per: so many of what is counted make one of the unit.
        every_s: the shortest time between two lines.
        now: seconds; for tests.
    """

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        unit: str = "MiB",
        per: int = MIB,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._say, self._unit, self._per = what, say, unit, per
        self._every_s, self._now = every_s, now
        self._began = now()
        self._next = self._began + QUIET_S

    def show(self, done: int, total: int) -> None:
        """So many are done, of so many; 0: of how many is not known."""
        now = self._now()
        if now >= self._next:
            self._next = now + self._every_s
            self._say(self.text(done, total))

    def text(self, done: int, total: int) -> str:
        """What is said of it now."""
        took_s = self._now() - self._began
        of = f" of {total // self._per:,}" if total else ""
        text = f"{self._what}: {done // self._per:,}{of} {self._unit}"
        if 0 < done < total:
            text += f", {_time(took_s * (total - done) / done)} left"
        return text


def _time(seconds: float) -> str:
    whole = max(1, round(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"
