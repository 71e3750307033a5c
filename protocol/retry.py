"""Back-off: how long to wait before the next attempt, one rule for all that is tried again."""

from __future__ import annotations

import random
from typing import Final

FIRST_S: Final = 0.02
MOST_S: Final = 0.5
_DOUBLINGS_MAX: Final = 20


def pause_s(failures: int, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> float:
    """Seconds after so many attempts that failed in a row: the first pause, doubled with each."""
    doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
    return min(most_s, first_s * 2.0**doublings)


def spread(pause: float) -> float:
    """That pause or down to half of it: many who fail at once do not come again at once."""
    return pause * random.uniform(0.5, 1.0)
