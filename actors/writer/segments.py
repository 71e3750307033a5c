"""The file space that the log goes on in: taking it, and waiting for it."""

from __future__ import annotations

import errno
import os
import time
from typing import Final

import msgspec

from cometmq.actors.runtime.family import Family
from cometmq.protocol.errors import CometError, DiskFull, ServiceNotAvailable
from cometmq.shm.kernel.store import Sleepers
from cometmq.shm.live.control import Counter, Doorbell
from cometmq.shm.log.commit_log import CommitLog

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SEGMENT_TIMEOUT_S: Final = 5  # RocketMQ waits as long for its allocator
SEGMENT_LOOK_S: Final = 0.1
SPACE_AT_ONCE_BYTES: Final = 32 * 1_048_576  # the rest the allocator may take back


class Missing(msgspec.Struct, frozen=True):
    """File space that was not ready when it was needed."""

    allocated: int  # physical offset up to which there was some
    since: float  # time.monotonic()


class SegmentWait:
    """Takes file space that the allocator has ready: normally it has, with the segments.

    It is waited for once. Then whoever needs it is refused at once, until there is more: nobody
    else of the writer, and no other thread of a service, is kept waiting again.
    """

    def __init__(self, family: Family, sleepers: Sleepers) -> None:
        self._family = family
        self._sleepers = sleepers
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        self._allocated = family.control.sleep_on(Counter.ALLOCATED, Doorbell.APPENDERS)
        self._wrote = family.control.read(Counter.WROTE)
        self._errno = family.control.read(Counter.ALLOCATE_ERRNO)
        self._wanted = family.control.own(Counter.SPACE_WANTED)
        self._missing: Missing | None = None
        self.end = 0  # physical offset: file space below it is the writer's, and stays

    def take(self, end: int) -> bool:
        """Whether it is there up to `end`; then it is taken, with some of what lies behind.

        First it is said what is taken, then looked whether it is there. The allocator, which takes
        back what nobody needs, first says what is there, then looks what was taken: one of them
        sees the other.
        """
        if end <= self.end:
            return True
        wanted = max(end, min(self._allocated.value, end + SPACE_AT_ONCE_BYTES))
        self._wanted.move(wanted)
        self._allocated.arm()  # a full barrier
        allocated = self._allocated.value
        if allocated < end:
            return False
        self._allocated.disarm()
        self._missing = None
        self.end = min(wanted, allocated)
        return True

    def need(self, end: int, log: CommitLog) -> int:
        """Wait until it is there for the log up to `end`; up to where it is. Raises as `wait`."""
        if not self.take(end):
            if log.physical_offset > self._wrote.value:
                # Or the allocator would not know how far we have come.
                log.publish()
                log.wake()
            self.wait(end)
        return self.end

    def wait(self, end: int) -> None:
        """Raises DiskFull, ServiceNotAvailable: it cannot be had now."""
        self._wanted.wake()
        allocated = self._allocated.value
        if self._missing is None or self._missing.allocated != allocated:
            self._missing = Missing(allocated, time.monotonic())
        while (reason := self._refusal(end, self._missing)) is None:
            # Short steps, so that a full disk is noticed although nothing is counted then.
            if self._sleepers.wait(self._allocated, end, SEGMENT_LOOK_S) and self.take(end):
                return
        raise reason

    def _refusal(self, end: int, missing: Missing) -> CometError | None:
        """Why it is waited for no longer."""
        start = (end - 1) // self._segment_bytes * self._segment_bytes
        code = self._errno.value
        if code in NO_SPACE:
            return DiskFull(f"no room for the segment at {start}: {os.strerror(code)}")
        if code:
            return ServiceNotAvailable(f"no segment at {start}: {os.strerror(code)}")
        if self._family.gone.is_set():
            return ServiceNotAvailable("the broker has ended")
        waited_s = time.monotonic() - missing.since
        if waited_s < SEGMENT_TIMEOUT_S:
            return None
        return ServiceNotAvailable(
            f"the segment at {start} is not ready after {waited_s:.1f} s: the allocator process is "
            "busy or stopped"
        )
