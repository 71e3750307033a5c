"""Runs of a replica as its `ha` process sees them: their counters, and how the next is begun."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Final

from cometmq.actors.replication.core.actions import Service
from cometmq.actors.runtime.family import Family
from cometmq.actors.writer.segments import NO_SPACE
from cometmq.protocol.commands import BeginRun, RunBegun
from cometmq.protocol.errors import CometError, ShuttingDown
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.pending import Pending
from cometmq.shm.live import control
from cometmq.shm.live.control import Counter, Disk, Phase

UNDER_WAY_MAX: Final = 2

_SERVED: Final = {
    Service.OPEN: control.Service.OPEN,
    Service.UNSURE: control.Service.UNSURE,
    Service.SHORT: control.Service.SHORT,
    Service.DEPOSED: control.Service.DEPOSED,
}


class Run:
    """The counters of one run; the next has others.

    `epoch`: that this replica is the master of in it; 0: it follows.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.epoch = family.epoch
        control = family.control
        self._phase = control.sleep_on(Counter.PHASE, family.doorbell)
        self.wrote_cell = control.sleep_on(Counter.WROTE, family.doorbell)
        self._flushed = control.sleep_on(Counter.FLUSHED, family.doorbell)
        self._min = control.read(Counter.MIN_OFFSET)
        self._replicated = control.own(Counter.REPLICATED)
        self._sure_until = control.own(Counter.SURE_UNTIL)
        self._known = control.own(Counter.CONFIRM_KNOWN)
        self._service = control.own(Counter.SERVICE)
        self._needed_from = control.own(Counter.SLAVES_FROM)
        self._disk = control.read(Counter.DISK_STATE)
        self._allocate_errno = control.read(Counter.ALLOCATE_ERRNO)

    def arm(self) -> None:
        """Have the next change of these ring; whoever reads after that misses nothing. `wrote` is
        armed where its next change is of use."""
        self._phase.arm()
        self._flushed.arm()

    @property
    def is_recovered(self) -> bool:
        """Whether the log's end is known."""
        return self._phase.value >= Phase.RECOVERED

    @property
    def wrote(self) -> int:
        return self.wrote_cell.value if self.is_recovered else 0

    @property
    def flushed(self) -> int:
        return self._flushed.value

    @property
    def begin(self) -> int:
        """0 until the cleaner has looked."""
        return self._min.value

    @property
    def disk_is_full(self) -> bool | None:
        """Whether the log has no room to go on; None: it is not known yet, in this run."""
        if self._disk.value == Disk.UNKNOWN:
            return None
        return self._disk.value == Disk.TOO_FULL or self._allocate_errno.value in NO_SPACE

    def confirm(self, offset: int) -> None:
        """All below may be read, and acknowledged."""
        if not self.is_recovered:
            return
        offset = min(offset, self.wrote_cell.value)
        if offset > self._replicated.value:
            self._replicated.advance(offset)
        if not self._known.value:
            self._known.advance(1)

    def serve(self, service: Service) -> None:
        self._service.reset(_SERVED[service])

    def sure_until(self, until_s: float) -> None:
        """Our session holds until then (engine.now_s); 0: it does not."""
        self._sure_until.reset(int(until_s * 1000))

    def keep_from(self, offset: int | None) -> None:
        """Followers still need what lies at or above it; None: there are none."""
        wanted = 0 if offset is None else offset + 1
        if wanted != self._needed_from.value:
            self._needed_from.reset(wanted)


class Pace:
    """How often a master's log goes to its followers while it grows: not while this many pieces of
    it are under way, so that what comes meanwhile goes as one (Nagle's rule, RFC 896, but for two).
    A message that comes alone never waits for that.
    """

    def __init__(self) -> None:
        self._ends: deque[int] = deque()  # of what is under way
        self.is_full = False  # as it was found last: there may be more to send

    def may_send(self, confirmed: int) -> bool:
        while self._ends and self._ends[0] <= confirmed:
            self._ends.popleft()
        self.is_full = len(self._ends) >= UNDER_WAY_MAX
        return not self.is_full

    def sent(self, end: int) -> None:
        self._ends.append(end)

    def forget(self) -> None:
        """What is under way is not waited for: it may never be confirmed."""
        self._ends.clear()
        self.is_full = False


class WholeFlushed:
    """How far the log is on the disk, by the ends of what is in one piece: nothing else may ever be
    confirmed, or a derived write could be confirmed by half."""

    def __init__(self) -> None:
        self._told = 0
        self._ends: deque[int] = deque()  # of frames that were laid down, and maybe not flushed

    def begin_run(self) -> None:
        self._told = 0
        self._ends.clear()

    def laid_down(self, end: int) -> None:
        """A frame of the master is in the log."""
        self._ends.append(end)

    def news(self, run: Run, log_end: int) -> int:
        """What the core has not been told of; 0: nothing."""
        whole = flushed = run.flushed
        if flushed >= log_end:
            self._ends.clear()
            whole = log_end
        elif not run.epoch:  # a master's log was flushed up to something that was published
            whole = 0
            while self._ends and self._ends[0] <= flushed:
                whole = self._ends.popleft()
        if whole <= self._told:
            return 0
        self._told = whole
        return whole


class Runs:
    """Has the supervisor begin one run after the other.

    Args:
        call_soon: has a call made in the actor's thread.
        on_begun: another run has begun; if a mastership has ended with the one before, the end that
            the log had then.
        on_failed: none can be begun, and why.
    """

    def __init__(
        self,
        family: Family,
        *,
        call_soon: Callable[[Callable[[], object]], object],
        on_begun: Callable[[int | None], None],
        on_failed: Callable[[str], object],
    ) -> None:
        self.now = Run(family)
        self._call_soon = call_soon
        self._on_begun = on_begun
        self._on_failed = on_failed
        self._supervisor: Channel | None = None

    def begin(
        self, epoch: int, *, cut_to: int = -1, begin_at: int = -1, ends_mastership: bool = False
    ) -> None:
        """See BeginRun."""
        channel = self._supervisor
        if channel is None:
            address = self.now.family.addresses["broker"]
            channel = self._supervisor = Channel(address, "the supervisor")

        def done(pending: Pending) -> None:
            self._call_soon(lambda: self._begun(epoch, ends_mastership, pending))

        command = BeginRun(epoch, cut_to, begin_at, os.getpid())
        channel.request(command, on_done=done)

    def _begun(self, epoch: int, ends_mastership: bool, pending: Pending) -> None:
        try:
            answer, _ = pending.result()
        except ShuttingDown:
            return  # this process is about to be told
        except CometError as error:
            self._on_failed(f"no other run can be begun: {error}")
            return
        assert isinstance(answer, RunBegun)
        self.now = Run(self.now.family.in_next_run(epoch))
        self._on_begun(answer.end if ends_mastership else None)

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
