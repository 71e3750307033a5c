"""A connection to ZooKeeper by kazoo, which is an extra: `pip install 'cometmq[cluster]'`.

kazoo has threads of its own, and connects again by itself. What is asked here has a time limit, and
it is told apart whether a request may have reached a server: kazoo queues what it cannot send yet.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

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

    Args:
        session_s: its time-out.
        patience_s: for a server that answers nothing, where there are others.
    """

    def __init__(
        self, where: str, hosts: Sequence[Address], session_s: float, patience_s: float
    ) -> None:
        self._where = where
        self._patience_s = patience_s if len(hosts) > 1 else math.inf
        self._opening_s = session_s / CONNECTS if len(hosts) > 1 else math.inf
        self._handler = _handler(session_s)
        self._waits_since: float | None = None  # time.monotonic(): nothing was answered since
        client, retry, self._errors = kazoo("client"), kazoo("retry"), kazoo("exceptions")
        self._timeout = kazoo("handlers.threading").KazooTimeoutError
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self._closed = False
        again = {"max_tries": -1, "delay": FIRST_S, "max_delay": MOST_S, "max_jitter": 0.5}
        self._client = client.KazooClient(
            hosts=",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                           for host, port in hosts),
            timeout=session_s,
            handler=self._handler,
            connection_retry=retry.KazooRetry(**again),
            logger=_kazoo_log,
        )  # fmt: skip
        self._client.add_listener(self._hear)

    def _hear(self, state: str) -> None:
        self._waits_since = None  # requests of the connection before have failed
        if state == "CONNECTED":
            self._connected.set()
        else:
            self._connected.clear()

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
        except self._errors.KazooException as error:
            raise EngineFault(f"{self._where}: {type(error).__name__} {error}".rstrip()) from error

    def _wait_connected(self, until: float) -> None:
        """A server that takes the connection and opens no session is left."""
        while not self._connected.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
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
        return EngineUnreachable(
            f"{self._where}: no server has answered in time: is a majority of them running, and "
            "reachable from here?"
        )

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise self._unreachable()
            if not self._started:
                self._client.start_async()
                self._started = True

    def close(self) -> None:
        """Ends the session of ZooKeeper, if a server can be reached."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._started:
                self._client.stop()
                self._client.close()


def _handler(session_s: float) -> Any:
    """kazoo's threads, with limits of time that kazoo has not: for a server to take a connection,
    and for its machine to confirm what was sent. kazoo sends a ping only where nothing else was
    sent for a while, so it never notices a connection that is dead while requests are made."""
    base: Any = kazoo("handlers.threading").SequentialThreadingHandler
    connect_s, silence_ms = session_s / CONNECTS, int(session_s / SILENCES * 1000)

    class Handler(base):  # type: ignore[misc]
        _line: socket.socket | None = None
        _made_at = 0.0

        def create_connection(self, *args: Any, timeout: float, **more: Any) -> Any:
            line = super().create_connection(*args, timeout=min(timeout, connect_s), **more)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
            self._line, self._made_at = line, time.monotonic()
            return line

        def age_s(self) -> float:
            """Of the connection, or of the attempt before the one under way."""
            return 0.0 if self._line is None else time.monotonic() - self._made_at

        def drop(self) -> None:
            """End the connection; kazoo makes another one, and has its requests fail."""
            line, self._line = self._line, None
            if line is not None:
                with contextlib.suppress(OSError):  # kazoo has closed it
                    line.shutdown(socket.SHUT_RDWR)

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


def granted_s(where: str, hosts: Sequence[Address], wanted_s: float, timeout_s: float) -> float:
    """The time-out that a session gets: servers have bounds (minSessionTimeout, usually two of
    their ticks, and maxSessionTimeout). Opens a session and closes it.

    Raises EngineUnreachable.
    """
    until = time.monotonic() + timeout_s
    why: object = "no time was left"
    for address in hosts:
        left = (until - time.monotonic()) / 2
        if left <= 0:
            break
        try:
            return _granted_by(address, wanted_s, left)
        except (OSError, struct.error) as error:
            why = f"{address[0]}:{address[1]}: {error}"
    raise EngineUnreachable(f"{where}: no server has opened a session; {why}")


def _granted_by(address: Address, wanted_s: float, timeout_s: float) -> float:
    with socket.create_connection(address, min(timeout_s, wanted_s / CONNECTS)) as line:
        line.settimeout(timeout_s)
        line.sendall(_CONNECT.pack(45, 0, 0, int(wanted_s * 1000), 0, 16, b"", 0))
        answer = b""
        while len(answer) < _CONNECTED.size:
            more = line.recv(_CONNECTED.size - len(answer))
            if not more:
                raise OSError("it closed the connection: it has no majority, or is no ZooKeeper")
            answer += more
        _, _, granted_ms = _CONNECTED.unpack(answer)
        line.sendall(_CLOSE)
    if not 0 < granted_ms < 10_000_000:
        raise OSError("it is no ZooKeeper")
    return float(granted_ms / 1000)
