"""The engine ZooKeeper: an ensemble somebody runs, or one of `managed.py`.

    ROOT/records/GROUP        a byte 1 and the record. Nothing: it was deleted
    ROOT/sessions/GROUP/ID    ephemeral: a broker that is there

A node's own version starts at 0 again when the node is made again. So a record's version is the
transaction that wrote it (mzxid), which grows for as long as the ensemble has its data; and a
record that is deleted leaves its node empty. A change looks which version of the node that
transaction is, and sets the node if it still has that one. Whoever deletes nodes by hand does it
while no broker runs.

Reads are linearizable by a write ahead of them that changes nothing (`barrier`), which costs what a
change costs.

That a session is in use the leader hears from the server in between, every half a tick. A renewal
goes through the leader, on the same way and behind that: so it proves that the leader has heard of
the renewal before it, a quarter of the time to live earlier, since no session is shorter than two
ticks. Its holder counts from there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cometmq.actors.replication.engines.access import PLAIN, Access
from cometmq.actors.replication.engines.engine import (
    RECORD_BYTES_MAX,
    TIMEOUT_S,
    Applied,
    Outcome,
    Refused,
    Stored,
    Unknown,
    View,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineFault, Lost, Rejected, SessionHeld
from cometmq.actors.replication.engines.handle import Handle
from cometmq.actors.replication.engines.kazoo_threads import Address, kazoo
from cometmq.actors.replication.engines.kazoos import Line, barrier, granted_s
from cometmq.actors.replication.engines.leased import RENEWALS

ROOT: Final = "/cometmq"
HANDLE_SESSION_S: Final = 4.0  # of a handle's own: no node hangs on it
HANGS: Final = 3  # servers that hang, which a call has the time to leave
_RECORD: Final = b"\1"


class ZooKeeperEngine(Handle):
    """See `engine.Engine`.

    Args:
        hosts: of the ensemble, host and port.
        root: the node that everything of ours is below; made if it is not there.

    Raises EngineMissing.
    """

    def __init__(
        self,
        hosts: Sequence[Address],
        root: str = ROOT,
        access: Access = PLAIN,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        shown = ",".join(f"{host}:{port}" for host, port in hosts)
        super().__init__(f"zookeeper://{shown}{root}", timeout_s)
        self.hosts = tuple(hosts)
        self.access = access
        self._root = root
        self._line = Line(self.where, self.hosts, HANDLE_SESSION_S, timeout_s / HANGS, access)
        errors = kazoo("exceptions")
        self._no_node: type[Exception] = errors.NoNodeError
        self._node_exists: type[Exception] = errors.NodeExistsError
        self._bad_version: type[Exception] = errors.BadVersionError
        self._pokes: dict[str, Callable[[object], None]] = {}  # of watches, one a group

    def record_path(self, group: str) -> str:
        return f"{self._root}/records/{group}"

    def sessions_path(self, group: str) -> str:
        return f"{self._root}/sessions/{group}"

    # --- records ---

    def _get(self, group: str) -> Stored | None:
        return self._read(group, self.timeout_s, sure=True)[1]

    def _read(self, group: str, timeout_s: float, *, sure: bool) -> tuple[int, Stored | None]:
        """The node's own version, -1 if there is none, and the record.

        Args:
            sure: linearizable; else it may be old.
        """
        path = self.record_path(group)
        starts = (barrier,) if sure else ()
        try:
            *_, (data, stat) = self._line.ask(
                timeout_s, *starts, lambda c: c.get_async(path), known=(self._no_node,)
            )
        except self._no_node:
            return -1, None
        if not data:
            return int(stat.version), None
        if data[:1] != _RECORD or len(data) > 1 + RECORD_BYTES_MAX:
            raise EngineFault(f"{self.where}: node {path} was not written by a broker")
        return int(stat.version), Stored(bytes(data[1:]), self._version(path, stat))

    def _version(self, path: str, stat: Any) -> int:
        """Of a record. Raises EngineFault."""
        if stat.mzxid <= 0:
            raise EngineFault(f"{self.where}: node {path} was changed by no transaction")
        return int(stat.mzxid)

    def _change(self, group: str, expected: int | None, record: bytes | None) -> Outcome:
        data = b"" if record is None else _RECORD + record
        until = time.monotonic() + self.timeout_s
        sure = False
        while True:
            left = max(0.0, until - time.monotonic())
            version, current = self._read(group, left, sure=sure)
            if (current and current.version) != expected:
                if sure:
                    return Refused(current)
                sure = True
                continue
            try:
                return Applied(self._put(group, version, data, until))
            except (self._bad_version, self._node_exists):
                sure = True  # somebody came first
            except self._no_node:
                self._line.ask(left, lambda c: c.ensure_path_async(f"{self._root}/records"))
            except Rejected:
                raise
            except (Lost, EngineFault) as error:  # whatever it has answered, it may have done it
                return Unknown(str(error))

    def _put(self, group: str, version: int, data: bytes, until: float) -> int:
        """The new mzxid. Raises Lost, EngineUnreachable, or what has come in between."""
        path = self.record_path(group)
        if version < 0:
            [(_, made)] = self._line.call(
                until, lambda c: c.create_async(path, data, include_data=True)
            )
            return self._version(path, made)
        [stat] = self._line.call(until, lambda c: c.set_async(path, data, version))
        return self._version(path, stat)

    # --- sessions ---

    def _alive(self, group: str) -> frozenset[int]:
        path = self.sessions_path(group)
        try:
            _, names = self._line.ask(
                self.timeout_s, barrier, lambda c: c.get_children_async(path),
                known=(self._no_node,),
            )  # fmt: skip
        except self._no_node:
            return frozenset()
        return self._ids(path, names)

    def _ids(self, path: str, names: Sequence[str]) -> frozenset[int]:
        for name in map(str, names):
            if not (name.isascii() and name.isdigit() and len(name) < 20):
                raise EngineFault(f"{self.where}: node {path}/{name:.80} is no broker's session")
        return frozenset(map(int, names))

    def _lease(self, group: str, broker_id: int, ttl_s: float) -> _Ephemeral:
        granted = granted_s(self.where, self.hosts, ttl_s, self.timeout_s, self.access)
        lease = _Ephemeral(self, f"{self.sessions_path(group)}/{broker_id}", granted)
        try:
            lease.open()
        except BaseException:
            lease.release()
            raise
        return lease

    # --- watches ---

    def _look(self, group: str) -> tuple[View, float | None]:
        """Each look sets the watches again: they tell of one change."""
        at_s = now_s()
        poke = self._pokes.setdefault(group, partial(self._moved, group))
        record, sessions = self.record_path(group), self.sessions_path(group)
        self._line.ask(
            self.timeout_s,
            lambda c: c.exists_async(record, watch=poke),
            lambda c: c.exists_async(sessions, watch=poke),
        )
        try:
            _, names = self._line.ask(
                self.timeout_s, barrier, lambda c: c.get_children_async(sessions, watch=poke),
                known=(self._no_node,),
            )  # fmt: skip
        except self._no_node:
            names = []
        return View(self._get(group), self._ids(sessions, names), at_s), None

    def _moved(self, group: str, _event: object) -> None:
        """In kazoo's thread, also when the connection is lost and watches with it."""
        self._poke(group)

    def _end(self) -> None:
        self._line.close()


class _Ephemeral:
    """A session's node: a `leased.Lease`, with a session of ZooKeeper of its own."""

    def __init__(self, engine: ZooKeeperEngine, path: str, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._renewed_s = now_s()  # before the last renewal that came through, or it was opened
        self._engine = engine
        self._path = path
        self._nonce = secrets.token_bytes(16)
        self._line = Line(engine.where, engine.hosts, ttl_s, ttl_s / RENEWALS, engine.access)

    def open(self) -> None:
        timeout_s = self._engine.timeout_s
        try:
            self._line.ask(
                timeout_s,
                lambda c: c.create_async(self._path, self._nonce, ephemeral=True, makepath=True),
                known=(self._engine._node_exists,),
            )
        except self._engine._node_exists:
            if not self._is_ours(timeout_s):  # it may be, after an answer that was lost
                raise SessionHeld(
                    f"{self._engine.where}: node {self._path} is another session's, which ends by "
                    "its time at the latest"
                ) from None

    def _is_ours(self, timeout_s: float) -> bool:
        _, stat = self._line.ask(timeout_s, barrier, lambda c: c.exists_async(self._path))
        return stat is not None and int(stat.ephemeralOwner) == self._line.session_id

    def renew(self, asked_at_s: float, timeout_s: float) -> float | None:
        before_s = self._renewed_s
        if not self._is_ours(timeout_s):
            return None
        self._renewed_s = asked_at_s
        return before_s + self.ttl_s

    def release(self) -> None:
        self._line.close()
