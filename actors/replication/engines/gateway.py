"""etcd's JSON gateway by http.client: requests to whichever endpoint answers, and a stream.

Sources: etcd's api_grpc_gateway page; rpc.proto for the fields. Keys and values are in base64, and
64-bit numbers are texts.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from cometmq.actors.replication.engines.access import Access, is_of_ours, is_refusal
from cometmq.actors.replication.engines.errors import (
    EngineFault,
    EngineUnreachable,
    Lost,
    Rejected,
)
from cometmq.actors.replication.engines.login import Login
from cometmq.protocol.retry import pause_s, spread

ANSWER_BYTES_MAX: Final = 4 << 20
ATTEMPT_S: Final = 0.5  # for one endpoint, of a request that another one may be asked instead
_IDLE_MAX: Final = 4  # connections kept

# rpctypes of etcd: another token is needed.
_WHO: Final = ("user name is empty", "invalid auth token", "revision of auth store is old")
# And this one, with a client's certificate and without a token.
_DENIED: Final = "permission denied"

Address = tuple[str, int]


class Unauthenticated(Rejected):
    """It does not know who asks: without a token, or by one that it has forgotten."""


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def decoded(text: object) -> bytes:
    """Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("no text")
    return base64.b64decode(text, validate=True)


class Gateway:
    """Several endpoints of one etcd."""

    def __init__(self, where: str, endpoints: Sequence[Address], access: Access) -> None:
        self._where = where
        self._access = access
        self._login = Login(where, access, self._send)
        self._endpoints = tuple(endpoints)
        self._lock = threading.Lock()
        self._good = 0  # the endpoint that is asked first
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []

    @property
    def endpoint(self) -> Address:
        """Host and port of the first server to try."""
        return self._endpoints[self._good]

    def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """A request that may be carried out twice: other endpoints are asked, again and again.

        Raises EngineUnreachable, EngineFault.
        """
        until = time.monotonic() + timeout_s
        failures = 0
        while True:
            left = until - time.monotonic()
            attempt_s = left if len(self._endpoints) == 1 else min(left, ATTEMPT_S)
            try:
                return self._once(path, body, time.monotonic() + attempt_s)
            except (Lost, EngineUnreachable) as error:
                failures += 1
                # All endpoints once without a pause.
                pause = spread(pause_s(failures // len(self._endpoints)))
                if time.monotonic() + pause >= until:
                    raise EngineUnreachable(
                        f"{error}: is a majority of the servers running, and reachable from here?"
                    ) from error
                if failures >= len(self._endpoints):
                    time.sleep(pause)  # nothing tells when a server is there again

    def ask_once(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """A request that must not be sent again once it may have arrived.

        Raises Lost; EngineUnreachable if it reached nobody; EngineFault.
        """
        until = time.monotonic() + timeout_s
        failures = 0
        while True:
            try:
                return self._once(path, body, until)
            except EngineUnreachable:
                failures += 1
                pause = spread(pause_s(failures))
                if time.monotonic() + pause >= until:
                    raise
                time.sleep(pause)  # nothing tells when a server is there again

    def _once(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        token = self._login.token(until)
        try:
            return self._send(path, body, until, token)
        except Unauthenticated:
            self._login.forget(token)
            return self._send(path, body, until, self._login.token(until))

    def forget_token(self) -> None:
        """Another one is got for what is asked next."""
        self._login.forget()

    def _send(self, path: str, body: dict[str, Any], until: float, token: str) -> dict[str, Any]:
        number, connection = self._connect(until)
        try:
            _set_timeout(connection, until)
            _request(connection, path, body, token)
            answer = connection.getresponse()
            content = answer.read(ANSWER_BYTES_MAX + 1)
            if answer.length and len(content) <= ANSWER_BYTES_MAX:
                raise http.client.IncompleteRead(content, answer.length)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._turn_from(number)
            kind = Rejected if is_of_ours(error) else Lost
            said = self._access.words(error)
            raise kind(f"{self._where}: {self._name(number)} {path}: {said}") from error
        if len(content) > ANSWER_BYTES_MAX or answer.will_close:
            connection.close()
        else:
            self._keep(number, connection)
        return self._understood(number, path, answer.status, content, has_token=bool(token))

    def _understood(
        self, number: int, path: str, status: int, content: bytes, *, has_token: bool
    ) -> dict[str, Any]:
        where = f"{self._where}: {self._name(number)} {path}"
        try:
            # A stream of one answer is one line with it.
            found = _parsed(content)
        except ValueError:
            found = None
        said = found.get("error") or found.get("message") if isinstance(found, dict) else None
        if status >= 500:  # no leader, a change of leader, no time: it may be done or not
            self._turn_from(number)
            raise Lost(f"{where}: {said or status!r:.200}")
        if status != 200 and isinstance(said, str):
            unknown = any(each in said for each in (_WHO if has_token else (*_WHO, _DENIED)))
            kind = Unauthenticated if unknown else Rejected
            raise kind(f"{where}: {said:.200} ({self._access.who()})")
        if status != 200 and b"CommonName" in content:
            raise Rejected(
                f"{where}: where etcd has users, it takes no certificate with a common name (CN) "
                f"by HTTP: issue one without (groupEngineCertFile = {self._access.asked.cert_file})"
            )
        if status != 200:
            raise Rejected(f"{where}: status {status}: {content[:200]!r}: is this an etcd?")
        if not isinstance(found, dict):
            raise EngineFault(f"{where}: {content[:200]!r}: is this an etcd?")
        return found

    # --- connections ---

    def _connect(self, until: float) -> tuple[int, http.client.HTTPConnection]:
        """To the first endpoint that takes it. Raises EngineUnreachable."""
        kept = self._kept()
        if kept is not None:
            return kept
        first = self._good
        why: list[str] = []
        refused = 0
        for step in range(len(self._endpoints)):
            number = (first + step) % len(self._endpoints)
            connection = self._connection(number, until)
            try:
                connection.connect()
            except OSError as error:
                why.append(f"{self._name(number)}: {self._access.words(error)}")
                refused += is_refusal(error)
                connection.close()
                continue
            self._good = number
            return number, connection
        if refused == len(why):  # it does not pass by itself
            raise Rejected(f"{self._where}: {'; '.join(why)}")
        raise EngineUnreachable(f"{self._where}: nobody answers ({'; '.join(why)})")

    def _connection(self, number: int, until: float) -> http.client.HTTPConnection:
        host, port = self._endpoints[number]
        left = until - time.monotonic()
        if len(self._endpoints) > 1:
            left = min(left, ATTEMPT_S)
        left, context = max(0.01, left), self._access.context()
        if context is not None:
            return http.client.HTTPSConnection(host, port, timeout=left, context=context)
        return http.client.HTTPConnection(host, port, timeout=left)

    def _kept(self) -> tuple[int, http.client.HTTPConnection] | None:
        """One that its server has not closed meanwhile: what is sent there would be in doubt."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                number, connection = self._idle.pop()
            if number == self._good and connection.sock is not None:
                poller = select.poll()
                poller.register(connection.sock, select.POLLIN)
                if not poller.poll(0):
                    return number, connection
            connection.close()

    def _keep(self, number: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append((number, connection))
                return
        connection.close()

    def _turn_from(self, number: int) -> None:
        """Another endpoint is asked first from now on."""
        with self._lock:
            if self._good == number:
                self._good = (number + 1) % len(self._endpoints)

    def _name(self, number: int) -> str:
        host, port = self._endpoints[number]
        return f"{host}:{port}"

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float,
        opened: Callable[[socket.socket], None],
    ) -> Iterator[dict[str, Any]]:
        """Answers without end, each a line. Waits for the next one without a time limit: whoever
        shuts the socket down that `opened` is told of ends it.

        Raises EngineUnreachable, Lost.
        """  # fmt: skip
        until = time.monotonic() + timeout_s
        token = self._login.token(until)
        number, connection = self._connect(until)
        with contextlib.closing(connection):
            try:
                assert connection.sock is not None
                opened(connection.sock)
                _request(connection, path, body, token)
                answer = connection.getresponse()
                connection.sock.settimeout(None)
                while line := answer.readline(ANSWER_BYTES_MAX):
                    found = _parsed(line)
                    if not isinstance(found, dict) or not isinstance(found.get("result"), dict):
                        raise ValueError(f"{line[:200]!r}")
                    yield found["result"]
            except (OSError, ValueError, http.client.HTTPException, AttributeError) as error:
                raise Lost(f"{self._where}: {self._name(number)} {path}: {error}") from error
            finally:
                self._turn_from(number)


def _parsed(content: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _set_timeout(connection: http.client.HTTPConnection, until: float) -> None:
    if connection.sock is not None:
        connection.sock.settimeout(max(0.01, until - time.monotonic()))


def _request(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], token: str
) -> None:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = token
    connection.request("POST", path, json.dumps(body), headers)
