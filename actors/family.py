"""What every process of the family is handed: settings, store, counters, doorbells, addresses."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from cometmq.conf import BrokerSettings, FlushDiskType
from cometmq.protocol.errors import ServiceNotAvailable
from cometmq.shm._kernel import OwnedCell
from cometmq.shm.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.last_run import LastRun
from cometmq.shm.queue_table import QUEUES_FILE, QueueTable

log = logging.getLogger(__name__)

EXIT_FATAL: Final = 71  # the store must not be used further; nothing is restarted


def note_failure(text: str, error: OSError, cell: OwnedCell) -> None:
    """What `out_of_service` leaves behind, for who must not end its process."""
    cell.reset(error.errno or errno.EIO)
    log.critical("%s: %s: the store is taken out of service", text, error.strerror)


def out_of_service(text: str, error: OSError, cell: OwnedCell) -> NoReturn:
    """End this process so that the supervisor ends the broker: the system may have dropped pages
    that it could not write. Nothing is retried.

    Args:
        cell: this process's errno counter, for the next start, which must not rely on the others.
    """
    note_failure(text, error, cell)
    logging.shutdown()
    os._exit(EXIT_FATAL)


@dataclass(frozen=True)
class Family:
    """The world of one child.

    Args:
        role: which actor this process hosts, such as "reader-0".
        doorbell: the number of this process's own eventfd in `doorbells`.
        addresses: where the actors take commands from the family, by role.
        bind: where this one listens to clients; None if it has no clients.
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
    hosted: bool = False  # a service has the writer, and appends without a command
    control: ControlFile = field(init=False)
    # The broker has ended and this process has not: nobody is to wait for a counter.
    gone: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        control = ControlFile.open(self.store / CONTROL_FILE, self.doorbells, writable=True)
        object.__setattr__(self, "control", control)

    @property
    def doorbell_fd(self) -> int:
        return self.doorbells[self.doorbell]

    @property
    def shows_tail(self) -> bool:
        """Whether what is written may be read before it is dispatched (shm/tail.py)."""
        return self.settings.flush_disk_type is not FlushDiskType.SYNC_FLUSH

    @property
    def tells_tail(self) -> bool:
        """Whether the writer tells how far each queue is written: a service appends natively, and
        does not."""
        return self.shows_tail and not self.hosted

    def queue_table(self, *, writable: bool = False) -> QueueTable:
        return QueueTable.open(
            self.store / QUEUES_FILE, self.control.read(Counter.QUEUES), writable=writable
        )

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
    def from_message(cls, message: dict[str, Any]) -> Family:
        """From what the supervisor has the zygote pass on."""
        settings = BrokerSettings.from_keys(message.pop("settings"))
        last_run = LastRun.from_message(message.pop("last_run"))
        store = Path(message.pop("store"))
        return cls(settings=settings, store=store, last_run=last_run, **message)
