"""A producer whose topic has other queues than it knows fetches the route and chooses again.

Fault 21: MessageIllegal for queues that the producer itself had chosen, ArgumentIllegal for queues
that were added, until a timer refreshed the route.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from patience import patient

from cometmq import Broker, Producer, errors
from cometmq.client import Admin, Consumer
from cometmq.client.aio import AsyncProducer
from cometmq.client.sending.bodies import BodySender
from cometmq.client.sending.receipt import Receipt
from cometmq.client.sending.staging import SinkLine, StageWriter
from cometmq.shm.kernel.codec import BatchEncoder, java_hash

COUNT = 40


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("choice") / "store") as running:
        yield running


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin(broker.name_server) as running:
        yield running


def a_topic(admin: Admin, queues: int) -> str:
    topic = f"t-{uuid.uuid4().hex}"
    admin.create_topic(topic, queues)
    return topic


def fewer(admin: Admin, topic: str, queues: int) -> None:
    admin.update_topic(topic, queues, force=True)


def fewer_by_deleting(admin: Admin, topic: str, queues: int) -> None:
    admin.delete_topic(topic)
    admin.create_topic(topic, queues)


def stored(broker: Broker, topic: str, count: int) -> dict[int, list[bytes]]:
    """Return the bodies in each queue, once there are `count`."""
    found: dict[int, list[bytes]] = defaultdict(list)
    with Consumer(broker.name_server, None) as consumer:
        consumer.assign(topic)
        while sum(map(len, found.values())) < count:
            messages = consumer.poll(1000, timeout_s=patient(60))
            assert messages, f"{sum(map(len, found.values()))} of {count} messages are there"
            for message in messages:
                found[message.queue_id].append(message.body)
        assert not consumer.poll(1, timeout_s=0.2)
    return found


def sorted_of(several: Iterable[Iterable[bytes]]) -> list[bytes]:
    return sorted(body for bodies in several for body in bodies)


def knowing(producer: Producer, topic: str) -> None:
    """Let the producer fetch the route, which it then does not refresh for 30 s."""
    producer.send(topic, b"first", queue_id=0).wait()


def send(producer: Producer, topic: str, **options: Any) -> list[Receipt]:
    made = [producer.send(topic, b"%d" % number, **options) for number in range(COUNT)]
    producer.flush()
    return [each.wait() for each in made]


def send_with_keys(producer: Producer, topic: str, **options: Any) -> list[Receipt]:
    made = [
        producer.send(topic, b"%d" % number, keys=f"k{number}", **options)
        for number in range(COUNT)
    ]
    return [each.wait() for each in made]


def send_async(producer: Producer, topic: str, **options: Any) -> list[Receipt]:
    futures = [producer.send_async(topic, b"%d" % number, **options) for number in range(COUNT)]
    return [each.result(patient(60)) for each in futures]


def send_many(producer: Producer, topic: str, **options: Any) -> list[Receipt]:
    bodies = [b"%d" % number for number in range(COUNT)]
    made: list[Receipt] = []
    for start in range(0, COUNT, 4):
        made += producer.send_many(topic, bodies[start : start + 4], **options)
    return made


def send_in_transactions(producer: Producer, topic: str, **options: Any) -> list[Receipt]:
    made = []
    for number in range(0, COUNT, 2):
        with producer.transaction(topic, b"%d" % number, **options) as transaction:
            made.append(transaction.send(topic, b"%d" % (number + 1), **options))
    return made


WAYS: dict[str, tuple[Callable[..., list[Receipt]], dict[str, Any], dict[str, Any]]] = {
    "send": (send, {}, {}),
    "linger": (send, {"linger_ms": 5}, {}),
    "send_async": (send_async, {}, {}),
    "send_async-linger": (send_async, {"linger_ms": 5}, {}),
    "send_many": (send_many, {}, {}),
    "compressed": (send, {"compress": "zlib", "compress_over": 1, "linger_ms": 5}, {}),
    "delayed": (send, {}, {"delay_level": 1}),
    "delayed-linger": (send, {"linger_ms": 5}, {"delay_level": 1}),
    "timed": (send, {"linger_ms": 5}, {"deliver_after": timedelta(milliseconds=1)}),
    "dedup": (send_with_keys, {"dedup": "keys", "linger_ms": 5}, {}),
    "dedup-at-once": (send_with_keys, {"dedup": "keys"}, {}),
    "named": (send, {"producer_id": "named"}, {}),
    "named-linger": (send, {"producer_id": "named-linger", "linger_ms": 5}, {}),
    "transactions": (send_in_transactions, {"name": "tx"}, {}),
    "no-retries": (send, {"retry_max": 0}, {}),
}


#: Each way meets both keys and both changes; which key meets which change alternates.
CHOICES = [
    (way, key, change)
    for number, way in enumerate(WAYS)
    for key, change in zip(
        (None, "o-42"),
        (fewer, fewer_by_deleting) if number % 2 else (fewer_by_deleting, fewer),
        strict=True,
    )
]


@pytest.mark.parametrize(("way", "key", "change"), CHOICES)
def test_fewer_queues_make_a_producer_choose_again(
    broker: Broker, admin: Admin, way: str, key: str | None, change: Callable[..., None]
) -> None:
    topic = a_topic(admin, 8)
    send_all, of_producer, of_message = WAYS[way]
    if key is not None:
        of_message = {**of_message, "ordering_key": key}
    warm = {"keys": "first"} if "dedup" in of_producer else {}
    with Producer(broker.name_server, **of_producer) as producer:
        producer.send(topic, b"first", queue_id=0, **warm).wait()
        change(admin, topic, 2)
        receipts = send_all(producer, topic, **of_message)
    if way not in ("delayed", "delayed-linger", "timed", "transactions"):
        assert {each.queue_id for each in receipts} <= {0, 1}
    found = stored(broker, topic, COUNT + 1)
    found[0].remove(b"first")
    assert sorted_of(found.values()) == sorted(b"%d" % each for each in range(COUNT))
    assert set(found) <= {0, 1}
    if key is not None and way not in ("timed",):
        assert found[abs(java_hash(key)) % 2] == [b"%d" % each for each in range(COUNT)]


@pytest.mark.parametrize("linger_ms", [0, 5])
@pytest.mark.parametrize("key", [None, "o-42"])
def test_tasks_choose_again(
    broker: Broker, admin: Admin, linger_ms: float, key: str | None
) -> None:
    topic = a_topic(admin, 8)

    async def work() -> list[Receipt]:
        async with AsyncProducer(broker.name_server, linger_ms=linger_ms, name="tx") as producer:
            await producer.send(topic, b"first", queue_id=0)
            await asyncio.to_thread(fewer, admin, topic, 3)
            sends = [
                producer.send(topic, b"%d" % number, ordering_key=key) for number in range(COUNT)
            ]
            receipts = await asyncio.gather(*sends)
            for _ in range(4):
                async with producer.transaction(topic, b"tx") as transaction:
                    receipts.append(await transaction.send(topic, b"tx", ordering_key=key))
            return receipts

    assert {each.queue_id for each in asyncio.run(work())[:COUNT]} <= {0, 1, 2}
    found = stored(broker, topic, COUNT + 9)
    assert set(found) <= {0, 1, 2}
    if key is not None:
        numbers = [each for each in found[abs(java_hash(key)) % 3] if each.isdigit()]
        assert numbers == [b"%d" % each for each in range(COUNT)]


def test_messages_of_several_keys_that_shared_a_batch_go_to_the_queue_of_each(
    broker: Broker, admin: Admin
) -> None:
    """Messages for a remaining queue stay in it; those of removed queues go by their own keys."""

    def queue_of(key: str) -> int:
        number = abs(java_hash(key)) % 8
        return number if number < 3 else abs(java_hash(key)) % 3

    topic = a_topic(admin, 8)
    keys = [f"k{number}" for number in range(30)]
    with Producer(broker.name_server, linger_ms=10_000) as producer:
        producer.send(topic, b"first", queue_id=0)
        producer.flush()
        made = [
            (key, producer.send(topic, f"{key} {turn}".encode(), ordering_key=key))
            for turn in range(20)
            for key in keys
        ]
        fewer(admin, topic, 3)
        producer.flush()
        for key, receipt in made:
            assert receipt.wait().queue_id == queue_of(key)
            assert receipt.done
            assert receipt.queue_offset >= 0
        assert len({(each.queue_id, each.queue_offset) for _, each in made}) == len(made)
        assert len({each.msg_id for _, each in made}) == len(made)
    found = stored(broker, topic, len(made) + 1)
    for key in keys:
        mine = [each for each in found[queue_of(key)] if each.split()[0] == key.encode()]
        assert mine == [f"{key} {turn}".encode() for turn in range(20)]
    with Consumer(broker.name_server, None) as consumer:
        consumer.assign(topic)
        by_id = {}
        while len(by_id) < len(made) + 1:
            for message in consumer.poll(1000, timeout_s=patient(60)):
                by_id[message.msg_id] = message.body
    for turn in range(20):
        for index, key in enumerate(keys):
            receipt = made[turn * len(keys) + index][1]
            assert by_id[receipt.msg_id] == f"{key} {turn}".encode()


def test_a_queue_that_the_user_chose_is_refused_alone(broker: Broker, admin: Admin) -> None:
    topic = a_topic(admin, 8)
    key = next(f"k{n}" for n in range(1000) if abs(java_hash(f"k{n}")) % 8 == 7)
    with Producer(broker.name_server, linger_ms=10_000) as producer:
        producer.send(topic, b"first", queue_id=0)
        producer.flush()
        chosen = producer.send(topic, b"chosen", queue_id=7)
        keyed = producer.send(topic, b"keyed", ordering_key=key)  # in the same batch
        fewer(admin, topic, 2)
        with pytest.raises(errors.MessageIllegal, match="which has 2 queues"):
            producer.flush()
        assert keyed.wait().queue_id == abs(java_hash(key)) % 2
        with pytest.raises(errors.MessageIllegal, match="which has 2 queues"):
            chosen.wait()
        with pytest.raises(errors.ArgumentIllegal, match="it has 0 to 1"):
            producer.send(topic, b"no", queue_id=7)
    assert sorted_of(stored(broker, topic, 2).values()) == [b"first", b"keyed"]


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_queue_that_was_added_is_there_at_once(
    broker: Broker, admin: Admin, linger_ms: float
) -> None:
    topic = a_topic(admin, 2)
    with Producer(broker.name_server, linger_ms=linger_ms) as producer:
        knowing(producer, topic)
        with pytest.raises(errors.ArgumentIllegal, match="it has 0 to 1"):
            producer.send(topic, b"no", queue_id=2)
        for queues, call in (
            (3, lambda queue: [producer.send(topic, b"x", queue_id=queue)]),
            (
                4,
                lambda queue: [
                    producer.send_async(topic, b"x", queue_id=queue).result(patient(60))
                ],
            ),
            (5, lambda queue: producer.send_many(topic, [b"x"], queue_id=queue)),
        ):
            admin.update_topic(topic, queues)
            (receipt,) = call(queues - 1)
            assert receipt.wait().queue_id == queues - 1
        admin.update_topic(topic, 6)
        producer.send_oneway(topic, b"x", queue_id=5)
    assert {queue: len(each) for queue, each in stored(broker, topic, 5).items()} == {
        0: 1, 2: 1, 3: 1, 4: 1, 5: 1,
    }  # fmt: skip


def test_a_queue_that_was_added_is_there_for_tasks(broker: Broker, admin: Admin) -> None:
    topic = a_topic(admin, 2)

    async def work() -> None:
        async with AsyncProducer(broker.name_server, name="tx") as producer:
            await producer.send(topic, b"first", queue_id=0)
            await asyncio.to_thread(admin.update_topic, topic, 3)
            assert (await producer.send(topic, b"x", queue_id=2)).queue_id == 2
            await asyncio.to_thread(admin.update_topic, topic, 4)
            await producer.send_oneway(topic, b"x", queue_id=3)
            await asyncio.to_thread(admin.update_topic, topic, 5)
            async with producer.transaction(topic, b"x", queue_id=4):
                pass
            with pytest.raises(errors.ArgumentIllegal, match="it has 0 to 4"):
                await producer.send(topic, b"x", queue_id=5)

    asyncio.run(work())
    assert set(stored(broker, topic, 4)) == {0, 2, 3, 4}


def test_a_topic_that_may_be_written_again_is_written_at_once(broker: Broker, admin: Admin) -> None:
    topic = a_topic(admin, 2)
    with Producer(broker.name_server) as producer:
        knowing(producer, topic)
        admin.update_topic(topic, perm=4)
        with pytest.raises(errors.NoPermission):
            producer.send(topic, b"no")
        with pytest.raises(errors.NoPermission):
            producer.send(topic, b"no")
        admin.update_topic(topic, perm=6)
        producer.send(topic, b"yes")
    assert sorted_of(stored(broker, topic, 2).values()) == [b"first", b"yes"]


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_keys_keep_their_order_while_queues_come_and_go(
    broker: Broker, admin: Admin, linger_ms: float
) -> None:
    """The messages of a key stay in order within a queue, with several concurrent senders."""
    topic = a_topic(admin, 8)
    has_ended = threading.Event()
    progress = threading.Semaphore(0)
    sent: dict[str, list[bytes]] = {}
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            keys = [f"{name}{number}" for number in range(7)]
            with Producer(broker.name_server, linger_ms=linger_ms) as producer:
                mine: dict[str, list[bytes]] = {key: [] for key in keys}
                turn = 0
                while not has_ended.is_set():
                    futures = []
                    for key in keys:
                        body = f"{key} {turn}".encode()
                        mine[key].append(body)
                        futures.append(producer.send_async(topic, body, ordering_key=key))
                    turn += 1
                    if turn % 20 == 0:
                        futures[-1].result(patient(60))
                        progress.release()
                producer.flush()
            sent.update(mine)
        except BaseException as error:
            failures.append(error)
            progress.release(1_000)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    with Admin(broker.name_server) as other:
        for queues in (3, 8, 2, 5, 1, 8, 3):
            fewer(other, topic, queues)
            for _ in range(8):
                assert progress.acquire(timeout=patient(120))
    has_ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    fewer(admin, topic, 8)
    found = stored(broker, topic, sum(map(len, sent.values())))
    assert sorted_of(found.values()) == sorted_of(sent.values())
    for bodies in found.values():
        last: dict[bytes, int] = {}
        for body in bodies:
            key, number = body.split()
            assert last.get(key, -1) < int(number), (key, number, last[key])
            last[key] = int(number)


def test_bodies_of_sinks_go_elsewhere(broker: Broker, admin: Admin) -> None:
    topic = a_topic(admin, 8)
    with BodySender(broker.name_server) as sender:
        sender.queues(topic)
        fewer(admin, topic, 2)
        for number in range(COUNT):
            encoder = BatchEncoder(size_max=1 << 16, count_max=10)
            encoder.add(b"%d" % number, None, None, None, 0)
            sender.send(topic, None, encoder.take(), 1)
        sender.flush()
    assert set(stored(broker, topic, COUNT)) <= {0, 1}


def test_staged_bodies_go_elsewhere(broker: Broker, admin: Admin) -> None:
    topic = a_topic(admin, 8)
    with SinkLine(broker.name_server, "sink-of-choice") as line:
        stage = StageWriter(line, 1, "stage")
        stage.queues(topic)
        fewer(admin, topic, 2)
        for number in range(COUNT):
            encoder = BatchEncoder(size_max=1 << 16, count_max=10)
            encoder.add(b"%d" % number, None, None, None, 0)
            stage.send(topic, None, encoder.take(), 1)
        stage.finish()
        line.commit(1, ["stage"])
    assert set(stored(broker, topic, COUNT)) <= {0, 1}


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_topic_that_nobody_may_write_any_more_fails_every_message(
    broker: Broker, admin: Admin, linger_ms: float
) -> None:
    topic = a_topic(admin, 4)
    with Producer(broker.name_server, linger_ms=linger_ms) as producer:
        knowing(producer, topic)
        admin.update_topic(topic, perm=4)
        futures = []
        for key in [None] * COUNT + ["k"] * 3:
            # It raises once the producer has the new route, and not before the broker refused one.
            with contextlib.suppress(errors.NoPermission):
                futures.append(producer.send_async(topic, b"no", ordering_key=key))
        assert futures
        assert {type(each.exception(60)) for each in futures} == {errors.NoPermission}
