"""How a group stands: by the engine's record, by sessions, and by what is on this machine.

It works while any of the replicas are down, or all. Where a replica is on another machine, what is
known of its log is what the master says; run it there where more is to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Self

import psutil

from cometmq.actors.replication.core.record import GroupRecord, decode_record
from cometmq.actors.replication.engines.engine import Engine, View, now_s
from cometmq.actors.replication.group.sessions import alive_in
from cometmq.actors.runtime import meters
from cometmq.cluster.place import GroupPlace
from cometmq.cluster.stores import LocalReplica, LocalStores

MASTER: Final = "master"
FOLLOWER: Final = "follower"
AWAY: Final = "away"

_NOBODY: Final = LocalReplica()


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica.

    Args:
        pid: of its broker, where that is on this machine and runs.
        epoch: that it has promised; None: not known.
        in_sync: it is in the in-sync set, and there.
        lag_bytes, lag_s: what it is behind the master; None: not known.
        why: it is not in sync; "" where it is.
    """

    name: str
    role: str
    address: str
    pid: int | None
    epoch: int | None
    in_sync: bool
    lag_bytes: int | None
    lag_s: float | None
    why: str


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """A group at one moment.

    Args:
        version: of the record in the engine; 0: there is none.
        master: who has been elected and is there; None: nobody.
        why: messages are not taken; "" where they are.
    """

    name_server: str
    group: str
    engine: str
    version: int
    epoch: int
    master: str | None
    min_in_sync: int
    why: str
    replicas: tuple[ReplicaStatus, ...]

    @property
    def serves(self) -> bool:
        return not self.why

    @property
    def in_sync(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.replicas if each.in_sync)

    def replica(self, name: str) -> ReplicaStatus | None:
        return next((each for each in self.replicas if each.name == name), None)

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "serves": self.serves}


class Looker:
    """Looks at one group, again and again. Raises of `look`: EngineError, StoreError."""

    def __init__(self, place: GroupPlace, engine: Engine) -> None:
        self.place = place
        self._engine = engine
        self._stores = LocalStores(place.stores)

    def look(self, view: View | None = None) -> GroupStatus:
        """
        Args:
            view: of a watch; None: the engine is asked.
        """
        self._follow_folder()
        if view is None:
            at_s = now_s()
            group = self.place.group
            view = View(self._engine.get(group), self._engine.alive(group), at_s)
        return status_of(self.place, view, self._stores.look())

    def supervisors(self) -> dict[str, psutil.Process]:
        """Of the replicas whose brokers run on this machine."""
        self._follow_folder()
        return self._stores.supervisors()

    def _follow_folder(self) -> None:
        """A replica of a cluster on this machine may have been added or removed since."""
        folder = self.place.folder
        if folder is not None and folder.reread():
            self.place = GroupPlace.of_folder(folder)
            self._stores.stores = dict(self.place.stores)

    def close(self) -> None:
        self._stores.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def status_of(place: GroupPlace, view: View, local: Mapping[str, LocalReplica]) -> GroupStatus:
    """Raises ConfigError for a record that cannot be read."""
    if view.stored is None:
        return GroupStatus(
            name_server=place.name_server, group=place.group, engine=place.engine, version=0,
            epoch=0, master=None, min_in_sync=0, replicas=(),
            why="the engine has no record of the group: it was never formed",
        )  # fmt: skip
    record = decode_record(view.stored.record)
    there = _Standing(record, view, local)
    replicas = tuple(there.replica(name) for name in record.replicas)
    return GroupStatus(
        name_server=place.name_server,
        group=place.group,
        engine=place.engine,
        version=view.stored.version,
        epoch=record.epoch,
        master=there.master,
        min_in_sync=record.min_iss,
        why=there.why_not_served(replicas),
        replicas=replicas,
    )


class _Standing:
    """What is known of one group at one moment."""

    def __init__(self, record: GroupRecord, view: View, local: Mapping[str, LocalReplica]) -> None:
        self._record = record
        self._local = local
        # A process that is gone from this machine is away, though its session lasts a while.
        self._alive = {
            name
            for name in alive_in(record, view.alive)
            if name not in local or local[name].pid is not None
        }
        self.master = record.master if record.master in self._alive else None
        master = local.get(self.master or "", _NOBODY)
        self._end, self._end_ms = master.wrote, master.wrote_ms
        self._followers = followers_in(master.said)

    def replica(self, name: str) -> ReplicaStatus:
        local = self._local.get(name, _NOBODY)
        in_sync = name in self._record.iss and name in self._alive
        role = MASTER if name == self.master else FOLLOWER if name in self._alive else AWAY
        lag_bytes, lag_s = self._lag(name, local)
        return ReplicaStatus(
            name=name,
            role=role,
            address=self._record.replicas[name].address,
            pid=local.pid,
            epoch=local.said.get("epoch"),
            in_sync=in_sync,
            lag_bytes=lag_bytes,
            lag_s=lag_s,
            why="" if in_sync else self._why(name, local, lag_bytes),
        )

    def _lag(self, name: str, local: LocalReplica) -> tuple[int | None, float | None]:
        """As its log lies here; else as the master has heard of it."""
        if name == self.master:
            return 0, 0.0
        if local.wrote is not None and self._end is not None:
            lag_bytes = max(0, self._end - local.wrote)
            lag_ms = max(0, self._end_ms - local.wrote_ms) if lag_bytes and local.wrote_ms else 0
            return lag_bytes, round(lag_ms / 1000, 3)
        lag = self._followers.get(name, {}).get("lag_bytes")
        return (None if lag is None else int(lag)), None

    def _why(self, name: str, local: LocalReplica, lag_bytes: int | None) -> str:
        """It is not in sync."""
        record = self._record
        if trouble := self._trouble(name):
            return trouble
        if name not in self._alive:
            why = self._why_away(name, local)
            if name in record.iss and self.master is not None:
                why += "; the group still counts on it, until the master leaves it out"
            elif name in record.elr:
                why += "; it has all that is confirmed"
            return why
        if name in record.elr:
            return "it left while too few were in sync, and is to join again"
        said = str(self._followers.get(name, {}).get("why", ""))
        if said:
            return said
        return f"{sized(lag_bytes)} behind" if lag_bytes else "it has not joined yet"

    def _trouble(self, name: str) -> str:
        """What it says itself, here or to the master."""
        said = self._local.get(name, _NOBODY).said.get("trouble")
        return str(said or self._followers.get(name, {}).get("trouble") or "")

    def _why_away(self, name: str, local: LocalReplica) -> str:
        if local.pid is not None:
            return "it runs, and has no session with the engine"
        if not self._record.replicas[name].store_uuid:
            return "it was never started"
        if local.damage:
            return f"its store is damaged, and to be replaced by an empty one: {local.damage}"
        if name in self._local:
            return "its process is not running"
        return "it has no session with the engine: it is not running, or cannot reach it"

    def why_not_served(self, replicas: tuple[ReplicaStatus, ...]) -> str:
        record = self._record
        if self.master is None:
            away = f"the master {record.master} is away, and " if record.master else ""
            if any(name in self._alive for name in (*record.iss, *record.elr)):
                return f"{away}no other one is elected yet" if away else "no master is elected yet"
            needed = " or ".join(record.iss or record.elr)
            return f"{away}no replica with all that is confirmed is there: start {needed}"
        in_sync = sum(each.in_sync for each in replicas)
        if in_sync < record.min_iss:
            return f"in sync: {in_sync}, needed: {record.min_iss}"
        local = self._local.get(self.master)
        if local is not None and not local.serves:
            return f"the master {self.master} does not serve yet"
        trouble = self._trouble(self.master)
        return f"the master {self.master}: {trouble}" if trouble else ""


def followers_in(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of a master's `ha` process on each follower, by replica."""
    found = meters.by_label(said, *meters.OF_FOLLOWER).values()
    return {str(each["replica"]): each for each in found if "replica" in each}


def sized(count: int | None) -> str:
    """Bytes, as people say them."""
    if count is None:
        return "an unknown number of bytes"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
