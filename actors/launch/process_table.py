"""The process table: which process has which role, whether it serves, and how often it has died."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from cometmq.actors.runtime.family import EXIT_FATAL, EXIT_UNSETTLED
from cometmq.protocol.errors import CometError, StoreError
from cometmq.protocol.retry import pause_s

DEATHS_WITHIN_S: Final = 10
DEATHS_MAX: Final = 5  # of one role within that time; more, and the broker ends
# The pause after a failed start doubles with each further one; the broker ends after more than
# FAILED_STARTS_MAX in a row.
FIRST_PAUSE_S: Final = 0.25
PAUSE_MAX_S: Final = 5.0
FAILED_STARTS_MAX: Final = 6


def how_it_ended(status: int) -> str:
    """Of a process, for people."""
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


class ProcessTable:
    """Written by the supervisor alone, from what is reported to it. No I/O.

    Args:
        roles: in the order in which they come to their end.
        hosted: the role that lives in a service's process, which is never killed, nor waited for.
    """

    def __init__(self, roles: Sequence[str], hosted: str = "") -> None:
        self.roles = roles
        self.pids: dict[str, int] = {}
        self.starts: dict[str, int] = defaultdict(int)  # how many processes each role has had
        self.asked = ""  # which role is to come to its end
        self.ends: dict[str, int] = {}  # the status of each that has, having been asked
        self._hosted = hosted
        self._ordered: set[str] = set()  # processes that are not known to run yet
        self._serving: set[str] = set()
        self._deaths: dict[str, list[float]] = defaultdict(list)
        self._failed_starts: dict[str, int] = defaultdict(int)  # in a row
        self._without_room: set[str] = set()  # roles whose last start failed on a full disk

    def is_hosted(self, role: str) -> bool:
        return bool(role) and role == self._hosted

    def ordered(self, role: str) -> None:
        """A process is on its way."""
        self._ordered.add(role)

    @property
    def all_run(self) -> bool:
        """Whether every process that was ordered is known."""
        return not self._ordered

    def begin_run(self, roles: Sequence[str]) -> None:
        """These are the roles from now on; who lives on has its place."""
        self.roles = roles

    def started(self, role: str, pid: int) -> None:
        self._ordered.discard(role)
        self.pids[role] = pid
        self.starts[role] += 1

    def serves(self, role: str) -> None:
        self._serving.add(role)
        self._failed_starts.pop(role, None)
        self._without_room.discard(role)

    @property
    def all_serve(self) -> bool:
        """A process may be reported to serve before it is reported to run."""
        return self.all_run and self._serving == set(self.roles)

    def gone(self, pid: int) -> str:
        """That process has ended; its role, or "" if it has none."""
        role = next((name for name, known in self.pids.items() if known == pid), "")
        if role:
            if role not in self._serving:
                self._failed_starts[role] += 1
            self._serving.discard(role)
            del self.pids[role]
        return role

    def lacks_room(self, role: str) -> None:
        """Note that a role cannot start because the disk is full: this never ends the broker."""
        self._without_room.add(role)

    def pause_before_start(self, role: str) -> float:
        """Return the seconds to wait before the next start: 0 if the last process has served."""
        failed = self._failed_starts[role]
        return pause_s(failed, first_s=FIRST_PAUSE_S, most_s=PAUSE_MAX_S) if failed else 0.0

    def has_come_to_its_end(self, role: str, status: int) -> bool:
        """Whether it was to end, and has: by itself, settled or not."""
        if role not in self.ends and role == self.asked and status in (0, EXIT_UNSETTLED):
            self.ends[role] = status
        return role in self.ends

    def died(self, role: str) -> int:
        """It has ended unasked; how often lately."""
        now = time.monotonic()
        deaths = [at for at in self._deaths[role] if at > now - DEATHS_WITHIN_S]
        self._deaths[role] = [*deaths, now]
        return len(self._deaths[role])

    def why_it_is_over(
        self, role: str, pid: int, status: int, *, is_ready: bool
    ) -> CometError | None:
        """Why the broker ends of that death; None: it goes on with another process."""
        how = how_it_ended(status)
        if status == EXIT_FATAL:
            return StoreError(f"{role} took the store out of service; see its log")
        if self.is_hosted(role):
            return CometError(f"the writer in process {pid} has ended, and this broker with it")
        if not is_ready:
            return CometError(f"{role} (process {pid}) ended {how} before the broker was ready")
        failed = self._failed_starts[role]
        if failed:
            if failed > FAILED_STARTS_MAX and role not in self._without_room:
                return CometError(f"{role} ended {how}: {failed} starts in a row have failed")
            return None
        deaths = self.died(role)
        if deaths > DEATHS_MAX:
            return CometError(f"{role} has ended {how}, {deaths} times in a row")
        return None

    @property
    def children(self) -> list[int]:
        """The processes that the supervisor may end."""
        return [pid for role, pid in self.pids.items() if not self.is_hosted(role)]
