"""Queue-less groups that take their messages in order (RocketMQ: FIFO groups)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from inside import wait_dispatched
from patience import patient

from cometmq import Admin, Broker, Reject, Retry, errors
from cometmq.client import Message, PopConsumer
from cometmq.client.popping.broker import taken_of
from cometmq.protocol.commands import (
    AckPopped,
    ChangeInvisible,
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    PopAck,
    PopExtension,
    PopMessages,
    Popped,
    PoppedMessages,
    PopsSettled,
)
from cometmq.protocol.takes import TAKE_MAX
from cometmq.protocol.wire.channel import Channel
from cometmq.testing import Sandbox

WAIT_S = patient(60)
QUEUES = 3
UNKNOWN, ILLEGAL = errors.HandleUnknown.code, errors.OffsetIllegal.code


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    return cometmq.topic("order", QUEUES)


def send(broker: Broker, topic: str, count: int, queue_id: int = 0) -> list[bytes]:
    bodies = [b"%d/%d" % (queue_id, number) for number in range(count)]
    with broker.producer() as producer:
        producer.send_many(topic, bodies, queue_id=queue_id)
    wait_dispatched(broker)
    return bodies


def take(consumer: PopConsumer, count: int = 32) -> list[Message]:
    """At least one, however long it takes."""
    deadline = time.monotonic() + WAIT_S
    while not (found := consumer.poll(count, patient(5))):
        assert time.monotonic() < deadline, "nothing has come"
    return found


def bodies_of(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def committed(broker: Broker, topic: str) -> dict[int, int]:
    with Admin(broker.name_server) as admin:
        found = admin.committed(topic, topic)
    return {queue: at for (_, queue), at in found.items() if at >= 0}


def dead_letters(broker: Broker, group: str) -> list[tuple[bytes, int]]:
    wait_dispatched(broker)  # they are read by their queues
    with Admin(broker.name_server) as admin:
        found = admin.dead_letters(group)
    return [(letter.message.body, letter.message.reconsume_times) for letter in found]


def ordered(broker: Broker, topic: str, **options: float) -> PopConsumer:
    return broker.pop_consumer(topic, topic, orderly=True, **options)  # type: ignore[arg-type]


# --- what it is for ---


def test_nothing_behind_what_is_out(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 7)
    with ordered(broker, topic) as one, ordered(broker, topic) as other:
        first = take(one, 3)
        assert bodies_of(first) == bodies[:3]
        assert other.poll(timeout_s=0) == one.poll(timeout_s=0) == []
        one.ack(first[2])  # in any order
        one.ack(first[0])
        assert committed(broker, topic) == {0: 1}
        assert other.poll(timeout_s=0) == []
        other.ack(first[1])  # anybody may say it
        assert committed(broker, topic) == {0: 3}
        rest = take(other)
        assert bodies_of(rest) == bodies[3:]
        other.ack(*rest)
        assert one.poll(timeout_s=0) == []
    assert committed(broker, topic) == {0: 7}


def test_other_queues_go_on(broker: Broker, topic: str) -> None:
    bodies = [send(broker, topic, 4, queue) for queue in range(QUEUES)]
    members = [ordered(broker, topic) for _ in range(QUEUES + 2)]
    taken = [member.poll(2, timeout_s=0) for member in members]
    assert sorted(map(bodies_of, taken)) == [[], [], *(each[:2] for each in bodies)]
    for member, messages in zip(members, taken, strict=True):
        member.ack(*messages)
    again = [message for member in members for message in member.poll(4, timeout_s=0)]
    assert sorted(bodies_of(again)) == sorted(body for each in bodies for body in each[2:])
    members[0].ack(*again)
    for member in members:
        member.close()


def test_whoever_waits_is_told_when_the_queue_is_free(broker: Broker, topic: str) -> None:
    send(broker, topic, 2)
    with (
        ordered(broker, topic) as one,
        ordered(broker, topic) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        first = take(one, 1)
        waiting = pool.submit(other.poll, 10, WAIT_S)
        one.ack(*first)
        assert bodies_of(waiting.result(WAIT_S)) == [b"0/1"]


def test_a_take_is_small(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 2 * TAKE_MAX + 1)
    with ordered(broker, topic) as consumer:
        for first in range(0, len(bodies), TAKE_MAX):
            found = take(consumer, 1_000)
            assert bodies_of(found) == bodies[first : first + TAKE_MAX]
            consumer.ack(*found)


def test_tags_leave_no_hole(broker: Broker, topic: str) -> None:
    with broker.producer() as producer:
        for number in range(9):
            producer.send(topic, b"%d" % number, tags="abc"[number % 3], queue_id=1)
    wait_dispatched(broker)
    with broker.pop_consumer(topic, topic, "b", orderly=True, invisible_s=0.3) as consumer:
        found = take(consumer)
        assert bodies_of(found) == [b"1", b"4", b"7"]
        consumer.ack(found[1])
        assert bodies_of(take(consumer)) == [b"1", b"7"]
    assert committed(broker, topic) == {1: 1}


# --- what is not acknowledged ---


def test_it_comes_again_in_its_place(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 6)
    with ordered(broker, topic, invisible_s=0.4) as gone, ordered(broker, topic) as consumer:
        first = take(gone, 4)
        gone.ack(first[1])
        again = take(consumer, 2)  # by itself, once the time is over
        assert [(m.body, m.reconsume_times, m.stored_topic) for m in again] == [
            (bodies[0], 1, topic), (bodies[2], 1, topic),
        ]  # fmt: skip
        with pytest.raises(errors.HandleUnknown):
            gone.ack(first[0])
        with pytest.raises(errors.HandleUnknown):
            gone.nack(first[2])
        with pytest.raises(errors.HandleUnknown):
            gone.extend(first[2], 1)
        gone.ack(first[1])  # said again: it is done with
        consumer.ack(*again)
        third = take(consumer)  # before what is new
        assert [(m.body, m.reconsume_times) for m in third] == [(bodies[3], 1)]
        consumer.ack(*third)
        assert bodies_of(take(consumer)) == bodies[4:]


def test_late_but_before_anybody_else(broker: Broker, topic: str) -> None:
    """As RocketMQ has it: the word counts, nobody has the message."""
    send(broker, topic, 2)
    with ordered(broker, topic, invisible_s=0.1) as consumer:
        first = take(consumer, 1)
        threading.Event().wait(0.5)
        consumer.ack(*first)
        assert [(m.body, m.reconsume_times) for m in take(consumer)] == [(b"0/1", 0)]


def test_given_back(broker: Broker, topic: str) -> None:
    """It comes first, after its time, and what was taken behind it is nobody's."""
    bodies = send(broker, topic, 5)
    with ordered(broker, topic) as one, ordered(broker, topic) as other:
        first = take(one, 4)
        began = time.monotonic()
        one.nack(first[1], after=1)
        for late in first[1:]:
            with pytest.raises(errors.HandleUnknown):
                one.ack(late)
        with pytest.raises(errors.HandleUnknown):
            one.nack(first[1])
        assert other.poll(timeout_s=0) == []  # the one before it is out, too
        one.ack(first[0])
        assert other.poll(timeout_s=0) == []
        again = take(other)
        assert time.monotonic() - began > 0.99
        assert [(m.body, m.reconsume_times) for m in again] == [
            (bodies[1], 1), (bodies[2], 0), (bodies[3], 0),
        ]  # fmt: skip
        other.nack(again[0], after=0)
        third = take(one)
        assert [m.reconsume_times for m in third] == [2, 0, 0]
        one.ack(*third)
        assert bodies_of(take(one)) == bodies[4:]
    assert dead_letters(broker, topic) == []


def test_extended(broker: Broker, topic: str) -> None:
    send(broker, topic, 3)
    with ordered(broker, topic, invisible_s=0.5) as one, ordered(broker, topic) as other:
        first = take(one, 2)
        one.extend(first[0], WAIT_S)
        assert other.poll(timeout_s=1) == []
        one.extend(first[1], 0.1)  # or shorter
        assert [m.reconsume_times for m in take(other, 5)] == [1, 1]


def test_dead_letters(broker: Broker, topic: str) -> None:
    """A message that kills each of its consumers; those behind it were not begun."""
    with Admin(broker.name_server) as admin:
        admin.create_group(topic, {"retryMaxTimes": 2})
    bodies = send(broker, topic, 3)
    with ordered(broker, topic, invisible_s=0.2) as consumer:
        counts = [[m.reconsume_times for m in take(consumer)] for _ in range(3)]
        assert counts == [[0] * 3, [1] * 3, [2] * 3]
        rest = take(consumer)
        assert bodies_of(rest) == bodies[1:]
        assert dead_letters(broker, topic) == [(bodies[0], 3)]
        consumer.reject(rest[0])
        (last,) = take(consumer)
        assert last.body == bodies[2]
        consumer.ack(last)
    assert sorted(dead_letters(broker, topic)) == [(bodies[0], 3), (bodies[1], 3)]
    assert committed(broker, topic) == {0: 3}


def test_given_back_too_often(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 2)
    with ordered(broker, topic, max_reconsume_times=1) as consumer:
        for attempt in (0, 1):
            first, second = take(consumer)
            assert (first.body, first.reconsume_times) == (bodies[0], attempt)
            consumer.nack(first, after=0)
        (second,) = take(consumer)
        assert (second.body, second.reconsume_times) == (bodies[1], 0)
    assert dead_letters(broker, topic) == [(bodies[0], 2)]


# --- handlers ---


class Steps:
    """What handlers were called with, by queue, and who was at work at the same time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._at_work: set[int] = set()
        self.done: dict[int, list[bytes]] = defaultdict(list)
        self.calls: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        self.overlaps: list[Message] = []
        self.over = threading.Event()

    def begin(self, message: Message) -> None:
        with self._lock:
            if message.queue_id in self._at_work:
                self.overlaps.append(message)
            self._at_work.add(message.queue_id)
            self.calls[message.queue_id].append((message.body, message.reconsume_times))

    def end(self, message: Message, *, is_done: bool) -> None:
        with self._lock:
            self._at_work.discard(message.queue_id)
            if is_done:
                self.done[message.queue_id].append(message.body)
            if sum(map(len, self.done.values())) == self._count:
                self.over.set()


def fails(message: Message) -> bool:
    """Every 7th message twice."""
    number = int(message.body.partition(b"/")[2])
    return number % 7 == 3 and message.reconsume_times < 2


def test_handlers_of_many_members(broker: Broker, topic: str) -> None:
    """More of them than queues, and each queue in its order, one message at a time."""
    bodies = {queue: send(broker, topic, 60, queue) for queue in range(QUEUES)}
    steps = Steps(60 * QUEUES)

    def handle(message: Message) -> None:
        steps.begin(message)
        failed = fails(message)
        steps.end(message, is_done=not failed)
        if failed:
            raise Retry(after=0.01)

    members = [ordered(broker, topic) for _ in range(5)]
    threads = [
        threading.Thread(target=member.run, args=(handle,), kwargs={"concurrency": 2})
        for member in members
    ]
    for thread in threads:
        thread.start()
    assert steps.over.wait(WAIT_S)
    for member in members:
        member.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert steps.done == bodies
    assert not steps.overlaps
    for queue, calls in steps.calls.items():
        assert len(calls) == 60 + 2 * sum(1 for number in range(60) if number % 7 == 3), queue
    assert committed(broker, topic) == dict.fromkeys(range(QUEUES), 60)


def test_reject_and_errors(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 6)
    seen: list[bytes] = []
    consumer = ordered(broker, topic)

    def handle(message: Message) -> None:
        seen.append(message.body)
        if message.body == bodies[1] and not message.reconsume_times:
            raise ValueError("not yet")
        if message.body == bodies[3]:
            raise Reject
        if message.body == bodies[5]:
            consumer.close()

    began = time.monotonic()
    consumer.run(handle, concurrency=3)
    assert time.monotonic() - began > 0.9  # without a time of its own it waits for 1 s
    assert seen == [*bodies[:2], *bodies[1:]]
    assert dead_letters(broker, topic) == [(bodies[3], 1)]
    assert committed(broker, topic) == {0: 6}


def test_what_was_not_begun_is_free_at_once(broker: Broker, topic: str) -> None:
    """And it is not counted."""
    bodies = send(broker, topic, 12)
    consumer = ordered(broker, topic, invisible_s=600)
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 3:
            consumer.close()

    consumer.run(handle, concurrency=1)
    assert seen == bodies[:3]
    with ordered(broker, topic) as other:
        left = take(other)
        other.ack(*left)
        left += take(other)  # that was never taken
        assert [(m.body, m.reconsume_times) for m in left] == [(body, 0) for body in bodies[3:]]


def test_asyncio(broker: Broker, topic: str) -> None:
    bodies = {queue: send(broker, topic, 40, queue) for queue in range(QUEUES)}

    async def main() -> Steps:
        steps = Steps(40 * QUEUES)
        async with broker.async_pop_consumer(topic, topic, orderly=True) as consumer:

            async def handle(message: Message) -> None:
                steps.begin(message)
                await asyncio.sleep(0.001)
                failed = fails(message)
                steps.end(message, is_done=not failed)
                if steps.over.is_set():
                    await consumer.close()
                if failed:
                    raise Retry(after=0)

            await consumer.run(handle, concurrency=7)
        return steps

    steps = asyncio.run(main())
    assert steps.done == bodies
    assert not steps.overlaps


# --- one way at a time ---


def test_a_group_has_one_way(broker: Broker, topic: str) -> None:
    send(broker, topic, 4)
    plain = broker.pop_consumer(topic, topic)
    (message,) = plain.poll(1, patient(5))
    with Admin(broker.name_server) as admin, ordered(broker, topic) as other:
        with pytest.raises(errors.GroupInUse, match="in no order"):
            other.poll()
        with pytest.raises(errors.GroupInUse, match="has messages out"):
            admin.update_group(topic, {"consumeMessageOrderly": True})
        plain.ack(message)
        admin.update_group(topic, {"consumeMessageOrderly": True})
        (second,) = take(other, 1)
        assert second.body == b"0/1"
        with pytest.raises(errors.GroupInUse, match="in order"):
            plain.poll()
        with pytest.raises(errors.GroupInUse, match="has messages out"):
            admin.update_group(topic, {"consumeMessageOrderly": False})
        other.nack(second, after=0)
        take(other, 1)
    plain.close()


def test_the_group_is_moved(broker: Broker, topic: str) -> None:
    """A reset counts: what was taken is forgotten, also where the group stood."""
    bodies = send(broker, topic, 6)
    with ordered(broker, topic, invisible_s=600) as consumer, Admin(broker.name_server) as admin:
        consumer.ack(*take(consumer, 2))
        out = take(consumer, 2)
        for first in (0, 3, 1, 1):
            admin.reset_offsets(topic, topic, first, queue_id=0)
            with pytest.raises(errors.HandleUnknown):
                consumer.extend(out[0], 5)
            out = take(consumer, 2)
            assert [(m.body, m.reconsume_times) for m in out] == [
                (body, 0) for body in bodies[first : first + 2]
            ]


# --- lies, and answers that are lost ---


def coordinator_of(broker: Broker) -> Channel:
    with Admin(broker.name_server) as admin:
        (found,) = admin.brokers()
    return Channel(str(found.coordinator), "coordinator")


def test_an_answer_that_is_lost_is_had_again(broker: Broker, topic: str) -> None:
    for queue in range(QUEUES):
        send(broker, topic, 5, queue)
    with coordinator_of(broker) as channel, ordered(broker, topic) as other:

        def ask(attempt: str = "attempt-1", count: int = 8) -> list[Popped]:
            command = PopMessages(topic, topic, count, 60_000, 0, False, "me", True, attempt)
            answer, _ = channel.ask(command, timeout_s=WAIT_S)
            assert isinstance(answer, PoppedMessages)
            found = [msgspec.structs.replace(each, until_ms=0) for each in answer.popped]
            return sorted(found, key=lambda each: each.queue_id)

        first = ask()
        assert sorted(each.count for each in first) == [3, 5]
        assert len(take(other)) == 5
        assert ask() == first
        assert ask("attempt-2") == []
        (fewer,) = ask(count=2)
        assert fewer in [msgspec.structs.replace(each, count=2) for each in first]


def test_handles_are_not_believed(broker: Broker, topic: str) -> None:
    send(broker, topic, 4)
    with ordered(broker, topic) as consumer, coordinator_of(broker) as channel:
        messages = take(consumer, 3)
        handle, queue = taken_of(messages[0]).popped.handle, messages[0].queue_id
        lies = [
            PopAck(topic, queue, handle + 1, 0, 1),
            PopAck(topic, queue, 0, 0, 1),
            PopAck(topic, queue, -1, 0, 1),
            PopAck(topic, queue, handle, 0, 4),
            PopAck(topic, queue, handle, 0, -1),
            PopAck(topic, queue, handle, 0, 0),
            PopAck(topic, queue, handle, -(2**63), 2**31 - 1),
            PopAck(topic, queue, handle, 2**63 - 1, 2**31 - 1),
            PopAck(topic, 99, handle, 0, 1),
            PopAck("nowhere", queue, handle, 0, 1),
        ]
        answer, _ = channel.ask(AckPopped(topic, lies), timeout_s=WAIT_S)
        assert answer == PopsSettled([UNKNOWN] * 3 + [ILLEGAL] * 5 + [UNKNOWN] * 2)
        given = [
            GivenBack(topic, queue, offset, 0, after_ms=0, handle=handle + more)
            for offset, more in ((0, 1), (3, 0), (-1, 0), (2**63 - 1, 0))
        ]
        answer, _ = channel.ask(GiveBackMessages(topic, given), timeout_s=WAIT_S)
        assert answer == MessagesGivenBack([UNKNOWN] * 4)
        extensions = [PopExtension(topic, queue, handle + 1, 0), PopExtension(topic, 9, handle, 0)]
        answer, _ = channel.ask(ChangeInvisible(topic, extensions), timeout_s=WAIT_S)
        assert answer == PopsSettled([UNKNOWN] * 2)
        for bad in (
            ChangeInvisible(topic, [PopExtension(topic, queue, handle, -1)]),
            ChangeInvisible(topic, [PopExtension(topic, queue, handle, 2**62)]),
            PopMessages(topic, topic, 1, 60_000, 0, False, "", True, "a" * 65),
            PopMessages(topic, topic, 1, 60_000, 0, False, "", True, "a\n"),
        ):
            with pytest.raises(errors.ArgumentIllegal):
                channel.ask(bad, timeout_s=WAIT_S)
        assert consumer.poll(timeout_s=0) == []
        consumer.ack(*messages)
        consumer.ack(*messages)
        assert committed(broker, topic) == {queue: 3}
        # One that waits for ever keeps its queue for half a day at most.
        (last,) = take(consumer)
        consumer.nack(last, after=86_400 * 300)
        assert consumer.poll(timeout_s=0) == []


def test_many_words_at_random(broker: Broker, topic: str) -> None:
    """Whoever says what: nothing is lost, nothing comes again that is acknowledged, and of each
    queue the first that is not acknowledged comes first."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for queue in range(QUEUES):
        send(broker, topic, 40, queue)
    acked: dict[int, set[int]] = defaultdict(set)
    members = [ordered(broker, topic, invisible_s=0.3) for _ in range(3)]
    deadline = time.monotonic() + WAIT_S
    while sum(map(len, acked.values())) < 40 * QUEUES:
        assert time.monotonic() < deadline
        member = chance.choice(members)
        found = member.poll(chance.randint(1, 12), 0.05)
        for queue in {message.queue_id for message in found}:
            offsets = [m.queue_offset for m in found if m.queue_id == queue]
            left = [at for at in range(40) if at not in acked[queue]]
            assert offsets == left[: len(offsets)]
        chance.shuffle(found)
        for message in found:
            what = chance.random()
            try:
                if what < 0.75:
                    member.ack(message)
                    acked[message.queue_id].add(message.queue_offset)
                elif what < 0.85:
                    member.nack(message, after=chance.choice([0, 0.1]))
                elif what < 0.95:
                    member.extend(message, 0.1)
            except errors.HandleUnknown:
                pass
    assert committed(broker, topic) == dict.fromkeys(range(QUEUES), 40)
    assert dead_letters(broker, topic) == []
    for member in members:
        member.close()
