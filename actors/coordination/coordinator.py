"""The coordinator: what topics there are, who consumes them, and how far they have come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import pykka

from cometmq.actors.coordination.announcing import Announcing
from cometmq.actors.coordination.beginnings import Arrivals
from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.groups import Groups
from cometmq.actors.coordination.holds import Holds
from cometmq.actors.coordination.members import Members, MemberSettings
from cometmq.actors.coordination.moves import Moves
from cometmq.actors.coordination.poppers import Poppers
from cometmq.actors.coordination.pops import Pops
from cometmq.actors.coordination.progress import Progress
from cometmq.actors.coordination.relay import Relay
from cometmq.actors.coordination.retries import Retries
from cometmq.actors.coordination.topics import Stored, Topics, TopicSettings, template_queues
from cometmq.actors.coordination.transactions import Transactions
from cometmq.actors.coordination.views import Views
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.service import Handler, Request, ServiceActor
from cometmq.protocol.commands import Command, GetLine
from cometmq.protocol.errors import (
    ShuttingDown,
)
from cometmq.protocol.ledger import (
    ENTRY_BYTES_MAX,
    entry_bytes_max,
)
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.ledger_log import LedgerLog

CONFIRM_TIMEOUT_S: Final = 2.5  # below the 3 s that a client waits, so that it hears the reason
RELAYED_MAX: Final = 64  # commands that wait for the cleaner
LOOKS: Final = 8  # for silent members, in a session's time


class CoordinatorSettings(MemberSettings, TopicSettings, Protocol):
    """What the coordinator needs of the broker's settings."""

    @property
    def max_topics(self) -> int: ...
    @property
    def max_groups(self) -> int: ...
    @property
    def slave_wait_s(self) -> float: ...


class CoordinatorActor(ServiceActor):
    """Actor that keeps topics, consumer groups, consumer offsets and holds.

    Writes, alone: config/*.json and cometmq.ledger.
    Wakes on: commands, answers of the commitlog process, the cleaner and the name servers, timers:
        held JoinGroups, silent members, flushConsumerOffsetInterval, a registration every 30 s.
    Dies: of a config file that is damaged at the start, with its .bak. If a file cannot be
        written, the request fails without effect.

    All commands of one poll batch are handled before anything is written: their changes go into one
    entry of the ledger. An answer never reports a change that a kill at that moment could undo.

    Args:
        store_dir: must exist; `config` is created in it.
        commitlog_endpoint: endpoint of the commitlog process for TopicsChanged.
        ledger_log: waits for the recovery, and returns the ledger from the log.
        queue_ends: waits for the recovery after a crash, and returns the current queue ends.
        stored: returns the queues of a topic that ever held a message, and their ranges. Raises
            ServiceNotAvailable while these are unknown.
        wait_dispatched: waits until `stored` covers the whole log. Raises ServiceNotAvailable on
            timeout.
        arrivals: gets a function that listens to a doorbell, and returns an object that rings it
            when `stored` has more. None: commands that wait for messages wait until they expire.
        cleaner_endpoint: endpoint of the cleaner for clients' commands; empty: there is none.
        scheduler_endpoint: endpoint of the scheduler, which stores retries; empty: no retries.
        log_begin: returns the physical offset at which the log begins.
        name_server_endpoints: name servers to register with; empty: only this broker has routes.
        entry_bytes_max: limit for the changes in an entry of the ledger.
        family_address: address for broker processes, beside which clients' lines are; empty: no
            lines.
        confirm_timeout_s: how long a topic may be unknown to name servers before the client gets an
            error.
        gate: gate of a master in a group; None: this broker is always the master.
        epoch: epoch in which this broker is the master.
    """

    role: ClassVar[str] = "coordinator"
    part_types: ClassVar[tuple[type, ...]] = (
        Topics, Members, Groups, Progress, Moves, Views, Retries, Holds, Transactions,
        Pops,
    )  # fmt: skip

    def __init__(
        self,
        settings: CoordinatorSettings,
        store_dir: Path,
        *,
        commitlog_endpoint: str,
        cleaner_endpoint: str = "",
        scheduler_endpoint: str = "",
        log_begin: Callable[[], int] = lambda: 0,
        name_server_endpoints: Sequence[str],
        confirm_timeout_s: float = CONFIRM_TIMEOUT_S,
        ledger_log: Callable[[], LedgerLog],
        queue_ends: Callable[[], Mapping[tuple[str, int], int]] | None = None,
        stored: Stored = lambda _topic: {},
        wait_dispatched: Callable[[], None] = lambda: None,
        arrivals: Callable[[Callable[[int], None]], Arrivals] | None = None,
        entry_bytes_max: int = ENTRY_BYTES_MAX,
        family_address: str = "",
        bind: Sequence[tuple[str, bool]] = (),
        limits: ConnectionLimits | None = None,
        gate: Gate | None = None,
        epoch: int = 0,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._books = Books(self, store_dir, settings.max_topics, settings.max_groups)
        self._members = Members(self, settings, self._books, gate)
        self._progress = Progress(self._books, self._members)
        self._poppers = Poppers(
            self._members,
            session_s=settings.consumer_session_timeout_ms / 1000,
            filters_on=settings.enable_property_filter,
        )
        self._moves = Moves(self._books, self._members, self._poppers)
        self._topics = Topics(settings, self._books, self._members, stored, wait_dispatched)
        make_topic, stored = self._topics.make, self._topics.stored
        self._groups = Groups(self._books, self._members, self._poppers, self._topics)
        self._views = Views(self._books, self._members, self._poppers, stored)
        self._relay = Relay(self, cleaner_endpoint, "the cleaner", RELAYED_MAX)
        self._retries = Retries(self, self._books, self._members, scheduler_endpoint, make_topic)
        self._transactions = Transactions(
            self, scheduler_endpoint, make_topic, self._progress.on_fetch_offsets
        )
        self._holds = Holds(self._books, self._relay, store_dir, log_begin)
        self._pops = Pops(self, self._books, self._members, self._poppers, self._retries, stored)
        self._arrivals = arrivals
        super().__init__(bind=bind, limits=limits)
        self._go_on = partial(
            self._books.go_on,
            commitlog_endpoint=commitlog_endpoint,
            entry_bytes_max=entry_bytes_max,
            slave_wait_s=settings.slave_wait_s,
            is_alone=gate is None,
            ends=queue_ends,
            template_queues=template_queues(settings),
        )
        self._ledger_log = ledger_log
        self._announce = partial(
            Announcing,
            self,
            self._books.topics,
            commitlog_endpoint=commitlog_endpoint,
            name_server_endpoints=name_server_endpoints,
            confirm_timeout_s=confirm_timeout_s,
            epoch=epoch,
        )
        self._announcing: Announcing
        self._family_address = family_address

    def parts(self) -> Sequence[object]:
        return (
            self._topics, self._members, self._groups, self._progress, self._moves, self._views,
            self._retries, self._holds, self._transactions,
            self._pops,
        )  # fmt: skip

    @classmethod
    def of_family(cls, family: Family, bind: Sequence[tuple[str, bool]]) -> pykka.ActorRef[Any]:
        return cls.start(**cls.arguments_of(family, bind))

    @classmethod
    def arguments_of(cls, family: Family, bind: Sequence[tuple[str, bool]]) -> dict[str, Any]:
        """What it is made with as one of a broker's processes."""
        log_begin = family.control.read(Counter.MIN_OFFSET)
        return dict(
            settings=family.settings,
            store_dir=family.store,
            commitlog_endpoint=family.addresses["commitlog"],
            cleaner_endpoint=family.addresses["cleaner"],
            scheduler_endpoint=family.addresses.get("scheduler", ""),
            log_begin=lambda: log_begin.value,
            name_server_endpoints=list(family.name_servers),
            ledger_log=family.ledger_log,
            queue_ends=family.queue_ends,
            stored=family.stored,
            wait_dispatched=family.wait_dispatched,
            arrivals=partial(_arrivals, family),
            entry_bytes_max=entry_bytes_max(
                family.settings.mapped_file_size_commit_log_bytes, family.settings.max_message_size
            ),
            family_address=family.addresses[cls.role],
            bind=bind,
            limits=ConnectionLimits.of(family.settings),
            gate=Gate.of(family),
            epoch=family.epoch,
        )

    def find_handler(self, kind: type[Command]) -> Handler:
        found = super().find_handler(kind)
        return found if self._gate is None else self._gate.guarded(kind, found)

    def on_start(self) -> None:
        """pykka's hook, in the actor's thread, before the first message."""
        self._go_on(self._ledger_log())
        self._announcing = self._announce()
        self._topics.begin(self._announcing)
        self._announcing.start()
        self._members.begin()
        self._holds.begin()
        arrivals = self._arrivals
        self._pops.begin(None if arrivals is None else arrivals(self.inbox.listen_to_doorbell))
        self.every(self._settings.flush_consumer_offset_interval_ms / 1000, self._flush)
        self.every(self._settings.consumer_session_timeout_ms / 1000 / LOOKS, self._expire)
        self._finish_round()
        if self._family_address:
            self.listen_for_lines(self._family_address)

    def on_stop(self) -> None:
        super().on_stop()
        self._books.close()
        if hasattr(self, "_announcing"):  # else the start has failed
            self._announcing.close()
        self._relay.close()
        self._retries.close()
        self._transactions.close()

    def settle(self) -> None:
        self._finish_round()
        error = ShuttingDown("the broker is stopping")
        try:
            self._books.end(error)
        finally:
            self._announcing.end()
            self._members.end(error)
            self._pops.end(error)
        self._books.note_life()

    def statistics(self) -> meters.Figures:
        return (
            self._books.statistics()
            | self._members.statistics()
            | self._announcing.statistics()
            | self._pops.statistics()
        )

    def on_get_line(self, command: GetLine, _request: Request) -> Command:
        return self.line_for(command)

    # --- rounds: everything that one drain of the sockets brought ---

    def on_requests(self, requests: list[Request]) -> None:
        super().on_requests(requests)
        self._finish_round()

    def _finish_round(self) -> None:
        """Make what happened outlive this process, then say that it happened."""
        self._topics.finish_round()
        self._members.finish_round()
        self._progress.finish_round()
        self._pops.finish_round()
        self._books.send()
        self._members.tell()

    def on_readable(self, source: Any) -> None:
        """What has become of an entry of the ledger."""
        self._books.hear()
        self._finish_round()

    def on_doorbell(self) -> None:
        """There is more in the queues, and somebody waits for that."""
        self._finish_round()

    def _expire(self) -> None:
        self._members.expire()
        self._poppers.expire()
        self._finish_round()

    def _flush(self) -> None:
        self._members.filters.forget()
        self._books.send()
        self._books.snapshots.begin()
        self._books.note_life()


def _arrivals(family: Family, listen: Callable[[int], None]) -> Arrivals:
    """The counter `dispatched`, which this process's doorbell rings for."""
    listen(family.doorbell_fd)
    return Dispatched(family)
