"""Delay levels: how long a message waits, by RocketMQ's `messageDelayLevel`."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
LEVELS_MAX: Final = 1_024  # each is a queue
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DIGITS_MAX: Final = 9


@lru_cache(16)  # each queue of a level asks
def parse_levels(text: str) -> tuple[int, ...]:
    """How long each level waits, in ms; level 1 is the first. Raises ValueError."""
    levels = text.split()
    if not 0 < len(levels) <= LEVELS_MAX:
        raise ValueError(f"{len(levels)} levels: 1 to {LEVELS_MAX} are wanted")
    return tuple(map(_milliseconds, levels))


def _milliseconds(level: str) -> int:
    number, unit = level[:-1], level[-1:]
    if unit not in _UNITS_MS or not (number.isascii() and number.isdigit()):
        raise ValueError(
            f"{level!r:.40} is no time: a number and s, m, h or d are wanted, as in 30s"
        )
    if len(number) > _DIGITS_MAX:
        raise ValueError(f"{level!r:.40}: a number of at most {_DIGITS_MAX} digits is wanted")
    return int(number) * _UNITS_MS[unit]
