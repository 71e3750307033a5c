"""A service that has its broker's writer inside, for test_writer_here: appends until it is killed.

    python writer_child.py STORE SETTINGS(JSON) ACKED [what]

Each of its threads appends to a queue of its own and to one that all share, and writes into ACKED,
a mapped file of 8-byte numbers, how many of its messages were acknowledged: the append returned.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import threading
from pathlib import Path

from cometmq import Broker
from cometmq.shm.kernel.store import Appender

THREADS = 3
SHARED = THREADS  # the queue that all append to
MANY = 5


def body_of(thread: int, number: int) -> bytes:
    size = random.Random(f"{thread} {number}").randrange(2_000)
    return b"%d %d " % (thread, number) + b"x" * size


def make_acked(path: Path) -> None:
    path.write_bytes(bytes(8 * 2 * THREADS))


def read_acked(path: Path) -> list[tuple[int, int]]:
    """By thread: acknowledged in its own queue, and in the shared one."""
    numbers = struct.unpack(f"<{2 * THREADS}q", path.read_bytes())
    return [numbers[2 * thread : 2 * thread + 2] for thread in range(THREADS)]


def append_for_ever(own: Appender, shared: Appender, thread: int, acked: mmap.mmap) -> None:
    number = 0
    while True:
        own.append(body_of(thread, number))
        struct.pack_into("<q", acked, 16 * thread, number + 1)
        if number % MANY == 0:
            shared.append_many([body_of(thread, number + each) for each in range(MANY)])
            struct.pack_into("<q", acked, 16 * thread + 8, number + MANY)
        number += 1


def main(store: str, settings: str, acked_path: str, what: str = "") -> None:
    with open(acked_path, "r+b") as file:
        acked = mmap.mmap(file.fileno(), 0)
    broker = Broker(store, settings=json.loads(settings), writer="here")
    first = broker.appender("kill", 0)
    if what == "forget":  # to close
        first.append(b"forgotten")
        return
    if what == "fork" and os.fork() == 0:
        signal.pause()  # with every descriptor of the service
    if what == "interrupt":
        print("ready", flush=True)
        with broker:
            append_for_ever(first, broker.appender("kill", SHARED), 0, acked)
    for thread in range(THREADS):
        own, shared = broker.appender("kill", thread), broker.appender("kill", SHARED)
        arguments = own, shared, thread, acked
        threading.Thread(target=append_for_ever, args=arguments, daemon=True).start()
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
