"""Back-off: how long to wait before the next attempt, one rule for all that is tried again."""

from __future__ import annotations

import random
from typing import Final

from cometmq.protocol.errors import CometError, SystemBusy

FIRST_S: Final = 0.02
MOST_S: Final = 0.5
# The longest one of who waits for another master, or for a broker that is started again: he waits
# little longer than that takes.
SOON_S: Final = 0.2
_DOUBLINGS_MAX: Final = 20


def pause_s(failures: int, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> float:
    """Seconds after so many attempts that failed in a row: the first pause, doubled with each."""
    doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
    return min(most_s, first_s * 2.0**doublings)


def pause_after(failures: int, error: CometError | None) -> float:
    """As `pause_s`, of who sends, where the last attempt has ended with that error: a broker that
    is busy gets more time than one that is away."""
    return pause_s(failures, most_s=MOST_S if isinstance(error, SystemBusy) else SOON_S)


def spread(pause: float) -> float:
    """That pause or down to half of it: many who fail at once do not come again at once."""
    return pause * random.uniform(0.5, 1.0)
