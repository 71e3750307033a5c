"""A service that appends by itself until it ends, or the power does.

    python appending.py STORE SETTINGS(JSON) BOOK(file)

Each of its threads appends to one queue, batch after batch; each line of its output is one batch
that was acknowledged: queue, first queue offset, number of its first message, how far the log was
written then, and when (time.monotonic(), which all processes share). How many messages of a queue
were ever begun stands in BOOK, a word for each queue, and is raised before. It begins at `go`, and
ends in order when its standard input does.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time
from pathlib import Path

from fault.power import BATCH, QUEUES, TOPIC, body_of

from cometmq import Broker
from cometmq.protocol.errors import CometError
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter

WORD = struct.Struct("<Q")


def open_book(path: Path) -> mmap.mmap:
    """How many messages of each queue were begun."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, QUEUES * WORD.size)
        return mmap.mmap(descriptor, QUEUES * WORD.size)
    finally:
        os.close(descriptor)


def append(
    broker: Broker, control: ControlFile, book: mmap.mmap, queue_id: int, over: threading.Event
) -> None:
    appender = broker.appender(TOPIC, queue_id)
    wrote = control.read(Counter.WROTE)
    while not over.is_set():
        (first,) = WORD.unpack_from(book, queue_id * WORD.size)
        WORD.pack_into(book, queue_id * WORD.size, first + BATCH)
        bodies = [body_of(queue_id, number) for number in range(first, first + BATCH)]
        try:
            offsets = appender.append_many(bodies, keys=f"{queue_id}-{first}")
        except CometError:  # the disk is gone, or the broker ends
            return
        line = f"{queue_id} {offsets.start} {first} {wrote.value} {time.monotonic()!r}\n"
        os.write(1, line.encode())  # in one piece: the next thread's may follow


def main(store: str, settings: str, book_path: str) -> None:
    broker = Broker(store, settings=json.loads(settings), writer="here")
    book, over = open_book(Path(book_path)), threading.Event()
    control = ControlFile.open(Path(store) / CONTROL_FILE, writable=False)
    os.write(1, f"ready {broker.name_server}\n".encode())
    threads: list[threading.Thread] = []
    for line in sys.stdin:
        if line == "go\n":
            threads += [
                threading.Thread(target=append, args=(broker, control, book, queue_id, over))
                for queue_id in range(QUEUES)
            ]
            for thread in threads:
                thread.start()
    over.set()
    broker.close()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
