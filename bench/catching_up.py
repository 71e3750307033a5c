"""How far a replica is behind its master: one that was away, and one that was not."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

from benchmarks import Report
from patience import patient
from slave_load import keep

from cometmq import Producer
from cometmq.shm.live.control import ReadCell
from cometmq.shm.os.files import COMMITLOG_DIR

TOPIC: Final = "bench_meanwhile"
BODY: Final = bytes(range(128))
PAUSE_S: Final = 0.002  # between two sends whose time is taken
LOOK_S: Final = 0.001  # a counter of another broker's wakes nobody here
COUNTED: Final = (0.05, 0.95)  # from this share of the log to that one: without starts and ends


def bare_copy_s(store: Path, size: int, target: Path) -> float:
    """Seconds for so many bytes of the log's files through a socket into another file, and until
    that is on the disk."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = listener.getsockname()[1]
    taker = context.Process(target=keep, args=(port, str(target), theirs))
    taker.start()
    with listener, listener.accept()[0] as connection:
        began = time.perf_counter()
        left = size
        for path in sorted((store / COMMITLOG_DIR).iterdir()):
            with path.open("rb") as file:
                at, end = 0, min(left, path.stat().st_size)
                while at < end:
                    at += os.sendfile(connection.fileno(), file.fileno(), at, end - at)
                left -= end
        connection.shutdown(socket.SHUT_WR)
        assert ours.poll(600)
        took = time.perf_counter() - began
        assert ours.recv() == size
    taker.join(patient(60))
    target.unlink()
    return took


class Sends:
    """One at a time, in a thread: what each took."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._over = threading.Event()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(PAUSE_S):
            began = time.perf_counter()
            self._producer.send(TOPIC, BODY)
            self._times.append(time.perf_counter() - began)

    def __enter__(self) -> Sends:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def at_ms(self, percent: int) -> float:
        return sorted(self._times)[len(self._times) * percent // 100] * 1e3


def wait_for(has: ReadCell, offset: float) -> None:
    """Until a log has come so far."""
    while has.value < offset:
        time.sleep(LOOK_S)


def bytes_per_s(has: ReadCell, begin: int, end: int) -> float:
    """How fast a log grows from one offset to another."""
    marks = []
    for share in COUNTED:
        wait_for(has, begin + share * (end - begin))
        marks.append((time.perf_counter(), has.value))
    (first, low), (last, high) = marks
    return (high - low) / max(last - first, 1e-6)


def lags_s(wrote: ReadCell, has: ReadCell, seconds: float) -> list[float]:
    """Of all that a master writes in that time: how much later its slave has it, as far as looks
    every millisecond tell."""
    marks: deque[tuple[float, int]] = deque()  # when the master had come so far
    found = []
    now = time.perf_counter()
    until = now + seconds
    while now < until:
        time.sleep(LOOK_S)
        end, now = has.value, time.perf_counter()
        while marks and marks[0][1] <= end:
            found.append(now - marks.popleft()[0])
        if wrote.value > (marks[-1][1] if marks else end):
            marks.append((now, wrote.value))
    return found + [now - at for at, _ in marks]  # it does not have these yet


def tell(
    report: Report, rate: float, bare: float, before: Sends, beside: Sends, during: Sends
) -> None:
    """
    Args:
        rate, bare: bytes/s, the latter of a bare copy.
        before, beside, during: with nothing else, beside the bare copy, during the catch-up. What
            sends wait for beside the copy is the machine's: no process of a broker takes part.
    """
    report("catch-up, bare copy", bare / 1e6, "MB/s")
    report("catch-up", rate / 1e6, "MB/s")
    report("catch-up, of a bare copy", 100 * rate / bare, "%")
    for percent in (50, 99):
        report(f"catch-up, sends before: p{percent}", before.at_ms(percent), "ms")
        report(f"catch-up, sends beside the bare copy: p{percent}", beside.at_ms(percent), "ms")
        report(f"catch-up, sends meanwhile: p{percent}", during.at_ms(percent), "ms")
