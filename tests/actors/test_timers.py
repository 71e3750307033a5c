"""Messages with a time of their own, in a running broker: never early, once, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import psutil
import pytest
from family import RunningBroker
from patience import patient
from receiving import take_and_ack
from shared_data import data_path
from still import stop
from waiting import until

from cometmq.actors.scheduling.scheduler import LOOK_S
from cometmq.actors.scheduling.timers import Timers
from cometmq.actors.tables.timers import TimersState
from cometmq.client import Admin, AsyncProducer, Consumer, Producer
from cometmq.client.sending.receipt import Receipt
from cometmq.protocol.errors import ArgumentIllegal, CometError, MessageIllegal, TooLate
from cometmq.protocol.names import DELAY_TOPIC, TIMER_TOPIC
from cometmq.shm.derived.timer_files import read_check, write_check
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import Counter as Progress

WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("timers") / "store", {}) as running:
        yield running


def name_server(broker: RunningBroker) -> str:
    return broker.ready.name_server


def lines(count: int) -> list[bytes]:
    return data_path("loghub", "Linux.log").read_bytes().splitlines()[:count]


def due_of(message: Message) -> int:
    return int(message.properties["TIMER_DELIVER_MS"])


async def send_from_tasks(broker: RunningBroker, bodies: list[bytes]) -> None:
    async with AsyncProducer(name_server(broker)) as producer:
        recalled = await producer.send("due", b"never", queue_id=3, deliver_after=3_600)
        await producer.recall(recalled)
        for body in bodies:
            await producer.send("due", body, queue_id=3, deliver_after=0.5)


def send_in_all_ways(
    broker: RunningBroker, bodies: list[bytes]
) -> tuple[list[datetime], list[Receipt]]:
    """120 bodies; the times of the first 40 and of the next, and some receipts."""
    now = datetime.now(UTC)
    times = [now + timedelta(milliseconds=700 + 37 * (i * 7 % 40)) for i in range(40)]
    with (
        Producer(name_server(broker)) as producer,
        Producer(name_server(broker), linger_ms=5) as lingering,
    ):
        for body, at in zip(bodies[:40], times, strict=True):
            producer.send("due", body, queue_id=0, deliver_at=at)
        for body, at in zip(bodies[40:80], times, strict=True):
            lingering.send("due", body, queue_id=1, deliver_at=at)
        producer.send_many("due", bodies[80:100], queue_id=2, deliver_after=1.25)
        futures = [
            producer.send_async("due", body, queue_id=2, deliver_after=timedelta(seconds=1))
            for body in bodies[100:110]
        ]
        producer.send("due", b"now", queue_id=0)
        lingering.flush()
        receipts = [future.result(WAIT_S) for future in futures]
        asyncio.run(send_from_tasks(broker, bodies[110:]))
    return times, receipts


@contextmanager
def scheduler_held(broker: RunningBroker) -> Iterator[None]:
    """Until all that was sent is dispatched: it sees that together, however long sending takes."""
    scheduler = psutil.Process(broker.pids()["scheduler"])
    stop(scheduler.pid)
    try:
        yield
        wrote = broker.counter(Progress.WROTE)
        until(lambda: broker.counter(Progress.DISPATCHED) >= wrote, says="all is dispatched")
    finally:
        scheduler.resume()


@pytest.mark.slow
def test_messages_come_when_they_are_due(broker: RunningBroker) -> None:
    """By every way of sending, in the order of their times, never early."""
    bodies = lines(120)
    with Consumer(name_server(broker), "due", "due") as consumer:
        with scheduler_held(broker):
            times, receipts = send_in_all_ways(broker, bodies)
            assert [each.body for each in take_and_ack(consumer, 1)] == [b"now"]
        found = take_and_ack(consumer, 120)
    assert sorted(each.body for each in found) == sorted(bodies)
    for each in found:
        assert each.store_timestamp_ms >= due_of(each)
    for queue_id in range(2):
        dues = [due_of(m) for m in found if m.queue_id == queue_id]
        assert dues == sorted(dues)
        assert set(dues) == {int(-(-at.timestamp() * 1000 // 1)) for at in times}
    assert {receipt.due_ms for receipt in receipts} <= {due_of(each) for each in found}
    with Admin(name_server(broker)) as admin:
        assert not admin.scheduled("due")  # one was recalled


@pytest.mark.slow
def test_what_is_recalled_does_not_come(broker: RunningBroker) -> None:
    with (
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), "recall", "recall") as consumer,
    ):
        receipts = producer.send_many(
            "recall", [b"%d" % i for i in range(20)], queue_id=0, deliver_after=5
        )
        for i in range(0, 20, 2):
            producer.recall(receipts[i] if i % 4 else receipts[i].recall_handle)
        producer.recall(receipts[0])  # twice is as good
        producer.send("recall", b"last", queue_id=0, deliver_after=6)
        found = take_and_ack(consumer, 11)
        assert [each.body for each in found] == [b"%d" % i for i in range(1, 20, 2)] + [b"last"]
        with pytest.raises(TooLate, match="due at"):
            producer.recall(receipts[1])
        plain = producer.send("recall", b"x")
        with pytest.raises(ArgumentIllegal, match="without deliver_at"):
            producer.recall(plain)
        for handle in ("", "nonsense", "djEgYSBiIGMgZA=="):
            with pytest.raises(ArgumentIllegal, match="no recall handle"):
                producer.recall(handle)


def test_what_lingers_has_its_own_time(broker: RunningBroker) -> None:
    """Messages that share batches, some by the quick way: times, levels and none, in turns."""

    class Slow(tzinfo):
        """A time zone in Python, that lets other threads in."""

        def utcoffset(self, _: datetime | None) -> timedelta:
            threading.Event().wait(0.0001)
            return timedelta(hours=2)

        def dst(self, _: datetime | None) -> timedelta:
            return timedelta()

    hour = datetime.now(UTC).replace(microsecond=1) + timedelta(hours=1)
    ways: list[dict[str, Any]] = [
        {"deliver_at": hour}, {"deliver_after": 3_600}, {"deliver_after": timedelta(hours=1)},
        {"delay_level": 18}, {"delay_level": 17}, {}, {"deliver_at": hour.astimezone(Slow())},
        {"deliver_at": hour, "tags": "t" * 2_000}, {"deliver_after": 3_600, "keys": "k"},
    ]  # fmt: skip
    receipts: list[tuple[dict[str, Any], Receipt]] = []
    with Producer(name_server(broker), linger_ms=20) as producer:

        def work(number: int) -> None:
            for way in ways[number:] + ways[:number]:
                receipts.extend((way, producer.send("lingers", b"x", **way)) for _ in range(40))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ArgumentIllegal, match="both given"):
            producer.send("lingers", b"x", deliver_at=hour, deliver_after=1)
        with pytest.raises(ArgumentIllegal, match="a time to deliver it as well"):
            producer.send("lingers", b"x", deliver_after=1, delay_level=1)
        producer.flush()
        wanted = int(hour.timestamp() * 1000) + 1
        names = {receipt.msg_id for _, receipt in receipts}
        assert len(names) == 4 * 40 * len(ways)
        queues = [(TIMER_TOPIC, 0), (DELAY_TOPIC, 16), (DELAY_TOPIC, 17)]
        queues += [("lingers", n) for n in range(8)]
        stored: dict[str, tuple[str, Message]] = {}

        def look() -> bool:
            for topic, queue_id in queues:
                found = broker.read_queue(topic, queue_id)
                stored.update((each.msg_id, (topic, each)) for each in found)
            return names <= stored.keys()

        until(look, says="all are dispatched")
        for way, receipt in receipts:
            topic, message = stored[receipt.msg_id]
            if "delay_level" in way:
                assert (topic, message.queue_id) == (DELAY_TOPIC, way["delay_level"] - 1)
            elif not way.keys() & {"deliver_at", "deliver_after"}:
                assert topic == "lingers"
            else:
                assert topic == TIMER_TOPIC
                assert receipt.due_ms == due_of(message)
                from_now_ms = due_of(message) - message.store_timestamp_ms
                assert due_of(message) == wanted or 0 < from_now_ms <= 3_600_000
                assert due_of(message) == wanted or "deliver_after" in way
            assert (message.tags, message.keys) == (way.get("tags"), way.get("keys"))


def test_what_waits_is_listed(broker: RunningBroker) -> None:
    with Producer(name_server(broker)) as producer, Admin(name_server(broker)) as admin:
        hours = [5, 1, 3, 200, 2]
        receipts = [producer.send("listed", b"x", deliver_after=timedelta(hours=h)) for h in hours]
        producer.recall(receipts[2])
        found = admin.scheduled("listed")
        assert [each.due_ms for each in found] == [receipts[i].due_ms for i in (1, 4, 0, 3)]
        assert [each.message.msg_id for each in found[:2]] == [
            receipts[1].msg_id,
            receipts[4].msg_id,
        ]
        producer.recall(found[0].recall_handle)
        assert len(admin.scheduled("listed", 2)) == 2
        assert admin.scheduled("listed")[0].due_ms == receipts[4].due_ms
    assert broker.statistics("scheduler")["timers_pending"] >= 5


@pytest.mark.parametrize(
    "when",
    [
        {"deliver_after": float("nan")}, {"deliver_after": float("inf")}, {"deliver_after": "1"},
        {"deliver_after": True}, {"deliver_after": 1e12}, {"deliver_at": datetime(2027, 1, 1)},
        {"deliver_at": 1.5}, {"deliver_after": 1, "deliver_at": datetime(2027, 1, 1, tzinfo=UTC)},
        {"deliver_after": 1, "delay_level": 2},
    ],
)  # fmt: skip
def test_times_that_are_none(broker: RunningBroker, when: dict[str, object]) -> None:
    with Producer(name_server(broker)) as producer, pytest.raises(ArgumentIllegal):
        producer.send("never", b"x", **when)  # type: ignore[arg-type]


def test_times_that_have_passed_or_are_far(broker: RunningBroker) -> None:
    with (
        Producer(name_server(broker)) as producer,
        Consumer(name_server(broker), "past", "past") as consumer,
    ):
        producer.send("past", b"long ago", deliver_at=datetime(1969, 1, 1, tzinfo=UTC))
        east = timezone(timedelta(hours=9))
        producer.send("past", b"just now", deliver_at=datetime.now(east))
        producer.send("past", b"negative", deliver_after=-5)
        far = producer.send("past", b"far", deliver_at=datetime(9999, 1, 1, tzinfo=UTC))
        found = take_and_ack(consumer, 3)
        assert {each.body for each in found} == {b"long ago", b"just now", b"negative"}
        with pytest.raises(MessageIllegal, match="of at most"):
            producer.send("past", b"x", deliver_after=253_402_300_799)
    (message,) = broker.read_queue(TIMER_TOPIC, 0, far.queue_offset + 1)[-1:]
    assert message.body == b"far"


@pytest.mark.slow
def test_what_was_due_meanwhile_comes_at_once(tmp_path: Path) -> None:
    """In the order of its time, once, after an orderly end and after a kill."""
    store = tmp_path / "store"
    with (
        RunningBroker(store, {}) as broker,
        Producer(name_server(broker), linger_ms=5) as producer,
    ):
        now = datetime.now(UTC)
        for i in range(200):
            at = now + timedelta(milliseconds=2500 + i * 7 % 40 * 40)
            producer.send("down", b"%d" % i, queue_id=0, deliver_at=at)
        producer.send("down", b"later", queue_id=0, deliver_at=now + timedelta(days=300))
        producer.flush()
        sent_in_time = datetime.now(UTC) < now + timedelta(seconds=2.4)
    last = now + timedelta(seconds=4.1)
    time.sleep(max(0.0, (last - datetime.now(UTC)).total_seconds()))
    with RunningBroker(store, {}) as broker:
        found = broker.read_queue("down", 0, 200)
        dues = [due_of(message) for message in found]
        assert dues == sorted(dues) or not sent_in_time
        with Producer(name_server(broker)) as producer:
            for i in range(50):
                producer.send("down", b"more %d" % i, queue_id=0, deliver_after=0.3 + i / 100)
        broker.kill("scheduler")
        assert len(broker.read_queue("down", 0, 250)) == 250
    with RunningBroker(store, {}) as broker:
        broker.read_queue("down", 0, 250)
        bodies = [each.body for each in broker.read_queue("down", 0, 250)]
        assert len(set(bodies)) == len(bodies) == 250


# --- what RocketMQ left behind ---


@pytest.mark.parametrize("name", ["timer", "timer-killed"])
def test_a_store_of_rocketmq_goes_on(name: str, tmp_path: Path) -> None:
    """What waited there is delivered as its own broker delivered it a day later; what was recalled
    is not, also where RocketMQ forgets that over a kill."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    theirs = golden.meta(name, golden.BROKERS)["settings"]
    keys = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "mappedFileSizeTimerLog",
            "maxMessageSize", "maxHashSlotNum", "maxIndexNum", "fileReservedTime")  # fmt: skip
    expected = golden.expected(name)
    before = {queue: len(rows) for queue, rows in expected["contentAtRestart"].items()}
    late = expected["restarts"]["late"]["stored"]
    recalled = {
        row["gid"] for row in golden.meta(name, golden.BROKERS)["sent"] if row.get("recallAnswer")
    }
    now_ms = time.time_ns() // 1_000_000
    with RunningBroker(store, {key: theirs[key] for key in keys}) as broker:
        for queue in ("TimerA@0", "TimerA@1", "TimerB@0"):
            topic, _, queue_id = queue.rpartition("@")
            rows = late.get(queue, [])
            begin = before.get(queue, 0)
            wanted = {row["gid"] for row in rows} - recalled
            stored = broker.read_queue(topic, int(queue_id), begin + len(wanted))[begin:]
            gids = {message.properties["gid"] for message in stored}
            assert wanted <= gids, queue
            for message in stored:
                assert message.properties["gid"] not in recalled
                assert int(message.properties["TIMER_OUT_MS"]) + 1000 <= message.store_timestamp_ms
                assert int(message.properties["TIMER_OUT_MS"]) < now_ms + 60_000
            if name == "timer":  # and nothing twice
                assert len(gids) == len(stored)


# --- faults ---


@pytest.mark.slow
def test_once_whatever_is_killed(tmp_path: Path) -> None:
    """Each process that has to do with it is killed while messages come due, then all of them;
    senders and recalls go on."""
    store = tmp_path / "store"
    sent: dict[bytes, Receipt] = {}
    recalled: set[bytes] = set()
    over = threading.Event()

    def send(broker: RunningBroker) -> None:
        with Producer(name_server(broker), timeout_s=patient(20)) as producer:
            number = 0
            while not over.is_set():
                body = b"%d" % number
                number += 1
                try:
                    after = 0.05 + number % 40 / 20
                    receipt = producer.send("once", body, queue_id=0, deliver_after=after)
                    sent[body] = receipt
                    if number % 40 > 30 and number % 3 == 0:
                        producer.recall(receipt)
                        recalled.add(body)
                except CometError:
                    continue  # it may be stored
                over.wait(0.002)

    with RunningBroker(store, {}) as broker:
        sender = threading.Thread(target=send, args=(broker,))
        sender.start()
        try:
            for role in ("scheduler", "commitlog", "scheduler", "dispatcher", "scheduler"):
                broker.kill(role)
                over.wait(0.3)
        finally:
            over.set()
            sender.join()
        broker.kill_all()
    (store / "config" / "timercheck").unlink(missing_ok=True)
    with RunningBroker(store, {}) as broker:
        wanted = sent.keys() - recalled
        deadline = time.monotonic() + WAIT_S
        while not wanted <= (got := Counter(m.body for m in broker.read_queue("once", 0))).keys():
            assert time.monotonic() < deadline, f"{len(wanted - got.keys())} are missing"
            over.wait(0.1)
            over.clear()
        stored = Counter(
            m.body
            for m in broker.read_queue(TIMER_TOPIC, 0)
            if "TIMER_DEL_UNIQKEY" not in m.properties
        )
        delivered = broker.read_queue("once", 0)
    assert not recalled & got.keys()
    for body, count in Counter(m.body for m in delivered).items():
        assert count <= stored[body]
    for message in delivered:
        assert message.store_timestamp_ms >= due_of(message)


@pytest.mark.slow
def test_without_its_files_the_wheel_is_made_anew(tmp_path: Path) -> None:
    """Of the topic of timers: once what was delivered, and what waits, also what is damaged."""
    store = tmp_path / "store"
    with RunningBroker(store, {}) as broker, Producer(name_server(broker)) as producer:
        producer.send("anew", b"before", queue_id=0, deliver_after=0.1)
        producer.send_many("anew", [b"%d" % i for i in range(9)], queue_id=0, deliver_after=3)
        far = [producer.send("anew", b"far", queue_id=0, deliver_after=90_000) for _ in range(2)]
        producer.recall(far[0])
        broker.read_queue("anew", 0, 1)
    for harm in ("gone", "torn", "odd"):
        segment = store / "timerlog" / f"{0:020d}"
        if harm == "gone":
            segment.unlink()
            (store / "timerwheel").unlink()
            (store / "config" / "timercheck").unlink()
        elif harm == "torn":
            with segment.open("r+b") as file:
                file.seek(3 * 52)
                file.write(bytes(52))
        else:
            segment.write_bytes(b"x" * 1000)
        with RunningBroker(store, {}) as broker:
            wait_pending(broker)
            found = broker.read_queue("anew", 0, 10 if harm == "odd" else 1)
    assert [m.body for m in found] == [b"before", *(b"%d" % i for i in range(9))]


def wait_pending(broker: RunningBroker) -> None:
    """Until the wheel is made: what is far is in it, and the others as long as they wait."""
    deadline = time.monotonic() + WAIT_S
    while broker.statistics("scheduler")["timers_pending"] not in (2, 11):
        assert time.monotonic() < deadline, broker.statistics("scheduler")
        time.sleep(0.05)


@pytest.mark.slow
def test_timercheck_is_written_at_an_end_that_finds_the_dispatcher_behind(tmp_path: Path) -> None:
    """Fault 39: without timercheck RocketMQ would deliver the timer again."""
    store = tmp_path / "store"
    with RunningBroker(store, {}) as broker, Producer(name_server(broker)) as producer:
        producer.send("late", b"first", queue_id=0, deliver_after=0.1)
        broker.read_queue("late", 0, 1)
        producer.send("other", b"makes the topic", queue_id=0)
        dispatcher = broker.pids()["dispatcher"]
        os.kill(dispatcher, signal.SIGSTOP)
        resumes = threading.Timer(1.0, os.kill, (dispatcher, signal.SIGCONT))
        resumes.start()
        producer.send("other", b"is not dispatched", queue_id=0)
    resumes.join()
    check = read_check(store)
    assert check is not None
    assert check.queue_offset == 1
    assert check.log_end > 0


@pytest.mark.slow
def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """The wheel has come to tomorrow; what is sent today is delivered today, in time and once."""
    store = tmp_path / "store"
    with RunningBroker(store, {}) as broker, Producer(name_server(broker)) as producer:
        producer.send("back", b"first", queue_id=0, deliver_after=0.1)
        broker.read_queue("back", 0, 1)
    check = read_check(store)
    assert check is not None
    now_ms = time.time_ns() // 1_000_000
    write_check(store, check._replace(read_ms=now_ms + 86_400_000), now_ms)
    with RunningBroker(store, {}) as broker, Producer(name_server(broker)) as producer:
        for i in range(10):
            producer.send("back", b"%d" % i, queue_id=0, deliver_after=0.5 + i / 10)
        broker.kill("scheduler")
        found = broker.read_queue("back", 0, 11)
        broker.until_logged("the clock was set back by")
    assert sorted(m.body for m in found) == sorted([b"first", *(b"%d" % i for i in range(10))])
    for message in found:
        assert message.store_timestamp_ms >= due_of(message)


def test_a_clock_that_is_set_back_waits_for_timercheck(tmp_path: Path) -> None:
    """While that cannot be written, the wheel stays where it is, and it is tried again."""
    turned: list[int] = []
    written: list[TimersState] = []
    now, seen = time.time_ns() // 1_000_000, 5
    wheel: Any = SimpleNamespace(
        passed=[], at_due=now + 86_400_000, at_place=-1, end=52, turn_back=turned.append
    )
    timers: Any = Timers.__new__(Timers)
    timers._family, timers._late, timers.seen = SimpleNamespace(store=tmp_path), [], seen
    timers._clock = SimpleNamespace(state=lambda _wheel, *at: at)
    timers._write = lambda _records, state, _stored: written.append(state)
    (tmp_path / "config").touch()  # no folder
    with pytest.raises(OSError, match="config"):
        timers._turn_back(wheel, now)
    assert not turned
    assert not written
    (tmp_path / "config").unlink()
    assert timers._turn_back(wheel, now)
    assert (turned, len(written)) == ([now], 1)
    check = read_check(tmp_path)
    assert check is not None
    assert now - 1_000 <= check.read_ms < now
    assert (check.log_end, check.queue_offset) == (52, seen)


@pytest.mark.slow
def test_timercheck_goes_on_while_nothing_is_due(tmp_path: Path) -> None:
    """Else RocketMQ delivers the last second's again after a kill, however long ago that was."""
    store = tmp_path / "store"
    settings = {"flushDelayOffsetInterval": 100, "flushCommitLogThoroughInterval": 100}
    with RunningBroker(store, settings) as broker, Producer(name_server(broker)) as producer:
        producer.send("checked", b"soon", queue_id=0, deliver_after=0.1)
        producer.send("checked", b"late", queue_id=0, deliver_after=timedelta(hours=1))
        (message,) = broker.read_queue("checked", 0, 1)
        second_ms = int(message.properties["TIMER_OUT_MS"])

        def is_past() -> bool:
            check = read_check(store)
            return check is not None and check.read_ms > second_ms + 1_000

        began = time.monotonic()
        until(is_past, says="timercheck goes on")
        assert time.monotonic() - began < LOOK_S / 2
