"""The coordinator of a slave: what its master's coordinator has decided, as the log brings it."""

from __future__ import annotations

import logging
import time
from typing import Any, Final, NoReturn

import pykka

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.coordination.ledger import Ledger
from cometmq.actors.replication.slaves.copied_ledger import CopiedLedger, LedgerArrivals
from cometmq.actors.replication.slaves.follower import not_master
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import Handler
from cometmq.protocol.commands import Command, ServedBy
from cometmq.protocol.errors import StoreError
from cometmq.protocol.ledger import Fold, LedgerDamaged, Place, decode_entry
from cometmq.shm.reading.ledger_log import LedgerLog

log = logging.getLogger(__name__)

SLICE_S: Final = 0.005  # of the actor's time, for entries of the ledger
RETRY_S: Final = 1.0


class SlaveCoordinatorActor(CoordinatorActor):
    """Keeps the books of its master: makes the changes that the ledger has, as they arrive, and
    answers questions. Whoever wants a change hears NotMaster.

    Writes, alone: config/*.json, cometmq.ledger, so that the store opens as a master's.
    Wakes on: commands; the queue of the ledger; answers of the commitlog process, the cleaner and
        the name servers; timers: flushConsumerOffsetInterval, a registration every 30 s.
    Dies as the master's does.
    """

    def __init__(self, *arguments: Any, family: Family, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._family = family
        self._ledger: CopiedLedger

    @classmethod
    def of_family(cls, family: Family, bind: Any) -> pykka.ActorRef[Any]:
        arguments = cls.arguments_of(family, bind) | {"queue_ends": None, "gate": None}
        return cls.start(family=family, **arguments)

    def find_handler(self, kind: type[Command]) -> Handler:
        served_by = kind.access.served_by
        is_served = served_by is ServedBy.EVERY or (
            served_by is ServedBy.SLAVE and not self._family.settings.is_in_group
        )
        return super().find_handler(kind) if is_served else self.refuse

    def refuse(self, _command: Command, _request: Any) -> NoReturn:
        raise not_master(self._family.settings)

    # --- start and end ---

    def on_start(self) -> None:
        self._go_on(self._ledger_log(), make_ledger=self._make_ledger)
        self._reader = self._family.store_reader()
        self._arrivals_of_ledger = LedgerArrivals(self._family)
        self._fold = Fold(self._ledger.covered)
        self._announcing = self._announce()
        self._topics.begin(self._announcing)
        self._announcing.start()
        self._holds.begin()
        self.every(self._settings.flush_consumer_offset_interval_ms / 1000, self._flush)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._replay()
        if self._family_address:
            self.listen_for_lines(self._family_address)

    def _make_ledger(self, last: Place, position: int) -> Ledger:
        refusal = not_master(self._family.settings)
        self._ledger = CopiedLedger(refusal, last=last, position=position)
        return self._ledger

    def settle(self) -> None:
        """All that was copied is in the books, and these are in their files."""
        while self._replay_some(float("inf")):
            pass
        self._books.snapshots.write_now()
        self._announcing.end()
        self._books.note_life()

    def on_stop(self) -> None:
        super().on_stop()
        if hasattr(self, "_reader"):
            self._reader.close()

    # --- rounds ---

    def _finish_round(self) -> None:
        """Nobody has changed anything."""

    def on_doorbell(self) -> None:
        self._replay()

    # --- the ledger ---

    def _replay(self) -> None:
        """Make the changes that have come; then sleep until there are more."""
        self._arrivals_of_ledger.arm(self._ledger.position)
        try:
            more = self._replay_some(time.monotonic() + SLICE_S)
        except (StoreError, OSError) as error:
            log.error("the ledger cannot be read at record %d, again in %g s: %s",
                      self._ledger.position, RETRY_S, error)  # fmt: skip
            self.after(RETRY_S, self._replay)
            return
        if more:
            self.call_soon(self._replay)

    def _replay_some(self, until: float) -> bool:
        """False if all that there was is in the books."""
        ledger = LedgerLog(self._reader)
        version = self._books.topics.version
        if ledger.end <= self._ledger.position:
            return False
        self._pass_over_missing(ledger)
        for queue_offset, body in ledger.entries(self._ledger.position):
            self._take_entry(queue_offset, body)
            if time.monotonic() > until:
                break
        else:
            self._ledger.position = max(self._ledger.position, ledger.end)
        if self._books.topics.version != version:
            self._announcing.topics_changed()
        return True

    def _pass_over_missing(self, ledger: LedgerLog) -> None:
        """A copy that begins in the middle of its master's log has no changes from before it.

        Where books were laid down they know these, and the places of entries tell what they do not
        know yet.
        """
        if self._ledger.position >= ledger.begin:
            return
        if not self._ledger.covered.epoch:
            log.error(
                "this copy begins with record %d of its master's ledger: topics, groups and "
                "offsets from before it are not known here. Stop this slave, copy the master's "
                "config/ and cometmq.ledger into its store, and start it again",
                ledger.begin,
            )  # fmt: skip
        self._ledger.position = ledger.begin

    def _take_entry(self, queue_offset: int, body: bytes) -> None:
        try:
            place, changes, unknown = decode_entry(body)
        except LedgerDamaged as error:
            log.error("record %d: %s; what it changed is not known", queue_offset, error)
            self._ledger.position = queue_offset + 1
            return
        if unknown:
            log.error("record %d of the ledger has %d changes of kinds that this version does not "
                      "know", queue_offset, unknown)  # fmt: skip
        if self._fold.admit(place):
            self._books.replay(changes)
        self._ledger.took(place, queue_offset)

    def statistics(self) -> meters.Figures:
        found: meters.Figures = self._books.statistics() | self._announcing.statistics()
        return {**found, meters.LEDGER_POSITION: self._ledger.position}
