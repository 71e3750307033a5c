"""One replica of a group, as a state machine: events in, actions out. Pure: no I/O, no clock.

docs/replication.md tells the protocol's rules in words; their numbers stand in these files. The
parts: `Local` (this store), `EngineLink` (the group's record), `Registering`, `Electing`,
`Following`, `Leading`. The actors and the simulator
(tests/simulator) drive this same class, as actions.py says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final

from cometmq.actors.replication.core.actions import Action, Lead, LogView, Send, StepDown, Why
from cometmq.actors.replication.core.electing import Electing
from cometmq.actors.replication.core.following import Following
from cometmq.actors.replication.core.frames import (
    Ack,
    Agreed,
    AnyFrame,
    Apart,
    Beat,
    Bid,
    Bytes,
    Hello,
    Marks,
    Refused,
    Welcome,
)
from cometmq.actors.replication.core.leading import Leading, Standing
from cometmq.actors.replication.core.link import EngineLink
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.promises import Promises, with_epoch
from cometmq.actors.replication.core.record import GroupRecord, Life
from cometmq.actors.replication.core.registering import Registering
from cometmq.actors.replication.core.settings import Settings

_FOR_MASTERS: Final = (Hello, Marks, Ack)


class Replica:
    """From one start of its process to its end.

    Args:
        log: what is asked of the log.
        begin, end: of the log, as a scan of all its records since the last one known to hold has
            found it.
        flushed: what of it is on the disk; at most `end`.
        known_end: what the log is known to have had, by counters that have outlived its process:
            `end` may not be below it. 0 after the machine has started anew.
        boot_id: of the running kernel.

    Before any other event after a pause, `tick`: it says what time it is.
    """

    local_type: ClassVar[type[Local]] = Local
    link_type: ClassVar[type[EngineLink]] = EngineLink
    registering_type: ClassVar[type[Registering]] = Registering
    electing_type: ClassVar[type[Electing]] = Electing
    following_type: ClassVar[type[Following]] = Following
    leading_type: ClassVar[type[Leading]] = Leading

    def __init__(
        self,
        settings: Settings,
        promises: Promises,
        log: LogView,
        *,
        begin: int,
        end: int,
        flushed: int,
        known_end: int,
        boot_id: str,
    ) -> None:
        self._local = self.local_type(
            settings, promises, log, begin=begin, end=end, flushed=flushed
        )
        self.local = self._local  # for its driver to look at
        self._link = self.link_type(self._local)
        self._electing = self.electing_type(self._local, self._link)
        self._following = self.following_type(self._local, self._link)
        self._leading: Leading | None = None
        self._is_stopping = False  # a mastership's end is under way
        self._registering = self.registering_type(self._local, self._link, boot_id)
        self._known_end = known_end

    # --- what a driver may ask ---

    @property
    def leads(self) -> int:
        """The epoch that this replica leads; 0: none."""
        return self._leading.epoch if self._leading else 0

    def followers(self) -> list[Standing]:
        """A master's, as far as they have begun to follow in this epoch."""
        return self._leading.standings() if self._leading else []

    @property
    def record(self) -> GroupRecord | None:
        return self._link.record

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """The first one."""
        local = self._local
        local.now = now
        if self._registering.begin(self._known_end):
            self._link.get()
        return self._local.taken()

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        local = self._local
        local.now = max(now, local.now)
        if local.stopped:
            return []
        self._link.poll()
        if self._leading:
            self._leading.tick()
        elif self._registering.is_done and not self._is_stopping:
            self._following.tick()
            self._electing.tick()
        elif not self._is_stopping:
            self._settle()
        local.keep_confirm()
        return self._local.taken()

    def frame(self, sender: str, frame: AnyFrame, length: int = 0, crc: int = 0) -> list[Action]:
        """
        Args:
            sender: the replica, as its key has proved.
            length, crc: of the bytes behind a Bytes frame.
        """
        local = self._local
        if local.stopped:
            return []
        if frame.group != local.promises.group:
            local.refuse(sender, type(frame).__name__, Why.OTHER_GROUP)
        elif isinstance(frame, _FOR_MASTERS):
            self._for_master(sender, frame)
        else:
            self._for_follower(sender, frame, length, crc)
        return self._local.taken()

    def appended(self, end: int) -> list[Action]:
        """A master's log has grown by what clients have brought."""
        if self._local.stopped:
            return []
        assert end >= self._local.end, (end, self._local.end)
        self._local.end = end
        if self._leading:
            self._leading.appended()
        return self._local.taken()

    def flushed(self, flushed: int) -> list[Action]:
        """All below is on the disk, as of the last cut."""
        local = self._local
        if local.stopped:
            return []
        assert flushed <= local.end, (flushed, local.end)
        local.flushed = max(local.flushed, flushed)
        if self._leading:
            self._leading.flushed()
        else:
            self._following.flushed()
        return self._local.taken()

    def cleaned(self, begin: int) -> list[Action]:
        """What lies below was deleted, because it is old. Only confirmed bytes are."""
        assert self._local.begin <= begin <= self._local.confirm
        self._local.begin = begin
        return self._local.taken()

    def stopped(self, end: int) -> list[Action]:
        """After StepDown: nothing is appended any more."""
        if self._local.stopped:
            return []
        assert end >= self._local.end, (end, self._local.end)
        self._local.end = end
        self._is_stopping = False
        self._settle()
        return self._local.taken()

    def ending(self) -> list[Action]:
        """An orderly end: all is flushed, and nothing follows."""
        local = self._local
        if local.stopped:
            return []
        assert local.flushed == local.end, (local.flushed, local.end)
        self._registering.end()
        return self._local.taken()

    # --- events of the engine ---

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> list[Action]:
        """The answer to a Get, or what a watch has told (number 0). None: there is no record."""
        if self._local.stopped:
            return []
        is_news = self._link.learn(version, record)
        self._link.read(number)
        if is_news:
            self._settle()
        elif self._leading:
            self._leading.serve()
        return self._local.taken()

    def watched(self) -> list[Action]:
        """The record has changed."""
        if not self._local.stopped:
            self._link.get()
        return self._local.taken()

    def cas_applied(self, ticket: int, version: int) -> list[Action]:
        if not self._local.stopped and self._link.applied(ticket, version):
            self._settle()
        return self._local.taken()

    def cas_refused(self, ticket: int, version: int, record: GroupRecord) -> list[Action]:
        """
        Args:
            version, record: what is there instead.
        """
        if self._local.stopped:
            return []
        self._link.refused(ticket)
        return self.learned(version, record)

    def cas_unknown(self, ticket: int) -> list[Action]:
        """No answer came in time. It may be applied all the same, also later."""
        if not self._local.stopped:
            self._link.unknown(ticket)
        return self._local.taken()

    def session(self, until: float | None) -> list[Action]:
        """Our session with the engine holds until then; None: the engine has ended it."""
        if self._local.stopped:
            return []
        self._link.session(until)
        if self._leading:
            self._leading.serve()
        return self._local.taken()

    def sessions(self, alive: Iterable[Life]) -> list[Action]:
        """Who has a session."""
        self._link.alive = frozenset(alive)
        return self._local.taken()

    # --- frames ---

    def _for_master(self, sender: str, frame: Hello | Marks | Ack) -> None:
        """A promise of a later epoch than ours ends our mastership, whoever brings it."""
        local = self._local
        leading = self._leading
        if leading and frame.epoch > leading.epoch:
            self._step_down()
            self._link.get()
            leading = None
        if leading is None:
            epoch = local.promises.promised_epoch
            local.refuse(sender, type(frame).__name__, Why.NOT_LEADING, epoch, frame.epoch)
            if isinstance(frame, Hello):
                local.do(Send(sender, Refused(frame.group, epoch, frame.nonce)))
        elif isinstance(frame, Hello):
            leading.on_hello(sender, frame)
        elif isinstance(frame, Marks):
            leading.on_marks(sender, frame)
        else:
            leading.on_ack(sender, frame)

    def _for_follower(self, sender: str, frame: AnyFrame, length: int, crc: int) -> None:
        following = self._following
        if isinstance(frame, Bytes):
            following.on_bytes(sender, frame, length, crc)
        elif isinstance(frame, Beat):
            following.on_beat(sender, frame)
        elif isinstance(frame, Welcome):
            following.on_welcome(sender, frame)
        elif isinstance(frame, Agreed):
            following.on_agreed(sender, frame)
        elif isinstance(frame, Apart):
            following.on_apart(sender, frame)
        elif isinstance(frame, Bid):
            self._electing.on_bid(sender, frame)
        elif frame.epoch > self._local.promises.promised_epoch:
            self._link.get()  # Refused, by who knows more than we do

    # --- what the record makes of us ---

    def _settle(self) -> None:
        """Be what the latest record says."""
        record, local = self._link.record, self._local
        if record is None or self._is_stopping:
            return
        if record.epoch < local.promises.promised_epoch:
            here, there = local.promises.promised_epoch, record.epoch
            local.refuse("engine", "record", Why.ENGINE_BEHIND, here, there)
            return
        if not self._registering.settle(record):
            return
        leading = self._leading
        is_named = record.master == local.me
        if leading and is_named and record.epoch == leading.epoch:
            leading.learned(record)
        elif leading:
            self._step_down()
        elif is_named and record.epoch > local.promises.promised_epoch:
            self._lead(record)
        else:
            self._following.follow("" if is_named else record.master, record.epoch)

    def _step_down(self) -> None:
        assert self._leading is not None
        self._local.do(StepDown(self._leading.epoch))
        self._electing.has_resigned = self._leading.is_resigning
        self._leading, self._is_stopping = None, True

    def _lead(self, record: GroupRecord) -> None:
        """Promise the epoch that was won. The log stays whole: what others have confirmed of it
        is not known here (rule 1)."""
        local = self._local
        self._following.leave()
        self._electing.reset()
        epochs = with_epoch(local.promises.epochs, record.epoch, local.begin, local.end)
        local.keep(promised_epoch=record.epoch, epochs=epochs)
        local.do(Lead(record.epoch, local.end))
        self._leading = self.leading_type(local, self._link, record)
        self._leading.serve()
