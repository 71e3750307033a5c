"""A DEALER socket to one address, and the state of its connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import zmq

from cometmq.protocol import frames
from cometmq.protocol.errors import NotReachable
from cometmq.protocol.retry import pause_s, spread
from cometmq.protocol.wire import liveness
from cometmq.protocol.wire.addresses import allow_ipv6
from cometmq.protocol.wire.monitor import read_event

Payload = Sequence[bytes | bytearray | memoryview]
ZERO_COPY_BYTES: Final = 65_536  # below this a copy is cheaper than pyzmq's bookkeeping
# Plain numbers: pyzmq's enumerations take their time.
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
LAST: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# What pyzmq has around it costs as much as the sending of a small frame.
_send: Final = zmq.backend.Socket.send
CONNECTED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
FAILED: Final = int(zmq.EVENT_CONNECT_RETRIED)  # an attempt is over, and ZeroMQ would wait now
NEVER_MS: Final = 1 << 30


class Dealer:
    """Hands over only to a peer that is connected: nothing waits in it for one that may come.

    So what `send` refused has not left, and never will. ZeroMQ would carry what lies in a socket
    to the next connection, minutes later; and if it is told not to (ZMQ_IMMEDIATE), it drops
    answers that have come and are not read yet. So it connects once, and does not try again: what
    had come is read, and the socket replaced, together with what was still in it. `retry_if_due`
    makes a new attempt after a pause. Whoever uses it holds the channel's lock.

    Raises NotReachable for an address that ZeroMQ does not know what to do with.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._failures = 0  # attempts in a row
        self._open()

    def _open(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)  # what waits is bounded by whoever asks, not by dropping
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, frames.FRAME_MAX)
        socket.set(zmq.RECONNECT_IVL, NEVER_MS)
        allow_ipv6(socket, self.endpoint, self._failures)
        liveness.watch(socket, self.endpoint)
        liveness.watch_attempts(socket, self.endpoint)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            CONNECTED | DISCONNECTED | FAILED
        )
        readable(self._monitor)  # until it is first looked at, its descriptor tells nothing
        self._timeout_ms = -1
        self._connected = self._lost = False
        self._retry_at: float | None = None  # time.monotonic(); the attempt has failed
        self.socket = socket
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise NotReachable(f"{self.endpoint!r} is no address to connect to: {error}") from None
        self.descriptors = (_descriptor(socket), _descriptor(self._monitor))
        self.poll_list: tuple[tuple[Any, int], ...] = ((socket, POLLIN), (self._monitor, POLLIN))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)

    def reopen(self) -> None:
        self.close()
        self._open()

    # --- the connection ---

    @property
    def is_connected(self) -> bool:
        """Whether the handshake is over, and the connection not known to be lost."""
        if not self._connected:
            self._read_monitor()
        return self._connected

    @property
    def is_connecting(self) -> bool:
        return not self.is_connected and self._retry_at is None

    @property
    def retry_in_s(self) -> float | None:
        """When `retry_if_due` will do something; None: there is nothing to be done again."""
        if self._retry_at is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def retry_if_due(self) -> None:
        """Make another attempt to connect, if the last one failed a while ago."""
        if self.retry_in_s == 0.0:
            self.reopen()

    def wait_connected(self, timeout_s: float) -> None:
        """Sleep until it may be connected, or something comes, or it is time to try again."""
        self.retry_if_due()
        retry_in_s = self.retry_in_s
        if retry_in_s is not None:
            timeout_s = min(timeout_s, retry_in_s)
        if not self.is_connected:
            zmq.zmq_poll(self.poll_list, max(1, int(timeout_s * 1000)))

    def may_be_lost(self, readable: Sequence[Any]) -> bool:
        """Whether `was_lost` has anything to tell, after a look at `poll_list`."""
        return self._lost or self._monitor in readable

    def was_lost(self) -> bool:
        """Whether a connection has ended since this was last asked."""
        self._read_monitor()
        lost, self._lost = self._lost, False
        return lost

    def _read_monitor(self) -> None:
        while readable(self._monitor):
            event, _ = read_event(self._monitor)
            if event == CONNECTED:
                self._connected = True
                self._failures = 0
                continue
            self._lost = self._lost or self._connected
            self._connected = False
            if self._retry_at is None:  # else it is told twice of one end
                self._failures += 1
                self._retry_at = time.monotonic() + spread(pause_s(self._failures))

    # --- messages ---

    def send(self, head: bytes, payload: Payload) -> bool:
        """False: there is no connection, and nothing of it will ever leave."""
        if not self.is_connected:
            return False
        socket, last = self.socket, len(payload)
        _send(socket, head, MORE if last else LAST)
        for index, frame in enumerate(payload, 1):
            flags = MORE if index < last else LAST
            if len(frame) < ZERO_COPY_BYTES:
                _send(socket, frame, flags)
            else:
                socket.send(frame, flags, copy=False)
        return True

    def receive(self, timeout_s: float) -> list[zmq.Frame] | None:
        """The frames of the next message; None after the time, which is at least 1 ms."""
        timeout_ms = max(1, int(timeout_s * 1000))
        if timeout_ms != self._timeout_ms:
            self.socket.set(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            return self.socket.recv_multipart(copy=False)
        except zmq.Again:
            return None

    def receive_nowait(self) -> list[zmq.Frame] | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    @property
    def is_readable(self) -> bool:
        return readable(self.socket)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(EVENTS)) & POLLIN)
