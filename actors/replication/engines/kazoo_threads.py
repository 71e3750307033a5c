"""kazoo's threads as they are here: with limits of time that it has not, and nothing that a server
says ends one.
"""

from __future__ import annotations

import importlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from cometmq.actors.replication.engines.access import Access, is_refusal, shut
from cometmq.actors.replication.engines.errors import EngineMissing

Address = tuple[str, int]

#: A machine that is gone does not refuse a connection. So many servers on such machines are tried
#: in the time of a session; kazoo by itself waits for each of them as long as a session is.
CONNECTS: Final = 6
#: A connection is ended once its other side has confirmed nothing for so long a part of a session.
SILENCES: Final = 3
#: Of one answer: it is read as a whole. A record has 64 KiB, a list of sessions some KiB.
ANSWER_BYTES_MAX: Final = 4 << 20
#: Longer than that no session is; ours have a minute at most.
SESSION_MS_MAX: Final = 10_000_000

_AUTH_XID: Final = -4  # of what is answered to a user's name
_PASSWORD_BYTES: Final = 16  # of a session


class Odd(Exception):
    """It is nothing that a ZooKeeper says there."""


def kazoo(module: str) -> Any:
    """A module of kazoo. Raises EngineMissing."""
    try:
        return importlib.import_module(f"kazoo.{module}")
    except ImportError as error:
        raise EngineMissing(
            "the engine ZooKeeper needs the package kazoo: pip install 'cometmq[cluster]'"
        ) from error


def connection(
    client: Any, on_odd: Callable[[str, Exception], None], on_end: Callable[[], None]
) -> Any:
    """A client's connection thread. What a server says that cannot be costs that connection, as a
    broken one does: kazoo's own ends the thread, and its client never comes back.

    Such an answer is also the one that ZooKeeper gives behind that which it does not give, where
    the session has moved to another server meanwhile.

    Requests of a session are numbered over all its connections, as Java's client does it. kazoo
    begins anew with each. But a request of one connection may still be on its way when the next is
    there, and what becomes of it is told to whoever has the same session and number: of two
    changes the second was said to be made, and the first one was.

    Args:
        on_odd: told which server it was, and what.
        on_end: told that the thread ends: as it was asked to, because a user is refused, or by a
            fault that is no server's. The client does not begin again by itself then.
    """
    base: Any = kazoo("protocol.connection").ConnectionHandler
    known_errors = kazoo("exceptions").EXCEPTIONS
    connecting = kazoo("protocol.states").KeeperState.CONNECTING

    class Connection(base):  # type: ignore[misc]
        _number = 0
        _is_beginning = False

        @property
        def _xid(self) -> int:
            return self._number

        @_xid.setter
        def _xid(self, number: int | None) -> None:
            self._number = number or self._number

        def zk_loop(self) -> None:
            try:
                super().zk_loop()
            except Exception as error:
                on_odd("kazoo", error)
            finally:
                on_end()

        def _connect_attempt(self, host: str, hostip: str, port: int, retry: Any) -> Any:
            try:
                return super()._connect_attempt(host, hostip, port, retry)
            except Exception as error:
                on_odd(f"{host}:{port}", error)
                self.client._session_callback(connecting)
                return None  # the next one

        def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
            """What is said before anything else."""
            self._is_beginning = True
            try:
                found = super()._invoke(timeout, request, xid)
            finally:
                self._is_beginning = False
            if xid is None:
                opened, _ = found
                is_open = (
                    opened.session_id != 0  # ZooKeeper's owner of nodes that are no session's
                    and len(opened.passwd or b"") == _PASSWORD_BYTES
                    and opened.time_out <= SESSION_MS_MAX
                )
                is_refused = opened.time_out <= 0
                if not (is_open or is_refused):
                    raise Odd("it opens no session, and does not refuse one either")
            return found

        def _read(self, length: int, timeout: float) -> Any:
            if not 0 <= length <= ANSWER_BYTES_MAX:
                raise Odd(f"it announces {length} bytes")
            return super()._read(length, timeout)

        def _read_header(self, timeout: float) -> Any:
            found = super()._read_header(timeout)
            if found[0].xid == _AUTH_XID and not self._is_beginning:
                raise Odd("it answers who we are, which nobody has said")
            return found

        def _read_response(self, header: Any, buffer: bytes, offset: int) -> Any:
            """Whoever has asked is told that the connection is lost."""
            pending = self.client._pending
            expected = pending[0][2] if pending else "none"
            if header.xid != expected:
                raise Odd(f"it answers request {header.xid} where {expected} is the next")
            if header.err and header.err not in known_errors:
                raise Odd(f"it answers with error {header.err}, which kazoo does not know")
            return super()._read_response(header, buffer, offset)

    made = client._connection
    return Connection(client, made.retry_sleeper, logger=made.logger)


def handler(session_s: float, access: Access, *, is_alone: bool) -> Any:
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
