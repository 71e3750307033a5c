"""What the core of a replica wants done, and how it is done here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from cometmq.actors.replication.core.actions import (
    Action,
    Append,
    Cas,
    Confirmed,
    Get,
    Keep,
    Lead,
    Refuse,
    Send,
    Serve,
    Ship,
    StartOver,
    StepDown,
    Stop,
    Truncate,
)
from cometmq.actors.replication.core.frames import Bytes, Welcome
from cometmq.actors.replication.group.backlog import Backlog
from cometmq.actors.replication.group.engine_calls import EngineCalls
from cometmq.actors.replication.group.free_space import FreeSpace
from cometmq.actors.replication.group.log_feed import LogFeed
from cometmq.actors.replication.group.log_view import GroupLog
from cometmq.actors.replication.group.state_transfer import StateTransfer
from cometmq.actors.replication.group.terms import Runs
from cometmq.actors.replication.peers.peers import Peers
from cometmq.actors.runtime.event_log import EventLog
from cometmq.shm.kernel.codec import crc32

log = logging.getLogger(__name__)

RECENT_FRAMES: Final = 8  # that are not checked again: each goes to every follower


class _Checked(NamedTuple):
    """Bytes of the log that hold, and have this CRC."""

    offset: int
    length: int
    crc: int
    sent_to: set[str]


class ActionRunner:
    """Carries out actions, each as soon as it is told to; of some the end comes later.

    Args:
        group: its name.
        log_end: of the log, as the core has it.
        on_laid_down: is called with the end of a frame that is in the log at once.
        on_stop: ends the process, and says why.
    """

    def __init__(
        self,
        group: str,
        *,
        peers: Peers,
        books: StateTransfer,
        log_view: GroupLog,
        log_line: LogFeed,
        engine: EngineCalls,
        room: FreeSpace,
        runs: Runs,
        said: EventLog,
        log_end: Callable[[], int],
        call_soon: Callable[[Callable[[], object]], object],
        on_laid_down: Callable[[int], None],
        on_stop: Callable[[str], NoReturn],
    ) -> None:
        self._group = group
        self._peers = peers
        self._books = books
        self._log = log_view
        self._log_line = log_line
        self._runs = runs
        self._said = said
        self._log_end = log_end
        self._on_laid_down = on_laid_down
        self.backlog = Backlog(self._say, call_soon=call_soon, on_fault=on_stop)
        self.content: memoryview | None = None  # behind the frame that the core has now
        self._checked: deque[_Checked] = deque(maxlen=RECENT_FRAMES)
        self._how: dict[type[Action], Callable[[Any], bool | None]] = {
            Send: self._send,
            Ship: self._ship,
            Append: self._append,
            Keep: lambda action: room.keep(action.promises),
            Get: engine.get,
            Cas: engine.cas,
            Confirmed: lambda action: runs.now.confirm(action.offset),
            Serve: self._serve,
            Refuse: self._refuse,
            Stop: lambda action: on_stop(action.why),
            Lead: self._lead,
            StepDown: self._step_down,
            Truncate: self._truncate,
            StartOver: self._start_over,
        }

    def do(self, action: Action) -> bool:
        """False: it is under way, and comes to its end when LogFeed, Runs or FreeSpace say so."""
        return self._how[type(action)](action) is not False

    # --- to the others ---

    def _send(self, action: Send) -> None:
        if isinstance(action.frame, Welcome):
            self.backlog.drop_of(action.to)  # it is all of sessions that are over
        if self.backlog.has(action.to):
            self.backlog.put(action)
        else:
            self._say(action)

    def _ship(self, action: Ship) -> None:
        is_behind = action.offset + action.length < self._log_end()
        if is_behind or self.backlog.has(action.to):
            self.backlog.put(action)
        else:
            self._say(action)

    def _say(self, action: Send | Ship) -> None:
        if isinstance(action, Send):
            self._peers.send(action.to, action.frame)
        else:
            self._send_bytes(action)

    def _send_bytes(self, action: Ship) -> None:
        offset, length, to = action.offset, action.length, action.to
        checked = self._checked_for(to, offset, length)
        content = self._log.read(offset, offset + length, was_read=checked is not None)
        if checked is None:
            checked = _Checked(offset, length, crc32(content), set())
            self._checked.append(checked)
        checked.sent_to.add(to)
        frame = Bytes(
            self._group, action.epoch, action.nonce, offset, length, checked.crc, action.confirm
        )
        self._peers.send(to, frame, content)

    def _checked_for(self, to: str, offset: int, length: int) -> _Checked | None:
        """None: it has to be checked. Also if that follower wants it again, for it may be damaged
        by now; others would find that it has another CRC."""
        for each in self._checked:
            if (each.offset, each.length) == (offset, length) and to not in each.sent_to:
                return each
        return None

    # --- to the log ---

    def _append(self, action: Append) -> bool:
        content, self.content = self.content, None
        assert content is not None, action
        assert len(content) == action.length, action
        if not self._log_line.lay_down(action.offset, content):
            return False
        self._on_laid_down(action.offset + action.length)
        return True

    # --- runs ---

    def _lead(self, action: Lead) -> bool:
        log.warning("this replica is the master of epoch %d, from %d", action.epoch, action.start)
        self._runs.begin(action.epoch)
        return False

    def _step_down(self, action: StepDown) -> bool:
        log.warning("this replica is no master any more; it was that of epoch %d", action.epoch)
        self.backlog.drop()
        self._runs.begin(0, ends_mastership=True)
        return False

    def _truncate(self, action: Truncate) -> bool:
        log.warning("the log is cut to %d: what follows there is not the master's", action.to)
        self._changed_log()
        self._runs.begin(0, cut_to=action.to)
        return False

    def _start_over(self, action: StartOver) -> bool:
        """With the books of the master, which tell what its log does not tell any more."""
        if self._books.are_needed(action.at):
            self._books.fetch(lambda: self._begin_log(action.at))
        elif self._runs.now.wrote == action.at == self._log.begins_at():
            return True  # an empty log, which begins there already
        else:
            self._begin_log(action.at)
        return False

    def _begin_log(self, at: int) -> None:
        log.warning("the log begins anew at %d, where the master's begins", at)
        self._changed_log()
        self._runs.begin(0, begin_at=at)

    def _changed_log(self) -> None:
        self._checked.clear()
        self.backlog.drop()
        self._log.forget_from(0)  # files of the same names will be others

    # --- the rest ---

    def _serve(self, action: Serve) -> None:
        log.info("the master of epoch %d serves: %s", action.epoch, action.service.value)
        self._runs.now.serve(action.service)

    def _refuse(self, action: Refuse) -> None:
        self._said.warn((action.sender, action.what, action.why), "%s", action)
