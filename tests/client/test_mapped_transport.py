"""Consumers that map the store of a broker on their machine."""

from __future__ import annotations

import asyncio
import logging
import mmap
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections import Counter as Counts
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from client_children import consume_until_killed, hand_back
from family import RunningBroker, send_batch
from patience import patient
from ports import free_ports
from receiving import take_and_ack
from shared_data import data_path
from still import go_on, stopped
from waiting import until

from cometmq import Admin, AsyncConsumer, Broker, Consumer, Message, Producer
from cometmq.client.receiving import pulling
from cometmq.protocol.commands import (
    Attended,
    AttendQueues,
    DeletedSegments,
    DeleteSegments,
    GetLocal,
    LocalStore,
    PullMessages,
    PullResult,
    QueueKey,
)
from cometmq.protocol.errors import NotMapped, StoreDamaged
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.live import Bell, OwnedCell, ReadCell, Sleeper, WakeWords
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.os.files import list_segments, segment_name
from cometmq.shm.os.processes import boot_id
from cometmq.shm.reading.local import MappedStore
from cometmq.shm.reading.selection import selection_of

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
WAIT_S = patient(30)
NOBODY = 65_534
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"mappedFileSizeCommitLog": 8 * MIB, "consumerSessionTimeout": 3_000}
    with Broker(tmp_path_factory.mktemp("mapped") / "store", settings=settings) as broker:
        yield broker


def stores_of(consumer: Consumer) -> list[MappedStore]:
    """What the consumer has mapped and reads."""
    mapped = consumer._receiver.puller._mapped
    assert mapped is not None
    return [each.store for each in mapped._brokers.values() if each.serving and each.store]


def as_seen(messages: list[Message]) -> list[tuple[Any, ...]]:
    """Everything of a message, in the order of its queue."""
    return sorted((m.queue_id, m.queue_offset, m.physical_offset, m.record) for m in messages)


# --- what is delivered ---


@pytest.mark.parametrize("name", ["Apache", "HDFS", "OpenStack", "Zookeeper"])
@pytest.mark.slow
def test_the_same_comes_both_ways(broker: Broker, name: str) -> None:
    lines = data_path("loghub", f"{name}.log").read_bytes().splitlines()
    lines = [line for line in lines if line]
    with broker.producer(linger_ms=2) as producer:
        for number, line in enumerate(lines):
            tag = re.sub(rb"\W", b"", line.split()[-1])[:10].decode() or None
            producer.send(name, line, tags=tag, keys=f"{name}-{number}")
        producer.flush()
    found = {}
    for transport in ("mapped", "zmq", "auto"):
        with broker.consumer(f"same-{transport}", name, transport=transport) as consumer:
            found[transport] = as_seen(take_and_ack(consumer, len(lines)))
            assert consumer.poll(1, 0.05) == []
            if transport != "zmq":
                assert len(stores_of(consumer)) == 1
    assert found["mapped"] == found["zmq"] == found["auto"]
    assert len(found["zmq"]) == len(lines)


def test_a_queues_order_is_kept(broker: Broker) -> None:
    with broker.producer() as producer, broker.consumer("g", "ordered") as consumer:
        for start in range(0, 3_000, 300):
            bodies = [str(i).encode() for i in range(start, start + 300)]
            producer.send_many("ordered", bodies, queue_id=2)
            assert [m.body for m in take_and_ack(consumer, 300, at_once=77)] == bodies


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_tags(broker: Broker, transport: str) -> None:
    """Also those whose hashes are the same: "Aa" and "BB"."""
    topic = f"tags-{transport}"
    with broker.producer() as producer:
        for number in range(400):
            producer.send(topic, b"%d" % number, tags=["Aa", "BB", "c", None][number % 4])
    with broker.consumer("g", topic, tags="Aa || c", transport=transport) as consumer:
        found = take_and_ack(consumer, 200)
        assert Counts(message.tags for message in found) == {"Aa": 100, "c": 100}
        assert consumer.poll(1, 0.1) == []
        consumer.commit()
        # What was passed over counts as done.
        assert all(
            queue.progress.done == queue.next_offset
            for queue in consumer._receiver.owned.find(None, None)
        )
    with broker.consumer("g", topic, tags="Aa || c", transport=transport) as consumer:
        assert consumer.poll(1, 0.5) == []


def test_two_groups_and_two_members(broker: Broker) -> None:
    with (
        broker.producer() as producer,
        broker.consumer("one", "groups", transport="mapped") as alone,
        broker.consumer("two", "groups", transport="mapped") as first,
        broker.consumer("two", "groups", transport="mapped") as second,
    ):
        until(lambda: {len(first.assignment), len(second.assignment)} == {4})
        bodies = [str(i).encode() for i in range(4_000)]
        producer.send_many("groups", bodies)
        assert sorted(m.body for m in take_and_ack(alone, 4_000)) == sorted(bodies)
        shared: list[Message] = []
        deadline = time.monotonic() + WAIT_S
        while len(shared) < 4_000:
            for member in (first, second):
                messages = member.poll(500, 0.05)
                member.ack(messages)
                shared += messages
            assert time.monotonic() < deadline
        assert sorted(m.body for m in shared) == sorted(bodies)


def test_messages_outlive_the_mapping(broker: Broker) -> None:
    with broker.producer() as producer:
        producer.send_many("views", [b"kept"] * 10)
    with broker.consumer("g", "views") as consumer:
        messages = take_and_ack(consumer, 10)
    assert [m.body for m in messages] == [b"kept"] * 10


def test_a_queue_that_is_being_given_up_hands_out_nothing_more(broker: Broker) -> None:
    """It waits for what the user has in hand; what comes meanwhile is the next owner's."""
    with broker.producer() as producer, broker.consumer("g", "given") as consumer:
        producer.send("given", b"in hand", queue_id=0)
        take_and_ack(consumer, 1)  # so it is known that the user acknowledges
        producer.send("given", b"in hand", queue_id=0)
        until(lambda: bool(consumer.poll(1, 1)))
        owned = consumer._receiver.owned
        ((name, queue),) = [
            (key[0], each) for key, each in owned._queues.items() if not each.queue_id
        ]
        giver = threading.Thread(
            target=owned.give_up, args=(name, [QueueKey("given", 0)]), kwargs={"wait": True}
        )
        giver.start()
        until(lambda: queue.dropped)
        producer.send("given", b"not ours any more", queue_id=0)
        found = consumer.poll(1, 0.5)
        assert giver.is_alive(), "it was to wait for what is in hand"
        giver.join()
        assert found == []


def test_seek_and_new_queues(broker: Broker) -> None:
    """A queue that nothing was ever sent to has no place in shared memory to sleep on."""
    with broker.consumer("g", "young", transport="mapped") as consumer:
        assert consumer.poll(1, 0.2) == []
        with broker.producer() as producer:
            for queue_id in range(8):
                producer.send("young", b"x", queue_id=queue_id)
                assert take_and_ack(consumer, 1)[0].queue_id == queue_id
        consumer.seek("earliest")
        assert len(take_and_ack(consumer, 8)) == 8
        consumer.seek("latest")
        assert consumer.poll(1, 0.1) == []


@pytest.mark.slow
def test_more_queues_than_a_sleeper_takes(tmp_path: Path) -> None:
    with (
        RunningBroker(tmp_path / "store", {"mappedFileSizeCommitLog": MIB}) as broker,
        Producer(broker.ready.name_server) as producer,
    ):
        broker.create_topic("wide", 200)
        with Consumer(broker.ready.name_server, "g", "wide", transport="mapped") as consumer:
            until(lambda: consumer.poll(1, 0.01) == [] and len(consumer.assignment) == 200)
            for number in range(200):
                producer.send("wide", b"%d" % number, queue_id=number)
                (message,) = take_and_ack(consumer, 1)
                assert (message.queue_id, message.body) == (number, b"%d" % number)


def test_a_damaged_record_is_not_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"a" * 100, b"b" * 100, b"c" * 100])
        at = broker.read_queue("t", 0, 3)[1].physical_offset
        with (broker.store / "commitlog" / segment_name(0)).open("r+b") as segment:
            segment.seek(at + 150)
            segment.write(b"#")
        with Consumer(broker.ready.name_server, "g", "t", transport="mapped") as consumer:
            assert [m.body[:1] for m in take_and_ack(consumer, 2)] == [b"a", b"c"]
            assert consumer.poll(1, 0.1) == []
            until(
                lambda: [q.progress.done for q in consumer._receiver.owned.find(None, None)] == [3]
            )
    assert f"the record at physical offset {at} is damaged" in caplog.text


# --- waking up ---


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
def test_20_000_hand_overs_of_a_counter(tmp_path: Path, *, silent: bool) -> None:
    """A wake-up that is lost would cost a minute. The sleepers may only read the counters; a silent
    one the wake words as well."""
    count = 20_000
    with (tmp_path / "words").open("w+b") as file:
        file.truncate(8192)
        memory = mmap.mmap(file.fileno(), 8192)
        words = WakeWords(memoryview(memory)[4096:])
        words.silent = silent
        there = OwnedCell(memory, 0, (), 1, False, words, 0)
        child = multiprocessing.get_context("fork").Process(
            target=hand_back, args=(tmp_path / "words", count)
        )
        child.start()
        read_only = mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ)
        seen = WakeWords(memoryview(read_only)[4096:]) if silent else words
        assert seen.writable is not silent
        back = ReadCell(read_only, 128, 1, seen, 1)
        sleeper = Sleeper([back], Bell())
        for number in range(1, count + 1):
            there.advance(number)
            while True:
                sleeper.look()
                if back.value == number:
                    break
                assert sleeper.sleep(patient(60)), f"hand-over {number} was lost"
        child.join(WAIT_S)
        assert child.exitcode == 0


def test_hand_overs_through_the_broker(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is sent when the one before has come: every one meets a sleeper."""
    monkeypatch.setattr(pulling, "CHECK_S", 60.0)  # else a lost wake-up is noticed every second
    with broker.producer() as producer, broker.consumer("g", "ping") as consumer:
        until(lambda: consumer.poll(1, 0.01) == [] and len(consumer.assignment) == 8)
        for number in range(500):
            producer.send("ping", b"%d" % number, queue_id=number % 8)
            messages = consumer.poll(10, patient(20))
            assert [m.body for m in messages] == [b"%d" % number]
            consumer.ack(messages)


def test_asyncio_is_woken(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "CHECK_S", 60.0)

    async def run() -> None:
        with broker.producer() as producer:
            async with AsyncConsumer(
                broker.name_server, "g", "async", transport="mapped"
            ) as consumer:
                while len(consumer.assignment) < 8:
                    assert await consumer.poll(1, 0.05) == []
                for number in range(250):
                    producer.send("async", b"%d" % number)
                    (message,) = await consumer.poll(10, patient(20))
                    assert message.body == b"%d" % number
                    consumer.ack(message)

    asyncio.run(run())


def test_close_ends_a_sleep(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = broker.consumer("g", "closing", transport="mapped")
    until(lambda: consumer.poll(1, 0.01) == [] and bool(stores_of(consumer)))
    mapped = consumer._receiver.puller._mapped
    assert mapped is not None
    sleep, sleeps = mapped.sleep, threading.Event()

    def sleeping(timeout_s: float) -> None:
        sleeps.set()
        sleep(timeout_s)

    monkeypatch.setattr(mapped, "sleep", sleeping)
    found: list[list[Message]] = []
    thread = threading.Thread(target=lambda: found.append(consumer.poll(1, None)))
    thread.start()
    assert sleeps.wait(patient(60))
    consumer.close()
    thread.join(patient(60))
    assert found == [[]]


# --- brokers that end, and others in their place ---


@pytest.mark.slow
def test_the_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Nothing is lost, what comes twice was not committed, and the new run is mapped."""
    settings = {"port": free_ports(4), "consumerSessionTimeout": 3_000}
    store, sent = tmp_path / "store", []
    first = RunningBroker(store, settings)
    name_server = first.ready.name_server
    with Consumer(name_server, "g", "t", auto_commit_ms=20, transport="mapped") as consumer:
        found: list[Message] = []
        for run in range(3):
            with RunningBroker(store, settings) if run else first as current:
                with Producer(name_server) as producer:
                    for part in range(20):
                        bodies = [b"%d-%d-%d" % (run, part, i) for i in range(50)]
                        producer.send_many("t", bodies, queue_id=part % 8)
                        sent += bodies
                        found += consumer.poll(30, 0.01)
                deadline = time.monotonic() + WAIT_S
                while {m.body for m in found} < set(sent):
                    messages = consumer.poll(100, 0.2)
                    consumer.ack(messages)
                    found += messages
                    assert time.monotonic() < deadline, (run, len(found), len(sent))
                (mapped,) = stores_of(consumer)
                with current.control() as control:
                    assert mapped.nonce == control.meta["nonce"]
                current.kill_all()
    assert {m.body for m in found} == set(sent)
    for queue_id in range(8):
        offsets = [m.queue_offset for m in found if m.queue_id == queue_id]
        begins = [at for at, offset in enumerate(offsets) if at and offset != offsets[at - 1] + 1]
        assert len(begins) <= 2, "more than one new beginning a restart"


def test_processes_of_the_broker_are_killed(tmp_path: Path) -> None:
    with (
        RunningBroker(tmp_path / "store") as broker,
        Producer(broker.ready.name_server) as producer,
        Consumer(broker.ready.name_server, "g", "t", transport="mapped") as consumer,
    ):
        expected = 0
        for role in ("reader-0", "dispatcher", "commitlog", "reader-0", "coordinator"):
            producer.send_many("t", [b"before"] * 100)
            broker.kill(role)
            producer.send_many("t", [b"after"] * 100)
            expected += 200
            messages = take_and_ack(consumer, 200)
            assert Counts(m.body for m in messages) == {b"before": 100, b"after": 100}
            assert len(messages) == 200


def test_a_dispatcher_that_stands_still(tmp_path: Path) -> None:
    """Nobody has to ask it: the store is mapped, and what it has not dispatched is read. But it
    makes the places of new queues."""
    with (
        RunningBroker(tmp_path / "store") as broker,
        Producer(broker.ready.name_server) as producer,
    ):
        producer.send_many("t", [b"before"] * 100, queue_id=0)
        broker.read_queue("t", 0, 100)  # so that the dispatcher has made its place
        dispatcher = broker.pids()["dispatcher"]
        with (
            stopped(dispatcher),
            Consumer(broker.ready.name_server, "g", "t", transport="mapped") as consumer,
        ):
            producer.send_many("t", [b"after"] * 100, queue_id=0)
            assert len(take_and_ack(consumer, 200)) == 200
            assert len(stores_of(consumer)) == 1
            producer.send("t", b"new", queue_id=1)
            assert consumer.poll(1, 0.1) == []
            go_on(dispatcher)
            assert [m.body for m in take_and_ack(consumer, 1)] == [b"new"]


@pytest.mark.slow
def test_another_store_at_the_same_place(tmp_path: Path) -> None:
    settings = {"port": free_ports(4), "consumerSessionTimeout": 3_000}
    store = tmp_path / "store"
    first = RunningBroker(store, settings)
    name_server = first.ready.name_server
    with Consumer(name_server, "g", "t", transport="mapped") as consumer:
        with Producer(name_server) as producer:
            producer.send_many("t", [b"first"] * 2_000, queue_id=0)
        take_and_ack(consumer, 100, 100)  # most of it waits in the first store
        first.kill_all()
        store.rename(tmp_path / "aside")
        with RunningBroker(store, settings), Producer(name_server) as producer:
            producer.send_many("t", [b"second"] * 10, queue_id=0)
            deadline = time.monotonic() + WAIT_S
            found: list[bytes] = []
            while b"third" not in found:
                assert time.monotonic() < deadline, Counts(found)
                producer.send("t", b"third", queue_id=0)
                messages = consumer.poll(1024, 0.1)
                if b"second" in found or b"third" in found:
                    assert b"first" not in [m.body for m in messages]
                found += [m.body for m in messages]
            (mapped,) = stores_of(consumer)
            assert mapped.control.meta["store"] == str(store.resolve())


def test_a_store_whose_files_are_taken_away_says_nothing_of_its_queues(tmp_path: Path) -> None:
    """As of a replica that an empty store takes the place of. Its queues do not begin anew."""
    with RunningBroker(tmp_path / "store") as broker:
        name_server = broker.ready.name_server
        with Producer(name_server) as producer:
            for topic in ("t", "u"):
                producer.send_many(topic, [b"one"] * 10, queue_id=0)
        with Consumer(name_server, "g", "t", transport="mapped") as consumer:
            assert len(take_and_ack(consumer, 10)) == 10
            (mapped,) = stores_of(consumer)
            selected = selection_of("*", "")
            path = broker.store / "consumequeue" / "u" / "0" / segment_name(0)
            kept = path.rename(tmp_path / "kept")
            with pytest.raises(StoreDamaged, match=f"{segment_name(0)} is not there.*5 of u/0"):
                mapped.reader.messages("u", 0, 5, 32, 1 << 20, selected)
            pull = PullMessages("u", 0, 5, 32, 1 << 20)
            with pytest.raises(StoreDamaged, match="5 of u/0"):
                broker.reader.ask(pull, timeout_s=WAIT_S)
            kept.rename(path)
            answer, _ = broker.reader.ask(pull, timeout_s=WAIT_S)
            assert isinstance(answer, PullResult)
            assert answer.next_queue_offset == 10
            found = mapped.reader.messages("u", 0, 5, 32, 1 << 20, selected)
            assert found.next_queue_offset == 10


def test_what_is_mapped_is_what_the_broker_means(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        with Channel(broker.endpoints.readers[0]) as line:
            found, _ = line.ask(GetLocal(boot_id()), timeout_s=patient(30))
            assert isinstance(found, LocalStore)
            with pytest.raises(NotMapped, match="another machine"):
                line.ask(GetLocal("0" * 36), timeout_s=patient(30))
            with pytest.raises(NotMapped, match="no longer"):
                line.ask(AttendQueues("0" * 32, []), timeout_s=patient(30))
            mapped = MappedStore(found, foreign=False)
            answer, _ = line.ask(AttendQueues(mapped.nonce, []), timeout_s=patient(30))
            assert answer == Attended(0)
            mapped.close()
        copy = tmp_path / "copy"
        shutil.copytree(broker.store, copy)
        there = msgspec.structs.replace(found, path=str(copy))
        with pytest.raises(NotMapped, match="another file"):
            MappedStore(there, foreign=True)
        (copy / CONTROL_FILE).unlink()
        (copy / CONTROL_FILE).symlink_to(broker.store / CONTROL_FILE)
        with pytest.raises(NotMapped, match="symbolic"):
            MappedStore(there, foreign=True)
        (copy / CONTROL_FILE).unlink()
        os.mkfifo(copy / CONTROL_FILE)
        with pytest.raises(NotMapped, match="no plain file"):
            MappedStore(there, foreign=True)


# --- permissions ---


@ROOT
def test_without_the_right_to_read(broker: Broker) -> None:
    with broker.producer() as producer:
        producer.send_many("rights", [b"x"] * 100)
    os.seteuid(NOBODY)
    try:
        with broker.consumer("auto", "rights") as consumer:
            assert len(take_and_ack(consumer, 100)) == 100
            assert stores_of(consumer) == []
        with pytest.raises(NotMapped, match="Permission denied"):
            broker.consumer("forced", "rights", transport="mapped")
    finally:
        os.seteuid(0)


@ROOT
def test_another_users_store_is_mapped_only_when_asked_for(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        name_server = broker.ready.name_server
        os.chown(broker.store / CONTROL_FILE, NOBODY, -1)
        with Producer(name_server) as producer:
            producer.send_many("t", [b"x"] * 100)
        for transport, count in (("auto", 0), ("zmq", 0), ("mapped", 1)):
            with Consumer(name_server, transport, "t", transport=transport) as consumer:
                assert len(take_and_ack(consumer, 100)) == 100
                mapped = 0 if transport == "zmq" else len(stores_of(consumer))
                assert mapped == count


@ROOT
def test_segments_that_cannot_be_read(tmp_path: Path) -> None:
    """Mapping begins, and then fails: the queue goes on through ZeroMQ where it was."""
    with RunningBroker(tmp_path / "store") as broker:
        name_server = broker.ready.name_server
        with Producer(name_server) as producer, Consumer(name_server, "g", "t") as consumer:
            producer.send_many("t", [b"1"] * 100, queue_id=0)
            assert len(take_and_ack(consumer, 100)) == 100
            assert len(stores_of(consumer)) == 1
            segment = broker.store / "commitlog" / segment_name(MIB)
            until(segment.exists)
            segment.chmod(0)
            os.seteuid(NOBODY)  # has opened what it needs but this
            try:
                producer.send_many("t", [b"2" * 1_000] * 1_500, queue_id=0)
                found = take_and_ack(consumer, 1_500)
                assert [m.queue_offset for m in found] == list(range(100, 1_600))
            finally:
                os.seteuid(0)


@ROOT
def test_a_broker_that_cannot_be_mapped_beside_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer then sleeps in ZeroMQ, and is woken by either."""
    monkeypatch.setattr(pulling, "CHECK_S", 60.0)
    with (
        RunningBroker(tmp_path / "one", {"brokerName": "one"}) as one,
        RunningBroker(
            tmp_path / "two",
            {"brokerName": "two", "namesrvAddr": one.ready.name_server.removeprefix("tcp://")},
        ) as two,
    ):
        os.chown(two.store / CONTROL_FILE, NOBODY, -1)
        with Admin(one.ready.name_server) as admin:
            admin.create_topic("t", 2)
            lines = [one.channel(each.commitlog) for each in admin.brokers()]
        with Consumer(one.ready.name_server, "g", "t") as consumer:
            until(lambda: consumer.poll(1, 0.01) == [] and len(consumer.assignment) == 4)
            for number in range(200):
                send_batch(lines[number % 2], "t", 0, [b"%d" % number])
                assert [m.body for m in consumer.poll(1, patient(20))] == [b"%d" % number]
            assert len(stores_of(consumer)) == 1


def test_transports_have_names(broker: Broker) -> None:
    with pytest.raises(ValueError, match="transport='shm': 'auto', 'mapped', 'zmq'"):
        broker.consumer("g", "t", transport="shm")


# --- deletion ---


def cleaned(broker: RunningBroker, count: int) -> None:
    """The first segments are old, and go."""
    old = time.time() - 73 * 3600
    for number in range(count):
        os.utime(broker.store / "commitlog" / segment_name(number * MIB), times=(old, old))
    answer, _ = broker.coordinator.ask(DeleteSegments(), timeout_s=patient(30))
    assert isinstance(answer, DeletedSegments)
    assert answer.segments == [number * MIB for number in range(count)]


FAST = {
    "deleteCommitLogFilesInterval": 5,
    "cleanResourceInterval": 20,
    "flushIntervalCommitLog": 20,
    "recycledSegmentsMax": 0,
}


def filled(broker: RunningBroker, segments: int) -> int:
    """Messages in that many segments and a part of another."""
    number = 0
    while broker.counter(Counter.WROTE) < segments * MIB:
        broker.send("t", 0, [b"%06d" % i + bytes(1_000) for i in range(number, number + 100)])
        number += 100
    until(lambda: broker.counter(Counter.FLUSHED) >= segments * MIB)
    return number


def test_segments_are_deleted_beside_a_slow_consumer(tmp_path: Path) -> None:
    """It has let go of them before it polls again, and goes on where the log begins now."""
    with RunningBroker(tmp_path / "store", FAST) as broker:
        broker.create_topic("t", 1)
        count = filled(broker, 5)
        with Consumer(broker.ready.name_server, "g", "t", transport="mapped") as consumer:
            slow = take_and_ack(consumer, 10, 10)
            cleaned(broker, 4)
            assert list_segments(broker.store / "commitlog", MIB)[0] == 4 * MIB
            until(
                lambda: not any((broker.store / "cometmq.retired").iterdir()),
                says="somebody has not let go",
            )
            assert broker.statistics("cleaner")["forced_segments"] == 0
            rest: list[Message] = []
            while not rest or rest[-1].queue_offset < count - 1:
                rest += take_and_ack(consumer, 1)
            assert [m.body[:6] for m in slow + rest] == [
                b"%06d" % m.queue_offset for m in slow + rest
            ]
            offsets = [m.queue_offset for m in rest]
            assert offsets == sorted(set(offsets))
            assert offsets[-1] == count - 1


def test_a_consumer_that_is_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store", FAST) as broker:
        broker.create_topic("t", 1)
        filled(broker, 3)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(
            target=consume_until_killed, args=(broker.ready.name_server, "g", "t", theirs)
        )
        child.start()
        assert ours.poll(WAIT_S)
        references = (broker.store / "cometmq.references").stat().st_ino
        until(lambda: _locks(child.pid, references), says="the child has mapped nothing")
        child.kill()
        child.join()
        cleaned(broker, 2)
        until(lambda: not any((broker.store / "cometmq.retired").iterdir()))
        broker.send("t", 0, [b"more"])
        with Consumer(broker.ready.name_server, "other", "t", transport="mapped") as consumer:
            while take_and_ack(consumer, 1)[-1].body != b"more":
                pass


def _locks(pid: int | None, inode: int) -> bool:
    """Whether a process holds a reference to a segment."""
    folder = Path(f"/proc/{pid}/fdinfo")
    for entry in folder.iterdir():
        try:
            if re.search(rf"lock:.*:{inode} ", entry.read_text()):
                return True
        except FileNotFoundError:
            continue
    return False


def test_the_log_says_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old kernel, for one."""
    from cometmq.client.receiving import mapped

    def refuse() -> None:
        raise NotMapped("the system cannot wait for several futexes")

    monkeypatch.setattr(mapped, "_check_kernel", refuse)
    caplog.set_level(logging.DEBUG, "cometmq.client.receiving.mapped")
    with RunningBroker(tmp_path / "store") as broker:
        name_server = broker.ready.name_server
        with Producer(name_server) as producer, Consumer(name_server, "g", "t") as consumer:
            producer.send("t", b"x")
            assert len(take_and_ack(consumer, 1)) == 1
        with pytest.raises(NotMapped, match="cannot wait for several futexes"):
            Consumer(name_server, "g", "t", transport="mapped")
    assert "is not mapped: the system cannot wait for several futexes" in caplog.text
