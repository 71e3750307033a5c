"""What the core of a replica wants done, and how it is done here."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn

from cometmq.actors.replication.books_line import BooksLine
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
from cometmq.actors.replication.core.frames import Bytes
from cometmq.actors.replication.engine_calls import EngineCalls
from cometmq.actors.replication.log_line import LogLine
from cometmq.actors.replication.log_view import GroupLog
from cometmq.actors.replication.peers import Peers
from cometmq.actors.replication.room import Room
from cometmq.actors.replication.run import Runs
from cometmq.actors.replication.said import Said

log = logging.getLogger(__name__)

RECENT_FRAMES: Final = 8  # whose CRC is known: each goes to every follower


class Deeds:
    """Carries out actions, each as soon as it is told to; of some the end comes later.

    Args:
        group: its name.
        on_stop: ends the process, and says why.
    """

    def __init__(
        self,
        group: str,
        *,
        peers: Peers,
        books: BooksLine,
        log_view: GroupLog,
        log_line: LogLine,
        engine: EngineCalls,
        room: Room,
        runs: Runs,
        said: Said,
        on_stop: Callable[[str], NoReturn],
    ) -> None:
        self._group = group
        self._peers = peers
        self._books = books
        self._log = log_view
        self._log_line = log_line
        self._runs = runs
        self._said = said
        self.content: memoryview | None = None  # behind the frame that the core has now
        self._sums: deque[tuple[int, int, int]] = deque(maxlen=RECENT_FRAMES)
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
        """False: it is under way, and comes to its end when LogLine, Runs or Room say so."""
        return self._how[type(action)](action) is not False

    # --- to the others ---

    def _send(self, action: Send) -> None:
        self._peers.send(action.to, action.frame)

    def _ship(self, action: Ship) -> None:
        offset, length = action.offset, action.length
        content = self._log.read(offset, offset + length)
        crc = self._crc(offset, length, content)
        frame = Bytes(self._group, action.epoch, action.nonce, offset, length, crc, action.confirm)
        self._peers.send(action.to, frame, content)

    def _crc(self, offset: int, length: int, content: memoryview) -> int:
        for known_offset, known_length, crc in self._sums:
            if (known_offset, known_length) == (offset, length):
                return crc
        crc = zlib.crc32(content)
        self._sums.append((offset, length, crc))
        return crc

    # --- to the log ---

    def _append(self, action: Append) -> bool:
        content, self.content = self.content, None
        assert content is not None, action
        assert len(content) == action.length, action
        self._log_line.lay_down(action.offset, content)
        return False

    # --- runs ---

    def _lead(self, action: Lead) -> bool:
        log.warning("this replica is the master of epoch %d, from %d", action.epoch, action.start)
        self._runs.begin(action.epoch)
        return False

    def _step_down(self, action: StepDown) -> bool:
        log.warning("this replica is no master any more; it was that of epoch %d", action.epoch)
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
        self._sums.clear()
        self._log.forget_from(0)  # files of the same names will be others

    # --- the rest ---

    def _serve(self, action: Serve) -> None:
        log.info("the master of epoch %d serves: %s", action.epoch, action.service.value)
        self._runs.now.serve(action.service)

    def _refuse(self, action: Refuse) -> None:
        self._said.warn((action.sender, action.what, action.why), "%s", action)
