"""A group whose replicas are no brokers: sessions with a real engine, and control files. No tests
here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from cometmq.actors.replication.core.record import (
    GroupRecord,
    Member,
    changed,
    decode_record,
    elected,
    registered,
)
from cometmq.actors.replication.engines.engine import Session
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.group.sessions import session_id
from cometmq.cluster.administration import change
from cometmq.cluster.folder import ClusterFolder
from cometmq.cluster.running import ensure_formed
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase, Service

TTL_S = 30


class FakeMembers:
    """Of a cluster on this machine. Replicas are made to do what a broker would.

    Args:
        folder: of the cluster; its record is made if need be.
    """

    def __init__(self, folder: ClusterFolder) -> None:
        self.folder = folder
        self.group = folder.file.group
        self.engine = open_engine(folder.file.engine)
        ensure_formed(folder, self.engine)
        self._sessions: dict[str, Session] = {}

    @property
    def record(self) -> GroupRecord:
        stored = self.engine.get(self.group)
        assert stored is not None
        return decode_record(stored.record)

    def start(self, name: str) -> None:
        """Register a life of it, and hold a session."""
        before = self.record.replicas[name]
        member = Member(before.address, before.store_uuid or f"uuid-{name}", before.incarnation + 1)
        change(self.engine, self.group, lambda each: registered(each, name, member, stays=True))
        life = (name, member.store_uuid, member.incarnation)
        self._sessions[name] = self.engine.open_session(self.group, session_id(life), TTL_S)

    def end(self, name: str) -> None:
        self._sessions.pop(name).close()

    def join(self, *names: str) -> None:
        change(self.engine, self.group, lambda each: changed(each, names, ()))

    def leave(self, *names: str) -> None:
        change(self.engine, self.group, lambda each: changed(each, (), names))

    def elect(self, name: str) -> None:
        alive = set(self._sessions)
        change(self.engine, self.group, lambda each: elected(each, name, alive))

    def log(
        self,
        name: str,
        wrote: int,
        *,
        wrote_ms: int = 0,
        service: int = Service.NONE,
        phase: int = Phase.SERVING,
        pid: int | None = None,
    ) -> ControlFile:
        """The control file of a run whose log ends there.

        Args:
            pid: of its broker; this process by default.
        """
        store = self.folder.store_of(name)
        store.mkdir(parents=True, exist_ok=True)
        meta = {
            "pid": os.getpid() if pid is None else pid,
            "started_ms": int(time.time() * 1000),
            "token": f"no-such-{os.getpid()}-{name}",
        }
        control = ControlFile.create(store / CONTROL_FILE, meta)
        control.own(Counter.ALLOCATED).advance(wrote)
        control.own(Counter.WROTE).advance(wrote)
        control.own(Counter.WROTE_TIMESTAMP).advance(wrote_ms)
        control.own(Counter.SERVICE).advance(service)
        control.own(Counter.PHASE).advance(phase)
        return control

    def close(self) -> None:
        self.engine.close()


def make_cluster(path: Path, replicas: int = 3, **more: object) -> ClusterFolder:
    options = {"group": "orders", "min_in_sync": 2, **more}
    return ClusterFolder.make(path, replicas=replicas, **options)  # type: ignore[arg-type]
