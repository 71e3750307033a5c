"""Handlers that take long are named in the log, with what they have, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final

from cometmq.client.handling.work import Seat, describe

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1  # between two looks


def tell_if_stuck(seat: Seat, age_s: float, stuck_s: float) -> None:
    """It has had its unit for `age_s`: that is told at `stuck_s`, and each time it has doubled."""
    unit = seat.unit
    if unit is None or age_s < stuck_s or (seat.told_of is unit and age_s < 2 * seat.told_s):
        return
    seat.told_of, seat.told_s = unit, age_s
    log.warning("the handler has had %s for %.1f s", describe(unit), age_s)


class Watch:
    """Of one run. Used by one thread, as often as it gets to."""

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._look_at = 0.0

    def look(self, seats: Iterable[Seat]) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for seat in seats:
            tell_if_stuck(seat, now - seat.since, self._stuck_s)
