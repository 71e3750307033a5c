"""What a ZeroMQ socket's monitor says of its connections.

pyzmq has this as well, in a module that imports asyncio: that alone would be a twentieth of a
broker's start.
"""

from __future__ import annotations

import struct
from typing import Final

import zmq

_EVENT: Final = struct.Struct("=Hi")  # zmq_socket_monitor(3)


def read_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The next event, and its value. Raises zmq.Again if there is none."""
    event, _address = monitor.recv_multipart(zmq.NOBLOCK)
    found: tuple[int, int] = _EVENT.unpack(event)
    return found
