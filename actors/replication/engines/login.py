"""Who we are to an etcd whose users have passwords: it gives a token for one, which ages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from cometmq.actors.replication.engines.access import Access
from cometmq.actors.replication.engines.errors import EngineUnreachable, Lost, Rejected

log = logging.getLogger(__name__)

#: Path, body, until which time.monotonic(), under which token.
Send = Callable[[str, dict[str, Any], float, str], dict[str, Any]]

ASK_S: Final = 5.0

# rpctypes of etcd; the first is said before anybody has made it ask for passwords.
_NOT_ENABLED = "authentication is not enabled"


class Login:
    """The token of all requests; any number of threads ask for it.

    A password costs its server a tenth of a second of a processor. So one thread at a time asks,
    for longer than those wait who need the token: else a busy server would be asked again and
    again, and never be done.

    Args:
        send: as the gateway does. Raises Lost, Rejected, EngineUnreachable.
    """

    def __init__(self, where: str, access: Access, send: Send) -> None:
        self._where = where
        self._access = access
        self._send = send
        self._lock = threading.Lock()
        self._token: Future[str] | None = None  # None: to be asked for

    def token(self, until: float) -> str:
        """Empty: none is asked for. Raises EngineUnreachable, Rejected."""
        if not self._access.user:
            return ""
        with self._lock:
            token = self._token
            if token is None:
                token = self._token = Future()
                threading.Thread(target=self._ask, args=(token,), daemon=True).start()
        try:
            return token.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise EngineUnreachable(f"{self._where}: it gives no token in time") from None

    def forget(self, token: str | None = None) -> None:
        """It is not taken any more, as after a restart of the server; None: whichever it is."""
        with self._lock:
            known = self._token
            if known is not None and known.done() and token in (None, known.result()):
                self._token = None

    def _ask(self, token: Future[str]) -> None:
        try:
            found = self._authenticate(time.monotonic() + ASK_S)
        except Exception as error:
            with self._lock:
                self._token = None
            token.set_exception(error)
        else:
            token.set_result(found)

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
