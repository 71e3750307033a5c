"""The consumer against a broker that does as it is told."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from client_fakes import Handle, fake_broker, start_broker
from patience import patient
from receiving import take

from cometmq.client import Consumer, Producer
from cometmq.protocol import errors
from cometmq.protocol.commands import (
    CommitOffsets,
    JoinGroup,
    LeaveGroup,
    PullMessages,
    QueueKey,
)


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


def fill(handle: Handle, count: int, *, topic: str = "t", tags: str | None = None) -> None:
    """`count` messages in each of the four queues."""
    with Producer(handle.address) as producer:
        for queue_id in range(4):
            bodies = [f"{queue_id}:{i}".encode() for i in range(count)]
            producer.send_many(topic, bodies, queue_id=queue_id, tags=tags)


def offsets(handle: Handle, group: str = "g") -> list[int]:
    return [handle.broker.offsets.get((group, "t", i), -1) for i in range(4)]


def consumer_of(handle: Handle, group: str = "g", **options: object) -> Consumer:
    options.setdefault("auto_commit_ms", 3_600_000)
    return Consumer(handle.address, group, "t", **options)  # type: ignore[arg-type]


# --- reading ---


def test_everything_comes_in_the_order_of_its_queue(broker: Handle) -> None:
    fill(broker, 1_000)
    with consumer_of(broker, pull_bytes=20_000, prefetch_bytes=50_000) as consumer:
        messages = take(consumer, 4_000)
        assert not consumer.poll(timeout_s=0)
        assert len(consumer.assignment) == 4
    for queue_id in range(4):
        bodies = [each.body for each in messages if each.queue_id == queue_id]
        assert bodies == [f"{queue_id}:{i}".encode() for i in range(1_000)]


def test_a_waiting_poll_gets_what_is_sent(broker: Handle) -> None:
    with consumer_of(broker) as consumer, Producer(broker.address) as producer:
        assert not consumer.poll(timeout_s=0.1)
        broker.wait_for(lambda fake: len(fake.pulls) == 4)
        for i in range(20):
            producer.send("t", str(i).encode())
            assert [each.body for each in consumer.poll(timeout_s=patient(30))] == [str(i).encode()]


def test_two_groups_get_everything_each(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker, "g") as one, consumer_of(broker, "h") as other:
        assert len(take(one, 40)) == len(take(other, 40)) == 40


def test_max_count_is_kept_and_nothing_is_left_behind(broker: Handle) -> None:
    fill(broker, 25)
    with consumer_of(broker) as consumer:
        found = 0
        while found < 100:
            messages = consumer.poll(7, patient(30))
            assert 0 < len(messages) <= 7
            found += len(messages)
        assert found == 100


def test_a_loop_that_is_left_goes_on_later(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker) as consumer:
        first = []
        for message in consumer:
            first.append(message)
            if len(first) == 13:
                break
        second = consumer.poll(5)
        third = []
        for message in consumer:
            third.append(message)
            if len(third) == 40 - 13 - len(second):
                break
    seen = [(each.queue_id, each.queue_offset) for each in [*first, *second, *third]]
    assert len(set(seen)) == 40
    for queue_id in range(4):
        of_queue = [offset for queue, offset in seen if queue == queue_id]
        assert of_queue == sorted(of_queue)


def test_a_loop_ends_when_another_thread_closes(broker: Handle) -> None:
    fill(broker, 1)
    consumer = consumer_of(broker)
    seen = []
    waiting = threading.Event()

    def loop() -> None:
        for message in consumer:
            seen.append(message)
            if len(seen) == 4:
                waiting.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert waiting.wait(patient(60))
    consumer.close()
    thread.join(patient(60))
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll()
    consumer.close()


@pytest.mark.parametrize("tags", ["a", "a || c", "*"])
def test_tags(broker: Handle, tags: str) -> None:
    with Producer(broker.address) as producer:
        for i in range(30):
            producer.send("t", str(i).encode(), tags=("a", "b", None)[i % 3], queue_id=0)
    wanted = [i for i in range(30) if tags == "*" or i % 3 == 0]
    with consumer_of(broker, tags=tags) as consumer:
        messages = take(consumer, len(wanted))
        assert [int(each.body) for each in messages] == wanted
        for message in messages:
            consumer.ack(message)
        consumer.commit()
    assert offsets(broker)[0] == 30


def test_a_bad_tag_expression_is_told_at_once(broker: Handle) -> None:
    with pytest.raises(errors.SubscriptionIllegal):
        consumer_of(broker, tags="a | b")


def test_topics_may_be_added_and_given_back(broker: Handle) -> None:
    fill(broker, 5)
    with consumer_of(broker) as consumer, Producer(broker.address) as producer:
        take(consumer, 20)
        producer.send("u", b"other")
        consumer.subscribe("u")
        assert [each.body for each in take(consumer, 1)] == [b"other"]
        consumer.unsubscribe("t")
        broker.wait_for(
            lambda fake: (
                isinstance(fake.commands[-1], JoinGroup)
                and {key.topic for key in fake.commands[-1].owned} == {"u"}
            )
        )


# --- where it starts ---


def test_start_and_restart(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker, start="latest") as consumer, Producer(broker.address) as producer:
        assert not consumer.poll(timeout_s=0.2)
        assert offsets(broker) == [10] * 4  # what comes from here on is not missed
        producer.send("t", b"new", queue_id=3)
        assert [each.body for each in take(consumer, 1)] == [b"new"]
    with consumer_of(broker) as consumer:  # it was not acknowledged
        (message,) = take(consumer, 1)
        consumer.ack(message)
    assert offsets(broker) == [10, 10, 10, 11]
    with consumer_of(broker) as consumer:
        assert not consumer.poll(timeout_s=0.2)


def test_start_at_a_time(broker: Handle) -> None:
    fill(broker, 3)
    later = datetime.now(UTC).timestamp() * 1000 + 1_000_000
    with consumer_of(broker, start=int(later)) as consumer:
        assert not consumer.poll(timeout_s=0.1)
    with consumer_of(broker, "h", start=datetime(2020, 1, 1, tzinfo=UTC)) as consumer:
        assert len(take(consumer, 12)) == 12
    with pytest.raises(ValueError, match="'earliest', 'latest' or a time"):
        consumer_of(broker, start="beginning")


@pytest.mark.parametrize("words", [("earliest", "latest"), ("begin", "end")])
def test_seek(words: tuple[str, str], broker: Handle) -> None:
    earliest, latest = words
    fill(broker, 10)
    with consumer_of(broker, start=earliest) as consumer:
        consumer.seek(latest)
        assert not consumer.poll(timeout_s=0.1)
        assert offsets(broker) == [10] * 4
        consumer.seek(earliest)
        assert offsets(broker) == [0] * 4
        consumer.ack(take(consumer, 40))
        consumer.seek(7, "t", 2)
        assert [each.queue_offset for each in take(consumer, 3)] == [7, 8, 9]
        consumer.commit()
        assert offsets(broker) == [10, 10, 7, 10]
        consumer.seek(datetime(2020, 1, 1, tzinfo=UTC), queue_id=1)
        assert len(take(consumer, 10)) == 10
        with pytest.raises(errors.NotOwner):
            consumer.seek(earliest, "t", 9)
        with pytest.raises(ValueError, match="position"):
            consumer.seek("start")


# --- acknowledging ---


def test_progress_stops_at_the_first_that_is_missing(broker: Handle) -> None:
    fill(broker, 10)
    broker.broker.share = [QueueKey("t", 0)]
    with consumer_of(broker) as consumer:
        messages = take(consumer, 10)
        consumer.ack(messages[5:])
        consumer.commit()
        assert offsets(broker)[0] == -1
        consumer.ack([messages[i] for i in (0, 1, 3)])
        consumer.ack(messages[3])
        consumer.commit()
        assert offsets(broker)[0] == 2
        consumer.ack(iter([messages[2]]))
        consumer.commit()
        assert offsets(broker)[0] == 4
        consumer.ack(messages[4])
        consumer.commit()
        assert offsets(broker)[0] == 10


def test_acknowledgements_are_committed_in_the_background(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker, auto_commit_ms=20) as consumer:
        consumer.ack(take(consumer, 40))
        broker.wait_for(lambda fake: offsets(broker) == [10] * 4)
        count = len(broker.asked(CommitOffsets))
        assert not consumer.poll(timeout_s=0.1)
        assert len(broker.asked(CommitOffsets)) == count  # nothing new, nothing committed


def test_without_ack_nothing_is_committed(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker, auto_commit_ms=10) as consumer:
        take(consumer, 40)
    assert offsets(broker) == [-1] * 4
    assert broker.asked(LeaveGroup)


# --- sharing ---


def test_a_queue_that_is_lost_is_handed_over_in_order(broker: Handle) -> None:
    """Commit first, then say that it is free; the rest of it is not handed out."""
    fill(broker, 10)
    with consumer_of(broker) as consumer:
        first = consumer.poll(3, patient(30))
        lost = first[0].queue_id
        left = [QueueKey("t", i) for i in range(4) if i != lost]
        consumer.ack(first)
        broker.do(lambda fake: fake.give(left))
        broker.wait_for(
            lambda fake: (
                isinstance(fake.commands[-1], JoinGroup) and fake.commands[-1].owned == left
            )
        )
        assert broker.broker.offsets["g", "t", lost] == 3
        rest = take(consumer, 30)
        assert {each.queue_id for each in rest} == {key.queue_id for key in left}
        consumer.ack(first)  # too late, and no harm
        consumer.ack(rest)
        broker.do(lambda fake: fake.give(None))
        again = take(consumer, 7)
        assert [each.queue_offset for each in again] == list(range(3, 10))


def test_what_is_in_the_users_hands_may_be_acknowledged_for_a_moment(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker) as consumer:
        consumer.ack(consumer.poll(1, patient(30)))
        second = consumer.poll(4, patient(30))
        lost = second[0].queue_id
        broker.do(lambda fake: fake.give([QueueKey("t", i) for i in range(4) if i != lost]))
        time.sleep(0.1)  # the user works
        consumer.ack(second)
        broker.wait_for(lambda fake: fake.offsets.get(("g", "t", lost)) == 5)


def test_a_queue_that_is_not_ours_any_more_is_dropped(broker: Handle) -> None:
    fill(broker, 10)
    with consumer_of(broker) as consumer:
        consumer.ack(take(consumer, 40))
        broker.broker.commit_error = errors.NotOwner("it is another's")
        broker.broker.share = [QueueKey("t", 0)]
        consumer.commit()
        broker.wait_for(
            lambda fake: (
                isinstance(fake.commands[-1], JoinGroup)
                and fake.commands[-1].owned == [QueueKey("t", 0)]
            )
        )
        broker.broker.commit_error = None


def test_a_group_that_may_not_consume_is_told(broker: Handle) -> None:
    broker.broker.join_error = errors.NoPermission("group g may not consume")
    with consumer_of(broker) as consumer, pytest.raises(errors.NoPermission):
        consumer.poll(timeout_s=patient(30))


# --- faults ---


@pytest.mark.slow
def test_a_broker_restart_is_ridden_out() -> None:
    first = start_broker()
    fill(first, 10)
    with consumer_of(first) as consumer:
        consumer.ack(take(consumer, 40))
        first.stop()
        with fake_broker(first.address) as second:
            second.broker.topics = first.broker.topics
            second.broker.records = first.broker.records
            second.broker.cursors = first.broker.cursors
            with Producer(second.address) as producer:
                producer.send("t", b"new", queue_id=0)
                assert [each.body for each in take(consumer, 1)] == [b"new"]
            consumer.commit()
            assert offsets(second) == [10] * 4


def test_an_offset_that_is_gone(broker: Handle, caplog: pytest.LogCaptureFixture) -> None:
    fill(broker, 10)
    broker.broker.offsets["g", "t", 0] = 500  # the broker lost what was there
    with consumer_of(broker) as consumer, Producer(broker.address) as producer:
        take(consumer, 30)
        deadline = time.monotonic() + patient(60)
        while "resuming at 10" not in caplog.text:  # other queues had those messages
            assert time.monotonic() < deadline
            assert consumer.poll(1, timeout_s=0.01) == []
        producer.send("t", b"new", queue_id=0)
        assert [each.body for each in take(consumer, 1)] == [b"new"]
    assert "offset 500 is outside [0, 10], resuming at 10" in caplog.text


@pytest.mark.parametrize("position", ["body", "size"])
def test_a_damaged_record_is_reported_and_skipped(
    broker: Handle, caplog: pytest.LogCaptureFixture, position: str
) -> None:
    fill(broker, 10)
    broker.broker.share = [QueueKey("t", 0)]
    record = bytearray(broker.broker.records["t", 0][4])
    if position == "body":
        at = record.index(b"0:4")
        record[at] ^= 1
    else:
        record[0:4] = (7).to_bytes(4, "big")
    broker.broker.records["t", 0][4] = bytes(record)
    whole = [0, 1, 2, 3, 5, 6, 7, 8, 9] if position == "body" else [0, 1, 2, 3]
    with (
        caplog.at_level(logging.ERROR, "cometmq"),
        consumer_of(broker) as consumer,
        Producer(broker.address) as producer,
    ):
        messages = take(consumer, len(whole))
        assert [each.queue_offset for each in messages] == whole
        consumer.ack(messages)
        consumer.commit()
        assert offsets(broker)[0] == 10
        producer.send("t", b"new", queue_id=0)
        assert [each.body for each in take(consumer, 1)] == [b"new"]
    assert "t/0@b: a damaged record" in caplog.text
    assert "behind queue offset 3" in caplog.text


def test_prefetch_is_bounded(broker: Handle) -> None:
    fill(broker, 2_000)
    size = sum(map(len, broker.broker.records["t", 0]))
    with consumer_of(broker, pull_bytes=10_000, prefetch_bytes=80_000) as consumer:
        consumer.poll(1, patient(30))
        for _ in range(50):
            consumer._receiver.puller.pump(0.01)
        buffered = sum(queue.buffered_bytes for queue in consumer._receiver.owned.find(None, None))
        assert 40_000 < buffered <= 80_000 + 4 * 10_000 < 4 * size
        take(consumer, 7_999)
    assert max(command.max_bytes for command in broker.asked(PullMessages)) == 10_000


@pytest.mark.slow
def test_nobody_there_names_the_address() -> None:
    with pytest.raises(errors.NotReachable, match=r"127\.0\.0\.1:1 "):
        Consumer("tcp://127.0.0.1:1", "g", "t")


def test_a_fork_is_told(broker: Handle) -> None:
    with consumer_of(broker) as consumer:
        consumer.poll(timeout_s=0.1)
        child = os.fork()
        if not child:
            status = 0
            for call in (consumer.poll, lambda: next(iter(consumer)), consumer.close):
                try:
                    call()
                except RuntimeError as error:
                    status |= "fork" not in str(error)
                else:
                    status |= 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
