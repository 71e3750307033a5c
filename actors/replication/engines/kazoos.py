"""A connection to ZooKeeper by kazoo, which is an extra: `pip install 'cometmq[cluster]'`.

kazoo has threads of its own, and connects again by itself. What is asked here has a time limit, and
it is told apart whether a request may have reached a server: kazoo queues what it cannot send yet.
"""

from __future__ import annotations

import importlib
import logging
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from cometmq.actors.replication.engines.access import PLAIN, Access, Secret, is_refusal, shut
from cometmq.actors.replication.engines.errors import (
    EngineFault,
    EngineMissing,
    EngineUnreachable,
)
from cometmq.protocol.retry import FIRST_S, MOST_S, pause_s, spread

_kazoo_log: Final = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)  # it warns at each attempt to connect; see leased, watching

Address = tuple[str, int]

#: A machine that is gone does not refuse a connection. So many servers on such machines are tried
#: in the time of a session; kazoo by itself waits for each of them as long as a session is.
CONNECTS: Final = 6
#: From one look at a server that does not answer to the next.
LOOK_S: Final = 0.05
#: A connection is ended once its other side has confirmed nothing for so long a part of a session.
SILENCES: Final = 3


class Lost(Exception):
    """The request may have reached a server, and its answer did not come."""


def kazoo(module: str) -> Any:
    """A module of kazoo. Raises EngineMissing."""
    try:
        return importlib.import_module(f"kazoo.{module}")
    except ImportError as error:
        raise EngineMissing(
            "the engine ZooKeeper needs the package kazoo: pip install 'cometmq[cluster]'"
        ) from error


class Line:
    """One kazoo client, which is one session of ZooKeeper.

    A server may hang: its machine confirms what it is sent, and nothing is answered. kazoo never
    notices that while requests are made, so here the connection is ended then, and kazoo goes to
    the next server with the same session.

    What is made by it may be read and changed by its user alone, if it has one.

    Args:
        session_s: its time-out.
        patience_s: for a server that answers nothing, where there are others.
    """

    def __init__(
        self,
        where: str,
        hosts: Sequence[Address],
        session_s: float,
        patience_s: float,
        access: Access = PLAIN,
    ) -> None:
        self._where = where
        self._hosts = hosts
        self._access = access
        self._patience_s = patience_s if len(hosts) > 1 else math.inf
        self._opening_s = session_s / CONNECTS if len(hosts) > 1 else math.inf
        self._session_s = session_s
        self._waits_since: float | None = None  # time.monotonic(): nothing was answered since
        self._errors = kazoo("exceptions")
        self._timeout = kazoo("handlers.threading").KazooTimeoutError
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self._closed = False
        self._is_denied = False
        self._make()

    def _make(self) -> None:
        """A client anew."""
        self._handler = _handler(self._session_s, self._access, is_alone=len(self._hosts) == 1)
        again = {"max_tries": -1, "delay": FIRST_S, "max_delay": MOST_S, "max_jitter": 0.5}
        self._client = kazoo("client").KazooClient(
            hosts=",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                           for host, port in self._hosts),
            timeout=self._session_s,
            handler=self._handler,
            connection_retry=kazoo("retry").KazooRetry(**again),
            logger=_kazoo_log,
            **_user(self._access),
        )  # fmt: skip
        self._client.add_listener(self._hear)

    def _hear(self, state: str) -> None:
        self._waits_since = None  # requests of the connection before have failed
        if state == "CONNECTED":
            self._handler.opened()
            self._connected.set()
        else:
            self._connected.clear()
            self._is_denied = self._is_denied or self._client.client_state == "AUTH_FAILED"

    @property
    def session_id(self) -> int:
        found = self._client.client_id
        return int(found[0]) if found else 0

    def call(self, until: float, *starts: Callable[[Any], Any]) -> list[Any]:
        """Send requests in one go, and wait for all answers until that time.monotonic().

        Raises EngineUnreachable if nothing was sent; Lost; an error of ZooKeeper about nodes.
        """
        self._start()
        self._wait_connected(until)
        try:
            answers = [start(self._client) for start in starts]
            return [self._answer(each, until) for each in answers]
        except (
            self._errors.NoNodeError,
            self._errors.NodeExistsError,
            self._errors.BadVersionError,
        ):
            raise
        except (
            self._errors.ConnectionLoss,
            self._errors.SessionExpiredError,
            self._errors.ConnectionClosedError,
            self._errors.OperationTimeoutError,
            self._errors.SessionMovedError,
            self._timeout,
        ) as error:
            raise Lost(f"{self._where}: {type(error).__name__} {error}".rstrip()) from error
        except (self._errors.NoAuthError, self._errors.AuthFailedError) as error:
            raise EngineFault(
                f"{self._where}: there is no permission for that ({self._access.who()})"
            ) from error
        except self._errors.KazooException as error:
            raise EngineFault(f"{self._where}: {type(error).__name__} {error}".rstrip()) from error

    def _wait_connected(self, until: float) -> None:
        """A server that takes the connection and opens no session is left."""
        while not self._connected.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
            if refused := self._handler.refused(len(self._hosts)):
                raise EngineFault(f"{self._where}: {refused}")
            if self._is_denied:
                raise EngineFault(
                    f"{self._where}: nobody may say there who it is ({self._access.who()})"
                )
            if time.monotonic() >= until:
                raise self._unreachable()
            if self._handler.age_s() > self._opening_s and not self._connected.is_set():
                self._handler.drop()

    def _answer(self, request: Any, until: float) -> Any:
        """Of one request; a server that has answered none for too long is left, which fails it."""
        while True:
            now = time.monotonic()
            if self._waits_since is None:
                self._waits_since = now
            elif now > self._waits_since + self._patience_s:
                self._waits_since = None
                self._handler.drop()
            try:
                answer = request.get(timeout=max(0.001, min(LOOK_S, until - now)))
            except self._timeout:
                if time.monotonic() >= until:
                    raise
            else:
                self._waits_since = None
                return answer

    def ask(self, timeout_s: float, *starts: Callable[[Any], Any]) -> list[Any]:
        """As `call`, of what may be done twice: it is sent again. Raises EngineUnreachable."""
        until = time.monotonic() + timeout_s
        failures = 0
        while True:
            try:
                return self.call(until, *starts)
            except Lost as error:
                failures += 1
                pause = spread(pause_s(failures))
                if time.monotonic() + pause >= until:
                    raise self._unreachable() from error
                time.sleep(pause)  # nothing tells when a server is there again

    def _unreachable(self) -> EngineUnreachable:
        why = self._handler.why_none()
        return EngineUnreachable(
            f"{self._where}: no server has answered in time: is a majority of them running, and "
            f"reachable from here?{why and f' ({why})'}"
        )

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise self._unreachable()
            if self._is_denied:
                self._is_denied = False
                self._stop()  # kazoo does not try again by itself
                self._make()
            if not self._started:
                self._client.start_async()
                self._started = True

    def close(self) -> None:
        """Ends the session of ZooKeeper, if a server can be reached."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        if self._started:
            self._started = False
            self._client.stop()
            self._client.close()


def _user(access: Access) -> dict[str, Any]:
    """Of a kazoo client: who it is, and who may do anything with what it makes."""
    if not access.user:
        return {}
    word = access.password()
    acl = kazoo("security").make_digest_acl(access.user, word, all=True)
    return {"auth_data": [("digest", Secret(f"{access.user}:{word}"))], "default_acl": [acl]}


def _handler(session_s: float, access: Access, *, is_alone: bool) -> Any:
    """kazoo's threads, with limits of time that kazoo has not: for a server to take a connection,
    and for its machine to confirm what was sent. kazoo sends a ping only where nothing else was
    sent for a while, so it never notices a connection that is dead while requests are made.

    TLS is made here as well: kazoo's own trusts every authority that the machine does, and waits
    for a reply that has come already, in one piece with the one before."""
    base: Any = kazoo("handlers.threading").SequentialThreadingHandler
    connect_s, silence_ms = session_s / CONNECTS, int(session_s / SILENCES * 1000)
    secure_s = session_s if is_alone else connect_s  # a server that has just begun is slow at it

    class Handler(base):  # type: ignore[misc]
        _line: socket.socket | None = None
        _made_at = 0.0

        def __init__(self) -> None:
            super().__init__()
            self._taken = False  # a connection was, and no session opened since
            self._refused: dict[str, str] = {}  # by server: why TLS has failed, the last time

        def create_connection(
            self, address: Address, *, timeout: float, hostname: str = "", **_more: Any
        ) -> Any:
            hostname = hostname or address[0]
            line = super().create_connection(address, timeout=min(timeout, connect_s))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
            self._line, self._made_at, self._taken = line, time.monotonic(), True
            server = f"{hostname}:{address[1]}"

            def failed(error: OSError) -> None:
                if is_refusal(error):
                    self._refused[server] = f"{server}: {access.words(error)}"

            line.settimeout(secure_s)
            self._line = access.secured(line, hostname, failed)
            return self._line

        def opened(self) -> None:
            """There is a session."""
            self._taken = False
            self._refused.clear()

        def refused(self, servers: int = 1) -> str:
            """Why, once TLS has failed with so many of them."""
            found = list(self._refused.values())
            return "; ".join(found) if len(found) >= servers else ""

        def why_none(self) -> str:
            """What is known of servers without a session; "" if nothing is."""
            taken = "one takes connections and opens no session: it has no majority, or the one of "
            taken += "us speaks TLS and the other does not (groupEngineCaFile)"
            return self.refused() or (taken if self._taken else "")

        def select(self, read: Any, write: Any, error: Any, timeout: float | None = None) -> Any:
            """What TLS has taken from a connection already does not wake anybody."""
            ready = [each for each in read if isinstance(each, ssl.SSLSocket) and each.pending()]
            return (ready, [], []) if ready else super().select(read, write, error, timeout)

        def age_s(self) -> float:
            """Of the connection, or of the attempt before the one under way."""
            return 0.0 if self._line is None else time.monotonic() - self._made_at

        def drop(self) -> None:
            """End the connection; kazoo makes another one, and has its requests fail."""
            line, self._line = self._line, None
            if line is not None:
                shut(line)  # kazoo may have closed it

    return Handler()


def barrier(client: Any) -> Any:
    """A write that changes nothing: what is read behind it is what a majority has.

    A `sync` would not do, since a leader that has lost its majority answers one until it notices.
    """
    transaction = client.transaction()
    transaction.check("/", -1)
    return transaction.commit_async()


# --- what kazoo does not tell ---

_CONNECT: Final = struct.Struct(">iiqiqi16sb")  # length, protocol, zxid, ms, session, password
_CONNECTED: Final = struct.Struct(">iii")  # length, protocol, ms
_CLOSE: Final = struct.pack(">iii", 8, 1, -11)


def granted_s(
    where: str,
    hosts: Sequence[Address],
    wanted_s: float,
    timeout_s: float,
    access: Access = PLAIN,
) -> float:
    """The time-out that a session gets: servers have bounds (minSessionTimeout, usually two of
    their ticks, and maxSessionTimeout). Opens a session and closes it.

    Raises EngineUnreachable.
    """
    until = time.monotonic() + timeout_s
    why, refused = "no time was left", 0
    for address in hosts:
        left = (until - time.monotonic()) / 2
        if left <= 0:
            break
        try:
            return _granted_by(address, wanted_s, left, access)
        except (OSError, struct.error) as error:
            why = f"{address[0]}:{address[1]}: {access.words(error)}"
            refused += is_refusal(error)
    if refused == len(hosts):
        raise EngineFault(f"{where}: {why}")
    raise EngineUnreachable(f"{where}: no server has opened a session; {why}")


def _granted_by(address: Address, wanted_s: float, timeout_s: float, access: Access) -> float:
    plain = socket.create_connection(address, min(timeout_s, wanted_s / CONNECTS))
    plain.settimeout(timeout_s)
    with access.secured(plain, address[0]) as line:
        line.sendall(_CONNECT.pack(45, 0, 0, int(wanted_s * 1000), 0, 16, b"", 0))
        answer = b""
        while len(answer) < _CONNECTED.size:
            more = line.recv(_CONNECTED.size - len(answer))
            if not more:
                raise OSError(
                    "it closed the connection: it has no majority, or is no ZooKeeper, "
                    "or takes TLS alone"
                )
            answer += more
        _, _, granted_ms = _CONNECTED.unpack(answer)
        line.sendall(_CLOSE)
    if not 0 < granted_ms < 10_000_000:
        raise OSError("it is no ZooKeeper")
    return float(granted_ms / 1000)
