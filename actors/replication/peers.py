"""The lines between the replicas of a group: frames to each of the others, and from each.

A replica hears by its ROUTER alone, and speaks by one DEALER to each of the others. All of them are
under CURVE, with keys that come of the group's secret (secret.py). So the name of a sender is that
of the key that its connection was admitted with, whatever it says.

    n0  DEALER ------> ROUTER  n1        what n0 says to n1
        ROUTER <------ DEALER            what n1 says to n0

A message is an encoded frame; behind a Bytes frame comes what it is about. Frames may be lost:
nothing waits for a replica that is not connected, and what was on its way when a connection broke
does not arrive by the next one.

The sockets have a context of their own: whom ZeroMQ admits (ZAP, RFC 27) is asked once for each
context, and the threads that encrypt here keep nobody else's messages waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq
from zmq.utils import z85

from cometmq.actors.replication.core.frames import (
    FRAME_BYTES_MAX,
    AnyFrame,
    WithContent,
    decode_frame,
    encode_frame,
)
from cometmq.actors.replication.peer_dealer import (
    HEARING,
    PeerDealer,
    watch_over,
)
from cometmq.actors.replication.said import Said
from cometmq.actors.replication.secret import key_pair
from cometmq.actors.replication.strangers import LIMITS, Strangers
from cometmq.actors.runtime.connections import ConnectionLimits
from cometmq.protocol.errors import BadRequest, ConfigError
from cometmq.protocol.frames import FRAME_MAX

MIB: Final = 1_048_576
MESSAGES_AT_ONCE: Final = 64
BYTES_AT_ONCE: Final = 8 * MIB
MAILBOX_COUNT: Final = 1_000  # messages of one replica that wait to be taken up
BACKLOG: Final = 128
TEND_S: Final = 1.0

_ZAP: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"cometmq.replicas"
_CURVE_BYTES: Final = 33  # CurveZMQ, RFC 26: what a MESSAGE has beside what it carries
_SHORT_BYTES: Final = 256 - _CURVE_BYTES  # of what is carried: below it its length has one byte
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NO_WAIT: Final = int(zmq.NOBLOCK)
_SOURCE: Final = int(zmq.SRCFD)

OnFrame = Callable[[str, AnyFrame, memoryview | None], None]


class Peers:
    """One replica's lines to the others. All calls come from one thread.

    `replace` says who they are. Who comes before that is turned away, and tries again after 1 s.

    Args:
        group, own: names: of the group, of this replica.
        bind: host:port where the others come to; a port of 0 is chosen, see `address`.
        on_frame: takes a frame, its sender, and what came behind a Bytes frame: so many bytes as
            that says, valid for as long as somebody has the view; whether they are what they were
            is for who takes them to see.
        said: what is refused is told there, each thing once a minute.
        content_bytes_max: behind a Bytes frame; the same for the whole group.
        limits: of the connections that come.

    Raises ConfigError where nobody could come to `bind`, or ZeroMQ has no CURVE.
    """

    def __init__(
        self,
        *,
        group: str,
        own: str,
        secret: bytes,
        bind: str,
        on_frame: OnFrame,
        said: Said,
        content_bytes_max: int = FRAME_MAX,
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        self._group = group
        self._own = own
        self._secret = secret
        self._on_frame = on_frame
        self._said = said
        self._content_bytes_max = content_bytes_max
        self._keys = key_pair(secret, group, own)
        self._dealers: dict[str, PeerDealer] = {}
        self._names: dict[bytes, str] = {}  # by the public key of each that is admitted
        self._counts = dict.fromkeys(
            ("sent", "sent_bytes", "dropped", "heard", "heard_bytes", "refused", "not_admitted"), 0
        )
        self._tend_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)  # before anybody may ask
        self._router = self._make_router(limits)
        self._router.ipv6 = bind.startswith("[")
        self._strangers = Strangers(self._router, limits)
        try:
            self._router.bind(f"tcp://{bind}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"dLegerPeers: replicas cannot come to {own} at {bind}: {error.strerror}"
            ) from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._strangers.start(endpoint)
        self.address = endpoint.removeprefix("tcp://")
        self.sources: tuple[Any, ...] = (self._router, self._zap)  # `receive` when one is readable

    def _make_router(self, limits: ConnectionLimits) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.affinity = HEARING
        router.backlog = BACKLOG
        router.rcvhwm = MAILBOX_COUNT
        router.maxmsgsize = max(FRAME_BYTES_MAX, self._content_bytes_max) + _CURVE_BYTES
        router.handshake_ivl = limits.handshake_ms
        router.curve_server = True
        router.curve_secretkey = self._keys.private
        router.zap_domain = _DOMAIN
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        watch_over(router)
        return router

    # --- who they are ---

    def replace(self, addresses: Mapping[str, str]) -> None:
        """The replicas of the group and where they are, as its record says; this one may be among
        them. Who is new is connected, who has gone is let go and no longer heard, and who has moved
        is connected anew."""
        wanted = {name: where for name, where in addresses.items() if name != self._own}
        for name, dealer in list(self._dealers.items()):
            if wanted.get(name) != dealer.address:
                del self._dealers[name]
                dealer.close()
        self._names = {
            z85.decode(key_pair(self._secret, self._group, name).public): name for name in wanted
        }
        for name in wanted.keys() - self._dealers.keys():
            self._dealers[name] = self._connect(name, wanted[name])

    def _connect(self, name: str, address: str) -> PeerDealer:
        key = key_pair(self._secret, self._group, name).public
        return PeerDealer(self._context, name, address, self._keys, key, self._said)

    def _admit(self) -> None:
        """Answer ZeroMQ, which asks about each that has come and knows our public key."""
        while int(self._zap.getsockopt(_EVENTS)) & _POLLIN:
            asked = self._zap.recv_multipart(zmq.NOBLOCK)
            name = None
            if len(asked) == 7 and asked[2] == _DOMAIN and asked[5] == b"CURVE":
                name = self._names.get(asked[6])
            if name is None:
                self._counts["not_admitted"] += 1
                self._said.warn(
                    "key",
                    "somebody from %s has the secret of group %s and the key of none of its other "
                    "replicas (%s): it was not let in",
                    asked[3].decode("ascii", "replace") if len(asked) > 3 else "?", self._group,
                    ", ".join(sorted(self._dealers)),
                )  # fmt: skip
                # "Temporary": its connection ends, and it tries again. After a 400 ZeroMQ would
                # not, though the record may have that replica a moment later.
                answer = (b"300", b"no replica of this group", b"")
            else:
                answer = (b"200", b"OK", name.encode())
                self._dealers[name].try_now()
            self._zap.send_multipart((*asked[:2], *answer, b""), zmq.NOBLOCK)

    # --- what is said ---

    def send(self, to: str, frame: AnyFrame, content: memoryview | None = None) -> bool:
        """Give a frame to ZeroMQ, for one replica. False: it is dropped, as that one is no replica
        of the group, is not connected, or has enough before it. The content is copied: it may
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
        dealer = self._dealers.get(to)
        if dealer is None or not dealer.send(encode_frame(frame), content):
            self._counts["dropped"] += 1
            return False
        self._counts["sent"] += 1
        self._counts["sent_bytes"] += size or 0
        return True

    # --- what is heard ---

    def receive(self, source: Any = None) -> bool:
        """Take what has come, some of it, and hand it to `on_frame`; whether there is more.

        Args:
            source: which of `sources` can be read; None: any of them may.
        """
        self._tend()
        if source is not self._router:
            self._admit()
        count = size = 0
        while count < MESSAGES_AT_ONCE and size < BYTES_AT_ONCE:
            try:
                parts = _take_message(self._router)
            except zmq.Again:
                return False
            count += 1
            size += self._take(parts)
            if not int(self._router.getsockopt(_EVENTS)) & _POLLIN:
                return False
        return True

    def _take(self, parts: list[Any]) -> int:
        """One message; its size in bytes."""
        size = wire = 0
        for part in parts:
            length = len(part)
            size += length
            # What it takes on the wire: ZMTP 3 around CurveZMQ.
            wire += length + (_CURVE_BYTES + 2 if length < _SHORT_BYTES else _CURVE_BYTES + 9)
        fd = parts[0].get(_SOURCE)
        self._strangers.traffic_of(fd).handed += wire
        sender = parts[0].get("User-Id")
        if sender not in self._dealers:
            self._strangers.end_soon(fd)
            self._refuse(sender, "gone", "it is none of the group's replicas any more")
            return size
        try:
            frame, content = _message(parts)
        except BadRequest as error:
            self._refuse(sender, "malformed", str(error))
            return size
        self._counts["heard"] += 1
        self._counts["heard_bytes"] += 0 if content is None else content.nbytes
        self._on_frame(sender, frame, content)
        return size

    def _refuse(self, sender: str, kind: str, why: str) -> None:
        self._counts["refused"] += 1
        self._said.warn((kind, sender), "a message of replica %s is refused: %s", sender, why)

    def _tend(self) -> None:
        """Now and then, also to what nothing is sent by, or its news would pile up."""
        now = time.monotonic()
        if now >= self._tend_at:
            self._tend_at = now + TEND_S
            for dealer in self._dealers.values():
                dealer.tend()

    # --- the rest ---

    def statistics(self) -> dict[str, int | float | str]:
        """All but `peers`, `peers_connected`, `peers_connections` and `.connected` only grow."""
        for dealer in self._dealers.values():
            dealer.tend()
        found: dict[str, int | float | str] = {
            "peers": len(self._dealers),
            "peers_connected": sum(each.is_connected for each in self._dealers.values()),
            **{f"peers_{name}": count for name, count in self._counts.items()},
            **{f"peers_{name}": count for name, count in self._strangers.statistics().items()},
        }
        for name, dealer in self._dealers.items():
            found[f"peer.{name}.address"] = dealer.address
            found[f"peer.{name}.connected"] = int(dealer.is_connected)
        return found

    def close(self) -> None:
        """What was not sent by now is dropped."""
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
        self._router.disable_monitor()
        self._strangers.close()
        self._router.close()
        self._zap.close()
        self._context.term()


def _take_message(router: zmq.Socket[bytes]) -> list[Any]:
    """The next one that lies there, without the connection that it came by. Raises zmq.Again.

    As `recv_multipart`, which asks the socket after each part whether there is another one.
    """
    router.recv(_NO_WAIT)
    parts: list[Any] = [router.recv(_NO_WAIT, copy=False)]  # what follows the first is there
    while parts[-1].more:
        parts.append(router.recv(_NO_WAIT, copy=False))
    return parts


def _message(parts: list[Any]) -> tuple[AnyFrame, memoryview | None]:
    """The frame, and what is behind it. Raises BadRequest."""
    if len(parts) > 2:
        raise BadRequest(f"it has {len(parts)} parts, at most 2")
    frame = decode_frame(parts[0].buffer)
    content = memoryview(parts[1].buffer) if len(parts) > 1 else None
    expected = frame.length if isinstance(frame, WithContent) else None
    if expected != (None if content is None else content.nbytes):
        found = "nothing" if content is None else f"{content.nbytes} bytes"
        says = "nothing" if expected is None else f"{expected} bytes"
        raise BadRequest(f"{type(frame).__name__} says that {says} follow, {found} came")
    return frame, content
