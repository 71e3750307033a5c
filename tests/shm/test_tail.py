"""What is written and not dispatched yet is read from the log's tail (shm/reading/tail.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import still
from family import RunningBroker
from patience import patient

from cometmq import Consumer, Message, Producer
from cometmq.protocol.commands import (
    GetQueueRange,
    PullMessages,
    PullResult,
    PullStatus,
    QueueRange,
)
from cometmq.shm.live.control import Counter
from cometmq.shm.live.queue_table import ENDS_AT, QUEUES_FILE, QueueTable
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

pytestmark = pytest.mark.timeout(120)

WAIT_S = patient(30)
WAYS = ["mapped", "zmq"]


def stopped(broker: RunningBroker, role: str = "dispatcher") -> AbstractContextManager[None]:
    return still.stopped(broker.pids()[role])


def name_server(broker: RunningBroker) -> str:
    return broker.address("namesrv")


def consumer_of(broker: RunningBroker, way: str, **options: str) -> Consumer:
    return Consumer(name_server(broker), f"group-{way}", "t", transport=way, **options)


def begin(producer: Producer, consumer: Consumer, *queue_ids: int) -> None:
    """Two messages for each queue: by the second one the dispatcher has met it, and the writer
    tells of it."""
    for queue_id in queue_ids * 2:
        producer.send("t", b"first", tags="a", queue_id=queue_id)
        take(consumer, 1)


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        messages = consumer.poll(1024, 1)
        consumer.ack(messages)
        found += messages
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def dispatched(broker: RunningBroker) -> None:
    """Until everything is."""
    deadline = time.monotonic() + WAIT_S
    while broker.counter(Counter.DISPATCHED) < broker.counter(Counter.WROTE):
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 2)
        broker.create_topic("other", 1)
        yield broker


def bodies(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def test_nobody_waits_for_the_dispatcher(broker: RunningBroker, way: str) -> None:
    """Over two roll-overs, among messages of others; and later nothing comes twice."""
    with Producer(name_server(broker)) as producer, consumer_of(broker, way) as consumer:
        begin(producer, consumer, 0, 1)
        dispatched(broker)
        before = broker.counter(Counter.DISPATCHED)
        with stopped(broker):
            for start in range(0, 60, 20):
                producer.send_many("t", bodies(20, start), queue_id=0)
                producer.send_many("other", [bytes(100_000)] * 8)
                assert [m.body for m in take(consumer, 20)] == bodies(20, start)
            producer.send("t", b"last", queue_id=1)
            assert [m.body for m in take(consumer, 1)] == [b"last"]
            consumer.commit()
            assert broker.counter(Counter.DISPATCHED) == before
        producer.send_many("t", bodies(10, 60), queue_id=0)
        assert [m.body for m in take(consumer, 10)] == bodies(10, 60)
        dispatched(broker)
        assert consumer.poll(1, 0.05) == []
    assert "outside" not in broker.log
    found = broker.read_queue("t", 0, 72)
    assert [m.body for m in found] == [b"first", b"first", *bodies(70)]


def test_only_what_is_asked_for(broker: RunningBroker, way: str) -> None:
    with (
        Producer(name_server(broker)) as producer,
        consumer_of(broker, way, tags="a || b") as consumer,
    ):
        begin(producer, consumer, 0)
        with stopped(broker):
            for number, tag in enumerate(["a", "c", None, "b", "c", "a"]):
                producer.send("t", b"%d" % number, tags=tag, queue_id=0)
            assert [m.body for m in take(consumer, 3)] == [b"0", b"3", b"5"]


def test_another_dispatcher(broker: RunningBroker, way: str) -> None:
    """It is killed while a consumer is ahead of it: nothing is lost, nothing comes again."""
    with Producer(name_server(broker)) as producer, consumer_of(broker, way) as consumer:
        begin(producer, consumer, 0)
        with stopped(broker):
            producer.send_many("t", bodies(50), queue_id=0)
            assert [m.body for m in take(consumer, 50)] == bodies(50)
            killed = broker.pids()["dispatcher"]
            os.kill(killed, signal.SIGKILL)
            broker.wait_serves("dispatcher", not_pid=killed)
        producer.send_many("t", bodies(50, 50), queue_id=0)
        assert [m.body for m in take(consumer, 50)] == bodies(50, 50)
        dispatched(broker)
        assert consumer.poll(1, 0.05) == []


def test_nothing_is_shown_before_it_is_on_the_disk(tmp_path: Path, way: str) -> None:
    """SYNC_FLUSH: a power cut could take it back. The disk is waited for, not the dispatcher."""
    settings = {"flushDiskType": "SYNC_FLUSH"}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t", 1)
        with (
            Producer(name_server(broker), timeout_s=patient(20)) as producer,
            consumer_of(broker, way) as consumer,
        ):
            begin(producer, consumer, 0)
            with stopped(broker):
                with stopped(broker, "flush"):  # which syncs what is not waited for
                    producer.send("t", b"second", wait=False)
                    assert consumer.poll(1, 0.2) == []
                    assert broker.counter(Counter.WROTE) > broker.counter(Counter.FLUSHED)
                assert [m.body for m in take(consumer, 1)] == [b"second"]
                producer.send("t", b"third")
                assert [m.body for m in take(consumer, 1)] == [b"third"]


def damage(broker: RunningBroker, physical_offset: int) -> None:
    """The record's magic is none any more."""
    size = 1 << 20
    path = broker.store / COMMITLOG_DIR / segment_name(physical_offset // size * size)
    with path.open("r+b") as file:
        file.seek(physical_offset % size + 4)
        file.write(b"\0\0\0\0")


def test_what_only_the_dispatcher_can_judge(broker: RunningBroker, way: str) -> None:
    """Behind a damaged record it is waited for, and it wakes who waits."""
    with Producer(name_server(broker)) as producer, consumer_of(broker, way) as consumer:
        begin(producer, consumer, 0)
        with stopped(broker):
            with stopped(broker, "reader-0"):  # which waits, and would see it whole
                physical_offset = broker.counter(Counter.WROTE)
                producer.send("other", b"damaged")
                damage(broker, physical_offset)
            producer.send_many("t", bodies(5), queue_id=0)
            assert consumer.poll(1, 0.2) == []
        assert [m.body for m in take(consumer, 5)] == bodies(5)
        producer.send_many("t", bodies(5, 5), queue_id=0)
        assert [m.body for m in take(consumer, 5)] == bodies(5, 5)


def test_who_is_ahead_of_a_reader_that_knows_less(broker: RunningBroker) -> None:
    """Another reader finds damage before what this one has handed out: it has its client wait."""
    with Producer(name_server(broker)) as producer, consumer_of(broker, "zmq") as consumer:
        begin(producer, consumer, 0)
        with stopped(broker):
            physical_offset = broker.counter(Counter.WROTE)
            producer.send("other", b"damaged")
            producer.send_many("t", bodies(5), queue_id=0)
            assert [m.body for m in take(consumer, 5)] == bodies(5)
            damage(broker, physical_offset)
            broker.kill("reader-0")
            answer, _ = broker.reader.ask(PullMessages("t", 0, 7))
            assert isinstance(answer, PullResult)
            assert (answer.status, answer.next_queue_offset) == (PullStatus.NO_NEW_MESSAGE, 7)
        producer.send_many("t", bodies(5, 5), queue_id=0)
        assert [m.body for m in take(consumer, 5)] == bodies(5, 5)


def test_a_writer_that_died_before_it_told(broker: RunningBroker) -> None:
    """The next one tells how far the queues reach, and wakes who slept."""
    with Producer(name_server(broker)) as producer, consumer_of(broker, "mapped") as consumer:
        begin(producer, consumer, 0)
        found: list[Message] = []
        waiting = threading.Thread(target=lambda: found.extend(consumer.poll(1, WAIT_S)))
        with stopped(broker):
            producer.send("t", b"third", queue_id=0)
            assert end_of(broker) == 3
            set_end(broker, 3, 2)
            assert end_of(broker) == 2
            waiting.start()
            killed = broker.pids()["commitlog"]
            broker.end(killed)
        broker.wait_serves("commitlog", not_pid=killed)
        assert end_of(broker) == 3
        waiting.join(WAIT_S)
        assert [m.body for m in found] == [b"third"]


def set_end(broker: RunningBroker, old: int, new: int) -> None:
    """As it would be had the writer died before it told."""
    with (broker.store / QUEUES_FILE).open("r+b") as file:
        file.seek(place_of_end(broker))
        assert file.read(8) == old.to_bytes(8, "little")
        file.seek(place_of_end(broker))
        file.write(new.to_bytes(8, "little"))


def end_of(broker: RunningBroker) -> int:
    """What the writer tells of queue 0."""
    with (broker.store / QUEUES_FILE).open("rb") as file:
        file.seek(place_of_end(broker))
        return int.from_bytes(file.read(8), "little")


def place_of_end(broker: RunningBroker) -> int:
    with broker.control() as control:
        table = QueueTable.open(broker.store / QUEUES_FILE, control.read(Counter.QUEUES))
        slot = table.slot_of("t", 0)
    assert slot is not None
    return ENDS_AT + 8 * slot


def test_who_has_got_a_message_sees_it_counted(broker: RunningBroker) -> None:
    """Questions wait for the dispatcher; for one that stands still, not for long."""
    sent = 0
    for _ in range(200):
        sent += len(broker.send("t", 0, [b"x"] * 3))
        answer, _ = broker.reader.ask(GetQueueRange("t", 0))
        assert answer == QueueRange(0, sent)
    dispatched(broker)
    with stopped(broker):
        broker.send("t", 0, [b"x"])
        answer, _ = broker.reader.ask(GetQueueRange("t", 0))
        assert answer == QueueRange(0, sent)
        answer, _ = broker.reader.ask(PullMessages("t", 0, -1))
        assert isinstance(answer, PullResult)
        assert answer.max_queue_offset == sent + 1
    answer, _ = broker.reader.ask(GetQueueRange("t", 0))
    assert answer == QueueRange(0, sent + 1)
