"""Who we are to an etcd whose users have passwords: it gives a token for one, which ages."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cometmq.actors.replication.engines.access import Access
from cometmq.actors.replication.engines.errors import EngineFault, EngineUnreachable

log = logging.getLogger(__name__)

#: Path, body, until which time.monotonic(), under which token.
Send = Callable[[str, dict[str, Any], float, str], dict[str, Any]]

# rpctypes of etcd; the first is said before anybody has made it ask for passwords.
_NOT_ENABLED = "authentication is not enabled"


class Lost(Exception):
    """The request may have been carried out; its answer did not come."""


class Rejected(EngineFault):
    """The answer says that nothing was done, and will not be."""


class Login:
    """The token of all requests; any number of threads ask for it.

    Args:
        send: as the gateway does. Raises Lost, Rejected, EngineUnreachable.
    """

    def __init__(self, where: str, access: Access, send: Send) -> None:
        self._where = where
        self._access = access
        self._send = send
        self._lock = threading.Lock()
        self._token = None if access.user else ""

    def token(self, until: float) -> str:
        """Empty: none is asked for. Raises EngineUnreachable, Rejected."""
        with self._turn(until):
            if self._token is None:
                self._token = self._authenticate(until)
            return self._token

    def forget(self, token: str | None = None) -> None:
        """It is not taken any more, as after a restart of the server; None: whichever it is."""
        with self._lock:
            if self._access.user and token in (None, self._token):
                self._token = None

    @contextlib.contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise EngineUnreachable(f"{self._where}: it gives no token in time")
        try:
            yield
        finally:
            self._lock.release()

    def _authenticate(self, until: float) -> str:
        body = {"name": self._access.user, "password": self._access.password()}
        try:
            token = self._send("/v3/auth/authenticate", body, until, "").get("token")
        except Lost as error:  # nothing else was asked for
            raise EngineUnreachable(str(error)) from error
        except Rejected as error:
            if _NOT_ENABLED not in str(error):
                raise
            log.warning("%s asks nobody for a password: %s", self._where, _NOT_ENABLED)
            return ""
        if not (isinstance(token, str) and token and token.isascii() and token.isprintable()):
            raise Rejected(f"{self._where}: it gives no token: is this an etcd?")
        return token
