"""What a slave costs its master: two brokers on one machine, one of them with a slave, in turns.

The slave is a process of its own that acknowledges and keeps nothing (slave_load.py): on a machine
of few processors it takes some of them from the master, as a slave elsewhere would not.

And how soon a real slave that was away has all that it lacks, beside a bare copy of the same files
through a socket of this machine, while somebody sends to the master.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks import Counters, Report
from slave_load import follow, keep

from cometmq import Broker, Producer
from cometmq.bench.peers.server import free_ports
from cometmq.shm.os.files import COMMITLOG_DIR

pytestmark = pytest.mark.slow

BODY = random.Random(7).randbytes(128)
LARGE = random.Random(7).randbytes(1_000)
PAUSE_S = 0.002  # between two sends whose time is taken
COUNTED = (0.05, 0.95)  # from this share of the log to that one: without starts and ends


@pytest.fixture(params=["ASYNC_MASTER", "SYNC_MASTER"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Broker, Broker]]:
    """The role, a broker alone, and one with that role and a slave."""
    port = free_ports(1)
    settings = {"brokerRole": request.param, "haListenPort": port}
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    slave = multiprocessing.get_context("spawn").Process(target=follow, args=(port, theirs))
    with ExitStack() as stack:
        alone = stack.enter_context(Broker(tmp_path / "alone"))
        with Broker(tmp_path / "master", settings=settings) as master:
            slave.start()
            assert ours.poll(60)
            yield request.param, alone, master
        slave.join(60)


def in_turns(
    pair: tuple[str, Broker, Broker], run: Callable[[Producer], None], rounds: int, linger_ms: float
) -> tuple[float, float]:
    """The median seconds alone, and with a slave."""
    _, alone, master = pair
    with alone.producer(linger_ms=linger_ms) as one, master.producer(linger_ms=linger_ms) as two:
        took: tuple[list[float], list[float]] = [], []
        run(one), run(two)
        for _ in range(rounds):
            for producer, times in ((one, took[0]), (two, took[1])):
                began = time.perf_counter()
                run(producer)
                times.append(time.perf_counter() - began)
    return statistics.median(took[0]), statistics.median(took[1])


def test_send_with_linger(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    count = 500_000 if full else 5_000

    def run(producer: Producer) -> None:
        for _ in range(count):
            producer.send("bench_send", BODY)
        producer.flush()

    alone, with_slave = in_turns(pair, run, 7 if full else 1, 5)
    report(f"{pair[0]}, send(), of alone", 100 * alone / with_slave, "%")
    report(f"{pair[0]}, send()", count / with_slave / 1e3, "k messages/s")


def test_send_many(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    bodies = [BODY] * (1_000_000 if full else 20_000)

    def run(producer: Producer) -> None:
        producer.send_many("bench_many", bodies)

    alone, with_slave = in_turns(pair, run, 7 if full else 1, 0)
    report(f"{pair[0]}, send_many(), of alone", 100 * alone / with_slave, "%")
    report(f"{pair[0]}, send_many()", len(bodies) / with_slave / 1e6, "M messages/s")


def test_one_in_flight(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    count = 2_000 if full else 50

    def run(producer: Producer) -> None:
        for _ in range(count):
            producer.send("bench_one", BODY)

    alone, with_slave = in_turns(pair, run, 7 if full else 1, 0)
    report(f"{pair[0]}, one in flight, alone", alone / count * 1e6, "us")
    report(f"{pair[0]}, one in flight", with_slave / count * 1e6, "us")


# --- a slave that was away ---


def bare_copy_s(store: Path, size: int, target: Path) -> float:
    """Seconds for so many bytes of the log's files through a socket into another file."""
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
    taker.join(60)
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
            self._producer.send("bench_meanwhile", BODY)
            self._times.append(time.perf_counter() - began)

    def __enter__(self) -> Sends:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def p99_ms(self) -> float:
        return sorted(self._times)[len(self._times) * 99 // 100] * 1e3


def test_catch_up(tmp_path: Path, full: bool, report: Report) -> None:
    port, count = free_ports(1), 10_000_000 if full else 20_000
    master = {"brokerName": "bench", "haListenPort": port}
    at = f"127.0.0.1:{port}"
    slave = {"brokerName": "bench", "brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": at}
    with Broker(tmp_path / "master", settings=master) as broker, broker.producer() as producer:
        for _ in range(count // 20_000):
            producer.send_many("bench_backlog", [LARGE] * 20_000)
        wrote = Counters(tmp_path / "master").wrote
        size = wrote.value
        bare_s = bare_copy_s(tmp_path / "master", size, tmp_path / "copy")
        with Sends(producer) as before:
            time.sleep(3.0 if full else 0.3)  # of quiet
        with Sends(producer) as during, Broker(tmp_path / "slave", settings=slave):
            has = Counters(tmp_path / "slave").wrote
            marks = []
            for share in COUNTED:
                while has.value < share * size:
                    time.sleep(0.001)  # a counter of another broker's wakes nobody here
                marks.append((time.perf_counter(), has.value))
        (first, low), (last, high) = marks
        rate = (high - low) / max(last - first, 1e-6)
    report("catch-up, bare copy", size / bare_s / 1e6, "MB/s")
    report("catch-up", rate / 1e6, "MB/s")
    report("catch-up, of a bare copy", 100 * rate * bare_s / size, "%")
    report("catch-up, sends before: p99", before.p99_ms, "ms")
    report("catch-up, sends meanwhile: p99", during.p99_ms, "ms")
