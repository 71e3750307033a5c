"""One broker of a group that faults are tried on, and its disk.

replica = Replica("n0", folder, keys, "ext4", space="")
replica.start()
replica.kill()
replica.start()
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
from family import EndedEarly, RunningBroker, pull
from fault.disk import Disk
from fault.replica import BOOT, MODULE, NAMESPACE

from cometmq.actors.launch.addresses import address_of
from cometmq.actors.replication.core.record import GroupRecord, Life
from cometmq.actors.replication.group.promises_file import PromisesFile
from cometmq.protocol.commands import PullMessages
from cometmq.protocol.errors import CometError, StoreError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Service

GROUP: Final = "orders"
SPACE_BYTES: Final = 512 << 20
TAIL: Final = 3_000  # characters of a log, in what is said of a failure


class Replica:
    """One of the group's brokers, and its disk.

    Args:
        keys: its settings.
        space: its network namespace; empty: this process's.
    """

    def __init__(self, name: str, place: Path, keys: Mapping[str, object], kind: str, space: str):
        self.name = name
        self.disk = (
            Disk(place, kind, space_bytes=SPACE_BYTES, name=f"disk-{name}") if kind else None
        )
        self.store = (self.disk.folder if self.disk else place / name) / "store"
        self.store.parent.mkdir(exist_ok=True)
        self.log_path = place / f"{name}.log"
        self._keys, self._space = dict(keys), space
        self._boot = secrets.token_hex(8)
        self.broker: RunningBroker | None = None

    def start(self) -> None:
        self._before = self._promised()
        self.broker = RunningBroker(
            self.store,
            self._keys,
            wait=False,
            module=MODULE,
            environ={BOOT: self._boot, NAMESPACE: self._space},
            log_path=self.log_path,
        )

    # --- looking ---

    def _promised(self) -> Life | None:
        """The life of its store, as that has it."""
        try:
            promises = PromisesFile(self.store).load(GROUP, self.name)
        except (StoreError, OSError):
            return None
        return (self.name, promises.store_uuid, promises.incarnation)

    def is_in(self, record: GroupRecord) -> bool:
        """Whether the set has it, since it was started last."""
        life = record.life(self.name)
        return self.name in record.iss and life == self._promised() != self._before

    @property
    def runs(self) -> bool:
        return self.broker is not None and not self.broker.has_ended

    def control(self) -> ControlFile | None:
        """None between two runs."""
        try:
            return ControlFile.open(self.store / CONTROL_FILE, writable=False)
        except (StoreError, OSError):
            return None

    def counter(self, counter: Counter) -> int:
        """0 between two runs."""
        control = self.control()
        return control.read(counter).value if control is not None else 0

    @property
    def serves(self) -> bool:
        """As a master."""
        return self.runs and self.counter(Counter.SERVICE) in (Service.OPEN, Service.UNSURE)

    def pids(self) -> dict[str, int]:
        """By role."""
        assert self.broker is not None
        found = {}
        for process in self.broker.processes():
            with contextlib.suppress(psutil.Error):
                found[process.name().removeprefix("cmq-")] = process.pid
        return {**found, "supervisor": self.broker.pid}

    def read(self, topic: str, queue: int, queue_offset: int) -> list[Message]:
        """From its own reader, by its family's address."""
        control = self.control()
        assert control is not None
        address = address_of(control.meta["token"], "reader-0")
        with Channel(address, f"the reader of {self.name}") as line:
            return pull(line, PullMessages(topic, queue, queue_offset, 4))[1]

    @property
    def is_ready(self) -> bool:
        """All processes of its run serve; asked to end before, it ends as by a kill."""
        log = self.log
        return log.rfind("this run serves") > log.rfind("commitlog recovered")

    @property
    def log(self) -> str:
        """Of all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # --- faults ---

    def kill(self) -> None:
        """kill -9 of all its processes."""
        assert self.broker is not None
        self.broker.kill_all()
        self.broker = None

    def cut_power(self) -> None:
        """Until `power_on` its disk takes nothing. Nothing that it has answered since counts."""
        assert self.disk is not None
        self.disk.cut()

    def power_on(self) -> None:
        assert self.disk is not None
        self.kill()
        self.disk.power_on()
        self._boot = secrets.token_hex(8)

    def signal(self, number: int) -> None:
        assert self.broker is not None
        for process in self.broker.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> int:
        """In order; the exit status."""
        assert self.broker is not None
        status = self.broker.close()
        self.broker = None
        return status

    def why_ended(self) -> str:
        """Of one that has ended by itself, which then may be started again."""
        assert self.broker is not None
        try:
            self.broker.wait_ready()
            why = f"it had served; {self.broker.log[-TAIL:]}"
        except (CometError, EndedEarly) as error:
            why = str(error)[-TAIL:]
        self.broker.kill_all()
        self.broker = None
        return why

    def empty(self) -> None:
        """As a new disk in place of the old one."""
        shutil.rmtree(self.store, ignore_errors=not self.store.exists())

    def close(self, *, fails: bool) -> None:
        if self.broker is not None:
            self.signal(signal.SIGCONT)
            self.broker.kill_all()
        if self.disk is not None:
            with contextlib.suppress(OSError, shutil.Error):  # of one whose power is cut
                if fails:
                    kept = self.log_path.with_suffix(".kept")
                    shutil.copytree(self.store, kept, dirs_exist_ok=True)
            self.disk.close(lazily=fails)
