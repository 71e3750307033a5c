"""Messages that no handler has started: free at once, not counted as an attempt (Fault 7)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from inside import wait_dispatched, waiting_in
from patience import patient
from receiving import take
from waiting import until

import cometmq.client.popping.broker as popping_broker
from cometmq import Admin, Broker, errors
from cometmq.client import AsyncPopConsumer, Message, PopConsumer
from cometmq.client.popping.broker import PopBroker
from cometmq.protocol.commands import (
    Command,
    PopMessages,
    PoppedMessages,
    ReleasePopped,
    StopPopping,
)
from cometmq.protocol.errors import BadRequest, NotConfirmed
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)
LEASE_S = 600.0  # no test waits for its end


def send(broker: Broker, topic: str, count: int, **options: Any) -> list[bytes]:
    bodies = [b"%03d" % number for number in range(count)]
    with broker.producer() as producer:
        for body in bodies:
            producer.send(topic, body, **options)
    wait_dispatched(broker)  # an ordered pop returns what is dispatched by then
    return bodies


def shown(messages: Sequence[Message]) -> list[tuple[bytes, int]]:
    return sorted((message.body, message.reconsume_times) for message in messages)


def unseen(bodies: Sequence[bytes]) -> list[tuple[bytes, int]]:
    return [(body, 0) for body in sorted(bodies)]


def dead_letters(broker: Broker, group: str) -> int:
    with Admin(broker.name_server) as admin:
        return len(admin.dead_letters(group))


# --- release ---


@pytest.mark.parametrize("orderly", [False, True])
def test_released_messages_are_free_at_once_and_uncounted(
    broker: Broker, topic: str, orderly: bool
) -> None:
    bodies = send(broker, topic, 10, queue_id=0)
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as consumer:
        for _ in range(5):
            messages = take(consumer, 10)
            assert shown(messages) == unseen(bodies)
            for message in messages:
                consumer.release(message)
        with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as other:
            found = take(other, 10)
            assert shown(found) == unseen(bodies)
            other.ack(*found)
        with pytest.raises(errors.HandleUnknown):
            consumer.release(messages[0])


def test_release_leaves_the_neighbours_to_their_consumer(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 9, queue_id=0)
    with (
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other,
    ):
        messages = take(consumer, 9)
        consumer.release(messages[2], messages[3], messages[7])
        consumer.release(messages[2])  # again: no effect
        found = take(other, 3)
        assert shown(found) == unseen([bodies[2], bodies[3], bodies[7]])
        assert not other.poll(10, timeout_s=0.3)
        for gone in (messages[2], messages[7]):  # now held by another consumer
            with pytest.raises(errors.HandleUnknown):
                consumer.ack(gone)
            with pytest.raises(errors.HandleUnknown):
                consumer.nack(gone)
        consumer.ack(*(messages[at] for at in (0, 1, 4, 5, 6, 8)))
        other.release(found[1])
        other.ack(found[0], found[2])
        last = take(consumer, 1)
        assert shown(last) == unseen([bodies[3]])
        consumer.ack(*last)
    with Admin(broker.name_server) as admin:
        assert sum(each.lag for each in admin.describe_group(topic).queues) == 0


def test_a_waiting_poll_gets_what_is_released(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 1)
    with (
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        (message,) = take(consumer, 1)
        waiting = pool.submit(other.poll, 1, WAIT_S)
        assert not waiting.done()
        consumer.release(message)
        assert shown(waiting.result(WAIT_S)) == unseen(bodies)


def test_in_order_messages_before_a_released_one_stay(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 6, queue_id=0)
    with (
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=True) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=True) as other,
    ):
        messages = take(consumer, 6)
        consumer.release(messages[2])
        assert not other.poll(10, timeout_s=0.3)  # the queue waits for the first two
        with pytest.raises(errors.HandleUnknown):
            consumer.ack(messages[4])
        consumer.ack(messages[0], messages[1])
        assert shown(take(other, 4)) == unseen(bodies[2:])


def test_in_order_a_message_given_back_keeps_its_time(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 3, queue_id=0)
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=True) as consumer:
        messages = take(consumer, 3)
        consumer.nack(messages[2], after=1.0)
        consumer.release(messages[1])
        consumer.ack(messages[0])
        assert shown(take(consumer, 2)) == [(bodies[1], 0), (bodies[2], 1)]


def test_releases_survive_kills_of_the_broker(tmp_path: Path) -> None:
    """Released messages stay free after restarts, also with neighbours that are still out."""
    with Broker(tmp_path / "store", profile="test") as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("t", queues=1)
        bodies = send(broker, "t", 6)
        consumer = broker.pop_consumer("g", "t", invisible_s=LEASE_S)
        messages = take(consumer, 6)
        consumer.release(*messages[1:4])
        consumer.ack(messages[0])
        consumer.close()
    for _ in range(2):
        with (
            Broker(tmp_path / "store", profile="test") as broker,
            broker.pop_consumer("g", "t", invisible_s=LEASE_S) as consumer,
        ):
            found = take(consumer, 3)
            assert shown(found) == unseen(bodies[1:4])
            assert not consumer.poll(10, timeout_s=0.3)
            consumer.release(*found)


def test_an_older_broker_gives_back_instead(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With an older broker messages are given back, which counts as an attempt and is logged once;
    their neighbours stay with their consumer."""
    ask = Channel.ask

    def older(channel: Channel, command: Command, *rest: Any, **options: Any) -> Any:
        if isinstance(command, ReleasePopped):
            raise BadRequest("not a command: Invalid value 178 - at `$[1][0]`")
        return ask(channel, command, *rest, **options)

    monkeypatch.setattr(Channel, "ask", older)
    send(broker, topic, 4, queue_id=0)
    with (
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other,
    ):
        messages = take(consumer, 4)
        consumer.release(messages[1])
        consumer.release(messages[2])
        found = take(other, 2)
        assert shown(found) == [(messages[1].body, 1), (messages[2].body, 1)]
        consumer.ack(messages[0], messages[3])
        other.ack(*found)
    said = [each.message for each in caplog.records if "older than this client" in each.message]
    assert len(said) == 1


# --- the end of run and poll ---


@pytest.mark.parametrize("orderly", [False, True])
def test_restarts_count_no_attempts(broker: Broker, topic: str, orderly: bool) -> None:
    """More restarts than attempts allowed: no dead letter, each message is a first attempt."""
    bodies = send(broker, topic, 40)
    handled: list[tuple[bytes, int]] = []
    for _ in range(8):
        consumer = broker.pop_consumer(
            topic, topic, invisible_s=LEASE_S, orderly=orderly, max_reconsume_times=2
        )

        def handle(message: Message, consumer: PopConsumer = consumer) -> None:
            handled.append((message.body, message.reconsume_times))
            consumer.close()

        consumer.run(handle, concurrency=1)
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as consumer:
        left: list[Message] = []
        while len(left) < len(bodies) - len(handled):
            found = take(consumer, 1)
            consumer.ack(*found)
            left += found
    assert sorted([*handled, *shown(left)]) == unseen(bodies)
    assert not dead_letters(broker, topic)


@pytest.mark.parametrize("orderly", [False, True])
def test_all_takes_of_a_batch_are_released(broker: Broker, topic: str, orderly: bool) -> None:
    """An exit releases the messages of all pops that are in a thread's batch."""
    bodies = [*send(broker, topic, 30, queue_id=0), *send(broker, topic, 30, queue_id=1)]
    consumer = broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly)
    begun = 0

    def handle(message: Message) -> None:
        nonlocal begun
        begun += 1
        if begun == 7:
            raise SystemExit

    with pytest.raises(SystemExit):
        consumer.run(handle, concurrency=1)
    consumer.close()
    found: list[Message] = []
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as other:
        while len(found) < len(bodies) - 6:
            more = take(other, 1)
            other.ack(*more)
            found += more
    counted = [message for message in found if message.reconsume_times]
    assert len(counted) == 1  # the message whose handler raised


def test_messages_behind_a_handler_that_does_not_end_are_released(
    broker: Broker, topic: str
) -> None:
    bodies = send(broker, topic, 20)
    consumer = broker.pop_consumer(topic, topic, invisible_s=LEASE_S)
    goes_on, begun = threading.Event(), threading.Event()

    def handle(_message: Message) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(consumer.run, handle, concurrency=1, end_timeout_s=0.1)
        assert begun.wait(WAIT_S)
        consumer.close()
        run.result(WAIT_S)
        with broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other:
            found = take(other, len(bodies) - 1)
            assert {message.reconsume_times for message in found} == {0}
        goes_on.set()


def test_messages_that_wait_for_slow_handlers_are_released_in_time(
    broker: Broker, topic: str
) -> None:
    """Messages whose invisibility would end before a thread is free are released before that."""
    bodies = send(broker, topic, 3, queue_id=0)
    goes_on = threading.Event()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        handled.append(message.body)
        assert goes_on.wait(WAIT_S)

    consumer = broker.pop_consumer(topic, topic, invisible_s=4)
    with ThreadPoolExecutor(1) as pool, consumer:
        run = pool.submit(consumer.run, handle, concurrency=1)
        until(lambda: waiting_in(consumer) == 2)
        with broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other:
            assert shown(take(other, 2)) == unseen(set(bodies) - set(handled))
        goes_on.set()
        consumer.close()
        run.result(WAIT_S)


def test_no_handler_begins_after_close_returned_in_another(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 7: while the first close asked the broker, the run went on with what it had popped."""
    send(broker, topic, 40)
    stop = PopBroker.stop
    both = threading.Barrier(2)
    begun: list[threading.Thread] = []

    def slow_stop(self: PopBroker) -> None:
        others = {each for each in begun if each is not threading.current_thread()}
        until(lambda: len(begun) > 2 or not any(each.is_alive() for each in others))
        stop(self)

    consumer = PopConsumer(broker.name_server, topic, topic)

    def handler(_: Message) -> None:
        begun.append(threading.current_thread())
        if len(begun) <= 2:
            both.wait(WAIT_S)
        consumer.close()

    monkeypatch.setattr(PopBroker, "stop", slow_stop)
    consumer.run(handler, concurrency=2)
    assert len(begun) == 2


def test_a_poll_that_close_ends_releases_its_messages(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages in an answer that arrives while the consumer is closed are released."""
    read, reading, goes_on = PopBroker._read_all, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> list[Message]:
        found = read(*arguments)
        if found and not goes_on.is_set():
            reading.set()
            assert goes_on.wait(WAIT_S)
        return found

    monkeypatch.setattr(PopBroker, "_read_all", slow)
    bodies = send(broker, topic, 3, queue_id=0)
    consumer = broker.pop_consumer(topic, topic, invisible_s=LEASE_S)
    with ThreadPoolExecutor(2) as pool:
        polled = pool.submit(consumer.poll, 3, WAIT_S)
        assert reading.wait(WAIT_S)
        closed = pool.submit(consumer.close)
        until(lambda: consumer._closed)
        goes_on.set()
        assert polled.result(WAIT_S) == []
        closed.result(WAIT_S)
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as other:
        assert shown(take(other, 3)) == unseen(bodies)


@pytest.mark.parametrize("lost_by", [NotConfirmed("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("orderly", [False, True])
def test_messages_of_an_answer_that_is_lost_are_released(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, lost_by: BaseException,
    orderly: bool,
) -> None:  # fmt: skip
    bodies = send(broker, topic, 3, queue_id=0)
    ask = Channel.ask

    def lost(channel: Channel, command: Command, *rest: Any, **options: Any) -> Any:
        answer = ask(channel, command, *rest, **options)
        if isinstance(command, PopMessages):
            monkeypatch.setattr(Channel, "ask", ask)
            raise lost_by
        return answer

    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as consumer:
        monkeypatch.setattr(Channel, "ask", lost)
        if isinstance(lost_by, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                consumer.poll(10, timeout_s=0)
        else:
            assert consumer.poll(10, timeout_s=0) == []
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as other:
        assert shown(take(other, 3)) == unseen(bodies)


@pytest.mark.parametrize("late", ["unsent", "sent late"])
@pytest.mark.parametrize("missed", [StopPopping, ReleasePopped])
def test_a_release_that_fails_takes_nothing_from_a_later_poll(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, missed: type[Command], late: str
) -> None:
    """Messages of a lost answer are released by a command that fails, and a later poll receives
    them. The command that is sent again, or arrives late, must not release them a second time:
    two consumers would have one queue."""
    bodies = send(broker, topic, 3, queue_id=0)
    ask = Channel.ask
    failures: list[tuple[Channel, Command]] = []
    pops: list[Command] = []

    def fail(channel: Channel, command: Command, *rest: Any, **options: Any) -> Any:
        if isinstance(command, missed) and len(pops) == 1:
            failures.append((channel, command))
            raise NotConfirmed("lost")
        answer = ask(channel, command, *rest, **options)
        if isinstance(command, PopMessages):
            pops.append(command)
            if missed is StopPopping and len(pops) == 1:
                raise NotConfirmed("lost")
        return answer

    def unreadable(*_: object) -> list[Message]:
        monkeypatch.setattr(PopBroker, "_read", read)
        raise NotConfirmed("no reader")

    read = PopBroker._read
    options: dict[str, Any] = {"invisible_s": LEASE_S, "orderly": True}
    with (
        broker.pop_consumer(topic, topic, **options, timeout_s=0.1) as consumer,
        broker.pop_consumer(topic, topic, **options) as other,
    ):
        monkeypatch.setattr(Channel, "ask", fail)
        if missed is ReleasePopped:
            monkeypatch.setattr(PopBroker, "_read", unreadable)
        found: list[Message] = []
        until(lambda: found.extend(consumer.poll(3, timeout_s=0)) or found)
        assert shown(found) == unseen(bodies)
        channel, command = failures[0]
        if late == "sent late":
            ask(channel, command)
        assert consumer.poll(3, timeout_s=0) == []
        assert other.poll(3, timeout_s=0) == []
        consumer.ack(*found)


def test_threads_that_share_an_orderly_consumer_receive_no_message_twice(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll gets none of the messages that another thread is reading after its own poll."""
    read, reading, goes_on = PopBroker._read_all, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> list[Message]:
        monkeypatch.setattr(PopBroker, "_read_all", read)
        reading.set()
        assert goes_on.wait(WAIT_S)
        return read(*arguments)

    bodies = send(broker, topic, 3, queue_id=0)
    with (
        broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=True) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        monkeypatch.setattr(PopBroker, "_read_all", slow)
        polled = pool.submit(consumer.poll, 3, WAIT_S)
        assert reading.wait(WAIT_S)
        found = consumer.poll(3, timeout_s=0)
        goes_on.set()
        assert found == []
        assert shown(polled.result(WAIT_S)) == unseen(bodies)


def test_a_pop_behind_its_stop_takes_nothing(broker: Broker, topic: str) -> None:
    """A request that StopPopping overtook, on a connection of its own, is answered empty."""
    send(broker, topic, 3, queue_id=0)
    with Admin(broker.name_server) as admin:
        (address,) = [str(each.coordinator) for each in admin.brokers()]
    with closing(Channel(address)) as channel:
        channel.ask(StopPopping(topic, "me", "a"), timeout_s=WAIT_S)
        for attempt, count in (("a", 0), ("b", 3)):
            command = PopMessages(topic, topic, 3, 600_000, consumer="me", attempt=attempt)
            answer, _ = channel.ask(command, timeout_s=WAIT_S)
            assert isinstance(answer, PoppedMessages)
            assert sum(each.count for each in answer.popped) == count
        for group, attempt in (("a b", "c"), (topic, "c" * 65), (topic, "\n")):
            with pytest.raises((errors.NameIllegal, errors.ArgumentIllegal)):
                channel.ask(StopPopping(group, "me", attempt), timeout_s=WAIT_S)


def test_messages_that_cannot_be_read_are_released(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = send(broker, topic, 3, queue_id=0)

    def unreadable(*_: object) -> list[Message]:
        monkeypatch.setattr(PopBroker, "_read", read)
        raise popping_broker.NotConfirmed("no reader")

    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S) as consumer:
        read = PopBroker._read
        monkeypatch.setattr(PopBroker, "_read", unreadable)
        assert shown(take(consumer, 3)) == unseen(bodies)


# --- asyncio ---


@pytest.mark.parametrize("orderly", [False, True])
def test_cancelled_polls_take_nothing(broker: Broker, topic: str, orderly: bool) -> None:
    """Cancelled polls, more than threads and than attempts allowed, keep no messages."""
    bodies = [b"%d" % number for number in range(5)]

    async def work() -> None:
        options: dict[str, Any] = {"orderly": orderly, "invisible_s": LEASE_S}
        async with AsyncPopConsumer(
            broker.name_server, topic, topic, max_reconsume_times=3, **options
        ) as consumer:
            for _ in range(12):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(consumer.poll(1, timeout_s=WAIT_S), 0.1)
            await asyncio.to_thread(lambda: [send_one(broker, topic, body) for body in bodies])
            found: list[Message] = []
            while len(found) < len(bodies):
                some = await asyncio.wait_for(consumer.poll(5, timeout_s=WAIT_S), WAIT_S)
                await consumer.ack(*some)
                found += some
            assert shown(found) == unseen(bodies)

    asyncio.run(work())
    assert not dead_letters(broker, topic)


def send_one(broker: Broker, topic: str, body: bytes) -> None:
    with broker.producer() as producer:
        producer.send(topic, body, queue_id=0)


@pytest.mark.parametrize("orderly", [False, True])
def test_a_poll_that_is_cancelled_with_messages_releases_them(
    broker: Broker, topic: str, orderly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reading = PopBroker._read_all, threading.Event()
    goes_on = threading.Event()

    def slow(*arguments: Any) -> list[Message]:
        found = read(*arguments)
        if found:
            reading.set()
            assert goes_on.wait(WAIT_S)
        return found

    monkeypatch.setattr(PopBroker, "_read_all", slow)
    bodies = send(broker, topic, 4, queue_id=0)

    async def work() -> None:
        async with AsyncPopConsumer(
            broker.name_server, topic, topic, invisible_s=LEASE_S, orderly=orderly
        ) as consumer:
            polled = asyncio.create_task(consumer.poll(4, timeout_s=WAIT_S))
            assert await asyncio.to_thread(reading.wait, WAIT_S)
            polled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await polled
            goes_on.set()
            found: list[Message] = []
            while len(found) < 4:
                found += await consumer.poll(4, timeout_s=1)
            assert shown(found) == unseen(bodies)
            await consumer.release(*found)

    asyncio.run(work())
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as other:
        assert shown(take(other, 4)) == unseen(bodies)


@pytest.mark.parametrize("orderly", [False, True])
def test_a_run_that_is_cancelled_releases_what_it_has_not_begun(
    broker: Broker, topic: str, orderly: bool
) -> None:
    """A cancelled run releases messages in its poll and those of tasks that never ran."""
    bodies = send(broker, topic, 20)
    begun: list[bytes] = []

    async def handle(message: Message) -> None:
        begun.append(message.body)
        await asyncio.sleep(WAIT_S)

    async def work() -> None:
        for _ in range(6):
            async with AsyncPopConsumer(
                broker.name_server, topic, topic, invisible_s=LEASE_S, orderly=orderly,
                max_reconsume_times=100,
            ) as consumer:  # fmt: skip
                run = asyncio.create_task(consumer.run(handle, concurrency=4))
                before = len(begun)
                while len(begun) == before:
                    await asyncio.sleep(0.01)
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)

    asyncio.run(work())
    with broker.pop_consumer(topic, topic, invisible_s=LEASE_S, orderly=orderly) as other:
        found: list[Message] = []
        while len(found) < len(bodies):
            more = take(other, 1)
            other.ack(*more)
            found += more
    for message in found:
        assert message.reconsume_times == begun.count(message.body)


def test_the_log_is_quiet(broker: Broker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cometmq")
    send(broker, topic, 5)
    with broker.pop_consumer(topic, topic) as consumer:
        consumer.release(*take(consumer, 5))
    assert not caplog.records
