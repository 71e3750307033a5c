"""Attempts to give messages back. One of which nobody knows whether its copy is stored is made
again under the same number: then no second copy is stored."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

ATTEMPTS_MAX: Final = 65_536
# Without a word so long, the next attempt is another one: a copy is rather stored twice than an
# attempt taken for one that has long come to its end.
FORGET_S: Final = 300.0

Place = tuple[str, str, int, int]  # group, topic, queue and offset of a message


class _Attempt(NamedTuple):
    number: int
    at: float


class Attempts:
    """Those that are under way, or have ended without a word. Time is handed in: seconds of a clock
    that never goes back."""

    def __init__(self) -> None:
        self._open: dict[Place, _Attempt] = {}  # in the order of their times

    def __len__(self) -> int:
        return len(self._open)

    def number(self, place: Place, now: float) -> int:
        """Of an attempt that begins now: that of the one before, if it has not come to its end."""
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
        """It is known what became of that one."""
        found = self._open.get(place)
        if found is not None and found.number == number:
            del self._open[place]
