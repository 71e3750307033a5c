"""The engine etcd, 3.4 or later, by its JSON gateway; there is nothing to install beside it.

    PREFIX/records/GROUP        the record; its version is etcd's mod_revision, which never repeats
    PREFIX/sessions/GROUP/ID    a broker that is there; it hangs on a lease

Reads are linearizable as etcd's are unless asked otherwise. A lease has whole seconds, and etcd
gives it one and a half times its election time-out at least.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cometmq.actors.replication.engines.access import PLAIN, Access, shut
from cometmq.actors.replication.engines.engine import (
    RECORD_BYTES_MAX,
    TIMEOUT_S,
    Applied,
    Outcome,
    Refused,
    Stored,
    Unknown,
)
from cometmq.actors.replication.engines.errors import (
    EngineError,
    EngineFault,
    Lost,
    Rejected,
    SessionHeld,
)
from cometmq.actors.replication.engines.gateway import (
    Address,
    Gateway,
    decoded,
    encoded,
)
from cometmq.actors.replication.engines.handle import Handle
from cometmq.protocol.retry import pause_s, spread

log = logging.getLogger(__name__)

PREFIX: Final = "/cometmq"
TTL_S_GRANTED_MAX: Final = 10_000  # one and a half of the longest election time-out is far below


class EtcdEngine(Handle):
    """See `engine.Engine`.

    Args:
        endpoints: host and port where clients come.
        prefix: of all keys.
    """

    def __init__(
        self,
        endpoints: Sequence[Address],
        prefix: str = PREFIX,
        access: Access = PLAIN,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        shown = ",".join(f"{host}:{port}" for host, port in endpoints)
        super().__init__(f"etcd://{shown}{prefix}", timeout_s)
        self._prefix = prefix
        self._gateway = Gateway(self.where, endpoints, access)
        self._stream: _Stream | None = None

    def record_key(self, group: str) -> str:
        return f"{self._prefix}/records/{group}"

    def session_key(self, group: str, broker_id: int | str) -> str:
        return f"{self._prefix}/sessions/{group}/{broker_id}"

    # --- records ---

    def _get(self, group: str) -> Stored | None:
        body = {"key": encoded(self.record_key(group).encode())}
        return self._stored(group, self._ask("/v3/kv/range", body))

    def _stored(self, group: str, answer: dict[str, Any]) -> Stored | None:
        with self._understanding(group):
            found = answer.get("kvs", [])
            if not found:
                return None
            record = decoded(found[0].get("value", ""))
            version = int(found[0]["mod_revision"])
            if len(record) > RECORD_BYTES_MAX or not 0 < version < 2**63:
                raise ValueError(f"{len(record)} bytes of version {version}")
            return Stored(record, version)

    def _change(self, group: str, expected: int | None, record: bytes | None) -> Outcome:
        key = encoded(self.record_key(group).encode())
        if record is None:
            change: dict[str, Any] = {"request_delete_range": {"key": key}}
        else:
            change = {"request_put": {"key": key, "value": encoded(record)}}
        try:
            answer = self._gateway.ask_once(
                "/v3/kv/txn", _transaction(key, expected or 0, change), self.timeout_s
            )
            with self._understanding(group):
                if answer.get("succeeded") is True:
                    return Applied(int(answer["header"]["revision"]))
                read = answer["responses"][0]["response_range"]
        except Rejected:
            raise
        except (Lost, EngineFault) as error:  # whatever it has answered, it may have done it
            return Unknown(str(error))
        return Refused(self._stored(group, read))

    # --- sessions ---

    def _alive(self, group: str) -> frozenset[int]:
        start = self.session_key(group, "").encode()
        body = {"key": encoded(start), "range_end": encoded(_behind(start)), "keys_only": True}
        answer = self._ask("/v3/kv/range", body)
        with self._understanding(group):
            names = [decoded(each["key"])[len(start) :] for each in answer.get("kvs", [])]
            if not all(name.isdigit() and len(name) < 20 for name in names):
                raise ValueError(f"{names!r:.200} are no brokers' ids")
            return frozenset(map(int, names))

    def _lease(self, group: str, broker_id: int, ttl_s: float) -> _Lease:
        answer = self._ask("/v3/lease/grant", {"TTL": math.ceil(ttl_s)})
        with self._understanding(group):
            lease = _Lease(self, self.session_key(group, broker_id), answer["ID"], answer["TTL"])
        try:
            lease.open()
        except BaseException:
            with contextlib.suppress(EngineError):
                lease.release()
            raise
        return lease

    # --- watches ---

    def _source(self) -> None:
        """Called before the first watch: from then on the stream tells."""
        self._stream = _Stream(self, self._gateway)

    def heard(self, keys: Sequence[bytes]) -> None:
        """These have changed, as the stream says; none: it has begun."""
        for key in keys:
            name = key.decode(errors="replace").removeprefix(f"{self._prefix}/")
            self._poke(name.split("/")[1] if name.count("/") else None)
        if not keys:
            self._poke()

    def _missed(self) -> None:
        """The stream's server may hang: there are others."""
        if self._stream is not None:
            self._stream.again()

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._gateway.close()

    # --- ---

    def _ask(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        return self._gateway.ask(path, body, timeout_s or self.timeout_s)

    @contextlib.contextmanager
    def _understanding(self, group: str) -> Iterator[None]:
        """Around what takes an answer apart. Raises EngineFault."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineFault(
                f"{self.where}: group {group}: an answer that is none of etcd's, or keys that no "
                f"broker wrote: {error!r:.200}"
            ) from error


class _Lease:
    """A `leased.Lease`: etcd's lease, and the key that hangs on it.

    Raises ValueError for what etcd grants to nobody.
    """

    def __init__(self, engine: EtcdEngine, key: str, lease_id: object, ttl: object) -> None:
        self._engine = engine
        self._key = key
        self._id = str(int(str(lease_id)))
        granted_s = int(str(ttl))
        if not 0 < granted_s <= TTL_S_GRANTED_MAX:
            raise ValueError(f"a lease of {granted_s} s")
        self.ttl_s = float(granted_s)

    def open(self) -> None:
        key = encoded(self._key.encode())
        put = {"request_put": {"key": key, "value": encoded(secrets.token_bytes(16)),
                               "lease": self._id}}  # fmt: skip
        try:
            answer = self._engine._gateway.ask_once(
                "/v3/kv/txn", _transaction(key, 0, put), self._engine.timeout_s
            )
            ours = answer.get("succeeded") is True
        except Lost:
            ours = self._is_there(self._engine.timeout_s)
        if not ours:
            raise SessionHeld(
                f"{self._engine.where}: key {self._key} is another session's, which ends by its "
                "time at the latest"
            )

    def renew(self, asked_at_s: float, timeout_s: float) -> float | None:
        """Its time begins anew at the leader, after it was asked for."""
        answer = self._engine._ask("/v3/lease/keepalive", {"ID": self._id}, timeout_s / 2)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise EngineFault(f"{self._engine.where}: {answer!r:.200} is no lease's answer")
        # Of a lease that has ended there is no TTL.
        lives = int(result.get("TTL", 0)) > 0 and self._is_there(timeout_s / 2)
        return asked_at_s + self.ttl_s if lives else None

    def _is_there(self, timeout_s: float) -> bool:
        """Linearizable, other than the lease's answer: its key hangs on it."""
        answer = self._engine._ask("/v3/kv/range", {"key": encoded(self._key.encode())}, timeout_s)
        found = answer.get("kvs") or [{}]
        return bool(found[0].get("lease") == self._id)

    def release(self) -> None:
        self._engine._ask("/v3/lease/revoke", {"ID": self._id})


class _Stream:
    """The thread that hears of changes, of all groups: there are few."""

    def __init__(self, engine: EtcdEngine, gateway: Gateway) -> None:
        self._engine = engine
        self._gateway = gateway
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    def again(self) -> None:
        """From another endpoint."""
        with self._lock:
            if self._socket is not None:
                shut(self._socket)

    def close(self) -> None:
        self._ending.set()
        self.again()
        self._thread.join()

    def _opened(self, line: socket.socket) -> None:
        with self._lock:
            self._socket = line
        if self._ending.is_set():
            self.again()

    def _run(self) -> None:
        failures = 0
        while not self._ending.is_set():
            try:
                self._hear()
                failures = 0
            except Lost as error:
                log.debug("%s", error)
                failures = 1
            except EngineError as error:
                failures += 1
                log.debug("%s", error)
            except Exception as error:  # nobody else would begin the stream anew
                failures += 1
                if failures == 1:
                    log.warning("%s: the watch is begun anew: %r", self._engine.where, error)
            finally:
                with self._lock:
                    self._socket = None
            self._ending.wait(spread(pause_s(failures)))

    def _hear(self) -> None:
        start = f"{self._engine._prefix}/".encode()
        body = {"create_request": {"key": encoded(start), "range_end": encoded(_behind(start))}}
        timeout_s = self._engine.timeout_s
        for result in self._gateway.stream("/v3/watch", body, timeout_s, self._opened):
            if result.get("canceled"):  # as for a token that is forgotten: it comes with no answer
                self._gateway.forget_token()
                raise EngineFault(
                    f"{self._engine.where}: the watch was ended: {result.get('cancel_reason')}"
                )
            events = result.get("events", [])
            try:
                keys = [decoded(each["kv"]["key"]) for each in events]
            except (KeyError, TypeError, ValueError):
                keys = []
            self._engine.heard(keys)


def _transaction(key: str, revision: int, change: dict[str, Any]) -> dict[str, Any]:
    """Make the change if the key has that mod_revision, 0 if there is none; else read it."""
    equal = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
    read = {"request_range": {"key": key}}
    return {"compare": [equal], "success": [change], "failure": [read]}


def _behind(prefix: bytes) -> bytes:
    """The first key that does not begin with it: etcd's range_end of a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
