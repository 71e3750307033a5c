"""Detection of peers that vanished without closing their TCP connection.

A machine may lose power, a network may drop packets, a firewall may forget a connection. So both
ends of each TCP connection send heartbeats. ZeroMQ answers them in a thread of its own, however
busy the process is. A process that is stopped, or a message that is delayed, for less than
SILENCE_MS does not end the connection.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import zmq

HEARTBEAT_MS: Final = 5_000  # interval of the heartbeats of a ZeroMQ connection
SILENCE_MS: Final = 15_000  # without an answer to a heartbeat, until the connection is lost
CONNECT_MS: Final = 5_000  # limit of the TCP handshake; a new attempt follows
HANDSHAKE_MS: Final = 10_000  # limit of ZeroMQ's handshake
HEARTBEAT_BYTES: Final = 32  # a PING and a PONG on the wire, doubled

KEEPALIVE_S: Final = 5  # silence before the first keep-alive probe
KEEPALIVE_INTERVAL_S: Final = 3
KEEPALIVE_COUNT: Final = 4
#: How long sent bytes may be unconfirmed, as RocketMQ's haHousekeepingInterval.
UNCONFIRMED_MS: Final = 20_000


def watch(made: zmq.Socket[Any], endpoint: str) -> None:
    """Set heartbeats of a ZeroMQ socket, before it is connected or bound to `endpoint`. On one
    machine (ipc) the system reports each end of a connection."""
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
    """Set time limits for attempts to connect that are not answered."""
    if endpoint.startswith("tcp://"):
        made.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        made.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def watch_plain(made: socket.socket) -> None:
    """Set keep-alive of a TCP connection that is not ZeroMQ's. Raises OSError."""
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
