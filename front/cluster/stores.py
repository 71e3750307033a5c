"""What of a group is on this machine: each replica's process, and how far its log is.

Read from the control files of the stores, which disturbs nobody, also where the broker is stopped
or killed; and asked of the `ha` processes, which know of each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from cometmq.actors.launch.addresses import address_of
from cometmq.protocol.commands import GetStatistics, Statistics
from cometmq.protocol.errors import CometError, StoreError, StoreLocked
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase, Service
from cometmq.shm.os.locks import check_not_in_use
from cometmq.shm.os.processes import is_zombie
from cometmq.shm.state.damage import noted_damage

ASK_S: Final = 0.5
BETWEEN_RUNS_S: Final = 0.5


class LocalReplica(NamedTuple):
    """
    Args:
        pid: of its supervisor; None: it is not running.
        wrote, wrote_ms: where its log ends, and the store time of the last record; of a killed
            broker, as it had it. None after an orderly end, or before the first start.
        serves: as a master it takes messages.
        said: statistics of its `ha` process; empty where that does not answer.
        damage: that was found in its store.
    """

    pid: int | None = None
    wrote: int | None = None
    wrote_ms: int = 0
    serves: bool = False
    said: Mapping[str, Any] = {}
    damage: str = ""


def supervisor_of(meta: Mapping[str, Any]) -> psutil.Process | None:
    """The broker that has written a control file; None if it is gone."""
    try:
        process = psutil.Process(meta["pid"])
        if is_zombie(process.pid):
            return None
        return process if process.create_time() * 1000 <= meta["started_ms"] + 1000 else None
    except psutil.NoSuchProcess:
        return None


class LocalStores:
    """The stores of replicas, by name; looked at again and again."""

    def __init__(self, stores: Mapping[str, Path]) -> None:
        self.stores = dict(stores)
        self._channels: dict[str, Channel] = {}  # by token, which is another one for each start

    def look(self) -> dict[str, LocalReplica]:
        """Raises StoreError for a control file that is none."""
        controls = {name: _control_of(store) for name, store in self.stores.items()}
        metas = {name: control.meta for name, control in controls.items() if control is not None}
        alive = {name: meta for name, meta in metas.items() if supervisor_of(meta) is not None}
        said = self._ask({name: str(meta["token"]) for name, meta in alive.items()})
        return {
            name: LocalReplica(damage=noted_damage(self.stores[name]))
            if control is None
            else LocalReplica(
                alive[name]["pid"] if name in alive else None,
                control.read(Counter.WROTE).value,
                control.read(Counter.WROTE_TIMESTAMP).value,
                name in alive and _serves(control),
                said.get(name, {}),
                noted_damage(self.stores[name]),
            )
            for name, control in controls.items()
        }

    def supervisors(self) -> dict[str, psutil.Process]:
        """Those that run. Raises StoreError."""
        controls = {name: _control_of(store) for name, store in self.stores.items()}
        found = {
            name: supervisor_of(control.meta)
            for name, control in controls.items()
            if control is not None
        }
        return {name: process for name, process in found.items() if process is not None}

    def _ask(self, tokens: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
        """All at once: who is stopped or busy does not answer in time."""
        for token in set(self._channels) - set(tokens.values()):
            self._channels.pop(token).close()
        for token in set(tokens.values()) - set(self._channels):
            self._channels[token] = Channel(address_of(token, "ha"), "the ha process")
        asked = {
            name: (self._channels[token], self._channels[token].request(GetStatistics()))
            for name, token in tokens.items()
        }
        deadline = time.monotonic() + ASK_S
        found: dict[str, Mapping[str, Any]] = {}
        for name, (channel, pending) in asked.items():
            if channel.wait(pending, max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(CometError):
                    answer, _ = pending.result()
                    if isinstance(answer, Statistics):
                        found[name] = answer.values
        return found

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _serves(control: ControlFile) -> bool:
    """Its `ha` process lets it, and its commitlog process is there."""
    service, phase = control.read(Counter.SERVICE).value, control.read(Counter.PHASE).value
    return service in (Service.OPEN, Service.UNSURE) and phase == Phase.SERVING


def _control_of(store: Path) -> ControlFile | None:
    """None where no broker runs, nor was killed. Between two runs of a broker the file of neither
    is there for a moment, which nothing tells the end of."""
    path = store / CONTROL_FILE
    deadline = time.monotonic() + BETWEEN_RUNS_S
    while True:
        try:
            return ControlFile.open(path, writable=False)
        except NotADirectoryError:
            return None  # whatever that is, no broker runs on it
        except StoreError:
            if _beginning_of(path).strip(b"\0"):
                raise
            if time.monotonic() > deadline or not _is_in_use(store):
                return None
            time.sleep(BETWEEN_RUNS_S / 50)


def _beginning_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except FileNotFoundError:
        return b""


def _is_in_use(store: Path) -> bool:
    try:
        check_not_in_use(store)
    except StoreLocked:
        return True
    return False
