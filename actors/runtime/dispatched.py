"""The counter `dispatched`, for a reader to sleep on."""

from __future__ import annotations

import os

from cometmq.actors.runtime.family import Family
from cometmq.shm.kernel.live import wait_until
from cometmq.shm.live.control import Counter, Doorbell


class Dispatched:
    """How far the dispatcher has come. It naps between batches unless somebody waits for it."""

    def __init__(self, family: Family) -> None:
        self._cell = family.control.sleep_on(Counter.DISPATCHED, family.doorbell)
        self._progress = family.control.read(Counter.DISPATCHED)
        self._cover = family.control.read(family.cover)
        self._napping = family.control.read(Counter.NAPPING)
        self._its_doorbell = family.doorbells[Doorbell.DISPATCHER]

    @property
    def value(self) -> int:
        return self._cell.value

    @property
    def due(self) -> int:
        """How far it has to come for all to be there that is acknowledged now."""
        return self._cover.value

    def wait_for(self, end: int, timeout_s: float) -> bool:
        """Block until the log is dispatched up to `end`. Return False on timeout."""
        self.arm()  # wakes a dispatcher that naps
        return wait_until(self._progress, end, timeout_s)

    def arm(self) -> None:
        """Have the next move ring, and see that it comes soon."""
        self._cell.arm()
        if self._napping.value:
            os.eventfd_write(self._its_doorbell, 1)
