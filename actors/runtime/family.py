"""The family's context: settings, store, counters, doorbells, addresses, for each process."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from cometmq.actors.runtime.roles import role_of
from cometmq.conf import BrokerSettings, FlushDiskType
from cometmq.protocol.errors import ServiceNotAvailable
from cometmq.shm.derived.index_file import IndexShape
from cometmq.shm.kernel.live import OwnedCell
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueRange, QueueTable
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.os.files import Pages
from cometmq.shm.reading.ledger_log import LedgerLog
from cometmq.shm.reading.positions import LivePositions
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader
from cometmq.shm.state.damage import REPLACE_IT, note_damage

log = logging.getLogger(__name__)

EXIT_UNSETTLED: Final = 72  # it has ended without having come to the end of its work
DISPATCHED_TIMEOUT_S: Final = 1
EXIT_FATAL: Final = 71  # the store must not be used further; nothing is restarted


def note_failure(text: str, error: OSError, cell: OwnedCell) -> None:
    """What `out_of_service` leaves behind, for who must not end its process."""
    cell.reset(error.errno or errno.EIO)
    log.critical("%s: %s: the store is taken out of service", text, error.strerror)


def end_replica(store: Path, why: str) -> NoReturn:
    """End this process so that the supervisor ends the broker, and no other one is started on this
    store: what is damaged here is whole in other replicas, which serve on."""
    note_damage(store, why)
    log.critical("%s: %s", why, REPLACE_IT)
    logging.shutdown()
    os._exit(EXIT_FATAL)


def out_of_service(text: str, error: OSError, cell: OwnedCell) -> NoReturn:
    """End this process so that the supervisor ends the broker: the system may have dropped pages
    that it could not write. Nothing is retried.

    Args:
        cell: this process's errno counter, for the next start, which must not rely on the others.
    """
    note_failure(text, error, cell)
    logging.shutdown()
    os._exit(EXIT_FATAL)


_settled: tuple[dict[str, Any], BrokerSettings] | None = None  # the last ones of settings_of


def settings_of(keys: dict[str, Any]) -> BrokerSettings:
    """As BrokerSettings.from_keys. The same keys again cost nothing, nor memory of a fork's own."""
    global _settled
    if _settled is None or _settled[0] != keys:
        _settled = keys, BrokerSettings.from_keys(keys)
    return _settled[1]


@dataclass(frozen=True)
class Family:
    """The world of one child.

    Args:
        role: which actor this process hosts, such as "reader-0".
        doorbell: the number of this process's own eventfd in `doorbells`.
        addresses: where the actors take commands from the family, by role.
        bind: where this one listens to clients; None if it has no clients.
        epoch: that this replica of a group is the master of, in this run; 0: it is none.
        mapped: the control file, if it is mapped already, for another process.
    """

    role: str
    settings: BrokerSettings
    store: Path
    doorbells: Sequence[int]
    doorbell: int
    addresses: Mapping[str, str]
    name_servers: Sequence[str] = ()
    bind: str | None = None
    clean: bool = True  # the last run ended in order
    last_run: LastRun | None = None  # it was killed, and these were its counters
    epoch: int = 0
    mapped: InitVar[ControlFile | None] = None
    control: ControlFile = field(init=False)
    # The broker has ended and this process has not: nobody is to wait for a counter.
    gone: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self, mapped: ControlFile | None) -> None:
        role = role_of(self.role)
        if mapped is None:
            mapped = ControlFile.open(self.store / CONTROL_FILE, self.doorbells, writable=True)
        object.__setattr__(self, "control", mapped.owned(role.owns, role.owns_second))

    @property
    def doorbell_fd(self) -> int:
        return self.doorbells[self.doorbell]

    @property
    def index_shape(self) -> IndexShape:
        return IndexShape(self.settings.max_hash_slot_num, self.settings.max_index_num)

    @property
    def cover(self) -> Counter:
        """The counter below which messages may be shown: under SYNC_FLUSH nobody sees what a power
        cut could take back, and in a group nobody sees what the next master may not have."""
        if self.settings.is_in_group:
            return Counter.REPLICATED
        sync = self.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        return Counter.FLUSHED if sync else Counter.WROTE

    @property
    def log_source(self) -> str:
        """Where the `ha` process of a group hands the commitlog process the log of the master: an
        abstract Unix socket, see MasterConnection."""
        name = self.addresses["ha"].removeprefix("ipc://").removesuffix("-ha")
        return f"unix:{name}-log"

    @property
    def log_pages(self) -> Pages:
        """How they come to who writes to the log."""
        if self.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH:
            return Pages.SINGLE
        # A slave may take its log as fast as the disk does, and its master's clients wait for a
        # processor meanwhile, if that is on the same machine.
        return Pages.LARGE if self.settings.is_slave else Pages.AROUND

    def queue_table(self, *, writable: bool = False) -> QueueTable:
        return QueueTable.open(
            self.store / QUEUES_FILE, self.control.read(Counter.QUEUES), writable=writable
        )

    def ledger_log(self) -> LedgerLog:
        """The ledger, once the log is recovered and dispatched; on a slave, which has a later part
        of it come by itself, as far as it may be shown. To be called in the one thread that this
        process's doorbell is for."""
        if self.settings.is_slave:
            self.wait_confirmed()
        else:
            self.wait_recovered()
        return LedgerLog(self.store_reader())

    def store_reader(
        self, limits: ReadLimits | None = None, table: QueueTable | None = None
    ) -> StoreReader:
        """Of this store, as far as it is dispatched. In a group a damaged record ends the broker.

        Args:
            table: of the queues, if it is mapped already.
        """
        store = StoreReader(
            self.store,
            segment_bytes=self.settings.mapped_file_size_commit_log_bytes,
            queue_segment_bytes=self.settings.mapped_file_size_consume_queue_bytes,
            positions=LivePositions(self.control, self.queue_table() if table is None else table),
            limits=limits,
        )
        if self.settings.is_in_group:
            store.on_damage = partial(end_replica, self.store)
        return store

    @property
    def queue_ends(self) -> Callable[[], dict[tuple[str, int], int]] | None:
        """Where the queues end once they are recovered; None where no power cut can have cut
        them. To be called in the one thread that this process's doorbell is for."""
        if self.clean or self.control.read(Counter.PHASE).value >= Phase.SERVING:
            return None
        if self.settings.is_in_group:
            return None  # nothing that was confirmed is cut

        def ends() -> dict[tuple[str, int], int]:
            self.wait_recovered()
            table = self.queue_table()
            ranges = {key: table.range_of(*key) for key in table.queues()}
            return {key: found.max_queue_offset for key, found in ranges.items() if found}

        return ends

    @property
    def stored(self) -> Callable[[str], dict[int, QueueRange]]:
        """Takes a topic: its queues that ever held a message, and what they hold, as dispatched.

        What it returns raises ServiceNotAvailable while the broker starts.
        """
        table = self.queue_table()
        phase = self.control.read(Counter.PHASE)

        def stored(topic: str) -> dict[int, QueueRange]:
            if phase.value < Phase.SERVING:
                raise ServiceNotAvailable("the broker starts, and does not know its queues yet")
            return table.ranges_of(topic)

        return stored

    def wait_recovered(self) -> None:
        """Until the log is recovered and the queues are: in a group that elects its master, until
        all that the log has now is confirmed. Not `dispatched` alone: an empty log is dispatched at
        once, and its queues may have ended elsewhere before."""
        self.wait_for(Counter.PHASE, Phase.RECOVERED)
        self.wait_for(Counter.QUEUES_RECOVERED, 1)
        self.wait_for(Counter.DISPATCHED, self.control.read(Counter.WROTE).value)

    def wait_confirmed(self) -> None:
        """Until the log is recovered, and the queues are as far as they may be shown. For who does
        not need whole queues: the rest, which is for others to confirm, may take any time."""
        if not self.settings.is_in_group:
            self.wait_recovered()
            return
        self.wait_for(Counter.PHASE, Phase.RECOVERED)
        self.wait_for(Counter.QUEUES_RECOVERED, 1)
        self.wait_for(Counter.DISPATCHED, self.confirmed_end)

    @property
    def confirmed_end(self) -> int:
        """The end of what may be dispatched, of what is in the log."""
        return min(self.control.read(Counter.WROTE).value, self.control.read(self.cover).value)

    def in_next_run(self, epoch: int) -> Family:
        """For `ha`, which outlives a run: with the control file and the settings of the next one.

        Args:
            epoch: as it was ordered by BeginRun.
        """
        settings = self.settings.for_run(epoch)
        return replace(self, settings=settings, epoch=epoch, clean=False, last_run=None)

    def wait_dispatched(self) -> None:
        """Until what is in the log is in its queues. Raises ServiceNotAvailable after a second."""
        wrote = self.control.read(Counter.WROTE).value
        self.wait_for(Counter.DISPATCHED, wrote, DISPATCHED_TIMEOUT_S)

    def wait_for(self, counter: Counter, at_least: int, timeout_s: float | None = None) -> None:
        """Sleep until a counter has reached a value. Raises ServiceNotAvailable after the time.

        For the one thread that this process's doorbell is for.
        """
        cell = self.control.sleep_on(counter, self.doorbell)
        poll = select.poll()
        poll.register(self.doorbell_fd, select.POLLIN)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            cell.arm()
            if cell.value >= at_least:
                cell.disarm()
                return
            left_ms = None if deadline is None else int((deadline - time.monotonic()) * 1000)
            if left_ms is not None and left_ms <= 0:
                raise ServiceNotAvailable(
                    f"{counter.name.lower()} did not reach {at_least} within {timeout_s:g} s"
                )
            if self.gone.is_set():
                raise ServiceNotAvailable("the broker has ended")
            if poll.poll(left_ms):
                os.eventfd_read(self.doorbell_fd)

    @classmethod
    def from_message(cls, message: dict[str, Any], mapped: ControlFile | None = None) -> Family:
        """From what the supervisor has the zygote pass on."""
        settings = settings_of(message.pop("settings"))
        last_run = LastRun.from_message(message.pop("last_run"))
        store = Path(message.pop("store"))
        return cls(settings=settings, store=store, last_run=last_run, mapped=mapped, **message)
