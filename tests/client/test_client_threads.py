"""No thread of a client dies, whatever its calls raise, and every wait ends at its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fakes import Handle, fake_broker
from patience import patient
from waiting import until

from cometmq import Broker
from cometmq.client import Admin, AsyncProducer, Consumer, Producer
from cometmq.client.receiving.member import Member
from cometmq.client.receiving.membership import Membership
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.routes import Routes
from cometmq.client.sending.attempts import GRACE_S
from cometmq.client.sending.clock import Clock
from cometmq.client.sending.delivery import Delivery
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.recovery import Recovery
from cometmq.protocol.commands import TopicInfo
from cometmq.protocol.errors import CometError, NoPermission, NotConfirmed, SystemBusy
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.dealer import Dealer
from cometmq.protocol.wire.pending import PendingRequests
from cometmq.protocol.wire.steady import Steady

WAIT_S = patient(60)
TIMEOUT_S = patient(0.5)
LIMIT_S = TIMEOUT_S + GRACE_S + patient(8)  # a slow machine
PATIENT_S = patient(10)  # for a real broker's answer, whose disk has other users


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("cometmq ")]


def end_by_force(thread: threading.Thread) -> None:
    """It raises SystemExit where it is, as soon as it runs again."""
    assert thread.ident is not None
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    assert found == 1


def close_in_time(closing: Callable[[], None]) -> None:
    with within(LIMIT_S), contextlib.suppress(CometError):
        closing()


# --- a topic that may not be written -------------------------------------------------------------


@pytest.fixture
def read_only(broker: Handle) -> Handle:
    broker.broker.topics["ro"] = TopicInfo("ro", 4, 4, 4)
    broker.broker.topics["rw"] = TopicInfo("rw", 4, 4, 6)
    return broker


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_read_only_topic_is_refused_and_wedges_nothing(
    read_only: Handle, linger_ms: float
) -> None:
    producer = Producer(read_only.address, linger_ms=linger_ms, timeout_s=TIMEOUT_S)
    for _ in range(3):
        with within(LIMIT_S), pytest.raises(NoPermission, match="ro"):
            producer.send("ro", b"x").wait()
        with within(LIMIT_S), pytest.raises(NoPermission, match="ro"):
            producer.send_many("ro", [b"x"] * 10)
        with within(LIMIT_S), pytest.raises(NoPermission, match="ro"):
            producer.send_async("ro", b"x").result(WAIT_S)
        with within(LIMIT_S), pytest.raises(NoPermission, match="ro"):
            producer.send_oneway("ro", b"x")
        assert producer.send("rw", b"y").wait().queue_offset >= 0
    with within(LIMIT_S):
        producer.flush()
        producer.close()


def test_nor_does_it_in_asyncio(read_only: Handle) -> None:
    async def main() -> None:
        async with AsyncProducer(read_only.address, linger_ms=5, timeout_s=TIMEOUT_S) as producer:
            for _ in range(3):
                with pytest.raises(NoPermission):
                    await producer.send("ro", b"x")
                with pytest.raises(NoPermission):
                    await producer.send_many("ro", [b"x"])
                assert (await producer.send("rw", b"y")).queue_offset >= 0

    with within(LIMIT_S):
        asyncio.run(main())


@pytest.mark.parametrize("how", ["send", "async", "keyed"])
@pytest.mark.slow
def test_the_right_to_write_is_taken_from_a_running_producer(read_only: Handle, how: str) -> None:
    """While messages of that topic linger, and others as well."""
    producer = Producer(read_only.address, linger_ms=200, timeout_s=TIMEOUT_S)
    producer.send("t", b"before").wait()
    producer.send("rw", b"before").wait()
    key = "k" if how == "keyed" else None

    def send(topic: str) -> Callable[[], object]:
        if how == "async":
            return producer.send_async(topic, b"x").result
        return producer.send(topic, b"x", ordering_key=key).wait

    waiting, others = send("t"), send("rw")
    read_only.do(lambda fake: fake.topics.update(t=TopicInfo("t", 4, 4, 4)))
    read_only.broker.faults = [NoPermission.code] if how == "keyed" else []
    producer._sender.routes.refresh("t")
    producer._sender.delivery.lanes_of("t")
    with within(LIMIT_S), pytest.raises(NoPermission):
        waiting()
    with within(LIMIT_S):
        with contextlib.suppress(NoPermission):  # the one fault may meet both in one request
            others()
        assert producer.send("rw", b"y").wait().queue_offset >= 0
    with within(LIMIT_S), pytest.raises(NoPermission):
        producer.send("t", b"x").wait()
    read_only.do(lambda fake: fake.topics.update(t=TopicInfo("t", 4, 4, 6)))
    producer._sender.routes.refresh("t")
    assert producer.send("t", b"again").wait().queue_offset >= 0
    close_in_time(producer.close)


def test_an_operator_makes_a_topic_read_only_under_a_producer(tmp_path: Path) -> None:
    settings = {"logLevel": "ERROR"}
    with (
        Broker(tmp_path / "store", settings=settings) as broker,
        Admin(broker.name_server) as admin,
        broker.producer(linger_ms=1, timeout_s=PATIENT_S) as producer,
    ):
        for topic in ("a", "b"):
            admin.create_topic(topic, 4)
            producer.send(topic, b"x").wait()
        admin.update_topic("a", perm=4)
        for _ in range(20):
            with within(LIMIT_S + PATIENT_S), pytest.raises(NoPermission):
                producer.send("a", b"x").wait()
            assert producer.send("b", b"y").wait().queue_offset >= 0
        with within(LIMIT_S + PATIENT_S), contextlib.suppress(NoPermission):
            producer.flush()


# --- calls that fail -----------------------------------------------------------------------------


def fail(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException, times: int
) -> Callable[[], int]:
    """That method raises in threads of the client, so often; how often it has."""
    original = getattr(owner, name)
    raised = 0

    def failing(*arguments: Any, **keywords: Any) -> Any:
        nonlocal raised
        if threading.current_thread().name.startswith("cometmq ") and raised < times:
            raised += 1
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, failing)
    return lambda: raised


ERRORS = [NoPermission("as the test says"), RuntimeError("as the test says")]
PRODUCERS_CALLS = [
    (Clock, "_collect_due"),
    (Clock, "_collect_late"),
    (Clock, "_next_alarm"),
    (Delivery, "collect"),
    (Delivery, "launch"),
    (Delivery, "_land"),
    (Delivery, "_answered"),
    (Clock, "_expire"),
    (Delivery, "resume"),
    (Recovery, "look_up"),
    (Recovery, "_learn"),
    (Recovery, "look_after"),
    (Routes, "refresh"),
    (Routes, "commitlog"),
    (Batch, "settle"),
    (Channel, "request"),
    (Channel, "_pump_once"),
    (PendingRequests, "match"),
    (Channel, "_send"),
    (Channel, "descriptors"),
    (Dealer, "receive_nowait"),
]


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "name"), PRODUCERS_CALLS, ids=lambda each: getattr(each, "__name__", each)
)
def test_whatever_fails_in_a_producer(
    broker: Handle,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    error: Exception,
) -> None:
    producer = Producer(broker.address, linger_ms=1, timeout_s=TIMEOUT_S)
    for topic in ("a", "b"):
        producer.send(topic, b"before").wait()
    threads = {each.name for each in ours()}
    fail(monkeypatch, owner, name, error, times=2)
    broker.broker.faults = [2, None, "silent"]  # so that it has to wait and to try again
    for number in range(4):
        with within(LIMIT_S), contextlib.suppress(CometError):
            producer.send("a", b"%d" % number, queue_id=number % 4).wait()
    broker.broker.faults = []
    _until_stored(producer, "b")
    _until_stored(producer, "a")
    assert threads <= {each.name for each in ours()}
    close_in_time(producer.close)


def _until_stored(producer: Producer, topic: str) -> None:
    for _ in range(20):
        with within(LIMIT_S), contextlib.suppress(CometError):
            assert producer.send(topic, b"after").wait().queue_offset >= 0
            return
    raise AssertionError(f"nothing can be sent to {topic} any more")


CONSUMERS_CALLS = [
    (Membership, "_answered"),
    (Membership, "_take_in"),
    (Membership, "_await_join"),
    (Membership, "_send_join"),
    (Membership, "_commit_quietly"),
    (Membership, "_commit"),
    (Membership, "_leave"),
    (Member, "take_on"),
    (OwnedQueues, "progress_of"),
    (Member, "look_up_brokers"),
    (Channel, "request"),
    (Channel, "_pump_once"),
    (Channel, "descriptors"),
]


@pytest.mark.parametrize(
    ("owner", "name"), CONSUMERS_CALLS, ids=lambda each: getattr(each, "__name__", each)
)
@pytest.mark.slow
def test_whatever_fails_in_a_consumer(
    broker: Handle, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    with Producer(broker.address) as producer:
        producer.send_many("t", [b"x"] * 40)
    fail(monkeypatch, owner, name, RuntimeError("as the test says"), times=3)
    consumer = Consumer(broker.address, "g", "t", auto_commit_ms=20)
    found = 0
    deadline = time.monotonic() + WAIT_S
    while found < 40:
        assert time.monotonic() < deadline
        messages = consumer.poll(64, 0.2)
        found += len(messages)
        consumer.ack(messages)
    until(lambda: sum(broker.broker.offsets.values()) >= 40)
    close_in_time(consumer.close)


def test_an_admin_whose_line_fails(broker: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", queue_id=0)
    with Admin(broker.address, timeout_s=TIMEOUT_S) as admin:
        assert len(admin.queue_range("t", 0)) == 1
        for channel in admin._routes._channels.values():
            channel.start_pump()
        for owner, name in (
            (Channel, "_pump_once"),
            (PendingRequests, "match"),
            (Channel, "descriptors"),
        ):
            with monkeypatch.context() as patch:
                fail(patch, owner, name, RuntimeError("as the test says"), times=3)
                for _ in range(4):
                    with within(LIMIT_S), contextlib.suppress(CometError):
                        admin.queue_range("t", 0)
            assert len(admin.queue_range("t", 0)) == 1


ENDED = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

# --- threads that are ended by force -------------------------------------------------------------


@ENDED
def test_threads_of_a_producer_that_are_ended_by_force(broker: Handle) -> None:
    others = set(ours())  # of the broker that this process shares among tests
    producer = Producer(broker.address, linger_ms=1, timeout_s=TIMEOUT_S)
    called = threading.Semaphore(0)

    def send(topic: str) -> None:
        sent = producer.send_async(topic, b"x", callback=lambda *_: called.release())
        with contextlib.suppress(CometError):
            sent.result(LIMIT_S)

    broker.broker.faults = [2]  # for the recovery to be there
    send("a")
    assert called.acquire(timeout=WAIT_S)
    names = {each.name for each in ours()}
    assert {name.split(" at ")[0] for name in names} >= {
        "cometmq producer clock",
        "cometmq producer callbacks",
        "cometmq producer recovery",
        "cometmq the name server",  # the fake is all in one
    }
    for thread in [each for each in ours() if each not in others]:
        end_by_force(thread)
        while thread.is_alive():  # it falls when something wakes it
            broker.broker.faults = [2]
            send("a")
            send("b")
        until(lambda name=thread.name: name in {each.name for each in ours()})
        _until_stored(producer, "b")
    while called.acquire(blocking=False):
        pass
    send("a")
    assert called.acquire(timeout=WAIT_S)
    close_in_time(producer.close)


@ENDED
def test_threads_of_a_consumer_that_are_ended_by_force(broker: Handle) -> None:
    with Producer(broker.address) as producer:
        producer.send_many("t", [b"x"] * 40)
        consumer = Consumer(broker.address, "g", "t", auto_commit_ms=20)
        consumer.ack(consumer.poll(64, WAIT_S))
        mine = [each for each in ours() if "consumer" in each.name or "coordinator" in each.name]
        assert len(mine) == 2
        for thread in mine:
            end_by_force(thread)
            broker.do(lambda fake: fake.give(None))  # wakes it
            until(lambda thread=thread: not thread.is_alive())
            before = sum(broker.broker.offsets.values())
            producer.send("t", b"more")
            deadline = time.monotonic() + WAIT_S
            while sum(broker.broker.offsets.values()) <= before:
                assert time.monotonic() < deadline
                consumer.ack(consumer.poll(64, 0.05))
        close_in_time(consumer.close)


@pytest.mark.slow
def test_a_wait_ends_although_nothing_runs_any_more(
    broker: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the clock, which nobody can end from outside."""
    monkeypatch.setattr(Steady, "start", lambda self: None)
    broker.broker.hold.clear()
    producer = Producer(broker.address, linger_ms=1, timeout_s=TIMEOUT_S)
    with within(LIMIT_S), pytest.raises(NotConfirmed, match="may be stored"):
        producer.send("t", b"x").wait()
    with within(LIMIT_S), pytest.raises(NotConfirmed):
        producer.flush()
    with within(LIMIT_S), pytest.raises(NotConfirmed):
        producer.send_many("t", [b"x"] * 10)
    close_in_time(producer.close)


@pytest.mark.slow
def test_an_awaited_send_ends_although_nothing_runs_any_more(
    broker: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steady, "start", lambda self: None)
    broker.broker.hold.clear()

    async def main() -> None:
        producer = AsyncProducer(broker.address, linger_ms=1, timeout_s=TIMEOUT_S)
        with pytest.raises(NotConfirmed):
            await producer.send("t", b"x")
        with contextlib.suppress(CometError):
            await producer.close()

    with within(2 * LIMIT_S):
        asyncio.run(main())


@pytest.mark.slow
def test_waiting_for_room_ends(broker: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steady, "start", lambda self: None)
    broker.broker.hold.clear()
    producer = Producer(
        broker.address, linger_ms=1, timeout_s=TIMEOUT_S, max_in_flight_bytes=1000, batch_bytes=500
    )

    def send_all() -> None:
        for _ in range(100):
            producer.send("t", bytes(400))

    with within(LIMIT_S), pytest.raises(SystemBusy, match="max_in_flight_bytes"):
        send_all()
    close_in_time(producer.close)


# --- the thread itself ---------------------------------------------------------------------------


def test_a_steady_thread_goes_on_and_ends_when_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = 0

    def turn() -> bool:
        nonlocal turns
        turns += 1
        if turns <= 5:
            raise ValueError("no")
        return turns < 8

    thread = Steady("cometmq test", turn)
    thread.start()
    thread.start()
    assert thread.join(WAIT_S)
    assert turns == 8
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3  # 1, 2, 4
    thread.start()  # it has come to its end
    assert thread.join(0)
    assert turns == 8


@ENDED
def test_another_takes_the_place_of_one_that_was_ended(caplog: pytest.LogCaptureFixture) -> None:
    turns = threading.Semaphore(0)
    over = threading.Event()

    def turn() -> bool:
        turns.release()
        time.sleep(0.001)
        return not over.is_set()

    thread = Steady("cometmq test", turn)
    thread.start()
    (first,) = (each for each in ours() if each.name == "cometmq test")
    end_by_force(first)
    until(lambda: not first.is_alive())
    while turns.acquire(blocking=False):
        pass
    assert turns.acquire(timeout=WAIT_S)
    assert "another takes its place" in caplog.text
    over.set()
    assert thread.join(WAIT_S)
