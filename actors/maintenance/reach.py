"""Prefault distance: how far ahead of the log's tail it pays to have pages in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 30.0


class Reach:
    """As far as the writer comes before it can be followed, between two bounds.

    Doubled when the writer has come through half of it, and through as much since it was doubled
    last: so it becomes as large as what is written in one go, or twice. Halved for each 30 s in
    which less than a quarter of it was used up. How many of them have passed is found out at the
    next look: who is idle needs no timer, and finds it at its least again.

    Args:
        least_bytes, most_bytes: the bounds; the least counts where they contradict each other.
        has_room: whether it may grow by so many bytes.
        clock: seconds.
    """

    def __init__(
        self,
        least_bytes: int,
        most_bytes: int,
        *,
        has_room: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes = self._least = least_bytes
        self._most = max(least_bytes, most_bytes)
        self._has_room = has_room
        self._clock = clock
        self._grown_at: int | None = None  # the tail at that time
        self._used = 0  # at most, in this period
        self._since = clock()  # the begin of this period

    def look(self, tail: int, ready: int) -> int:
        """The bytes from now on; pages are in memory from the tail up to `ready`, if beyond."""
        self._shrink()
        used = self.bytes - (ready - tail)
        self._used = max(self._used, used)
        if self._grown_at is None:
            self._grown_at = tail
        elif 2 * used > self.bytes and 2 * (tail - self._grown_at) >= self.bytes:
            self._grow(tail)
        return self.bytes

    def _grow(self, tail: int) -> None:
        wanted = min(2 * self.bytes, self._most)
        if wanted > self.bytes and self._has_room(wanted - self.bytes):
            self.bytes = wanted
        self._grown_at = tail

    def _shrink(self) -> None:
        periods = int((self._clock() - self._since) // PERIOD_S)
        if periods > 0:
            quiet = periods if 4 * self._used < self.bytes else periods - 1
            self.bytes = max(self._least, self.bytes >> quiet)
            self._since += periods * PERIOD_S
            self._used = 0
