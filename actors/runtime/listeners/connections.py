"""What clients may have in flight at a port, and how many of them there may be.

ZeroMQ bounds messages, by their number and by the size of a frame: a message of frames without end,
or a thousand large ones that nobody has come to take, is all kept in memory. So a thread of its own
compares, for each connection, what the system has received with what was taken up, and what it was
answered with what the other side has confirmed. A connection over the limit is ended.

To know of connections it listens to the socket's monitor. It looks at them only when the process's
memory has grown; that costs one look at a small file each tick, and nothing without connections.

A descriptor belongs to ZeroMQ's thread, which may close it at any time, after which its number may
be anything's. So nothing is ever done to a number: what is to be ended is duplicated first, and the
duplicate is looked at, which stays what it is.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import socket as sockets
import struct
import threading
import time
from collections.abc import Iterable, Sized
from typing import Final

import msgspec
import zmq

from cometmq.actors.runtime import meters
from cometmq.conf import NetworkSettings
from cometmq.protocol.wire.liveness import HEARTBEAT_BYTES, HEARTBEAT_MS
from cometmq.protocol.wire.monitor import read_event
from cometmq.shm.os import libc
from cometmq.shm.os.memory import memory_of

log = logging.getLogger(__name__)

MIB: Final = 1_048_576
TICK_MS: Final = 50
HASTE_MS: Final = 10  # while memory grows
STEP_BYTES: Final = 16 * MIB  # memory has to grow so much before connections are looked at
TOTAL_PART: Final = 4  # of the machine's memory, which all connections together may have in flight
TOTAL_CONNECTIONS: Final = 8  # at their limit are allowed in any case
RESERVE: Final = 128  # descriptors that are left to the rest of the process
SPARES: Final = 8  # descriptors that are given up when there are no others
EVENTS_AT_ONCE: Final = 256

_TCP_INFO: Final = 11
_INFO_BYTES: Final = 136
_INFO_AT: Final = 120  # tcpi_bytes_acked, tcpi_bytes_received: Linux 4.2
# When it is closed, the other side is told so at once, even one that is in the middle of sending.
_RESET: Final = struct.pack("ii", 1, 0)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAGE: Final = resource.getpagesize()

EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_MONITOR_STOPPED
)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Of one port.

    Args:
        connections: at once; a further one is ended at once.
        in_flight_bytes: of one connection, either way: received and not taken up, or answered and
            not confirmed by the other side.
        handshake_ms: a connection that has not said by then that it speaks ZeroMQ is ended.
    """

    connections: int = 16_384
    in_flight_bytes: int = 128 * MIB
    handshake_ms: int = 5_000

    @classmethod
    def of(cls, settings: NetworkSettings) -> ConnectionLimits:
        return cls(settings.max_connections, settings.max_connection_in_flight_bytes)


class Traffic:
    """What a connection has brought and was sent, in bytes on the wire. Written by the actor."""

    __slots__ = ("fd", "given", "handed", "room_until")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.handed = 0
        self.given = 0
        self.room_until = 0  # until so much is given there is room, without a look


class Connection(msgspec.Struct):
    """One that the monitor has told of."""

    traffic: Traffic
    inode: int  # of its socket: a number alone may become another's
    acked: int  # as the system had counted when its traffic began to be counted
    received: int
    since: float  # time.monotonic()

    def in_flight(self) -> int:
        """Bytes; 0 if it is gone."""
        return max(0, self.waiting()) + max(0, self.unsent())

    def waiting(self) -> int:
        """Bytes received and not read yet, without heartbeats, which only ZeroMQ sees."""
        found = tcp_counts(self.traffic.fd)
        if found is None:
            return 0
        beats = (time.monotonic() - self.since) * 1000 / HEARTBEAT_MS
        return found[1] - self.received - self.traffic.handed - int(beats * HEARTBEAT_BYTES)

    def unsent(self) -> int:
        """Given to be sent, and not confirmed."""
        found = tcp_counts(self.traffic.fd)
        if found is None:
            return 0
        unsent = self.traffic.given - (found[0] - self.acked)
        if unsent < 0:  # the kernel also counts heartbeats
            self.acked, unsent = self.acked - unsent, 0
        return unsent


class Connections:
    """The connections of one ROUTER. Its thread ends with the monitor of the socket."""

    def __init__(self, socket: zmq.Socket[bytes], limits: ConnectionLimits) -> None:
        self._limits = limits
        self._total_max = max(
            TOTAL_CONNECTIONS * limits.in_flight_bytes, memory_of("MemTotal") // TOTAL_PART
        )
        self._known: dict[int, Connection] = {}  # by descriptor
        self._traffic: dict[int, Traffic] = {}
        self._spares: list[int] = []
        self._is_short = False  # of descriptors
        self._is_over = False
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._calm_bytes = self._anonymous_bytes()
        self._counts = meters.zeroes(*meters.OF_CLIENTS[1:])
        self._get_spares()
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._slot = os.dup(self._null)  # for a duplicate, when there is no other number left
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(EVENTS)
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self, endpoint: str) -> None:
        """Once the socket is bound there."""
        self._port = int(endpoint.rpartition(":")[2])
        self._thread.start()

    def close(self) -> None:
        """After the socket's monitor was ended."""
        if self._thread.ident is not None:
            self._thread.join()
        self._monitor.close(linger=0)
        self._give_up_spares()
        for descriptor in (self._memory, self._null, self._slot):
            os.close(descriptor)

    # --- the actor's thread ---

    def traffic_of(self, fd: int) -> Traffic:
        """Of the connection that a message came by."""
        found = self._traffic.get(fd)
        return found if found is not None else self._traffic.setdefault(fd, Traffic(fd))

    def has_room(self, traffic: Traffic) -> bool:
        """Whether its side can be given more: half of what may be in flight is for answers."""
        if traffic.given < traffic.room_until:
            return True
        known = self._known.get(traffic.fd)
        unsent = known.unsent() if known is not None and known.traffic is traffic else 0
        traffic.room_until = traffic.given + self._limits.in_flight_bytes // 2 - unsent
        return traffic.given < traffic.room_until

    def statistics(self) -> meters.Figures:
        return {meters.CONNECTIONS: len(self._known), **self._counts}

    # --- the thread ---

    def _run(self) -> None:
        next_look = 0.0
        monitor = select.poll()  # by the socket's own `poll` a tick costs twice as much
        monitor.register(self._monitor.fileno(), select.POLLIN)
        has_more = True  # the descriptor tells of what is new alone
        while not self._is_over:
            timeout_ms = -1
            if has_more:
                timeout_ms = 0
            elif self._known or self._is_short:
                timeout_ms = max(0, int((next_look - time.monotonic()) * 1000) + 1)
            try:
                if monitor.poll(timeout_ms) or has_more:
                    has_more = True  # also if this fails
                    has_more = self._take_events()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + TICK_MS / 1000
                    if self._look():
                        next_look = time.monotonic() + HASTE_MS / 1000
            except Exception:
                log.exception("connections are not watched for a moment")
                time.sleep(TICK_MS / 1000)  # or it would fail again at once, without end

    def _take_events(self) -> bool:
        """Whether there may be more of them."""
        for _ in range(EVENTS_AT_ONCE):
            try:
                event, value = read_event(self._monitor)
            except zmq.Again:
                return False
            match event:
                case zmq.EVENT_MONITOR_STOPPED:
                    self._is_over = True
                    return False
                case zmq.EVENT_ACCEPTED:
                    self._take_in(value)
                case zmq.EVENT_DISCONNECTED:
                    self._known.pop(value, None)
                    self._traffic.pop(value, None)
                case zmq.EVENT_ACCEPT_FAILED:
                    self._accept_failed(value)
                case _:
                    self._counts[meters.HANDSHAKES_FAILED] += 1
        return True

    def _take_in(self, fd: int) -> None:
        """A connection. What it has brought by now is not counted, since nobody knows how much of
        that was taken up."""
        try:
            inode = os.fstat(fd).st_ino
        except OSError:
            return  # it has gone again
        acked, received = tcp_counts(fd) or (0, 0)
        traffic = self._traffic[fd] = Traffic(fd)
        connection = self._known[fd] = Connection(traffic, inode, acked, received, time.monotonic())
        if len(self._known) > self._limits.connections:
            self._refuse(connection, f"there are {self._limits.connections} (maxConnections)")
        elif self._is_short or fd >= _last_descriptor():
            self._refuse(connection, "the process has hardly a descriptor left (ulimit -n)")

    def _refuse(self, connection: Connection, why: str) -> None:
        self._counts[meters.CONNECTIONS_REFUSED] += 1
        self._known.pop(connection.traffic.fd, None)
        peer = self._end(connection)
        log.warning("a connection is refused, as %s: from %s", why, peer)

    def _accept_failed(self, code: int) -> None:
        """Without a descriptor ZeroMQ would try again without a pause, and nobody could be told:
        what is given up here lets those who wait be taken in, and sent away."""
        self._counts[meters.ACCEPTS_FAILED] += 1
        if code in _NO_DESCRIPTOR:
            if not self._is_short:
                self._is_short = True
                log.error(
                    "no connection can be taken in (%s): all are refused until there are "
                    "descriptors again (ulimit -n)", os.strerror(code),
                )  # fmt: skip
            self._give_up_spares()

    def _look(self) -> bool:
        """One tick; whether memory grows."""
        if self._is_short and self._get_spares():
            self._is_short = False
            log.warning("connections are taken in again")
        now = self._anonymous_bytes()
        self._calm_bytes = min(self._calm_bytes, now)
        if now < self._calm_bytes + STEP_BYTES:
            return False
        self._calm_bytes = now
        self._end_those_over()
        return True

    def _end_those_over(self) -> None:
        in_flight = {fd: known.in_flight() for fd, known in list(self._known.items())}
        total = sum(in_flight.values())
        for fd in sorted(in_flight, key=in_flight.__getitem__, reverse=True):
            most = self._limits.in_flight_bytes
            if in_flight[fd] <= most and total <= self._total_max:
                return
            total -= in_flight[fd]
            connection = self._known.pop(fd, None)
            if connection is None:
                continue
            self._counts[meters.CONNECTIONS_ENDED] += 1
            log.error(
                "the connection of %s is ended: %d bytes of it are in flight, at most %d may be "
                "(maxConnectionInFlightBytes), and %d of all together",
                self._end(connection), in_flight[fd], most, self._total_max,
            )  # fmt: skip

    def _end(self, connection: Connection) -> str:
        """Shut a connection down, if it still is what it was; whose it is. ZeroMQ's thread then
        finds its end and closes it."""
        try:
            os.dup2(connection.traffic.fd, self._slot, inheritable=False)
            if os.fstat(self._slot).st_ino != connection.inode or tcp_counts(self._slot) is None:
                return "nobody"
            found = sockets.socket(fileno=self._slot)
            try:
                if found.getsockname()[1] != self._port:
                    return "nobody"
                host, port = found.getpeername()[:2]
                found.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
                found.shutdown(sockets.SHUT_RDWR)
                return f"{host}:{port}"
            finally:
                found.detach()
        except OSError:
            return "nobody"  # it has ended by itself
        finally:
            os.dup2(self._null, self._slot, inheritable=False)

    def _anonymous_bytes(self) -> int:
        """Memory of this process that belongs to no file."""
        fields = os.pread(self._memory, 256, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE

    # --- descriptors ---

    def _get_spares(self) -> bool:
        """Whether all are there."""
        try:
            while len(self._spares) < SPARES:
                self._spares.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._give_up_spares()
            return False
        return True

    def _give_up_spares(self) -> None:
        while self._spares:
            os.close(self._spares.pop())


def tcp_counts(fd: int) -> tuple[int, int] | None:
    """Bytes that the other side has confirmed, and that it has sent; None if it is no connection.

    The number may be another's by now: who acts on what is found has to look again.
    """
    try:
        found = libc.socket_option(fd, sockets.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(found) < _INFO_BYTES:
        return None
    acked, received = struct.unpack_from("QQ", found, _INFO_AT)
    return acked, received


def wire_bytes(frames: Iterable[Sized]) -> int:
    """What the frames of a message take on the wire (ZMTP 3)."""
    total = 0
    for frame in frames:
        size = len(frame)
        total += size + (2 if size < 256 else 9)
    return total


def _last_descriptor() -> int:
    """From there on descriptors are left to the rest of the process."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return 1 << 31
    return allowed - min(RESERVE, allowed // 8)
