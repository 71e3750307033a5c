"""What is said to one replica: a DEALER under CURVE, which nothing waits in for a connection."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from typing import Any, Final

import zmq

from cometmq.actors.replication.said import Said
from cometmq.actors.replication.secret import KeyPair
from cometmq.actors.replication.strangers import HANDSHAKE_MS, why_handshake_failed
from cometmq.protocol.wire.dealer import LAST, MORE, ZERO_COPY_BYTES, readable
from cometmq.protocol.wire.monitor import read_event

MIB: Final = 1_048_576
WAITING_COUNT: Final = 1_000  # messages that are not encrypted yet
WAITING_BYTES: Final = 64 * MIB  # of the larger ones among them
RECONNECT_MS: Final = 20
RECONNECT_MAX_MS: Final = 500
CONNECT_MS: Final = 1_000
# Nobody answers by a DEALER, so it is enough room for what the handshake needs.
ANSWER_BYTES: Final = 4_096
ANSWERS_AT_ONCE: Final = 64
# A machine that is gone says nothing: what it has not confirmed for so long ends the connection.
SILENCE_MS: Final = 2_000
KEEPALIVE_S: Final = 2  # after so much silence the system asks whether the other side is there
# The thread that encrypts what is said is not the one that decrypts what is heard.
HEARING: Final = 1
SPEAKING: Final = 2

# Any sign of an attempt comes more often, unless ZeroMQ has given the connection up.
GIVEN_UP_S: Final = 3.0

_send: Final = zmq.backend.Socket.send  # without what pyzmq has around it
_numbers: Final = itertools.count()
_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ENDED: Final = int(zmq.EVENT_DISCONNECTED)
_RETRIED: Final = int(zmq.EVENT_CONNECT_RETRIED)
_REACHED: Final = int(zmq.EVENT_CONNECTED)  # the handshake begins
_CUT_SHORT: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_WRONG: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_EVENTS: Final = _SUCCEEDED | _ENDED | _RETRIED | _REACHED | _CUT_SHORT | _WRONG


def watch_over(socket: zmq.Socket[bytes]) -> None:
    """A connection to a machine that has vanished is to end, whichever side speaks."""
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = KEEPALIVE_S
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = 3
    socket.setsockopt(zmq.TCP_MAXRT, SILENCE_MS)


class PeerDealer:
    """To one replica at one address.

    ZeroMQ connects again by itself after whatever happens to a connection, but for one thing: what
    does not follow its protocol it gives up for good. It may be somebody else's service that had
    the port for a moment, so then the socket is replaced.

    Args:
        key: the public one of the replica: nobody else can read what is said.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        address: str,
        keys: KeyPair,
        key: bytes,
        said: Said,
    ) -> None:
        self.address = address
        self._context = context
        self._name = name
        self._keys = keys
        self._key = key
        self._said = said
        self._open()

    def _open(self) -> None:
        self.is_connected = False
        self._is_resting = False  # until the next attempt
        self._is_given_up = False
        self._tried_at = time.monotonic()
        self._waiting: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._waiting_bytes = 0
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket = socket
        socket.linger = 0
        socket.affinity = SPEAKING
        socket.immediate = True
        socket.sndhwm = WAITING_COUNT
        socket.rcvhwm = 1
        socket.maxmsgsize = ANSWER_BYTES
        socket.ipv6 = self.address.startswith("[")
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = RECONNECT_MAX_MS
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.handshake_ivl = HANDSHAKE_MS
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.curve_serverkey = self._key
        watch_over(socket)
        self._monitor = self._watch()
        try:
            socket.connect(f"tcp://{self.address}")
        except zmq.ZMQError as error:  # of the record, and so nothing to end the process for
            self._say("address", str(error))

    def _watch(self) -> zmq.Socket[bytes]:
        """Its monitor without a limit: ZeroMQ's thread would wait where there is no more room, and
        we for that thread."""
        place = f"inproc://peer-{next(_numbers)}"  # of a socket that is closed it is freed later
        self._socket.monitor(place, _EVENTS)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0
        monitor.connect(place)
        return monitor

    def _say(self, kind: str, why: str) -> None:
        self._said.warn(
            (kind, self._name),
            "there is no line to replica %s at %s: %s", self._name, self.address, why,
        )  # fmt: skip

    def send(self, head: bytes, content: memoryview | None) -> bool:
        """Whether ZeroMQ has taken it, for a connection that is there."""
        size = 0 if content is None else content.nbytes
        if self._is_full(size):
            return False
        try:
            if content is None:
                _send(self._socket, head, LAST)
                return True
            _send(self._socket, head, MORE)
            self._send_content(content, size)
        except zmq.Again:
            return False
        return True

    def _send_content(self, content: memoryview, size: int) -> None:
        """A copy, since ZeroMQ encrypts it later, and by then the segment that it lies in may be
        another one's. It costs an eighth of the throughput."""
        if size < ZERO_COPY_BYTES:
            _send(self._socket, content, LAST)
            return
        tracker: Any = self._socket.send(bytes(content), LAST, copy=False, track=True)
        self._waiting.append((tracker, size))
        self._waiting_bytes += size

    def _is_full(self, size: int) -> bool:
        """ZeroMQ counts messages; whether there are too many bytes in them."""
        while self._waiting and self._waiting[0][0].done:
            self._waiting_bytes -= self._waiting.popleft()[1]
        return bool(self._waiting) and self._waiting_bytes + size > WAITING_BYTES

    # --- the connection ---

    def tend(self) -> None:
        """See to what has become of it, and throw away what may have been answered."""
        for _ in range(ANSWERS_AT_ONCE):
            if not readable(self._socket):
                break
            self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._said.warn(
                ("answer", self._name),
                "replica %s answers by the line that it is to be told things by: dropped",
                self._name,
            )
        self._take_events()
        if not self.is_connected and time.monotonic() > self._tried_at + GIVEN_UP_S:
            self._is_given_up = True
        if self._is_given_up:
            self._reopen()

    def try_now(self) -> None:
        """The replica has come to us, so it is there: no need to wait for the next attempt."""
        self._take_events()
        if self._is_resting or self._is_given_up:
            self._reopen()

    def _reopen(self) -> None:
        self.close()
        self._open()

    def _take_events(self) -> None:
        while readable(self._monitor):
            self._tried_at = time.monotonic()
            event, value = read_event(self._monitor)
            self._is_resting = event == _RETRIED
            self._take_event(event, value)

    def _take_event(self, event: int, value: int) -> None:
        if event == _REACHED:
            return
        if event == _SUCCEEDED:
            self.is_connected = True
        elif event == _ENDED:
            self.is_connected = False
        elif event == _RETRIED:
            self._say("away", "it cannot be connected to, and is tried again and again")
        elif event == _CUT_SHORT:
            self._say(
                "cut short",
                "it ended the handshake, as one does that has another secret or group, or no "
                f"replica of our name in its record ({os.strerror(value)})",
            )
        else:
            self._is_given_up = True
            self._say("wrong", why_handshake_failed(event, value))

    def close(self) -> None:
        """What waits is dropped."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
