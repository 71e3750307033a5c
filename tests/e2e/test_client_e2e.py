"""The client against the real broker."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pykka
import pytest
from client_children import consume_until_killed
from patience import patient

from cometmq.broker import Broker
from cometmq.client import Admin, Consumer, Message, Receipt, subscribe_actor
from cometmq.protocol import errors
from cometmq.protocol.commands import Ping, Pong

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {
        "consumerSessionTimeout": 3_000,
        "mappedFileSizeCommitLog": 64 * 1_048_576,
    }
    with Broker(tmp_path_factory.mktemp("broker") / "store", settings=settings) as broker:
        yield broker


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + patient(30)
    while len(found) < count:
        found += consumer.poll(count - len(found))
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def test_what_is_sent_comes(broker: Broker, request: pytest.FixtureRequest) -> None:
    topic = request.node.name
    with broker.producer() as producer, broker.consumer("g", topic, tags="a") as consumer:
        producer.send(topic, b"other", tags="b")
        receipt = producer.send(topic, b"hello", tags="a", keys="k", properties={"p": "v"})
        (message,) = take(consumer, 1)
        assert (message.body, message.tags, message.keys) == (b"hello", "a", "k")
        assert message.properties["p"] == "v"
        assert message.msg_id == receipt.msg_id
        assert (message.queue_id, message.queue_offset) == (receipt.queue_id, receipt.queue_offset)
        assert abs(receipt.store_timestamp_ms - time.time() * 1000) < 60_000


@pytest.mark.parametrize("linger_ms", [0, 2])
def test_all_receipts_are_true(broker: Broker, linger_ms: float) -> None:
    topic = f"receipts-{linger_ms}"
    count = 300 if not linger_ms else 20_000
    with broker.producer(linger_ms=linger_ms) as producer:
        receipts = [producer.send(topic, str(i).encode()) for i in range(count)]
        receipts += producer.send_many(topic, [str(i).encode() for i in range(count, 2 * count)])
        places = {(r.queue_id, r.queue_offset): (i, r.msg_id) for i, r in enumerate(receipts)}
    with broker.consumer("g", topic) as consumer:
        messages = take(consumer, 2 * count)
    found = {(m.queue_id, m.queue_offset): (int(m.body), m.msg_id) for m in messages}
    assert found == places


def test_progress_survives_a_restart_of_the_broker(tmp_path: Path) -> None:
    with Broker(tmp_path / "store") as broker:
        with broker.producer() as producer:
            producer.send_many("t", [str(i).encode() for i in range(1_000)], queue_id=0)
        with broker.consumer("g", "t") as consumer:
            consumer.ack(take(consumer, 600))
    with Broker(tmp_path / "store") as broker, broker.consumer("g", "t") as consumer:
        assert [int(each.body) for each in take(consumer, 400)] == list(range(600, 1_000))


# --- sharing ---


def owned(consumer: Consumer, count: int) -> bool:
    """Poll until the consumer owns so many queues."""
    deadline = time.monotonic() + patient(30)
    while len(consumer.assignment) != count:
        if time.monotonic() > deadline:
            return False
        consumer.ack(consumer.poll(100, 0.05))
    return True


def test_members_share_the_queues(broker: Broker) -> None:
    with broker.producer() as producer, broker.consumer("sharing", "shared") as one:
        producer.send("shared", b"x")
        assert owned(one, 8)
        with broker.consumer("sharing", "shared") as two:
            assert owned(one, 4)
            assert owned(two, 4)
            assert not set(one.assignment) & set(two.assignment)
            producer.send_many("shared", [b"x"] * 10)
        assert owned(one, 8)


def test_a_member_that_dies_is_replaced(broker: Broker) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with broker.producer() as producer, broker.consumer("dying", "deadly") as consumer:
        producer.send("deadly", b"x")
        child = context.Process(
            target=consume_until_killed, args=(broker.name_server, "dying", "deadly", theirs)
        )
        child.start()
        try:
            assert owned(consumer, 4)
            assert ours.poll(60)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            assert owned(consumer, 8)
        finally:
            child.kill()
            child.join()


def test_nothing_is_lost_or_doubled_while_members_come_and_go(broker: Broker) -> None:
    """Every message that is acknowledged in time comes once, whatever the group does."""
    count = 20_000
    seen: list[int] = []
    lock = threading.Lock()
    done = threading.Event()

    def work(rounds: int) -> None:
        for _ in range(rounds):
            with broker.consumer("busy", "busy", auto_commit_ms=20) as consumer:
                until = time.monotonic() + 1.5
                while not done.is_set() and (rounds == 1 or time.monotonic() < until):
                    messages = consumer.poll(200, 0.1)
                    with lock:
                        seen.extend(int(each.body) for each in messages)
                        if len(set(seen)) == count:
                            done.set()
                    consumer.ack(messages)

    threads = [threading.Thread(target=work, args=(rounds,)) for rounds in (1, 3)]
    with broker.producer(linger_ms=1) as producer:
        producer.send("busy", b"0").wait()
        for thread in threads:
            thread.start()
        for i in range(1, count):
            producer.send("busy", str(i).encode())
    assert done.wait(patient(60))
    for thread in threads:
        thread.join(patient(30))
    assert sorted(seen) == list(range(count))


# --- faults ---


def pid_of(broker: Broker, role: str) -> int:
    line = broker.actor(role)
    try:
        answer = line.ask(Ping())
    finally:
        line.stop()
    assert isinstance(answer, Pong)
    return answer.pid


def test_a_commitlog_that_is_killed_is_ridden_out(tmp_path: Path) -> None:
    """No acknowledged message is lost; repeats are whole batches, one behind the other."""
    count = 60_000
    with Broker(tmp_path / "store") as broker:
        with broker.producer(linger_ms=1, batch_count=200, timeout_s=patient(20)) as producer:
            producer.send("t", b"0", queue_id=0).wait()
            pid = pid_of(broker, "commitlog")
            receipts: list[Receipt] = []
            for i in range(1, count):
                receipts.append(producer.send("t", str(i).encode(), queue_id=0))
                if i == count // 2:
                    os.kill(pid, signal.SIGKILL)
            producer.flush()
            assert all(receipt.done for receipt in receipts)
            end = receipts[-1].queue_offset + 1
        with broker.consumer("g", "t") as consumer:
            messages = take(consumer, end)
    stored = [int(each.body) for each in messages]
    ids = [each.msg_id for each in messages]
    assert set(stored) == set(range(count))
    assert [stored[r.queue_offset] for r in receipts] == list(range(1, count))
    repeats = len(stored) - count
    assert repeats <= 200
    assert len(set(ids)) == count
    first_seen = list(dict.fromkeys(stored))
    assert first_seen == list(range(count))


def test_readers_and_coordinator_that_are_killed_are_ridden_out(tmp_path: Path) -> None:
    with Broker(tmp_path / "store") as broker, broker.producer() as producer:
        producer.send_many("t", [b"x"] * 1_000)
        with broker.consumer("g", "t") as consumer:
            consumer.ack(take(consumer, 1_000))
            consumer.commit()
            for role in ("reader-0", "coordinator"):
                os.kill(pid_of(broker, role), signal.SIGKILL)
                producer.send_many("t", [b"y"] * 100)
                messages = take(consumer, 100)
                assert {each.body for each in messages} == {b"y"}
                consumer.ack(messages)
            deadline = time.monotonic() + patient(60)
            while True:
                try:
                    consumer.commit()
                except errors.CometError:
                    assert time.monotonic() < deadline
                else:
                    break
        with broker.consumer("g", "t") as consumer:
            assert not consumer.poll(timeout_s=1)


# --- admin ---


def test_admin(broker: Broker) -> None:
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic("looked-after", queues=2)
        assert "looked-after" in admin.topics()
        assert [each.broker for each in admin.brokers()] == [broker.name]
        receipts = producer.send_many("looked-after", [b"x"] * 10, queue_id=1)
        with broker.consumer("looking", "looked-after") as consumer:
            consumer.ack(take(consumer, 10)[:4])
            consumer.commit()
            report = admin.describe_group("looking")
            assert report.members == [consumer.member]
            assert report.subscriptions == {"looked-after": "*"}
            assert report.lag == 6
            assert {each.member for each in report.queues} == {consumer.member}
        topic = admin.describe_topic("looked-after")
        assert topic.message_count == 10
        assert [(q.queue_id, q.max_queue_offset) for q in topic.queues] == [(0, 0), (1, 10)]
        assert admin.queue_range("looked-after", 1) == range(0, 10)
        assert "looking" in [each.group for each in admin.groups()]

        moved = admin.reset_offsets("looking", "looked-after", "begin")
        assert moved == {(broker.name, 0): 0, (broker.name, 1): 0}
        assert admin.describe_group("looking").lag == 10
        with broker.consumer("looking", "looked-after") as consumer:
            messages = take(consumer, 10)
        found = admin.get_message(messages[3].offset_msg_id)
        assert found.msg_id == messages[3].msg_id == receipts[3].msg_id
        offset_msg_id = messages[3].offset_msg_id
        inside = f"{int(offset_msg_id, 16) + 1:0{len(offset_msg_id)}X}"  # a byte behind its first
        with pytest.raises(errors.MessageNotFound):
            admin.get_message(inside)
        with pytest.raises(ValueError, match="no offset message id"):
            admin.get_message("nonsense")

        now = datetime.now(UTC)
        assert admin.search_offset("looked-after", 1, now - timedelta(hours=1)) == 0
        assert admin.search_offset("looked-after", 1, now + timedelta(hours=1)) == 10
        admin.reset_offsets("looking", "looked-after", 7, queue_id=1)
        assert admin.committed("looking", "looked-after")[broker.name, 1] == 7
        with pytest.raises(errors.GroupNotExist):
            admin.describe_group("nobody")
        admin.delete_topic("looked-after")
        assert "looked-after" not in admin.topics()
        with pytest.raises(errors.TopicNotExist):
            admin.describe_topic("looked-after")


# --- asyncio ---


def test_asyncio(broker: Broker) -> None:
    async def run() -> None:
        async with (
            broker.async_producer(linger_ms=2) as producer,
            broker.async_consumer("g", "aio") as consumer,
        ):
            receipts = await asyncio.gather(
                *(producer.send("aio", str(i).encode()) for i in range(2_000))
            )
            assert len({receipt.msg_id for receipt in receipts}) == 2_000
            bodies: set[bytes] = set()
            async for message in consumer:
                bodies.add(message.body)
                consumer.ack(message)
                if len(bodies) == 1_500:
                    break
            while len(bodies) < 2_000:
                messages = await consumer.poll()
                bodies.update(message.body for message in messages)
                consumer.ack(messages)
            await consumer.commit()
            later = asyncio.create_task(consumer.poll(timeout_s=patient(60)))
            await asyncio.sleep(0.1)
            await producer.send("aio", b"later")
            assert [each.body for each in await later] == [b"later"]
            await consumer.seek("begin")
            assert len(await consumer.poll(10, patient(30))) > 0

    asyncio.run(run())


# --- actors ---


class Pupil(pykka.ThreadingActor):
    """Takes messages, but not each at the first time."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.taken: list[bytes] = []
        self.refused: set[bytes] = set()
        self.done = threading.Event()
        self.wanted = wanted

    def on_receive(self, message: Any) -> None:
        messages = message if isinstance(message, list) else [message]
        for each in messages:
            if each.body.endswith(b"3") and each.body not in self.refused:
                self.refused.add(each.body)
                raise RuntimeError("not yet")
        self.taken += [each.body for each in messages]
        if len(self.taken) >= self.wanted:
            self.done.set()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.slow
def test_an_actor_gets_messages_as_its_commands(broker: Broker, batch: bool) -> None:
    topic = f"actor-{batch}"
    with broker.producer() as producer:
        for queue_id in range(2):
            bodies = [b"%d:%d" % (queue_id, i) for i in range(10)]
            producer.send_many(topic, bodies, queue_id=queue_id)
    pupil = Pupil.start(20)
    with broker.consumer("pupils", topic) as consumer:
        with subscribe_actor(pupil, consumer, batch=batch) as subscription:
            assert pupil.proxy().done.get().wait(patient(60))
            assert subscription.running
        assert not subscription.running
        taken = pupil.proxy().taken.get()
        for queue_id in range(2):
            prefix = b"%d:" % queue_id
            of_queue = [each for each in taken if each.startswith(prefix)]
            assert of_queue == [b"%d:%d" % (queue_id, i) for i in range(10)]
    pupil.stop()
    with broker.consumer("pupils", topic) as consumer:
        assert not consumer.poll(timeout_s=0.5)
