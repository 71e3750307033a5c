"""Attempts to give messages back. If it is unknown whether the copy of a message is stored, the
next attempt has the same number, so that no second copy is stored."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

ATTEMPTS_MAX: Final = 65_536
# An attempt without an outcome expires after this time, and the next one gets a new number: a
# second copy is better than an attempt that is mistaken for one that ended long ago.
FORGET_S: Final = 300.0

Place = tuple[str, str, int, int]  # group, topic, queue and offset of a message


class _Attempt(NamedTuple):
    number: int
    at: float


class Attempts:
    """Attempts that are in progress or ended without a known outcome. Callers pass the time:
    seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._open: dict[Place, _Attempt] = {}  # ordered by time

    def __len__(self) -> int:
        return len(self._open)

    def number(self, place: Place, now: float) -> int:
        """Return the number of an attempt that begins now: that of the previous attempt if its
        outcome is unknown, otherwise a new one."""
        before = self._open.pop(place, None)
        if before is not None and now - before.at <= FORGET_S:
            number = before.number
        else:
            number = secrets.randbits(62) | 1
        self._open[place] = _Attempt(number, now)
        while len(self._open) > ATTEMPTS_MAX or self._oldest_at < now - FORGET_S:
            del self._open[next(iter(self._open))]
        return number

    @property
    def _oldest_at(self) -> float:
        return next(iter(self._open.values())).at

    def end(self, place: Place, number: int) -> None:
        """Forget an attempt, whose outcome is now known."""
        found = self._open.get(place)
        if found is not None and found.number == number:
            del self._open[place]
