"""The master of a broker is somewhere else from now on, as after a fail-over: clients follow.

The name server hears of the new one late, after the clients have missed the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
from client_fakes import Handle, fake_broker, start_broker
from patience import patient

from cometmq.client import AsyncPopConsumer, Consumer, Message, PopConsumer, Producer
from cometmq.client.receiving.membership import Membership
from cometmq.client.routes import Routes
from cometmq.client.sending import attempts
from cometmq.client.sending.attempts import SEND_S
from cometmq.client.sending.ends import pause_until
from cometmq.protocol.commands import BrokerEndpoints, GetRoute, JoinGroup, PopMessages
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable, SystemBusy
from cometmq.protocol.retry import MOST_S, SOON_S

WAIT_S = patient(10)  # an unused route is refreshed every 30 s


@pytest.fixture
def names() -> Iterator[Handle]:
    """A name server, which knows of topic t."""
    with fake_broker(topics=["t"]) as handle:
        yield handle


@pytest.fixture
def old(names: Handle) -> Iterator[Handle]:
    handle = start_broker(topics=["t"])
    names.broker.moved_to = handle.address
    yield handle
    handle.stop()


@pytest.fixture
def elect(names: Handle) -> Iterator[Callable[[], Handle]]:
    """The name server hears of another master."""
    started: list[Handle] = []

    def begin() -> Handle:
        handle = start_broker(topics=["t"])
        started.append(handle)
        names.broker.moved_to = handle.address
        return handle

    yield begin
    for handle in started:
        handle.stop()


def lose(old: Handle, names: Handle) -> None:
    """Kill the master; the client has asked where it is, and heard of the same one."""
    asked = len(names.asked(GetRoute))
    old.stop()
    names.wait_for(lambda _: len(names.asked(GetRoute)) > asked)


def test_a_member_without_queues(names: Handle, old: Handle, elect: Callable[[], Handle]) -> None:
    """No reader of its own misses the broker."""
    old.broker.share = []
    with Consumer(names.address, "g", "t"):
        old.wait_for(lambda fake: fake.joins)
        lose(old, names)
        elect().wait_for(lambda fake: any(isinstance(each, JoinGroup) for each in fake.commands))


def test_a_member_that_asks_nothing_when_its_master_goes(
    names: Handle, old: Handle, elect: Callable[[], Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No question of it fails, and the next one finds no connection."""
    old.broker.share = []
    send_join, asked, lost = Membership._send_join, 0, threading.Event()

    def lose_before(self: Membership, command: JoinGroup) -> None:
        nonlocal asked
        if command.wait_ms and not lost.is_set():
            asked = len(names.asked(GetRoute))
            old.stop()
            while self._channel._dealer.is_connected:
                time.sleep(0.005)
            lost.set()
        send_join(self, command)

    monkeypatch.setattr(Membership, "_send_join", lose_before)
    with Consumer(names.address, "g", "t"):
        assert lost.wait(WAIT_S)
        names.wait_for(lambda _: len(names.asked(GetRoute)) > asked)
        elect().wait_for(lambda fake: any(isinstance(each, JoinGroup) for each in fake.commands))


@pytest.mark.slow
def test_a_run_without_queues(names: Handle, old: Handle, elect: Callable[[], Handle]) -> None:
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.body)
        consumer.close()

    with (
        PopConsumer(names.address, "g", "t", timeout_s=0.5) as consumer,
        ThreadPoolExecutor() as pool,
    ):
        ended = pool.submit(consumer.run, handle)
        old.wait_for(lambda fake: any(isinstance(each, PopMessages) for each in fake.commands))
        lose(old, names)
        ask_in_vain(names, ended)
        new = elect()
        send(names, b"x")
        ended.result(WAIT_S)
    assert seen == [b"x"]
    assert new.asked(PopMessages)


@pytest.mark.slow
def test_a_run_of_tasks_without_queues(
    names: Handle, old: Handle, elect: Callable[[], Handle]
) -> None:
    seen: list[bytes] = []
    connected = threading.Event()

    async def consume() -> None:
        async def handle(message: Message) -> None:
            seen.append(message.body)
            await consumer.close()

        consumer = AsyncPopConsumer(names.address, "g", "t", timeout_s=0.5)
        async with consumer:
            connected.set()
            await consumer.run(handle)

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(asyncio.run, consume())
        old.wait_for(lambda fake: any(isinstance(each, PopMessages) for each in fake.commands))
        lose(old, names)
        ask_in_vain(names, ended)
        elect()
        send(names, b"x")
        ended.result(WAIT_S)
    assert seen == [b"x"]


@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.slow
def test_a_producer_whose_route_had_no_followers_yet(
    names: Handle, old: Handle, elect: Callable[[], Handle], linger_ms: int
) -> None:
    """Once it hears of them it waits for one of them, as if it had known them when it sent."""
    with (
        ThreadPoolExecutor() as pool,
        Producer(names.address, linger_ms=linger_ms, timeout_s=None) as producer,
        fake_broker(topics=["t"]) as follower,
    ):
        producer.send("t", b"before").wait()
        old.stop()
        follower.broker.name, follower.broker.broker_id = names.broker.name, 1
        names.broker.peers.append(follower.broker)
        began = time.monotonic()
        sent = pool.submit(lambda: producer.send("t", b"late").wait())
        names.wait_for(lambda _: sent.done() or time.monotonic() > began + SEND_S + 0.5)
        elect()
        sent.result(WAIT_S)


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_a_producer_looks_soon_where_nobody_listens(
    names: Handle,
    old: Handle,
    elect: Callable[[], Handle],
    linger_ms: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that takes long is one thing, no connection another."""
    monkeypatch.setattr(attempts, "CHECK_S", 3_600.0)
    with (
        ThreadPoolExecutor() as pool,
        Producer(names.address, linger_ms=linger_ms, timeout_s=patient(60)) as producer,
    ):
        producer.send("t", b"before").wait()
        old.stop()
        asked = len(names.asked(GetRoute))
        sent = pool.submit(lambda: producer.send("t", b"late").wait())
        names.wait_for(lambda _: len(names.asked(GetRoute)) > asked + 2)
        new = elect()
        sent.result(WAIT_S)
    assert [*new.broker.batches.values()] == [[[b"late"]]]


@pytest.mark.parametrize(
    ("failures", "error", "attempts_max", "longest"),
    [
        (1, None, None, 0.02),
        (5, NotReachable("x"), None, SOON_S),
        (1_000_000, NotConfirmed("x"), None, SOON_S),
        (1_000_000, SystemBusy("x"), None, MOST_S),
        (1_000_000, NotReachable("x"), 1_000_001, MOST_S),
    ],
)
def test_a_producer_pauses(
    failures: int, error: CometError | None, attempts_max: int | None, longest: float
) -> None:
    assert attempts.RetryPolicy(None, attempts_max).pause_s(failures, error) == longest
    if error is not None and attempts_max is None:  # the end of a transaction as well
        assert pause_until(math.inf, failures, error) == longest


@pytest.mark.slow
def test_a_poll_says_so_when_nobody_answers_for_long(names: Handle, old: Handle) -> None:
    with PopConsumer(names.address, "g", "t", timeout_s=2) as consumer:
        send(names, b"x")
        assert consumer.poll(timeout_s=WAIT_S)
        old.stop()
        began = time.monotonic()
        with pytest.raises((NotReachable, NotConfirmed)):
            poll_in_vain(consumer)
        assert time.monotonic() >= began + 2


def poll_in_vain(consumer: PopConsumer) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert consumer.poll(timeout_s=0.1) == []


def send(names: Handle, body: bytes) -> None:
    with Producer(names.address) as producer:
        producer.send("t", body)


def ask_in_vain(names: Handle, ended: Future[None]) -> None:
    """For longer than the consumer's `timeout_s`: each question costs it a second."""
    asked = len(names.asked(GetRoute))
    names.wait_for(lambda _: ended.done() or len(names.asked(GetRoute)) >= asked + 2)
    assert not ended.done(), ended.exception()


# --- a topic that is not there yet, while there is no master ---


@pytest.fixture
def routes(names: Handle) -> Iterator[Routes]:
    with contextlib.closing(Routes(names.address)) as found:
        yield found


def followers_of(routes: Routes) -> list[BrokerEndpoints]:
    return [msgspec.structs.replace(each, broker_id=7) for each in routes.brokers()]


def test_a_new_topic_waits_for_a_master(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    masters, looks = routes.brokers(), 0
    followers = followers_of(routes)

    def brokers(_timeout_s: float) -> list[BrokerEndpoints]:
        nonlocal looks
        looks += 1
        return followers if looks < 4 else masters

    monkeypatch.setattr(routes, "brokers", brokers)
    assert routes.ensure("t").brokers
    assert looks == 4


def test_it_does_not_wait_beyond_its_time(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    followers, looks = followers_of(routes), 0

    def brokers(_timeout_s: float) -> list[BrokerEndpoints]:
        nonlocal looks
        looks += 1
        return followers

    monkeypatch.setattr(routes, "brokers", brokers)
    began = time.monotonic()
    with pytest.raises(NotReachable, match="no broker that is a master"):
        routes.ensure("t", 0.5)
    assert time.monotonic() - began >= 0.3
    assert looks > 1


def test_where_there_are_no_brokers_nobody_waits(
    routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def brokers(timeout_s: float) -> list[BrokerEndpoints]:
        looks.append(timeout_s)
        return []

    monkeypatch.setattr(routes, "brokers", brokers)
    with pytest.raises(NotReachable, match=r"knows no broker$"):
        routes.ensure("t")
    assert len(looks) == 1
