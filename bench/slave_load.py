"""What the benchmarks of replication run in a process of its own. No benchmarks here."""

from __future__ import annotations

import os
import socket
import struct
import time
from multiprocessing.connection import Connection

from cometmq import Producer

HEADER = struct.Struct(">qi")
BUFFER_BYTES = 4_194_304


def follow(port: int, line: Connection) -> None:
    """A slave that keeps nothing: it acknowledges each frame once all of it has come. So what is
    measured beside it is the master, and not a second disk. Until the master closes."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        connection.sendall(struct.pack(">q", 0))
        line.send(None)
        end = have = 0
        while count := connection.recv_into(buffer[have:]):
            have += count
            at = 0
            while have - at >= HEADER.size:
                offset, size = HEADER.unpack_from(buffer, at)
                if have - at < HEADER.size + size:
                    break
                at += HEADER.size + size
                end = offset + size
            if at:
                buffer[: have - at] = bytes(buffer[at:have])
                have -= at
                connection.sendall(struct.pack(">q", end))


def keep(port: int, path: str, line: Connection) -> None:
    """Put all that comes from this port into a file; says how much, once it is on the disk."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    size = 0
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        open(path, "wb", buffering=0) as file,
    ):
        while count := connection.recv_into(buffer):
            at = 0
            while at < count:
                at += file.write(buffer[at:count])
            size += count
        os.fdatasync(file.fileno())
    line.send(size)


def send_steadily(name_server: str, bytes_per_s: float, line: Connection) -> None:
    """Messages of 1,000 bytes, so many bytes a second, until the other end says something."""
    body, count = bytes(range(250)) * 4, 1_000  # of one call
    with Producer(name_server) as producer:
        next_at = time.perf_counter()
        while not line.poll(max(0.0, next_at - time.perf_counter())):
            producer.send_many("bench_steady", [body] * count)
            next_at += count * len(body) / bytes_per_s
