"""Controls: what wires, memory and disk cost on this machine in this minute, without a broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import zmq

from cometmq.bench import histograms
from cometmq.bench.extra import BenchError
from cometmq.bench.stamps import Stamper

WAIT_S: Final = 60
WINDOW: Final = 100_000  # messages that a socket holds
WRITE_BYTES: Final = 4 << 20  # of one call, as in control.c
PAGES_BYTES: Final = 256 << 20  # for half a second; at most four times as much
COMPILE: Final = ("gcc", "-O2", "-Wall")


# --- C --------------------------------------------------------------------------------------------


def build(folder: Path) -> Path:
    """Compile the bare loops. Raises BenchError when there is no gcc."""
    program = folder / "bare-loops"
    source = Path(__file__).with_name("control.c")
    if shutil.which(COMPILE[0]) is None:
        raise BenchError("gcc is not installed: the controls of memory and disk need it")
    done = subprocess.run(
        [*COMPILE, "-o", program, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = "; ".join(done.stderr.split("\n")).strip("; ")
        raise BenchError(f"{source.name} cannot be compiled: {said}")
    return program


def _run(program: Path, *arguments: object) -> list[int]:
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"control {arguments[0]}: {done.stderr.strip()}")
    return [int(word) for word in done.stdout.split()]


def memcpy_per_s(program: Path, size: int, count: int) -> float:
    (took_ns,) = _run(program, "memcpy", size, count)
    return count / (took_ns / 1e9)


def fdatasync_ns(program: Path, path: Path, size: int, count: int) -> array[int]:
    return array("q", _run(program, "fdatasync", path, size, count))


def write_bytes_per_s(program: Path, path: Path, size: int, how: str) -> float:
    """Of a new file with its fdatasync; `how`: "direct", past the page cache, or "cached"."""
    size -= size % WRITE_BYTES
    (took_ns,) = _run(program, "write", path, size, how)
    return size / (took_ns / 1e9)


def page_bytes_per_s(program: Path, path: Path, size: int) -> tuple[float, float]:
    """Of first stores into the pages of a new file, and of such into the same pages, resident now.

    A segment of a log is written so: what a fresh page costs bounds every writer of a mapped file.
    """
    fresh_ns, resident_ns = _run(program, "pages", path, size)
    return size / (fresh_ns / 1e9), size / (resident_ns / 1e9)


def read_bytes_per_s(program: Path, folder: Path) -> float:
    """Of all files below the folder, one after the other; cold if they were dropped before."""
    paths = sorted(each for each in folder.rglob("*") if each.is_file() and each.stat().st_size)
    count, took_ns = _run(program, "read", *paths)
    return count / (took_ns / 1e9)


# --- pyzmq ----------------------------------------------------------------------------------------


@contextmanager
def _beside(what: str) -> Iterator[tuple[int, IO[str]]]:
    """This module in a process of its own: the port it listens on, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cometmq.bench.control", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.stdout
    finally:
        process.kill()
        process.communicate()


def _serve(what: str) -> None:
    """Until our parent ends us, or is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    socket = zmq.Context().socket(zmq.ROUTER if what == "echo" else zmq.PULL)
    socket.set_hwm(WINDOW)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while what == "echo":
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)
    while True:
        count = int.from_bytes(socket.recv(), "little")
        for _ in range(count):
            socket.recv()
        print(time.monotonic_ns(), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


@contextmanager
def _to(what: str, kind: int) -> Iterator[tuple[Any, IO[str]]]:
    with _beside(what) as (port, said), zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(WINDOW)
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket, said


def echo_ns(size: int, count: int) -> array[int]:
    """Round trips between two processes, one in flight; DEALER to ROUTER over TCP."""
    body = Stamper(size, 0, 1).body(0)
    with _to("echo", zmq.DEALER) as (socket, _):
        times, clock = array("q"), time.monotonic_ns
        for number in range(count + count // 10):
            before = clock()
            socket.send(body)
            if not socket.poll(WAIT_S * 1000):
                raise BenchError("the echo was not answered")
            socket.recv()
            if number >= count // 10:
                times.append(clock() - before)
    return times


def push_pull_per_s(size: int, count: int) -> float:
    """Messages a second from one process to another, a ZeroMQ message each."""
    bodies = Stamper(size, 0, 1).bodies(0, 1000)
    with _to("pull", zmq.PUSH) as (socket, said):
        for warm in (count // 10, count):
            socket.send(warm.to_bytes(8, "little"))
            began = time.monotonic_ns()
            for number in range(warm):
                socket.send(bodies[number % 1000])
            ended = int(said.readline())
    return count / ((ended - began) / 1e9)


def measure(folder: Path, size: int, seconds: float) -> dict[str, tuple[dict[str, float], Any]]:
    """By case: its values, and the histogram of its latencies or None."""
    program = build(folder)
    count = max(1_000, int(8_000 * seconds))
    echo = histograms.of(echo_ns(size, count))
    sync = histograms.of(fdatasync_ns(program, folder / "sync", size, max(200, count // 8)))
    pages = PAGES_BYTES * max(1, min(4, round(2 * seconds)))
    fresh, resident = page_bytes_per_s(program, folder / "pages", pages)
    copies = max(1_000_000, int(5e6 * seconds))
    return {
        "pyzmq echo, one in flight": (values_of(echo), echo),
        "pyzmq push/pull": (_rate(push_pull_per_s(size, count * 50), size), None),
        "memcpy into resident memory": (_rate(memcpy_per_s(program, size, copies), size), None),
        "first stores into fresh file pages": ({"mb_per_s": fresh / 1e6}, None),
        "the same pages, resident": ({"mb_per_s": resident / 1e6}, None),
        "pwrite and fdatasync": (values_of(sync), sync),
    }


def values_of(histogram: Any) -> dict[str, float]:
    """Percentiles as the lines have them."""
    return {
        name if name == "count" else f"{name}_us": float(value)
        for name, value in histograms.summary(histogram).items()
    }


def _rate(per_s: float, size: int) -> dict[str, float]:
    return {"messages_per_s": per_s, "mb_per_s": per_s * size / 1e6}


if __name__ == "__main__":
    _serve(sys.argv[1])
