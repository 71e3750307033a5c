"""A connection to ZooKeeper by kazoo, which is an extra: `pip install 'cometmq[cluster]'`.

kazoo has threads of its own, and connects again by itself. What is asked here has a time limit, and
it is told apart whether a request may have reached a server: kazoo queues what it cannot send yet.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from cometmq.actors.replication.engines.access import PLAIN, Access, Secret, is_refusal
from cometmq.actors.replication.engines.errors import (
    EngineFault,
    EngineUnreachable,
    Lost,
    Rejected,
)
from cometmq.actors.replication.engines.kazoo_threads import (
    CONNECTS,
    SESSION_MS_MAX,
    Address,
    Odd,
    connection,
    handler,
    kazoo,
)
from cometmq.actors.replication.said import Said
from cometmq.protocol.retry import FIRST_S, MOST_S, pause_s, spread

# It warns at each attempt to connect, and tells faults with the way to them; see leased, watching,
# and what is said here.
_kazoo_log: Final = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.CRITICAL)

#: From one look at a server that does not answer to the next.
LOOK_S: Final = 0.05

# Raised by who reads an answer, of one that is none.
_ODD: Final = (struct.error, ValueError, TypeError, IndexError, RuntimeError)


class Line:
    """One kazoo client, which is one session of ZooKeeper.

    A server may hang: its machine confirms what it is sent, and nothing is answered. kazoo never
    notices that while requests are made, so here the connection is ended then, and kazoo goes to
    the next server with the same session. Whatever ends kazoo's thread, there is another client
    with the next request, and so another session.

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
        self._is_over = False  # the client has ended
        self._odd = ""  # what a server has said that cannot be, since there was an answer
        self._said = Said()
        self._make()

    def _make(self) -> None:
        """A client anew."""
        self._handler = handler(self._session_s, self._access, is_alone=len(self._hosts) == 1)
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
        self._client._connection = connection(self._client, self._heard_odd, self._ended)
        self._client.add_listener(self._hear)

    def _hear(self, state: str) -> None:
        self._waits_since = None  # requests of the connection before have failed
        if state == "CONNECTED":
            self._handler.opened()
            self._connected.set()
        else:
            self._connected.clear()
            self._is_denied = self._is_denied or self._client.client_state == "AUTH_FAILED"

    def _ended(self) -> None:
        self._is_over = True

    def _heard_odd(self, server: str, error: Exception) -> None:
        why = str(error) if isinstance(error, Odd) else repr(error)
        self._odd = f"{server}: {why:.200}"
        self._said.warn(server, "%s: %s: it is connected anew", self._where, self._odd)

    @property
    def session_id(self) -> int | None:
        """Also while no server is connected, when kazoo's `client_id` is None: a connection may
        break as soon as an answer was read, and the session goes on. None: there is no session."""
        number: int | None = self._client._session_id
        return number

    def call(self, until: float, *starts: Callable[[Any], Any]) -> list[Any]:
        """Send requests in one go, and wait for all answers until that time.monotonic().

        Raises EngineUnreachable or Rejected if nothing was sent, or done; Lost; EngineFault; an
        error of ZooKeeper about nodes.
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
        except _ODD as error:
            self._heard_odd("an answer", error)
            self._handler.drop()
            raise Lost(f"{self._where}: {self._odd}") from error
        except (self._errors.NoAuthError, self._errors.AuthFailedError) as error:
            # The second is said before anything that was asked is sent.
            raise Rejected(
                f"{self._where}: there is no permission for that ({self._access.who()})"
            ) from error
        except self._errors.KazooException as error:
            raise EngineFault(f"{self._where}: {type(error).__name__} {error}".rstrip()) from error

    def _wait_connected(self, until: float) -> None:
        """A server that takes the connection and opens no session is left."""
        while not self._connected.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
            if refused := self._handler.refused(len(self._hosts)):
                raise Rejected(f"{self._where}: {refused}")
            if self._is_denied:
                raise Rejected(
                    f"{self._where}: nobody may say there who it is ({self._access.who()})"
                )
            if time.monotonic() >= until:
                raise self._unreachable()
            self._start()
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
                self._waits_since, self._odd = None, ""
                return answer

    def ask(
        self,
        timeout_s: float,
        *starts: Callable[[Any], Any],
        known: tuple[type[Exception], ...] = (),
    ) -> list[Any]:
        """As `call`, of what may be done twice: it is sent again. Raises EngineUnreachable.

        Args:
            known: the errors about nodes that are answers to this; another one is an EngineFault.
        """
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
            except self._errors.KazooException as error:
                if isinstance(error, known):
                    raise
                raise EngineFault(
                    f"{self._where}: {type(error).__name__} is no answer to what was asked"
                ) from error

    def _unreachable(self) -> EngineUnreachable:
        why = self._odd or self._handler.why_none()
        return EngineUnreachable(
            f"{self._where}: no server has answered in time: is a majority of them running, and "
            f"reachable from here?{why and f' ({why})'}"
        )

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise self._unreachable()
            if self._is_over:
                self._stop()
                self._is_denied = self._is_over = False
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
    if not 0 < granted_ms <= SESSION_MS_MAX:
        raise OSError("it is no ZooKeeper")
    return float(granted_ms / 1000)
