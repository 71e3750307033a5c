"""Through ZeroMQ: one Python client process, one broker on the same machine, ASYNC_FLUSH.

Canonical load: 128-byte bodies. The control of the round trip is a bare pyzmq echo beside it.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from benchmarks import Report, median_s
from patience import patient

from cometmq import Broker

BODY = random.Random(7).randbytes(128)


def test_send_with_linger(broker: Broker, full: bool, report: Report) -> None:
    count = 1_000_000 if full else 20_000
    with broker.producer(linger_ms=5) as producer:

        def run() -> None:
            send = producer.send
            for _ in range(count):
                send("bench_send", BODY)
            producer.flush()

        median = median_s(run, 3 if full else 1)
    report("send(), acknowledged", count / median / 1e3, "k messages/s")


def test_send_many(broker: Broker, full: bool, report: Report) -> None:
    count = 2_000_000 if full else 20_000
    bodies = [BODY] * count
    with broker.producer() as producer:
        median = median_s(lambda: producer.send_many("bench_many", bodies), 3 if full else 1)
    report("send_many(), acknowledged", count / median / 1e6, "M messages/s")


def test_send_oneway(broker: Broker, full: bool, report: Report) -> None:
    """What a message costs the thread that sends it, which other load hardly changes."""
    count = 3_000 if full else 200
    took = []
    with broker.producer() as producer:
        for _ in range(9 if full else 1):
            producer.send("bench_oneway", BODY, queue_id=0)  # behind all that came before
            began = time.thread_time()
            for _ in range(count):
                producer.send_oneway("bench_oneway", BODY, queue_id=0)
            took.append(time.thread_time() - began)
    report("send_oneway(), processor time", statistics.median(took) / count * 1e6, "us")
    report("the same, best round", min(took) / count * 1e6, "us")


def test_poll_of_a_warm_backlog(broker: Broker, full: bool, report: Report) -> None:
    count = 2_000_000 if full else 20_000
    with broker.producer() as producer:
        producer.send_many("bench_poll", [BODY] * count)

    def drain(group: str) -> None:
        with broker.consumer(group, "bench_poll", transport="zmq") as consumer:
            left = count
            while left:
                messages = consumer.poll(8192, timeout_s=patient(10))
                assert messages, f"{left} of {count} messages did not come"
                consumer.ack(messages)
                left -= len(messages)

    groups = iter(range(100))
    median = median_s(lambda: drain(f"group{next(groups)}"), 3 if full else 1)
    report("poll(), warm backlog", count / median / 1e6, "M messages/s")


@pytest.fixture
def echo() -> Iterator[Callable[[], float]]:
    """Seconds of one round trip through a bare ROUTER in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        socket = zmq.Context().socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        os.write(writer, b"%d\n" % port)
        while True:
            socket.send_multipart(socket.recv_multipart())
    port = int(os.read(reader, 16))
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")

    def once() -> float:
        began = time.perf_counter()
        dealer.send(BODY)
        dealer.recv()
        return time.perf_counter() - began

    yield once
    dealer.close(linger=0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_one_in_flight(
    broker: Broker,
    echo: Callable[[], float],
    full: bool,
    report: Report,
) -> None:
    """Ours and the echo take turns, so that both meet the same machine."""
    count = 5_000 if full else 100
    with broker.producer() as producer:

        def once() -> float:
            began = time.perf_counter()
            producer.send("bench_one", BODY)
            return time.perf_counter() - began

        for _ in range(50):
            once()
            echo()
        ours, theirs = [], []
        for _ in range(count // 50):
            ours += [once() for _ in range(50)]
            theirs += [echo() for _ in range(50)]
    report("p50", statistics.median(ours) * 1e6, "us")
    report("p50 of a bare echo", statistics.median(theirs) * 1e6, "us")
    report("p50 against it", statistics.median(ours) / statistics.median(theirs), "times")
