"""The port that the other replicas come to, and what one costs there who is none of them.

Until its handshake is over a connection is a stranger's. It costs a descriptor, the memory of a
handshake, and what it takes to answer: so there are few places, a stranger has little time and may
send little, and all together have a tenth of this thread's time. For a further one who comes the
stranger that came first has to go. A replica needs some milliseconds for its handshake.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from cometmq.actors.replication.peers.certificate import name_of
from cometmq.actors.replication.peers.poller import Poller
from cometmq.actors.replication.peers.tls import HANDSHAKE_S, ConnectionLost, TlsConnection
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.event_log import EventLog

BACKLOG: Final = 128
PLACES: Final = 128
STRANGER_BYTES: Final = 16_384  # a replica's handshake has some 1,100, with longer keys some 2,300
ACCEPTS_AT_ONCE: Final = 16
SHARE_S: Final = 0.005  # of this thread's time between two calls of `tend`

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Stranger(NamedTuple):
    connection: TlsConnection
    address: str
    until: float  # time.monotonic()


class Acceptor:
    """Of one port, in one thread.

    Args:
        bind: host:port, an IPv6 address in brackets.
        context: of TLS, for who comes.
        poller: waits for them.
        let_in: takes a connection, the name that it has shown, and where it comes from. False: it
            is ended.
        said: what is refused is told there.
        places: how many strangers there may be.
        handshake_s: how long one may be a stranger.

    Raises OSError where nobody can come to `bind`.
    """

    def __init__(
        self,
        bind: str,
        context: ssl.SSLContext,
        poller: Poller,
        *,
        let_in: Callable[[TlsConnection, str, str], bool],
        said: EventLog,
        places: int = PLACES,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._context = context
        self._poller = poller
        self._let_in = let_in
        self._said = said
        self._places = places
        self._handshake_s = handshake_s
        self._strangers: dict[int, _Stranger] = {}  # in the order in which they came
        self._counts = meters.zeroes(
            meters.PEERS_CONNECTIONS_REFUSED,
            meters.PEERS_HANDSHAKES_FAILED,
            meters.PEERS_ACCEPTS_FAILED,
        )
        self._listener = _listen(bind)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._own = Poller()  # while they have no time, nobody looks at it
        self._own.add(self._listener.fileno(), self._accept)
        self._spent_s = 0.0
        self._have_time = True
        poller.add(self._own.fileno(), self._serve)

    def __len__(self) -> int:
        return len(self._strangers)

    def statistics(self) -> meters.Figures:
        return dict(self._counts)

    def tend(self, now: float) -> None:
        """Now and then.

        Args:
            now: time.monotonic()
        """
        self._spent_s = 0.0
        if not self._have_time:
            self._poller.add(self._own.fileno(), self._serve)
            self._have_time = True
        for stranger in list(self._strangers.values()):
            if now < stranger.until:
                break  # so it is with all that came later
            self._refuse(stranger, f"it was a stranger for {self._handshake_s:.0f} s")

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._end(stranger)
        self._poller.remove(self._own.fileno())
        self._own.close()
        self._listener.close()

    # --- who comes ---

    def _serve(self, _events: int) -> None:
        began = time.thread_time()
        self._own.serve()
        self._spent_s += time.thread_time() - began
        if self._spent_s > SHARE_S:
            self._have_time = False
            self._poller.remove(self._own.fileno())

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                plain, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    continue  # that one has gone already
                self._counts[meters.PEERS_ACCEPTS_FAILED] += 1
                self._said.warn("descriptors", "no replica can be let in: %s", error.strerror)
                if not self._make_room("there are no descriptors"):
                    self._spent_s = SHARE_S  # no more of this before `tend`
                    return
            else:
                self._take_in(plain, f"{address[0]}:{address[1]}")

    def _take_in(self, plain: socket.socket, address: str) -> None:
        connection = TlsConnection(plain, self._context, is_server=True)
        if len(self._strangers) >= self._places:
            self._make_room(f"others come, and {self._places} are there")
        stranger = _Stranger(connection, address, time.monotonic() + self._handshake_s)
        self._strangers[connection.fileno()] = stranger
        self._own.add(connection.fileno(), lambda _events: self._go_on(stranger))

    def _go_on(self, stranger: _Stranger) -> None:
        """With its handshake."""
        connection = stranger.connection
        try:
            connection.fill(memoryview(bytearray(STRANGER_BYTES)))
            if connection.received_bytes > STRANGER_BYTES:
                self._refuse(stranger, f"over {STRANGER_BYTES} bytes came before its handshake")
                return
            if not connection.shake_hands():
                return
        except ConnectionLost as lost:
            self._counts[meters.PEERS_HANDSHAKES_FAILED] += 1
            self._said.warn(
                ("handshake", str(lost)),
                "at the port of replicas a connection came to nothing: %s. It was from %s",
                lost, stranger.address,
            )  # fmt: skip
            self._end(stranger)
            return
        self._let_go(stranger)
        if not self._let_in(connection, name_of(connection.tls), stranger.address):
            connection.close()

    def _make_room(self, why: str) -> bool:
        """The first to come goes; False: there is none."""
        for stranger in self._strangers.values():
            self._refuse(stranger, why)
            return True
        return False

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._counts[meters.PEERS_CONNECTIONS_REFUSED] += 1
        self._end(stranger)
        self._said.warn(
            "refused", "at the port of replicas the connection of %s is ended: %s",
            stranger.address, why,
        )  # fmt: skip

    def _let_go(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._own.remove(stranger.connection.fileno())

    def _end(self, stranger: _Stranger) -> None:
        self._let_go(stranger)
        stranger.connection.close()


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
