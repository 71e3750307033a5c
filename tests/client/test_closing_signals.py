"""`close` in a signal's handler, while the thread that it interrupts polls or acknowledges."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from patience import patient

from cometmq import Admin, Broker, Consumer, PopConsumer

WAIT_S = patient(60)


@pytest.fixture
def hangs() -> Iterator[None]:
    """What waits for itself is an error here and not the end of all tests."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it waits for itself")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(WAIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def iterate(consumer: Consumer, seen: Callable[[], None]) -> None:
    for message in consumer:
        consumer.ack(message)
        seen()


def poll(consumer: Consumer | PopConsumer, seen: Callable[[], None]) -> None:
    while True:
        for message in consumer.poll(10, timeout_s=WAIT_S):
            consumer.ack(message)
            seen()


@pytest.mark.parametrize(
    ("work", "pops", "transport"),
    [
        (iterate, False, "mapped"),
        (iterate, False, "zmq"),
        (poll, False, "mapped"),
        (poll, False, "zmq"),
        (poll, True, ""),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("hangs")
@pytest.mark.slow
def test_a_signal_closes_who_polls(
    broker: Broker,
    work: Callable[[Consumer | PopConsumer, Callable[[], None]], None],
    pops: bool,
    transport: str,
    waits: bool,
) -> None:
    """It took a lock that its own thread had, for ever."""
    topic = f"{work.__name__}-{pops}-{transport}-{waits}"
    with broker.producer() as producer:
        producer.send_many(topic, [b"x"] * 500)
    came = threading.Event()
    count = 0

    def seen() -> None:
        nonlocal count
        count += 1
        if count == (500 if waits else 5):
            came.set()

    def strike() -> None:
        came.wait(WAIT_S)
        if waits:
            time.sleep(0.2)  # it is most likely asleep by now; right at any time
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    consumer: Consumer | PopConsumer
    if pops:
        consumer = broker.pop_consumer(topic, topic)
    else:
        consumer = broker.consumer(topic, topic, transport=transport)
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        try:
            work(consumer, seen)
        except RuntimeError as error:
            assert "closed" in str(error)  # noqa: PT017
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        consumer.close()
    if waits:
        with Admin(broker.name_server) as admin:
            assert sum(each.lag for each in admin.describe_group(topic).queues) == 0
