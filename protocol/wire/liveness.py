"""How an end of a connection finds out that the other one is gone, although nobody says so.

A machine without power, a network that drops packets, a firewall that forgets a connection: no end
of it ever comes. So both ends of each connection by TCP ask each other for a sign of life. What
ZeroMQ asks is answered by its own thread, however busy the process is; a process that stands still
for less than SILENCE_MS, or a message that takes as long on its way, changes nothing.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import zmq

HEARTBEAT_MS: Final = 5_000  # how often each end of a ZeroMQ connection asks
SILENCE_MS: Final = 15_000  # after so much silence behind that the connection is lost
CONNECT_MS: Final = 5_000  # for the system's handshake; a new attempt follows
HANDSHAKE_MS: Final = 10_000  # for ZeroMQ's
HEARTBEAT_BYTES: Final = 32  # of a PING and a PONG on the wire, and as much again

KEEPALIVE_S: Final = 5  # after so much silence the system asks
KEEPALIVE_INTERVAL_S: Final = 3
KEEPALIVE_COUNT: Final = 4
#: How long sent bytes may be unconfirmed, as RocketMQ's haHousekeepingInterval.
UNCONFIRMED_MS: Final = 20_000


def watch(made: zmq.Socket[Any], endpoint: str) -> None:
    """Have a ZeroMQ socket find out; before it is connected or bound to that address. On one
    machine (ipc) the system tells of each end."""
    if not endpoint.startswith("tcp://"):
        return
    made.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    made.set(zmq.TCP_KEEPALIVE, 1)
    made.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    made.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    made.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    made.set(zmq.TCP_MAXRT, UNCONFIRMED_MS)


def watch_attempts(made: zmq.Socket[Any], endpoint: str) -> None:
    """Have it give up attempts to connect that nobody answers."""
    if endpoint.startswith("tcp://"):
        made.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        made.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def watch_plain(made: socket.socket) -> None:
    """The same for a connection of TCP that ZeroMQ has no part in. Raises OSError."""
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        return
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
        (socket.TCP_USER_TIMEOUT, UNCONFIRMED_MS),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
