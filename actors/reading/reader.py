"""The reader: messages out, by queue and by key, and what there is to know about queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cometmq.actors.reading.key_queries import KeyQueries
from cometmq.actors.reading.local_clients import LocalClients
from cometmq.actors.reading.pulls import BYTES_MAX, COUNT_MAX, Pulls
from cometmq.actors.reading.questions import OF_QUEUES, Questions
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.errors import ShuttingDown
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader


class ReaderActor(ServiceActor):
    """Answers pulls and questions about the store; holds pulls until there is something for them.

    Writes, alone: nothing.
    Wakes on: commands; what its parts sleep on, which say so; `min_offset`, to let go of what is
    deleted.
    Dies of nothing that matters to others: clients pull again.
    """

    role = "reader"
    part_types: ClassVar[tuple[type, ...]] = (Pulls, Questions, KeyQueries, LocalClients)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        self._family = family
        table = family.queue_table()
        self._store = store = open_store(family, table)
        dispatched = Dispatched(family)
        self._pulls = Pulls(self, family, table, store, dispatched)
        self._questions = Questions(self, family, table, store, dispatched, super().handle)
        self._by_key = KeyQueries(family, store)
        self._local = LocalClients(self, family)
        super().__init__(bind=bind, limits=ConnectionLimits.of(family.settings))
        self._min = family.control.sleep_on(Counter.MIN_OFFSET, family.doorbell)
        self._log_min = 0  # what lies below is not mapped any more

    def parts(self) -> Sequence[object]:
        return self._pulls, self._questions, self._by_key, self._local

    def on_start(self) -> None:
        if self._family.settings.is_in_group:  # a master may have to wait for others
            self._family.wait_confirmed()
        else:
            self._family.wait_for(Counter.PHASE, Phase.SERVING)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._let_go_of_deleted()

    def handle(self, request: Request) -> None:
        if type(request.command) not in OF_QUEUES or not self._questions.defers(request):
            super().handle(request)

    def on_doorbell(self) -> None:
        self._let_go_of_deleted()
        self._pulls.hear()
        self._questions.answer_deferred()

    def _let_go_of_deleted(self) -> None:
        """Armed first: what is deleted while we look wakes us again."""
        self._min.arm()
        if self._min.value > self._log_min:
            self._log_min = self._min.value
            self._store.let_go_of_deleted()
            self._local.tell_of_deleted(self._log_min)

    def settle(self) -> None:
        """Whoever waits is told to come again."""
        error = ShuttingDown("the broker is shutting down")
        self._pulls.settle(error)
        self._questions.settle(error)
        self._local.settle(error)
        self._by_key.settle()

    def statistics(self) -> meters.Figures:
        return self._pulls.statistics()


def open_store(family: Family, table: QueueTable) -> StoreReader:
    """The store as it is read here, its tail included."""
    settings = family.settings
    limits = ReadLimits(
        hot_bytes=BYTES_MAX,
        hot_count=COUNT_MAX,
        cold_bytes=BYTES_MAX,
        cold_count=COUNT_MAX,
        scan_bytes=settings.max_filter_message_size,
        skip_removed=False,  # one unreadable entry hides no others
    )
    store = family.store_reader(limits, table)
    store.read_tail(family.control, family.cover)
    return store
