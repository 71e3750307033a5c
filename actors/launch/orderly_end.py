"""The orderly end: every role settles, one after the other, and its process is seen to be gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from cometmq.actors.launch.ending import SignsOfLife, end_now, has_ended
from cometmq.actors.launch.process_table import ProcessTable
from cometmq.actors.runtime.family import EXIT_UNSETTLED
from cometmq.protocol.commands import Finish
from cometmq.protocol.errors import CometError, NotConfirmed
from cometmq.protocol.progress import Progress
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.live.control import IN_GROUP, ControlFile, Counter, Phase

if TYPE_CHECKING:
    from cometmq.actors.launch.hosted import Host

log = logging.getLogger("cometmq.actors.launch.supervisor")

SILENCE_S: Final = 60  # a role that is to come to its end and does not move so long is given up
NOTICE_S: Final = 5  # how often the log says what the end waits for
POLL_S: Final = 0.2
KILL_TIMEOUT_S: Final = 5
BEHIND: Final = (Counter.DISPATCHED, Counter.FLUSHED)  # where an orderly end has everything


class OrderlyEnd:
    """What counts is how a process has ended, not its answer, which may be lost.

    Args:
        addresses: of the family, by role.
        host: of the commitlog actor, where that is no child.
        read_reports: takes in what children report, for so many seconds.
        failure: why the broker gives up, once it has.
    """

    def __init__(
        self,
        table: ProcessTable,
        control: ControlFile,
        addresses: Mapping[str, str],
        host: Host | None,
        read_reports: Callable[[float], None],
        failure: Callable[[], CometError | None],
    ) -> None:
        self._table = table
        self._control = control
        self._addresses = addresses
        self._host = host
        self._read_reports = read_reports
        self._failure = failure
        # Of a group's log some may still be cut: its queues may end before it.
        self._counters = BEHIND[1:] if control.meta.get(IN_GROUP) else BEHIND
        self._backlog = 0  # bytes, when the end began
        self._progress = Progress("done", log.warning)

    def run(self) -> list[str]:
        """What could not be settled, in words."""
        self._backlog = self._left_bytes()
        self._progress = Progress("done", log.warning)
        return [*filter(None, map(self._finish, self._table.roles)), *self._behind()]

    def _finish(self, role: str) -> str:
        """Have one role come to its end and its process be gone; else why not.

        One that is not there, or ends before it has settled, is started again for this, as at any
        other time.
        """
        table = self._table
        table.asked = role
        life = SignsOfLife(self._control)
        told_at = time.monotonic() + NOTICE_S
        with Channel(self._addresses[role], role) as channel:
            starts = table.starts[role]
            pending = channel.request(Finish())
            while not self._has_settled(role, pending):
                failure = self._failure()
                if failure is not None:
                    return str(failure)
                if table.ends.get(role) == EXIT_UNSETTLED:
                    return f"{role} could not be settled: {_error_of(pending) or 'see its log'}"
                if pending.done and (
                    isinstance(_error_of(pending), NotConfirmed) or table.starts[role] > starts
                ):  # its process has ended, be it after the answer; to the next one
                    starts = table.starts[role]
                    pending = channel.request(Finish())
                channel.wait(pending, POLL_S, keep=True)
                self._read_reports(POLL_S if pending.done else 0)
                if self._host is not None and table.is_hosted(role) and has_ended(self._host.pid):
                    return f"process {self._host.pid}, which has the writer, is gone"
                if life.silent_s(self._moving(role)) > SILENCE_S:
                    return self._give_up(role)
                if time.monotonic() > told_at:
                    told_at += NOTICE_S
                    log.warning("%s", self._what_is_waited_for(role))
        table.ends[role] = 0
        return ""

    def _has_settled(self, role: str, pending: Pending) -> bool:
        if self._table.is_hosted(role):  # its process stays
            return writer_has_stopped(self._control) or (
                pending.done and _error_of(pending) is None
            )
        return self._table.ends.get(role) == 0

    def _moving(self, role: str) -> int | None:
        """The process whose work is a sign of life. A service works for itself."""
        return None if self._table.is_hosted(role) else self._table.pids.get(role)

    def _give_up(self, role: str) -> str:
        table = self._table
        table.ends[role] = EXIT_UNSETTLED
        if role in table.pids and not table.is_hosted(role):
            end_now([table.pids.pop(role)], KILL_TIMEOUT_S)
        return f"{role} did not finish, and nothing moved for {SILENCE_S} s"

    def _what_is_waited_for(self, role: str) -> str:
        pid = self._table.pids.get(role)
        process = "which is started again" if pid is None else f"process {pid}"
        behind = self._behind()
        if behind and self._backlog:
            done = self._backlog - self._left_bytes()
            behind.append(self._progress.text(max(0, done), self._backlog))
        return f"the end waits for {role} ({process}){': ' if behind else ''}{', '.join(behind)}"

    def _left_bytes(self) -> int:
        wrote = self._control.read(Counter.WROTE).value
        return sum(wrote - self._control.read(each).value for each in self._counters)

    def _behind(self) -> list[str]:
        """What is written, and not yet where an orderly end has everything."""
        wrote = self._control.read(Counter.WROTE).value
        left = {e.name.lower(): wrote - self._control.read(e).value for e in self._counters}
        found = [f"{name} is {count} bytes behind" for name, count in left.items() if count]
        if self._control.read(Counter.FLUSH_ERRNO).value:
            found.append("a sync has failed")
        return found


def writer_has_stopped(control: ControlFile) -> bool:
    """Whether the writer has come to its end in order: nothing more is appended."""
    return control.read(Counter.PHASE).value == Phase.STOPPED


def _error_of(pending: Pending) -> CometError | None:
    """Why a request that is done has failed, if it has."""
    if not pending.done:
        return None
    try:
        pending.result()
    except CometError as error:
        return error
    return None
