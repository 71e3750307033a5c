"""The ledger of a slave: its master's, as far as the copy of the log has it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from cometmq.actors.coordination.ledger import Ledger
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.tables.book import Book
from cometmq.protocol.errors import CometError, NotMaster
from cometmq.protocol.ledger import LEDGER_QUEUE, LEDGER_TOPIC, Change, Place
from cometmq.shm.kernel.live import STRIPES
from cometmq.shm.live.control import Counter


class CopiedLedger(Ledger):
    """Takes no changes but those that lie in the log.

    Args:
        refusal: what is said to whoever wants one made.
        last: the place of the last entry that every book has. What some have already is made once
            more, which comes to the same.
        position: the queue offset behind the last entry.
    """

    def __init__(self, refusal: NotMaster, *, last: Place, position: int) -> None:
        # Nothing of the writer's: no socket, and never anything under way.
        self._refusal = refusal
        self._life = max(time.time_ns() // 1_000_000, last.epoch + 1)
        self.covered = last
        self.position = position
        self.undone = self.entries = 0
        self._gathered = deque()
        self._flight = None

    @property
    def given(self) -> Place:
        return self.covered

    @property
    def epoch(self) -> int:
        """Of this process: no entry of the log has it."""
        return self._life

    def check_room(self) -> None:
        raise self._refusal

    def add(self, change: Change, books: Sequence[Book], *, on_disk: bool = False) -> None:
        raise self._refusal

    def took(self, place: Place, queue_offset: int) -> None:
        """An entry of the log is in the books."""
        self.covered = max(self.covered, place)
        self.position = queue_offset + 1
        self.entries += 1

    def send(self) -> None:
        """There is nothing to be sent."""

    def keep_otherwise(self, error: CometError) -> None:
        """There is nothing that the log would not take."""

    def close(self) -> None:
        """There is no socket."""


class LedgerArrivals:
    """Wakes the process once the log has more of the ledger, and its queue an entry for that."""

    def __init__(self, family: Family) -> None:
        self._table = family.queue_table()
        self._queues = family.control.sleep_on(Counter.QUEUES, family.doorbell)
        self._stripes = family.control.sleep_on_stripes(family.doorbell)
        self._watch = self._table.watch(self._stripes)
        self._dispatched = Dispatched(family)

    def arm(self, position: int) -> None:
        """For what lies at this queue offset, or behind it. Whoever looks after that misses
        nothing."""
        self._queues.arm()
        slot = self._table.slot_of(LEDGER_TOPIC, LEDGER_QUEUE)
        if slot is None:
            return
        self._queues.disarm()
        self._stripes[slot % STRIPES].arm()
        if self._watch.end(slot) > position:
            self._dispatched.arm()
