"""Several masters behind several name servers: topics on all, and a dead one's share taken over."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from family import RunningBroker
from patience import patient

from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.client import Admin, Consumer, Producer
from cometmq.protocol.errors import NotConfirmed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NAMES = "abc"


@contextmanager
def name_server() -> Iterator[str]:
    server = NameServerActor.start(bind=[("tcp://127.0.0.1:*", False)])
    try:
        yield server.proxy().addresses.get()[0]
    finally:
        server.stop()


def test_a_dead_masters_share_is_taken_by_the_others(tmp_path: Path) -> None:
    with name_server() as first, name_server() as second:
        servers = [first, second]
        settings = {"namesrvAddr": ";".join(servers)}
        brokers = {
            name: RunningBroker(tmp_path / name, settings | {"brokerName": name}) for name in NAMES
        }
        try:
            stay_and_go(servers, brokers)
        finally:
            for broker in brokers.values():
                broker.close()


def stay_and_go(servers: list[str], brokers: dict[str, RunningBroker]) -> None:
    with Admin(servers[1]) as admin:
        admin.create_topic("orders", queues=2)
        assert {each.broker for each in admin.brokers()} == set(NAMES)
    stored: Counter[str] = Counter()
    with (
        Producer(servers, timeout_s=3) as producer,
        Consumer(list(reversed(servers)), "g", "orders") as consumer,
    ):
        for number in range(60):
            stored[producer.send("orders", str(number).encode()).wait().broker] += 1
        assert stored == dict.fromkeys(NAMES, 20)
        brokers["b"].kill_all()
        lost = 0
        for number in range(60, 260):
            try:
                receipt = producer.send("orders", str(number).encode()).wait()
            except NotConfirmed:
                lost += 1  # it had been sent when the broker died
            else:
                assert receipt.broker != "b"
        assert lost <= 1
        consumer_has(consumer, at_least=240)
        brokers["b"] = RunningBroker(brokers["b"].store, brokers["b"].settings)
        deadline = time.monotonic() + patient(90)
        pause = threading.Event()
        while producer.send("orders", b"260").wait().broker != "b":  # avoided for 10 s at most
            assert time.monotonic() < deadline
            pause.wait(0.02)
        with suppress(NotConfirmed):
            producer.flush()


def consumer_has(consumer: Consumer, at_least: int) -> None:
    found: set[bytes] = set()
    deadline = time.monotonic() + patient(90)
    while len(found) < at_least - 20:  # what "b" has may not have been handed out before it died
        found |= {message.body for message in consumer.poll(timeout_s=1)}
        assert time.monotonic() < deadline, f"{len(found)} messages came"
