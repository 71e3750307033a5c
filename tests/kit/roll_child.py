"""Who appends while another thread syncs, for test_roll_over; with an msync that takes its time.

    python roll_child.py service STORE SETTINGS(JSON) COUNT holds|fails
    python roll_child.py log STORE

Prints one JSON line. A service: how many each thread has appended, what failed, and how long
`close` took; the disk may fail at that moment. A log: what the sync of a segment has returned that
was left meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import threading
import time
from pathlib import Path
from typing import Any

from patience import patient

from cometmq import Broker
from cometmq.shm.kernel.codec import file_maps
from cometmq.shm.kernel.live import COUNTER_BYTES, OwnedCell, QueueCursor
from cometmq.shm.log.commit_log import CommitLog

THREADS = 6
WAIT_S = patient(90)


def service(store: str, settings: str, count: str, disk: str) -> None:
    appended = [0] * THREADS
    failed: list[str] = []
    over = threading.Event()

    def append(appender: Any, thread: int) -> None:
        try:
            while not over.is_set():
                appender.append(b"%d %d " % (thread, appended[thread]) + bytes(6_000))
                appended[thread] += 1
        except BaseException as error:
            failed.append(f"{type(error).__name__}: {error}")

    broker = Broker(store, settings=json.loads(settings), writer="here")
    threads = [
        threading.Thread(target=append, args=(broker.appender("t", number), number), daemon=True)
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WAIT_S
    while sum(appended) < int(count) and not failed and time.monotonic() < deadline:
        time.sleep(0.01)
    began = time.monotonic()
    if disk == "fails":
        ctypes.CDLL(None).msync_fails()
        broker.close()
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    if disk == "holds":
        began = time.monotonic()
        broker.close()
    close_s = time.monotonic() - began
    print(json.dumps({"appended": appended, "failed": failed, "close_s": close_s}), flush=True)


def cell() -> OwnedCell:
    return OwnedCell(mmap.mmap(-1, COUNTER_BYTES), 0, ())


def log(store: str) -> None:
    Path(store).mkdir()
    size = 1 << 20
    written = CommitLog(
        Path(store),
        segment_bytes=size,
        physical_offset=0,
        store_host=bytes(8),
        max_message_bytes=size,
    )
    wrote, flushed = cell(), cell()
    written.open_segment()
    written.appender.publishes(wrote, cell(), cell(), cell(), size, written.tidy)
    written.appender.syncs(flushed, cell(), cell(), size)
    queue = QueueCursor("t", 0)
    written.append(queue, bytes(100_000))
    written.publish()
    found: dict[str, Any] = {"wrote": wrote.value}

    def sync() -> None:
        try:
            found["synced"] = written.sync()
        except OSError as error:
            found["failed"] = str(error)

    disk = ctypes.CDLL(None)
    disk.msync_is_held(1)
    thread = threading.Thread(target=sync)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not disk.msyncs_inside() and time.monotonic() < deadline:
        time.sleep(0.001)
    while written.physical_offset < 2 * size:
        written.append(queue, bytes(100_000))
    written.tidy()
    written._maps.close()  # what it was told to let go of, it has let go of
    found["mapped_meanwhile"] = file_maps()
    disk.msync_is_held(0)
    thread.join()
    found["mapped_in_the_end"] = file_maps()
    written.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    {"service": service, "log": log}[sys.argv[1]](*sys.argv[2:])
