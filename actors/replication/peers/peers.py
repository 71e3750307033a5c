"""The lines between the replicas of a group: frames to each of the others, and from each.

A replica hears by the connections that come to its port, and speaks by one to each of the others.
All of them are under TLS 1.3, with certificates of the group's authority on both sides, which is
whoever has the group's secret (certificate.py). So the name of a sender is the one that its
certificate has, whatever it says.

    n0  speaks -------> hears   n1        what n0 says to n1
        hears  <------- speaks            what n1 says to n0

A message is an encoded frame; behind a Bytes frame comes what it is about. Frames may be lost:
nothing waits for a replica that is not connected, and what was on its way when a connection broke
does not arrive by the next one.

All of it happens in the actor's own thread: no other one has to be woken for what comes or goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from cometmq.actors.replication.core.frames import (
    AnyFrame,
    WithContent,
    decode_frame,
    encode_frame,
)
from cometmq.actors.replication.peers.acceptor import PLACES, Acceptor
from cometmq.actors.replication.peers.certificate import contexts
from cometmq.actors.replication.peers.poller import Arrivals, Poller
from cometmq.actors.replication.peers.receiver import PeerReceiver
from cometmq.actors.replication.peers.sender import WELCOME, PeerSender
from cometmq.actors.replication.peers.tls import HANDSHAKE_S, ConnectionLost, TlsConnection
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.event_log import EventLog
from cometmq.conf import BrokerSettings
from cometmq.protocol.derived import WRITE_BYTES_MAX
from cometmq.protocol.errors import BadRequest, ConfigError
from cometmq.protocol.frames import FRAME_MAX

OnFrame = Callable[[str, AnyFrame, memoryview | None], None]


def content_bytes_max(settings: BrokerSettings) -> int:
    """What a replica takes behind a Bytes frame: a record, or a derived write, which is not cut."""
    return max(settings.stored_record_bytes_max, WRITE_BYTES_MAX)


class Peers:
    """One replica's lines to the others. All calls come from one thread.

    `replace` says who they are. Who comes before that is turned away, and tries again soon.

    Args:
        group, own: names: of the group, of this replica.
        bind: host:port where the others come to; a port of 0 is chosen, see `address`.
        on_frame: takes a frame, its sender, and what came behind a Bytes frame: so many bytes as
            that says, in memory of their own; whether they are what they were is for who takes
            them to see.
        said: what is refused is told there, each thing once a minute.
        content_bytes_max: behind a Bytes frame; the same for the whole group.
        strangers_max, handshake_s: how many there may be who have not shown that they are replicas,
            and for how long.

    Raises ConfigError where nobody could come to `bind`, or OpenSSL has no TLS 1.3.
    """

    def __init__(
        self,
        *,
        group: str,
        own: str,
        secret: bytes,
        bind: str,
        on_frame: OnFrame,
        said: EventLog,
        content_bytes_max: int = FRAME_MAX,
        strangers_max: int = PLACES,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._group = group
        self._own = own
        self._on_frame = on_frame
        self._said = said
        self._content_bytes_max = content_bytes_max
        self._contexts = contexts(secret, group, own)
        self._speaking: dict[str, PeerSender] = {}
        self._hearing: dict[str, PeerReceiver] = {}
        self._unfinished: set[str] = set()  # whom there is more to hear of, decrypted or not
        self._counts = meters.zeroes(meters.PEERS_SENT,
                meters.PEERS_SENT_BYTES,
                meters.PEERS_DROPPED,
                meters.PEERS_HEARD,
                meters.PEERS_HEARD_BYTES,
                meters.PEERS_REFUSED,
                meters.PEERS_NOT_ADMITTED,
                meters.PEERS_CONNECTIONS_ENDED)  # fmt: skip
        self._poller = Poller()
        self._arrivals = Arrivals()
        self._poller.add(self._arrivals.fd, lambda _events: self._arrivals.take())
        try:
            self._strangers = Acceptor(
                bind,
                self._contexts.server,
                self._poller,
                let_in=self._let_in,
                said=said,
                places=strangers_max,
                handshake_s=handshake_s,
            )
        except OSError as error:
            self._arrivals.close()
            self._poller.close()
            raise ConfigError(
                f"dLegerPeers: replicas cannot come to {own} at {bind}: {error.strerror}"
            ) from None
        self.address = self._strangers.address

    def fileno(self) -> int:
        """`receive` when it can be read."""
        return self._poller.fileno()

    # --- who they are ---

    def replace(self, addresses: Mapping[str, str]) -> None:
        """The replicas of the group and where they are, as its record says; this one may be among
        them. Who is new is connected, who has gone is let go and no longer heard, and who has moved
        is connected anew."""
        wanted = {name: where for name, where in addresses.items() if name != self._own}
        for name, speaking in list(self._speaking.items()):
            if wanted.get(name) != speaking.address:
                del self._speaking[name]
                speaking.close()
        for name in self._hearing.keys() - wanted.keys():
            self._end(self._hearing[name])
        for name in wanted.keys() - self._speaking.keys():
            self._speaking[name] = PeerSender(
                name, wanted[name], self._contexts.client, self._poller, self._arrivals, self._said
            )

    def _let_in(self, connection: TlsConnection, name: str, address: str) -> bool:
        """Somebody who has the group's secret, and that name. What it says later counts, where it
        was there before."""
        if name not in self._speaking:
            self._counts[meters.PEERS_NOT_ADMITTED] += 1
            self._said.warn(
                ("name", name),
                "somebody from %s has the secret of group %s and is called %s, as none of its "
                "other replicas is (%s): it was not let in",
                address, self._group, name, ", ".join(sorted(self._speaking)),
            )  # fmt: skip
            return False
        if name in self._hearing:
            self._end(self._hearing[name])
        try:
            connection.write(WELCOME)
        except ConnectionLost:
            return False
        hearing = PeerReceiver(connection, name, self._content_bytes_max, partial(self._take, name))
        self._hearing[name] = hearing
        self._poller.add(connection.fileno(), partial(self._hear, hearing))
        self._unfinished.add(name)  # it may have said something already
        self._speaking[name].try_now()
        return True

    # --- what is said ---

    def send(self, to: str, frame: AnyFrame, content: memoryview | None = None) -> bool:
        """Have a frame on its way to one replica. False: it is dropped, as that one is no replica
        of the group, is not connected, or has enough before it. The content is encrypted: it may
        change or go as soon as this returns.

        Raises ValueError for a content that is not what the frame says, or over the limit.
        """
        expected = frame.length if isinstance(frame, WithContent) else None
        size = None if content is None else content.nbytes
        if size != expected or (size or 0) > self._content_bytes_max:
            raise ValueError(
                f"{type(frame).__name__} with {size} bytes behind it: "
                f"it says {expected}, at most {self._content_bytes_max}"
            )
        speaking = self._speaking.get(to)
        if speaking is None or not speaking.send(encode_frame(frame), content):
            self._counts[meters.PEERS_DROPPED] += 1
            return False
        self._counts[meters.PEERS_SENT] += 1
        self._counts[meters.PEERS_SENT_BYTES] += size or 0
        return True

    # --- what is heard ---

    def receive(self) -> bool:
        """Take what has come, some of it, and hand it to `on_frame`; whether there is more."""
        if self._unfinished:
            unfinished, self._unfinished = self._unfinished, set()
            for name in unfinished:
                self._hear(self._hearing[name])
        self._poller.serve()
        return bool(self._unfinished)

    def _hear(self, hearing: PeerReceiver, _events: int = 0) -> None:
        if hearing.name in self._unfinished:
            return  # it has had its turn
        try:
            if hearing.receive():
                self._unfinished.add(hearing.name)
        except ConnectionLost as lost:
            self._lose(hearing, lost)

    def _take(self, sender: str, head: bytes, content: memoryview) -> None:
        try:
            frame = decode_frame(head)
            behind = _behind(frame, content)
        except BadRequest as error:
            self._counts[meters.PEERS_REFUSED] += 1
            self._said.warn(
                ("malformed", sender), "a message of replica %s is refused: %s", sender, error
            )
            return
        self._counts[meters.PEERS_HEARD] += 1
        self._counts[meters.PEERS_HEARD_BYTES] += len(content)
        self._on_frame(sender, frame, behind)

    def _lose(self, hearing: PeerReceiver, lost: ConnectionLost) -> None:
        if lost.is_fault:
            self._counts[meters.PEERS_CONNECTIONS_ENDED] += 1
            self._said.warn(
                ("fault", hearing.name),
                "the connection by which replica %s speaks is ended: %s", hearing.name, lost,
            )  # fmt: skip
        self._end(hearing)

    def _end(self, hearing: PeerReceiver) -> None:
        del self._hearing[hearing.name]
        self._unfinished.discard(hearing.name)
        self._poller.remove(hearing.connection.fileno())
        hearing.close()

    # --- the rest ---

    def tend(self) -> None:
        """See to what takes too long; some times a second."""
        now = time.monotonic()
        self._strangers.tend(now)
        for speaking in list(self._speaking.values()):
            speaking.tend(now)

    def statistics(self) -> meters.Figures:
        found: meters.Figures = {
            meters.PEERS: len(self._speaking),
            meters.PEERS_CONNECTED: sum(each.is_connected for each in self._speaking.values()),
            meters.PEERS_CONNECTIONS: len(self._hearing) + len(self._strangers),
            **self._counts,
            **self._strangers.statistics(),
        }
        for name, speaking in self._speaking.items():
            found[meters.PEER_ADDRESS.of(name)] = speaking.address
            found[meters.PEER_CONNECTED.of(name)] = int(speaking.is_connected)
        return found

    def close(self) -> None:
        """What was not sent by now is dropped."""
        for speaking in self._speaking.values():
            speaking.close()
        self._speaking.clear()
        for hearing in list(self._hearing.values()):
            self._end(hearing)
        self._strangers.close()
        self._arrivals.close()
        self._poller.close()


def _behind(frame: AnyFrame, content: memoryview) -> memoryview | None:
    """What it says is behind it; None: nothing ever is. Raises BadRequest."""
    expected = frame.length if isinstance(frame, WithContent) else None
    if len(content) != (expected or 0):
        raise BadRequest(
            f"{type(frame).__name__} says that {expected or 0} bytes follow, {len(content)} came"
        )
    return None if expected is None else content
