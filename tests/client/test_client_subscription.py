"""An actor of one's own as a consumer, where it goes wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pykka
import pytest
from client_fakes import Handle, fake_broker
from patience import patient

from cometmq.client import Consumer, Producer, subscribe_actor


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


class Stubborn(pykka.ThreadingActor):
    """Never takes what comes from queue 0."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bytes] = []
        self.attempts = 0
        self.tried_thrice = threading.Event()
        self.took_ten = threading.Event()

    def on_receive(self, message: Any) -> None:
        if message.queue_id == 0:
            self.attempts += 1
            if self.attempts == 3:
                self.tried_thrice.set()
            raise RuntimeError("never")
        self.taken.append(message.body)
        if len(self.taken) == 10:
            self.took_ten.set()


def fill(handle: Handle) -> None:
    with Producer(handle.address) as producer:
        producer.send_many("t", [b"bad%d" % i for i in range(5)], queue_id=0)
        producer.send_many("t", [b"%d" % i for i in range(10)], queue_id=1)


def test_a_queue_that_stands_still_holds_up_no_other(
    broker: Handle, caplog: pytest.LogCaptureFixture
) -> None:
    fill(broker)
    actor = Stubborn.start()
    proxy = actor.proxy()
    with Consumer(broker.address, "g", "t", auto_commit_ms=20) as consumer:
        with caplog.at_level(logging.ERROR), subscribe_actor(actor, consumer):
            assert proxy.took_ten.get().wait(patient(60))
            assert proxy.tried_thrice.get().wait(patient(60))
        assert proxy.taken.get() == [b"%d" % i for i in range(10)]
    actor.stop()
    assert broker.broker.offsets["g", "t", 1] == 10
    assert broker.broker.offsets.get(("g", "t", 0), 0) == 0
    assert "attempt 2; again in 0.2 s" in caplog.text


def test_a_dead_actor_ends_the_subscription(broker: Handle) -> None:
    fill(broker)
    actor = Stubborn.start()
    actor.stop()
    with Consumer(broker.address, "g", "t") as consumer:
        subscription = subscribe_actor(actor, consumer)
        subscription._thread.join(patient(60))
        assert not subscription.running
        subscription.stop()


def test_closing_the_consumer_ends_the_subscription(broker: Handle) -> None:
    actor = Stubborn.start()
    consumer = Consumer(broker.address, "g", "t")
    subscription = subscribe_actor(actor, consumer)
    consumer.close()
    subscription._thread.join(patient(60))
    assert not subscription.running
    actor.stop()
