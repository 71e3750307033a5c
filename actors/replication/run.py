"""What the `ha` process of a replica reads and writes of one run: its counters."""

from __future__ import annotations

from typing import Final

from cometmq.actors.replication.core.actions import Service
from cometmq.actors.runtime.family import Family
from cometmq.shm.live import control
from cometmq.shm.live.control import Counter, Phase

_SERVED: Final = {
    Service.OPEN: control.Service.OPEN,
    Service.UNSURE: control.Service.UNSURE,
    Service.SHORT: control.Service.SHORT,
    Service.DEPOSED: control.Service.DEPOSED,
}


class Run:
    """The counters of one run; the next has others.

    Args:
        epoch: that this replica is the master of in it; 0: it follows.
    """

    def __init__(self, family: Family, epoch: int) -> None:
        self.family = family
        self.epoch = epoch
        control = family.control
        self._phase = control.sleep_on(Counter.PHASE, family.doorbell)
        self._wrote = control.sleep_on(Counter.WROTE, family.doorbell)
        self._flushed = control.sleep_on(Counter.FLUSHED, family.doorbell)
        self._min = control.read(Counter.MIN_OFFSET)
        self._replicated = control.own(Counter.REPLICATED)
        self._service = control.own(Counter.SERVICE)
        self._needed_from = control.own(Counter.SLAVES_FROM)

    def arm(self) -> None:
        """Have the next change of any of them ring; whoever reads after that misses nothing."""
        for cell in (self._phase, self._wrote, self._flushed):
            cell.arm()

    @property
    def is_recovered(self) -> bool:
        """Whether the log's end is known."""
        return self._phase.value >= Phase.RECOVERED

    @property
    def wrote(self) -> int:
        return self._wrote.value if self.is_recovered else 0

    @property
    def flushed(self) -> int:
        return self._flushed.value

    @property
    def begin(self) -> int:
        """0 until the cleaner has looked."""
        return self._min.value

    def confirm(self, offset: int) -> None:
        """All below may be read, and acknowledged."""
        if self.is_recovered and offset > self._replicated.value:
            self._replicated.advance(min(offset, self._wrote.value))

    def serve(self, service: Service) -> None:
        self._service.reset(_SERVED[service])

    def keep_from(self, offset: int | None) -> None:
        """Followers still need what lies at or above it; None: there are none."""
        wanted = 0 if offset is None else offset + 1
        if wanted != self._needed_from.value:
            self._needed_from.reset(wanted)
