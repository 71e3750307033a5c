"""Groups without queues under kills and power cuts: what is acknowledged never comes again, and
what is not comes until it is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from family import RunningBroker
from fault.disk import Disk, need
from patience import patient

from cometmq.client import Message, PopConsumer, Producer
from cometmq.protocol.errors import CometError, HandleUnknown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = patient(120)
SYNC = {"flushDiskType": "SYNC_FLUSH", "brokerName": "broker-a"}


@pytest.fixture
def chance() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


Place = tuple[str, int, int]


def place_of(message: Message) -> Place:
    """A copy that was given back has another one: of a message there may be two, if a process was
    killed while it was made."""
    return message.stored_topic, message.queue_id, message.queue_offset


class Ledger:
    """What was sent, and what a broker has confirmed to be acknowledged."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()
        self.acked: set[bytes] = set()
        self._unknown: set[bytes] = set()  # the answer was lost: it may be, and then never comes
        self._places: set[Place] = set()  # of these
        self.again: list[Message] = []  # that were acknowledged before they came
        self._lock = threading.Lock()

    def send(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            body = b"%d" % len(self.sent)
            producer.send("t", body)
            self.sent.add(body)

    def pop(self, consumer: PopConsumer, count: int) -> list[Message]:
        with self._lock:
            before = set(self._places)
        messages = consumer.poll(count, 0.2)
        self.again += [message for message in messages if place_of(message) in before]
        return messages

    def ack(self, consumer: PopConsumer, message: Message) -> None:
        try:
            consumer.ack(message)
        except HandleUnknown:
            return  # too late: it comes again
        except CometError:
            self._unknown.add(message.body)
            raise
        with self._lock:
            self.acked.add(message.body)
            self._places.add(place_of(message))

    def finish(self, server: str) -> None:
        """All that is left comes within its time."""
        deadline = time.monotonic() + WAIT_S
        # What is in an answer that is lost comes when its time is over.
        with PopConsumer(server, "g", "t", invisible_s=10) as consumer:
            while missing := self.sent - self.acked - self._unknown:
                assert time.monotonic() < deadline, sorted(missing)
                for message in self.pop(consumer, 32):
                    self.ack(consumer, message)
        assert not self.again, [(each.body, each.reconsume_times) for each in self.again]


def test_power_cuts(chance: random.Random, tmp_path: Path) -> None:
    need("ext4", "power cuts of a group without queues")
    ledger = Ledger()
    log = tmp_path / "broker.log"
    with Disk(tmp_path, "ext4") as disk:
        store = disk.folder / "store"
        for _ in range(4):
            broker = RunningBroker(store, SYNC, log_path=log)
            server = broker.ready.name_server
            with (
                Producer(server) as producer,
                PopConsumer(server, "g", "t", invisible_s=chance.choice([1, 5])) as consumer,
            ):
                ledger.send(producer, 12)
                for _ in range(chance.randint(1, 4)):
                    messages = ledger.pop(consumer, chance.randint(1, 9))
                    chance.shuffle(messages)
                    for message in messages[: len(messages) * 2 // 3]:
                        ledger.ack(consumer, message)
                disk.cut()
                broker.kill_all()
            disk.power_on()
        with RunningBroker(store, SYNC, log_path=log) as broker:
            ledger.finish(broker.ready.name_server)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_kills_under_load(flush: str, chance: random.Random, tmp_path: Path) -> None:
    """Of each process, and of all, while several consumers acknowledge, give back and forget."""
    settings = {**SYNC, "flushDiskType": flush}
    ledger = Ledger()
    with ExitStack() as stack:
        broker = stack.enter_context(RunningBroker(tmp_path / "store", settings))
        broker.create_topic("t", 3)
        for role in ("coordinator", "scheduler", "commitlog", "reader-0", "dispatcher"):
            with (
                Consuming(broker.ready.name_server, ledger, chance),
                Producer(broker.ready.name_server, timeout_s=WAIT_S) as producer,
            ):
                ledger.send(producer, 20)
                broker.kill(role)
                ledger.send(producer, 20)
        with Consuming(broker.ready.name_server, ledger, chance):
            broker.kill_all()
    with RunningBroker(tmp_path / "store", settings) as broker:
        ledger.finish(broker.ready.name_server)


class Consuming:
    """Three consumers that come back whatever happens, until its end."""

    def __init__(self, server: str, ledger: Ledger, chance: random.Random) -> None:
        self._server = server
        self._ledger = ledger
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume, args=(random.Random(chance.random()),))
            for _ in range(3)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _consume(self, chance: random.Random) -> None:
        while not self._over.is_set():
            try:
                with PopConsumer(
                    self._server, "g", "t", invisible_s=chance.choice([5, 10]), timeout_s=patient(5)
                ) as consumer:
                    for message in self._messages(consumer, chance):
                        self._deal_with(consumer, message, chance.random())
            except CometError:
                self._over.wait(0.05)

    def _messages(self, consumer: PopConsumer, chance: random.Random) -> Iterator[Message]:
        while not self._over.is_set():
            yield from self._ledger.pop(consumer, chance.randint(1, 20))

    def _deal_with(self, consumer: PopConsumer, message: Message, what: float) -> None:
        if what < 0.8:
            self._ledger.ack(consumer, message)
        elif what < 0.9:
            consumer.nack(message, 1)
