"""Groups that take their messages in order, under kills: no queue is reordered, nothing of one is
given out while somebody has something of it, and what is acknowledged never comes again."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from family import RunningBroker
from fault.points import POINTS, Points
from patience import patient

from cometmq.client import Message, PopConsumer, Producer
from cometmq.protocol.errors import CometError, HandleUnknown

WAIT_S = patient(120)
NAMES = ("ledger.sent", "ledger.stored", "ledger.covered", "config.answer")
SYNC = {"flushDiskType": "SYNC_FLUSH", "brokerName": "broker-a"}


def take(consumer: PopConsumer, count: int) -> list[Message]:
    deadline = time.monotonic() + WAIT_S
    while not (found := consumer.poll(count, 1)):
        assert time.monotonic() < deadline
    return found


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_killed_between_the_deed_and_its_answer(name: str, moment: str, tmp_path: Path) -> None:
    """Whoever asks again has what the answer that was lost had, and is not told to wait until its
    time is over; a word that is said again counts once."""
    with (
        Points(tmp_path / "points") as hits,
        RunningBroker(
            tmp_path / "store", SYNC, environ=hits.environ, module=Points.MODULE
        ) as broker,
    ):
        broker.create_topic("t", 1)
        server = broker.ready.name_server
        with Producer(server) as producer:
            producer.send_many("t", [b"%d" % number for number in range(9)], queue_id=0)
        with PopConsumer(server, "g", "t", orderly=True, invisible_s=600) as consumer:
            consumer.ack(*take(consumer, 1))

            def arm() -> None:
                hits.arm(POINTS[f"{name}.{moment}"])

            arm()
            messages = take(consumer, 3)
            assert places(messages) == [(1, 0), (2, 0), (3, 0)]
            arm()
            consumer.ack(messages[0])
            arm()
            with contextlib.suppress(HandleUnknown):  # it was given back, and that is said again
                consumer.nack(messages[1], 0)
            arm()
            again = take(consumer, 9)
            assert places(again) == [(2, 1), (3, 0)]
            assert hits.wait_hit(WAIT_S) is not None
            hits.disarm()
            consumer.ack(*again)
            assert places(take(consumer, 9)) == [(offset, 0) for offset in range(4, 9)]


def places(messages: list[Message]) -> list[tuple[int, int]]:
    return [(message.queue_offset, message.reconsume_times) for message in messages]


# --- under load ---


class Take(NamedTuple):
    """Times are time.monotonic()."""

    queue: int
    offsets: list[int]
    asked: float
    came: float
    invisible_s: float


class Checker:
    """What was taken of each queue, what was said of it, and when."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.takes: list[Take] = []
        self.said: dict[tuple[int, int], float] = {}  # first word on a message, tried or not
        self.acked: dict[tuple[int, int], float] = {}  # confirmed
        self.begun: dict[tuple[int, int], float] = {}  # perhaps acknowledged, since then

    def check(self) -> None:
        by_queue: dict[int, list[Take]] = defaultdict(list)
        for each in sorted(self.takes, key=lambda take: take.came):
            assert each.offsets == sorted(each.offsets)
            by_queue[each.queue].append(each)
        for queue, takes in by_queue.items():
            for at, here in enumerate(takes):
                for offset in here.offsets:
                    assert self.acked.get((queue, offset), 1e99) > here.asked, ("again", here)
                for offset in range(here.offsets[0]):
                    assert self.begun.get((queue, offset), 1e99) < here.came, ("skipped", here)
                for before in takes[:at]:
                    silent = any(
                        self.said.get((queue, offset), 1e99) > here.came
                        for offset in before.offsets
                    )
                    over = before.asked + before.invisible_s
                    assert not silent or over <= here.came, ("held", before, here)


class Consuming(threading.Thread):
    """Takes, and says of most messages in their order what becomes of them; of some, nothing."""

    def __init__(
        self, server: str, checker: Checker, chance: random.Random, over: threading.Event
    ) -> None:
        super().__init__()
        self._server, self._checker, self._chance, self._over = server, checker, chance, over

    def run(self) -> None:
        while not self._over.is_set():
            invisible_s = self._chance.choice([1.0, 3.0])
            try:
                with PopConsumer(
                    self._server,
                    "g",
                    "t",
                    orderly=True,
                    invisible_s=invisible_s,
                    timeout_s=patient(5),
                ) as consumer:
                    while not self._over.is_set():
                        self._turn(consumer, invisible_s)
            except CometError:
                self._over.wait(0.05)

    def _turn(self, consumer: PopConsumer, invisible_s: float) -> None:
        asked = time.monotonic()
        found = consumer.poll(self._chance.randint(1, 6), 0.3)
        by_queue: dict[int, list[Message]] = defaultdict(list)
        for message in found:
            by_queue[message.queue_id].append(message)
        with self._checker.lock:
            came = time.monotonic()
            for queue, messages in by_queue.items():
                offsets = [message.queue_offset for message in messages]
                self._checker.takes.append(Take(queue, offsets, asked, came, invisible_s))
        for messages in by_queue.values():
            for message in messages:
                what = self._chance.random()
                if what < 0.04:
                    break  # it forgets this one, and what comes behind it
                self._say(consumer, message, is_done=what < 0.9)
                if what >= 0.9:
                    break

    def _say(self, consumer: PopConsumer, message: Message, *, is_done: bool) -> None:
        key = message.queue_id, message.queue_offset
        with self._checker.lock:
            now = time.monotonic()
            self._checker.said.setdefault(key, now)
            if is_done:
                self._checker.begun.setdefault(key, now)
            else:  # what comes behind it is nobody's then
                for offset in range(message.queue_offset + 1, message.queue_offset + 33):
                    self._checker.said.setdefault((message.queue_id, offset), now)
        try:
            if is_done:
                consumer.ack(message)
                with self._checker.lock:
                    self._checker.acked.setdefault(key, time.monotonic())
            else:
                consumer.nack(message, after=0.02)
        except HandleUnknown:
            pass


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_kills_under_load(flush: str, tmp_path: Path) -> None:
    """Of each process, and of all, while more members than queues are at work."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    settings = {**SYNC, "flushDiskType": flush}
    checker, sent = Checker(), 0
    broker = RunningBroker(tmp_path / "store", settings)
    try:
        broker.create_topic("t", 2)
        for role in ("coordinator", "scheduler", "commitlog", "reader-0", "dispatcher", "all"):
            over = threading.Event()
            server = broker.ready.name_server
            members = [
                Consuming(server, checker, random.Random(chance.random()), over) for _ in range(4)
            ]
            for member in members:
                member.start()
            with Producer(server, timeout_s=WAIT_S) as producer:
                for number in range(40):
                    if number == 20 and role != "all":
                        broker.kill(role)
                    producer.send("t", b"%d" % number, queue_id=number % 2)
                    sent += 1
            over.wait(1.0)  # they work on
            if role == "all":
                broker.kill_all()
            over.set()
            for member in members:
                member.join(WAIT_S)
                assert not member.is_alive()
        broker = RunningBroker(tmp_path / "store", settings)
        over = threading.Event()
        member = Consuming(broker.ready.name_server, checker, chance, over)
        member.start()
        deadline = time.monotonic() + WAIT_S
        while len(checker.begun) < sent:
            assert time.monotonic() < deadline, sent - len(checker.begun)
            over.wait(0.05)
        over.set()
        member.join(WAIT_S)
    finally:
        broker.kill_all()
    checker.check()
    assert len(checker.takes) > sent / 6


@pytest.mark.slow
def test_a_restart(tmp_path: Path) -> None:
    """What is out stays out, with its count, under its handle."""
    store = tmp_path / "store"
    with RunningBroker(store, SYNC) as broker:
        broker.create_topic("t", 2)
        server = broker.ready.name_server
        with Producer(server) as producer:
            for queue in range(2):
                producer.send_many("t", [b"%d" % number for number in range(4)], queue_id=queue)
        with PopConsumer(server, "g", "t", orderly=True, invisible_s=600) as consumer:
            found: list[Message] = []
            while len(found) < 8:  # what is acknowledged may not be in its queue yet
                found += take(consumer, 8)
            messages = sorted(found, key=lambda each: each.queue_id)
            consumer.nack(messages[0], after=0)
            consumer.ack(messages[5])
    with (
        RunningBroker(store, SYNC) as broker,
        PopConsumer(broker.ready.name_server, "g", "t", orderly=True) as consumer,
    ):
        again = take(consumer, 8)
        assert [(m.queue_id, m.queue_offset, m.reconsume_times) for m in again] == [
            (0, 0, 1), (0, 1, 0), (0, 2, 0), (0, 3, 0),
        ]  # fmt: skip
        consumer.ack(*again)
        assert consumer.poll(timeout_s=0.2) == []
