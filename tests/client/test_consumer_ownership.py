"""What a consumer does with the epochs of what it owns, and where it may seek to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from client_fakes import CommandT, FakeBroker, Handle, fake_broker
from patience import patient
from receiving import take

from cometmq.actors.runtime.service import Request
from cometmq.client import Admin, Consumer, Producer
from cometmq.client.administration.descriptions import OffsetMove
from cometmq.protocol import errors
from cometmq.protocol.commands import (
    CommitOffsets,
    DescribeQueues,
    FetchOffsets,
    JoinGroup,
    ResetOffsets,
    SearchOffsets,
)
from cometmq.protocol.retry import MOST_S

QUEUES = 4


@pytest.fixture
def broker() -> Iterator[Handle]:
    """Ten messages in each of the four queues."""
    with fake_broker() as handle:
        with Producer(handle.address) as producer:
            for queue_id in range(QUEUES):
                producer.send_many("t", [b"%d" % i for i in range(10)], queue_id=queue_id)
        yield handle


def consumer_of(handle: Handle, **options: object) -> Consumer:
    options.setdefault("auto_commit_ms", 3_600_000)
    return Consumer(handle.address, "g", "t", **options)  # type: ignore[arg-type]


def asked(broker: Handle, kind: type[CommandT], count: int) -> list[CommandT]:
    """The commands of that kind; the broker notes them after it has answered them."""
    broker.wait_for(lambda _: len(broker.asked(kind)) >= count)
    found = broker.asked(kind)
    assert len(found) == count
    return found


def end_epoch(broker: FakeBroker, queue_id: int, *, committed: int) -> None:
    """The queue has been another member's meanwhile, who has come so far."""
    broker.epochs["t", queue_id] = 2
    broker.offsets["g", "t", queue_id] = committed


def test_commits_name_the_epoch(broker: Handle) -> None:
    broker.do(lambda fake: fake.epochs.update({("t", 2): 7}))
    with consumer_of(broker) as consumer:
        consumer.ack(take(consumer, 40))
        consumer.commit()
        (commit,) = asked(broker, CommitOffsets, 1)
        assert sorted((each.queue_id, each.epoch) for each in commit.offsets) == [
            (0, 1), (1, 1), (2, 7), (3, 1),
        ]  # fmt: skip


def test_a_queue_of_another_epoch_is_taken_on_anew(broker: Handle) -> None:
    """Nothing that was read before is committed, and reading goes on at what is committed."""
    with consumer_of(broker) as consumer:
        consumer.ack(take(consumer, 40))

        def change(fake: FakeBroker) -> None:
            end_epoch(fake, 1, committed=4)
            fake.give(None)

        broker.do(change)
        again = take(consumer, 6)
        assert [(each.queue_id, each.queue_offset) for each in again] == [
            (1, offset) for offset in range(4, 10)
        ]
        consumer.commit()
        assert [broker.broker.offsets["g", "t", i] for i in range(4)] == [10, 4, 10, 10]
        consumer.ack(again)
        consumer.commit()
        assert broker.broker.offsets["g", "t", 1] == 10


def test_a_refused_commit_of_many_keeps_the_rest(broker: Handle) -> None:
    with consumer_of(broker) as consumer:
        consumer.ack(take(consumer, 40))
        broker.do(lambda fake: end_epoch(fake, 1, committed=4))  # it has not been told
        consumer.commit()
        assert [broker.broker.offsets["g", "t", i] for i in range(4)] == [10, 4, 10, 10]
        assert [each.queue_offset for each in take(consumer, 6)] == list(range(4, 10))


def test_a_seek_of_what_is_not_ours_any_more(broker: Handle) -> None:
    with consumer_of(broker) as consumer:
        consumer.ack(take(consumer, 40))
        broker.do(lambda fake: end_epoch(fake, 1, committed=4))
        with pytest.raises(errors.NotOwner, match="has ended"):
            consumer.seek("earliest", "t", 1)
        assert broker.broker.offsets["g", "t", 1] == 4
        assert [each.queue_offset for each in take(consumer, 6)] == list(range(4, 10))
        consumer.commit()  # the others are as they were
        assert [broker.broker.offsets["g", "t", i] for i in range(4)] == [10, 4, 10, 10]


def test_a_first_offset_of_what_is_not_ours_any_more(broker: Handle) -> None:
    """Another member had the queue between the share and the commit of where to begin."""

    def overtake(fake: FakeBroker) -> None:
        answer = fake.find_handler(FetchOffsets)

        def later(command: FetchOffsets, request: object) -> object:
            found = answer(command, request)  # type: ignore[arg-type]
            fake._handlers[FetchOffsets] = answer
            for queue_id in range(QUEUES):
                end_epoch(fake, queue_id, committed=4)
            return found

        fake._handlers[FetchOffsets] = later  # type: ignore[assignment]

    broker.do(overtake)
    with consumer_of(broker, start="latest") as consumer:
        assert {each.queue_offset for each in take(consumer, 24)} == set(range(4, 10))
    assert [broker.broker.offsets["g", "t", i] for i in range(4)] == [4] * 4


@pytest.mark.parametrize("start", ["earliest", "latest", datetime(2020, 1, 1, tzinfo=UTC)])
def test_a_new_group_asks_one_question_for_all_queues(
    broker: Handle, start: str | datetime
) -> None:
    with consumer_of(broker, start=start) as consumer:
        consumer.commit()  # waits for nothing, but polls need the assignment
        while not consumer.assignment:
            consumer.poll(1, 0.05)
    kind = SearchOffsets if isinstance(start, datetime) else DescribeQueues
    assert [len(each.queues) for each in asked(broker, kind, 1)] == [QUEUES]


@pytest.mark.parametrize("position", [-1, 11, 1 << 62])
def test_seek_outside_of_the_queue(broker: Handle, position: int) -> None:
    with consumer_of(broker) as consumer:
        with pytest.raises(errors.OffsetIllegal, match=f"{position}: queue 2 of t .* has 0 to 10"):
            consumer.seek(position, "t", 2)
        assert not broker.asked(CommitOffsets)
        consumer.seek(10, "t", 2)
        consumer.seek(0, "t", 2)
        assert len(take(consumer, 40)) == 40


def test_an_offset_belongs_to_one_queue(broker: Handle) -> None:
    with consumer_of(broker) as consumer:
        for arguments in [(), ("t",)]:
            with pytest.raises(ValueError, match="say which, by topic and queue_id"):
                consumer.seek(5, *arguments)
        with pytest.raises(ValueError, match="say which, by topic and queue_id"):
            consumer.seek(5, queue_id=1)


def test_an_administrator_cannot_reset_to_outside_of_the_queue(broker: Handle) -> None:
    with Admin(broker.address) as admin:
        with pytest.raises(errors.OffsetIllegal, match=r"11: queue 2 of t .* has 0 to 10"):
            admin.reset_offsets("g", "t", 11, 2)
        assert not broker.asked(ResetOffsets)
        assert admin.reset_offsets("g", "t", 10, 2) == {("b", 2): 10}
        assert admin.reset_offsets("g", "t", 11, 2, clamp=True) == {("b", 2): 10}
        assert admin.reset_offsets("g", "t", "begin", force=True) == {("b", i): 0 for i in range(4)}
        assert admin.shift_offsets("g", "t", 3, 1) == [OffsetMove("b", "t", 1, 0, 3, 3)]
        assert admin.shift_offsets("g", "t", -4, 1) == [OffsetMove("b", "t", 1, 3, -1, 0)]
        with pytest.raises(ValueError, match="topic t has no queue 4"):
            admin.shift_offsets("g", "t", 1, 4)


def test_many_topics_in_a_row_share_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was told by itself, with all before it. A coordinator had to take a thousand lists of
    up to a thousand topics, and answered nobody meanwhile, for minutes."""
    count = 300
    told: list[int] = []
    came = threading.Condition()

    def hold(_self: FakeBroker, command: JoinGroup, _request: Request) -> None:
        with came:
            told.append(len(command.subscriptions))
            came.notify_all()

    monkeypatch.setattr(FakeBroker, "on_join_group", hold)
    with fake_broker(topics=[f"t{number}" for number in range(count)]) as handle:
        began = time.monotonic()
        with Consumer(handle.address, "g") as consumer:
            for number in range(count):
                consumer.subscribe(f"t{number}")
            with came:
                assert came.wait_for(lambda: told[-1:] == [count], patient(30)), told
            took_s = time.monotonic() - began
            asked = len(told)
    assert told == sorted(told)
    assert asked <= 8 + took_s / MOST_S, (told, took_s)


# --- what was handed out, and what was not ---


def test_what_was_not_handed_out_is_not_acknowledged(broker: Handle) -> None:
    """Another consumer's, or what was handed out before a seek: it held up nothing, and was taken
    for done, though nobody here had seen it."""
    with Consumer(broker.address, None, "t") as other:
        theirs = {(each.queue_id, each.queue_offset): each for each in take(other, 40)}
    with consumer_of(broker, prefetch_count=5) as consumer:
        consumer.ack(theirs[0, 0])  # perhaps before anything is assigned
        first = take(consumer, 2)
        queue_id = first[0].queue_id
        assert [each.queue_id for each in first] == [queue_id] * 2
        for few in (theirs[queue_id, 3], [theirs[queue_id, offset] for offset in (2, 3, 4)]):
            consumer.ack(few)
        consumer.ack(first)
        consumer.ack(first)  # said twice
        consumer.commit()
        assert broker.broker.offsets["g", "t", queue_id] == 2
        rest = take(consumer, 38)
        consumer.seek(1, "t", queue_id)
        consumer.ack([each for each in rest if each.queue_id == queue_id])
        consumer.commit()
        assert broker.broker.offsets["g", "t", queue_id] == 1
        consumer.ack(take(consumer, 9))
        consumer.commit()
        assert broker.broker.offsets["g", "t", queue_id] == 10


def test_what_is_no_message_is_not_acknowledged(broker: Handle) -> None:
    with consumer_of(broker) as consumer:
        (message,) = take(consumer, 1)
        for junk in ("x", None, ["x"], [None], [message, None], [[message]]):
            with pytest.raises(errors.ArgumentIllegal, match="messages is"):
                consumer.ack(junk)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [40, 7])
def test_another_subscription_acknowledges_nothing(broker: Handle, count: int) -> None:
    """What had been handed out, and was not acknowledged, was committed."""
    with consumer_of(broker) as consumer:
        handed_out = take(consumer, count)
        assert consumer.poll(1 if count == 40 else 0, 0) == []  # all that was read has gone out
        consumer.subscribe("t", sql="odd IS NULL")
        consumer.commit()
        assert all(broker.broker.offsets.get(("g", "t", i), 0) == 0 for i in range(QUEUES))
        consumer.ack(handed_out[1:])
        consumer.commit()
        gap = handed_out[0]
        assert broker.broker.offsets.get(("g", "t", gap.queue_id), 0) == gap.queue_offset
        rest = take(consumer, 40 - count)
        assert not {(m.queue_id, m.queue_offset) for m in rest} & {
            (m.queue_id, m.queue_offset) for m in handed_out
        }
        consumer.ack([gap, *rest])
        consumer.commit()
        assert [broker.broker.offsets["g", "t", i] for i in range(QUEUES)] == [10] * QUEUES


@pytest.mark.parametrize("at", [datetime(2020, 1, 1, tzinfo=UTC), 1_577_836_800_000])
def test_seek_to_a_time(broker: Handle, at: datetime | int) -> None:
    with consumer_of(broker) as consumer:
        take(consumer, 40)
        consumer.seek_to_time(at)
        assert len(take(consumer, 40)) == 40
        for wrong in ("earliest", True, -1, 1.5):
            with pytest.raises(errors.ArgumentIllegal):
                consumer.seek_to_time(wrong)  # type: ignore[arg-type]
