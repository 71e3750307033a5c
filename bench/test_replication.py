"""What a slave costs its master: two brokers on one machine, one of them with a slave, in turns.

The slave is a process of its own that acknowledges and keeps nothing (slave_load.py): on a machine
of few processors it takes some of them from the master, as a slave elsewhere would not.

How far a real slave is behind while its master writes 200 MB/s; and how soon one that was away has
all that it lacks, beside a bare copy of the same files through a socket of this machine, while
somebody sends to the master.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks import Counters, Report
from catching_up import Sends, bare_copy_s, bytes_per_s, lags_s, tell, wait_for
from patience import patient
from slave_load import follow, send_steadily

from cometmq import Broker, Producer
from cometmq.bench.peers.server import free_ports

pytestmark = pytest.mark.slow

BODY = random.Random(7).randbytes(128)
LARGE = random.Random(7).randbytes(1_000)
ROUNDS = 15


@pytest.fixture(params=["ASYNC_MASTER", "SYNC_MASTER"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, memory: Callable[[], None]
) -> Iterator[tuple[str, Broker, Broker]]:
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
        slave.join(patient(60))


def in_turns(
    pair: tuple[str, Broker, Broker], run: Callable[[Producer], None], rounds: int, linger_ms: float
) -> tuple[float, float, float]:
    """The median seconds alone, and with a slave; the median of how much of the first one's rate
    the second one had, turn by turn: a machine may be slower for some of them."""
    _, alone, master = pair
    with alone.producer(linger_ms=linger_ms) as one, master.producer(linger_ms=linger_ms) as two:
        took: tuple[list[float], list[float]] = [], []
        run(one), run(two)
        for _ in range(rounds):
            for producer, times in ((one, took[0]), (two, took[1])):
                began = time.perf_counter()
                run(producer)
                times.append(time.perf_counter() - began)
    shares = [one_s / two_s for one_s, two_s in zip(*took, strict=True)]
    return statistics.median(took[0]), statistics.median(took[1]), statistics.median(shares)


def test_send_with_linger(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    count = 300_000 if full else 5_000

    def run(producer: Producer) -> None:
        for _ in range(count):
            producer.send("bench_send", BODY)
        producer.flush()

    _, with_slave, share = in_turns(pair, run, ROUNDS if full else 1, 5)
    report(f"{pair[0]}, send(), of alone", 100 * share, "%")
    report(f"{pair[0]}, send()", count / with_slave / 1e3, "k messages/s")


def test_send_many(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    bodies = [BODY] * (500_000 if full else 20_000)

    def run(producer: Producer) -> None:
        producer.send_many("bench_many", bodies)

    _, with_slave, share = in_turns(pair, run, ROUNDS if full else 1, 0)
    report(f"{pair[0]}, send_many(), of alone", 100 * share, "%")
    report(f"{pair[0]}, send_many()", len(bodies) / with_slave / 1e6, "M messages/s")


def test_one_in_flight(pair: tuple[str, Broker, Broker], full: bool, report: Report) -> None:
    count = 2_000 if full else 50

    def run(producer: Producer) -> None:
        for _ in range(count):
            producer.send("bench_one", BODY)

    alone, with_slave, _ = in_turns(pair, run, ROUNDS if full else 1, 0)
    report(f"{pair[0]}, one in flight, alone", alone / count * 1e6, "us")
    report(f"{pair[0]}, one in flight", with_slave / count * 1e6, "us")


# --- a slave that keeps what it is sent ---


def master_and_slave(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of both."""
    at, name = f"127.0.0.1:{port}", {"brokerName": "bench"}
    slave = {**name, "brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": at}
    return {**name, "haListenPort": port}, slave


@pytest.mark.usefixtures("memory")
def test_lag(tmp_path: Path, full: bool, report: Report) -> None:
    rate = 200e6 if full else 20e6
    master, slave = master_and_slave(free_ports(1))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with (
        Broker(tmp_path / "master", settings=master) as broker,
        Broker(tmp_path / "slave", settings=slave),
    ):
        wrote, has = Counters(tmp_path / "master").wrote, Counters(tmp_path / "slave").wrote
        sender = context.Process(target=send_steadily, args=(broker.name_server, rate, theirs))
        sender.start()
        wait_for(has, rate / 10)
        before, began = wrote.value, time.perf_counter()
        lags = sorted(lags_s(wrote, has, 10.0 if full else 0.5))
        written = (wrote.value - before) / (time.perf_counter() - began)
        ours.send(None)
        sender.join(patient(60))
    report("lag, the master writes", written / 1e6, "MB/s")
    for percent in (50, 99):
        report(f"lag, p{percent}", lags[len(lags) * percent // 100] * 1e3, "ms")
    report("lag, longest", lags[-1] * 1e3, "ms")


def test_catch_up(tmp_path: Path, memory: Callable[[], None], full: bool, report: Report) -> None:
    count = 10_000_000 if full else 20_000
    master, slave = master_and_slave(free_ports(1))
    with Broker(tmp_path / "master", settings=master) as broker, broker.producer() as producer:
        for _ in range(count // 20_000):
            producer.send_many("bench_backlog", [LARGE] * 20_000)
        wrote = Counters(tmp_path / "master").wrote
        size = wrote.value
        memory()
        with Sends(producer) as beside:
            bare_s = bare_copy_s(tmp_path / "master", size, tmp_path / "copy")
        with Sends(producer) as before:
            time.sleep(3.0 if full else 0.3)  # of quiet
        memory()
        with Sends(producer) as during, Broker(tmp_path / "slave", settings=slave):
            rate = bytes_per_s(Counters(tmp_path / "slave").flushed, 0, size)
    tell(report, rate, size / bare_s, before, beside, during)
