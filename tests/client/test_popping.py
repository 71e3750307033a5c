"""Queue-less groups, with a real broker: more consumers than queues, times, kills, and lies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import still
from family import RunningBroker
from inside import is_ending, wait_dispatched, waiting_in
from patience import patient
from receiving import take
from waiting import until

import cometmq.client.handling.async_run as handling_async_run
import cometmq.client.popping.broker as popping_broker
from cometmq import Admin, Broker, Reject, Retry, errors
from cometmq.actors.launch.addresses import address_of
from cometmq.client import AsyncPopConsumer, Consumer, Message, PopConsumer, Producer
from cometmq.client.popping.broker import taken_of
from cometmq.protocol.commands import (
    AckPopped,
    ChangeInvisible,
    GetStatistics,
    PopAck,
    PopExtension,
    PopMessages,
    PoppedMessages,
    PopsSettled,
    Statistics,
    StopPopping,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.os import processes

WAIT_S = patient(60)
HANGS_S = 3 * WAIT_S  # of a whole course
QUEUES = 2
ENDS = {False: "does not end", True: "is cancelled"}
GROWING = {
    "groupRetryPolicy": {
        "type": "EXPONENTIAL",
        "exponentialRetryPolicy": {"initial": 1, "multiplier": 2, "max": 1_000},
    }
}


def send(broker: Broker, topic: str, count: int, **options: str) -> list[bytes]:
    bodies = [b"%d" % number for number in range(count)]
    with broker.producer() as producer:
        for body in bodies:
            producer.send(topic, body, **options)
    return bodies


def lag(broker: Broker, group: str, topic: str) -> int:
    with Admin(broker.name_server) as admin:
        report = admin.describe_group(group)
    return sum(each.lag for each in report.queues if each.topic == topic)


# --- what it is for ---


def test_more_consumers_than_queues(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 40)
    consumers = [broker.pop_consumer(topic, topic) for _ in range(5)]
    messages = [message for each in consumers for message in take(each, 8)]
    assert sorted(message.body for message in messages) == sorted(bodies)
    assert consumers[0].poll(timeout_s=0) == []
    random.Random(1).shuffle(messages)
    while messages:  # anybody may say it, in any order
        random.Random(len(messages)).choice(consumers).ack(*messages[:7])
        del messages[:7]
    assert lag(broker, topic, topic) == 0
    for each in consumers:
        each.close()


def test_none_holds_up_another(broker: Broker, topic: str) -> None:
    send(broker, topic, 10)
    with broker.pop_consumer(topic, topic) as consumer:
        stuck = take(consumer, 1)
        others = take(consumer, 9, ack=True)
        send(broker, topic, 20)
        assert len(others + take(consumer, 20, ack=True)) == 29
        consumer.ack(*stuck)
    assert lag(broker, topic, topic) == 0


def test_whoever_waits_is_told_at_once(broker: Broker, topic: str) -> None:
    with broker.pop_consumer(topic, topic) as consumer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.poll, 10, WAIT_S)
        until(lambda: held(broker) > 0)
        began = time.monotonic()
        send(broker, topic, 1)
        assert [message.body for message in waiting.result(WAIT_S)] == [b"0"]
        assert time.monotonic() - began < WAIT_S / 2


def held(broker: Broker) -> float:
    with Channel(coordinator_of(broker), "coordinator") as channel:
        answer, _ = channel.ask(GetStatistics(), timeout_s=WAIT_S)
    assert isinstance(answer, Statistics)
    return float(answer.values["held_pops"])


def test_nobody_waits_after_close(broker: Broker, topic: str) -> None:
    """What comes then is not given to who has gone."""
    with ThreadPoolExecutor(1) as pool:
        consumer = broker.pop_consumer(topic, topic)
        waiting = pool.submit(consumer.poll, 10, WAIT_S)
        until(lambda: held(broker) > 0)
        consumer.close()
        assert waiting.result(WAIT_S) == []
    send(broker, topic, 1)
    with broker.pop_consumer(topic, topic) as another:
        take(another, 1, ack=True)


def test_tags_and_sql(broker: Broker, topic: str) -> None:
    """What is left out is done with, for the whole group."""
    for tag in ("a", "b", "c"):
        send(broker, topic, 6, tags=tag)
    with broker.pop_consumer("by-tag", topic, "a || c") as consumer:
        found = take(consumer, 12, ack=True)
        assert Counter(message.tags for message in found) == {"a": 6, "c": 6}
        assert consumer.poll(timeout_s=0) == []
    assert lag(broker, "by-tag", topic) == 0
    with broker.pop_consumer("by-sql", topic, sql="TAGS = 'b'") as consumer:
        assert {message.tags for message in take(consumer, 6, ack=True)} == {"b"}


def test_what_is_not_chosen_holds_nobody_up(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader was asked to wait for a message that is chosen, with each stretch that has none:
    so what was popped beside them came again before anybody had it."""
    monkeypatch.setattr(popping_broker, "SUSPEND_MS", 20_000)  # as readers wait at most
    with broker.producer() as producer:
        for queue_id in range(QUEUES):
            producer.send(topic, b"chosen", tags="a", queue_id=queue_id)
            producer.send(topic, b"last", tags="b", queue_id=queue_id)
    with broker.pop_consumer(topic, topic, "a", invisible_s=15) as consumer:
        take(consumer, 2, ack=True)
        with broker.producer() as producer:
            producer.send(topic, b"last", tags="b")
            producer.send(topic, b"chosen", tags="a")
        (message,) = take(consumer, 1, ack=True)
        assert message.reconsume_times == 0
        until(lambda: not consumer.poll(timeout_s=0) and lag(broker, topic, topic) == 0)


def test_a_group_begins_at_the_end(broker: Broker, topic: str) -> None:
    send(broker, topic, 5)
    with broker.pop_consumer(topic, topic, start="latest") as consumer:
        assert consumer.poll(timeout_s=0) == []
        send(broker, topic, 4)
        assert len(take(consumer, 4, ack=True)) == 4
        assert consumer.poll(timeout_s=0) == []


def dispatcher_of(broker: Broker) -> int:
    with Channel(address_of(broker._ready.token, "broker"), "broker") as line:
        answer, _ = line.ask(GetStatistics(), timeout_s=WAIT_S)
    assert isinstance(answer, Statistics)
    return int(answer.values["pid.dispatcher"])


def test_the_end_is_behind_what_was_acknowledged(broker: Broker, topic: str) -> None:
    """Also when the dispatcher has not come to it, and the queue has no slot yet."""
    with (
        ThreadPoolExecutor(1) as pool,
        Admin(broker.name_server) as admin,
    ):
        with still.stopped(dispatcher_of(broker)):
            send(broker, topic, 5)
            made = pool.submit(broker.pop_consumer, topic, topic, start="latest")
            until(lambda: held(broker) > 0)
        with made.result(WAIT_S) as consumer:
            assert sum(admin.committed(topic, topic).values()) == 5
            with broker.producer() as producer:
                producer.send(topic, b"new")
            assert [message.body for message in take(consumer, 1)] == [b"new"]


@pytest.mark.slow
def test_an_end_that_is_not_known_in_time_is_an_error(broker: Broker, topic: str) -> None:
    command = PopMessages(topic, topic, 10, 10_000, 0, True, "me")
    with Channel(coordinator_of(broker), "coordinator") as channel:
        with still.stopped(dispatcher_of(broker)):
            send(broker, topic, 5)
            with pytest.raises(errors.SystemBusy, match="dispatched"):
                channel.ask(command, timeout_s=WAIT_S)
        assert held(broker) == 0


def test_nobody_waits_for_an_end_after_close(broker: Broker, topic: str) -> None:
    with ThreadPoolExecutor(1) as pool, still.stopped(dispatcher_of(broker)):
        send(broker, topic, 1)
        consumer = broker.pop_consumer(topic, topic, start="latest")
        waiting = pool.submit(consumer.poll, 10, WAIT_S)
        until(lambda: held(broker) > 0)
        consumer.close()
        assert waiting.result(WAIT_S) == []
        assert held(broker) == 0


# --- what is not acknowledged ---


def test_it_comes_again_and_in_the_end_is_dead(broker: Broker, topic: str) -> None:
    with Admin(broker.name_server) as admin:
        admin.create_group(topic, {"retryMaxTimes": 1})
    send(broker, topic, 3)
    with broker.pop_consumer(topic, topic, invisible_s=0.3) as consumer:
        assert {message.reconsume_times for message in take(consumer, 3)} == {0}
        again = take(consumer, 3)
        assert {(m.topic, m.reconsume_times) for m in again} == {(topic, 1)}
        # At once: by no delay level, whose first one alone waits for a second.
        assert {m.properties.get("DELAY") for m in again} == {None}
        with Admin(broker.name_server) as admin:
            until(lambda: len(list(admin.dead_letters(topic))) == 3)
        assert consumer.poll(timeout_s=0) == []
    assert lag(broker, topic, topic) == 0


def test_given_back_rejected_extended(broker: Broker, topic: str) -> None:
    send(broker, topic, 3)
    with (
        broker.pop_consumer(topic, topic, invisible_s=WAIT_S) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=0.5) as hasty,
    ):
        back, dead = take(consumer, 2)
        consumer.nack(back, after=1)
        consumer.reject(dead)
        (extended,) = take(hasty, 1)
        hasty.extend(extended, WAIT_S)
        (again,) = take(consumer, 1, ack=True)  # and not what was extended
        assert (again.body, again.reconsume_times) == (back.body, 1)
        wait_dispatched(broker)  # letters are read by their queues
        with Admin(broker.name_server) as admin:
            (letter,) = admin.dead_letters(topic)
        assert letter.message.body == dead.body
        hasty.ack(extended)
    assert lag(broker, topic, topic) == 0


def test_too_late(broker: Broker, topic: str) -> None:
    send(broker, topic, 2)
    with (
        broker.pop_consumer(topic, topic, invisible_s=0.2) as consumer,
        broker.pop_consumer(topic, topic, invisible_s=600) as other,
    ):
        first, second = take(consumer, 2)
        again = take(other, 2)
        with pytest.raises(errors.HandleUnknown, match="the invisibility timeout is over"):
            consumer.extend(first, 5)
        with pytest.raises(errors.HandleUnknown, match="after the timeout it is delivered again"):
            consumer.ack(first, second)
        other.ack(*again)
        other.ack(*again)  # said again


def test_who_is_too_late_gives_nothing_back(broker: Broker, topic: str) -> None:
    """A handler that took longer than the message was invisible, and failed, left two of it: each
    of these did so again. One message was handled a thousand times within seconds."""
    send(broker, topic, 1)
    with broker.pop_consumer(topic, topic, invisible_s=0.2) as late:
        (message,) = take(late, 1)
        (again,) = take(late, 1)
        for give_back in (late.reject, lambda each: late.nack(each, 0)):
            with pytest.raises(errors.HandleUnknown, match="the invisibility timeout is over"):
                give_back(message)
        with pytest.raises(errors.HandleUnknown):
            late.reject(message)
    with broker.pop_consumer(topic, topic) as consumer:
        (third,) = take(consumer, 1)
        assert third.reconsume_times == again.reconsume_times + 1
        consumer.nack(third, after=0)
        for give_back in (consumer.reject, consumer.nack):
            with pytest.raises(errors.HandleUnknown, match="given back before"):
                give_back(third)
        (fourth,) = take(consumer, 1, ack=True)
        assert fourth.reconsume_times == third.reconsume_times + 1
        with pytest.raises(errors.HandleUnknown, match="acknowledged"):
            consumer.reject(fourth)
        assert consumer.poll(timeout_s=0.5) == []
    assert lag(broker, topic, topic) == 0
    with Admin(broker.name_server) as admin:
        assert admin.dead_letters(topic) == []


def test_many_give_back_at_once_what_is_about_to_come_again(broker: Broker, topic: str) -> None:
    """Of each message there is one, whoever is first: its owner, or its time."""
    bodies = send(broker, topic, 60)
    with broker.pop_consumer(topic, topic, invisible_s=0.3) as consumer:
        messages = take(consumer, 60)
        deadline = time.monotonic() + 0.2

        def back(message: Message) -> bool:
            threading.Event().wait(max(0.0, deadline - time.monotonic()))
            try:
                consumer.nack(message, after=0)
            except errors.HandleUnknown:
                return False
            return True

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(back, messages))
    with broker.pop_consumer(topic, topic, invisible_s=WAIT_S) as consumer:
        again = take(consumer, 60, ack=True)
        assert sorted(each.body for each in again) == sorted(bodies)
        assert consumer.poll(timeout_s=0.5) == []
    assert lag(broker, topic, topic) == 0


# --- handlers ---


@pytest.mark.slow
def test_what_is_acknowledged_stays_so_when_its_neighbour_goes_back(
    broker: Broker, topic: str
) -> None:
    """An `ack` is said again when its answer is lost, however late."""
    with broker.producer() as producer:
        producer.send_many(topic, [b"done", b"late"], queue_id=0)
    with broker.pop_consumer(topic, topic, invisible_s=1) as consumer:
        done, late = take(consumer, 2)
        assert taken_of(done) is taken_of(late)
        consumer.ack(done)
        (again,) = take(consumer, 1, ack=True)
        assert again.body == late.body
        consumer.ack(done)
        for told in ([late], [done, late]):
            with pytest.raises(errors.HandleUnknown):
                consumer.ack(*told)


def test_handlers(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 200)
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()
    consumer = broker.pop_consumer(topic, topic)

    def handle(message: Message) -> None:
        with lock:
            seen[message.body] += 1
            if seen.total() == len(bodies) + 2:
                consumer.close()  # in one of its own threads
        if message.body == b"7" and not message.reconsume_times:
            raise Retry(after=0)
        if message.body == b"8":
            raise Reject
        if message.body == b"9" and not message.reconsume_times:
            raise ValueError("this is tried again") from None

    retried = {b"7": 2, b"9": 2}
    with Admin(broker.name_server) as admin:
        admin.create_group(topic, {"retryMaxTimes": 3})

    consumer.run(handle, concurrency=8)
    assert seen == Counter({body: retried.get(body, 1) for body in bodies})
    wait_dispatched(broker)
    with Admin(broker.name_server) as admin:
        assert [letter.message.body for letter in admin.dead_letters(topic)] == [b"8"]
    assert lag(broker, topic, topic) == 0


def test_a_signal_closes_it(broker: Broker, topic: str) -> None:
    """`close` in a signal's handler waited for `run`, which went on behind the handler."""
    bodies = send(broker, topic, 3)
    done: list[bytes] = []
    consumer = broker.pop_consumer(topic, topic)

    def handle(message: Message) -> None:
        done.append(message.body)
        if len(done) == len(bodies):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    try:
        consumer.run(handle, concurrency=2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(done) == bodies
    assert lag(broker, topic, topic) == 0


def test_closed(broker: Broker, topic: str) -> None:
    """It says so at once. `ack` tried for 10 s, and a loop of polls went round without a pause."""
    send(broker, topic, 1)
    with broker.pop_consumer(topic, topic) as consumer:
        (message,) = take(consumer, 1)
    for call in (
        consumer.poll,
        lambda: consumer.ack(message),
        lambda: consumer.nack(message),
        lambda: consumer.reject(message),
        lambda: consumer.extend(message, 1),
        lambda: consumer.run(print),
    ):
        with pytest.raises(RuntimeError, match="the consumer is closed"):
            call()


def test_a_fork_may_not_use_it(broker: Broker, topic: str) -> None:
    send(broker, topic, 2)
    with broker.pop_consumer(topic, topic) as consumer:
        (message,) = take(consumer, 1)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            for call in (consumer.poll, lambda: consumer.ack(message), consumer.close):
                try:
                    call()
                except RuntimeError as error:
                    os.write(writing, str(error).encode() + b"\n")
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with open(reading) as told:
            lines = told.read().splitlines()
        assert len(lines) == 3
        assert all("PopConsumer was made before the process forked" in each for each in lines)
        consumer.ack(message)
        take(consumer, 1, ack=True)


def test_asyncio(broker: Broker, topic: str) -> None:
    bodies = send(broker, topic, 60)

    async def main() -> Counter[bytes]:
        seen: Counter[bytes] = Counter()
        async with broker.async_pop_consumer(topic, topic) as consumer:

            async def handle(message: Message) -> None:
                seen[message.body] += 1
                if message.body == b"5" and not message.reconsume_times:
                    raise Retry(after=0)
                if seen.total() == len(bodies) + 1:
                    await consumer.close()

            await consumer.run(handle, concurrency=10)
        async with AsyncPopConsumer(broker.name_server, topic, topic) as another:
            assert await another.poll(timeout_s=0) == []
        return seen

    assert asyncio.run(main()) == Counter([*bodies, b"5"])
    assert lag(broker, topic, topic) == 0


def test_a_handler_whose_own_task_was_cancelled_has_failed(broker: Broker, topic: str) -> None:
    """The run goes on."""
    send(broker, topic, 1)
    attempts: list[int] = []

    async def main() -> None:
        async with broker.async_pop_consumer(topic, topic) as consumer:

            async def handle(message: Message) -> None:
                attempts.append(message.reconsume_times)
                if len(attempts) == 1:
                    raise asyncio.CancelledError
                await consumer.close()

            await consumer.run(handle)

    asyncio.run(asyncio.wait_for(main(), HANGS_S))
    assert attempts == [0, 1]


def test_a_run_that_is_cancelled(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are its handlers, at once, and what they had in hand comes again at once."""
    monkeypatch.setattr(handling_async_run, "CANCELLED_S", WAIT_S)  # a busy machine needs it
    send(broker, topic, 6)
    cancelled: list[bytes] = []

    async def main() -> None:
        begun = asyncio.Semaphore(0)

        async def handle(message: Message) -> None:
            begun.release()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.body)
                if message.body != b"0":
                    raise

        async with broker.async_pop_consumer(topic, topic, invisible_s=600) as consumer:
            task = asyncio.create_task(consumer.run(handle, concurrency=6, end_timeout_s=1_000))
            for _ in range(6):
                await begun.acquire()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(main(), HANGS_S))
    assert sorted(cancelled) == [b"%d" % number for number in range(6)]
    with PopConsumer(broker.name_server, topic, topic) as other:
        again = take(other, 5, ack=True)
    assert sorted(each.body for each in again) == [b"%d" % number for number in range(1, 6)]
    assert {each.reconsume_times for each in again} == {1}
    assert lag(broker, topic, topic) == 0


def test_threads_of_the_event_loop_may_all_be_busy(broker: Broker, topic: str) -> None:
    """With other consumers that wait, for example: with 20 in a loop of two processors, what was
    done came again 17 times, as nobody got to say so."""
    bodies = send(broker, topic, 5)
    busy = threading.Event()

    async def main() -> list[bytes]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        seen: list[bytes] = []
        async with broker.async_pop_consumer(topic, topic) as consumer:

            async def handle(message: Message) -> None:
                seen.append(message.body)
                if len(seen) == len(bodies):
                    await consumer.close()

            loop.run_in_executor(None, busy.wait, 2 * HANGS_S)
            await consumer.run(handle)
        busy.set()
        return seen

    try:
        seen = asyncio.run(asyncio.wait_for(main(), HANGS_S))
    finally:
        busy.set()
    assert sorted(seen) == bodies
    assert lag(broker, topic, topic) == 0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.slow
def test_a_handler_that_wants_to_end(
    broker: Broker, topic: str, error: BaseException, is_async: bool
) -> None:
    """The delivery has failed, the run ends and raises it, and what is left comes again."""
    send(broker, topic, 3)
    seen: list[bytes] = []
    failed: list[bytes] = []

    def handle(message: Message) -> None:
        if not failed:
            failed.append(message.body)
            raise error
        seen.append(message.body)

    async def main() -> None:
        async def task(message: Message) -> None:
            handle(message)

        async with broker.async_pop_consumer(topic, topic, invisible_s=2) as consumer:
            await consumer.run(task, concurrency=2)

    with Admin(broker.name_server) as admin:
        admin.create_group(topic, GROWING)
    if is_async:
        with pytest.raises(type(error)):
            asyncio.run(asyncio.wait_for(main(), HANGS_S))
    else:
        with (
            broker.pop_consumer(topic, topic, invisible_s=2) as ending,
            pytest.raises(type(error)),
        ):
            ending.run(handle, concurrency=1)
    attempts: dict[bytes, int] = {}
    with broker.pop_consumer(topic, topic) as consumer:
        while {*seen, *attempts} != {b"0", b"1", b"2"}:  # a busy machine acknowledges too late
            (again,) = take(consumer, 1, ack=True)
            attempts[again.body] = again.reconsume_times
    assert failed[0] in seen or attempts[failed[0]] > 0


def test_a_task_that_does_not_end(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled once the end has waited long enough, and its message comes again at once."""
    monkeypatch.setattr(handling_async_run, "CANCELLED_S", WAIT_S)  # a busy machine needs it
    send(broker, topic, 2)

    async def main() -> None:
        async with broker.async_pop_consumer(topic, topic, invisible_s=600) as consumer:

            async def handle(message: Message) -> None:
                if message.body == b"0":
                    await asyncio.Event().wait()
                asyncio.get_running_loop().call_later(0, closing.set)

            async def close() -> None:
                await closing.wait()
                await consumer.close()

            closing = asyncio.Event()
            closer = asyncio.create_task(close())
            await consumer.run(handle, concurrency=5, end_timeout_s=0.1)
            await closer

    asyncio.run(asyncio.wait_for(main(), HANGS_S))
    with broker.pop_consumer(topic, topic) as consumer:
        assert [each.body for each in take(consumer, 1, ack=True)] == [b"0"]


def test_a_task_may_return_what_it_should_have_raised(broker: Broker, topic: str) -> None:
    send(broker, topic, 1)
    wrapped: list[bytes] = []

    def noted(handler: Callable[[Message], object]) -> Callable[[Message], object]:
        def call(message: Message) -> object:
            wrapped.append(message.body)
            return handler(message)

        return call

    async def main() -> None:
        async with broker.async_pop_consumer(topic, topic) as consumer:

            async def handle(_message: Message) -> Reject:
                await consumer.close()
                return Reject("nobody can do this")

            await consumer.run(handle, middleware=[noted])

    asyncio.run(asyncio.wait_for(main(), HANGS_S))
    wait_dispatched(broker)
    with Admin(broker.name_server) as admin:
        assert [letter.message.body for letter in admin.dead_letters(topic)] == [b"0"]
    assert wrapped == [b"0"]


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.slow
def test_a_handler_that_does_not_return(
    broker: Broker, topic: str, orderly: bool, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, with its message and for how long; again, when it has taken twice as long; and
    when it is left at the end."""
    send(broker, topic, 1, keys="k")
    told, begun = threading.Event(), threading.Event()
    waits = {"stuck_s": 0.2, "end_timeout_s": 0.1}

    def has_told(count: int) -> bool:
        return caplog.text.count("offset 0 keys k (attempt 1) for ") >= count

    async def tasks() -> None:
        async with broker.async_pop_consumer(topic, topic, orderly=orderly) as consumer:

            async def handle(_message: Message) -> None:
                begun.set()
                await asyncio.Event().wait()

            run = asyncio.create_task(consumer.run(handle, concurrency=1, **waits))
            await asyncio.to_thread(until, lambda: has_told(2))
            await consumer.close()
            await run

    def handle(_message: Message) -> None:
        begun.set()
        told.wait(WAIT_S)

    if is_async:
        asyncio.run(asyncio.wait_for(tasks(), HANGS_S))
    else:
        with (
            ThreadPoolExecutor(1) as pool,
            broker.pop_consumer(topic, topic, orderly=orderly) as consumer,
        ):
            run = pool.submit(consumer.run, handle, concurrency=1, **waits)
            until(lambda: has_told(2))
            consumer.close()
            run.result(WAIT_S)
            told.set()
    assert begun.is_set()
    assert f"the handler has had {topic}/" in caplog.text
    assert f"offset 0 keys k (attempt 1) is left: its handler {ENDS[is_async]}" in caplog.text


@pytest.mark.parametrize("wants_to_end", [False, True])
def test_what_a_run_has_not_begun_comes_again_soon(
    broker: Broker, topic: str, wants_to_end: bool
) -> None:
    """Long before its time is over: others take it. What was handled does not come again."""
    bodies = send(broker, topic, 20)
    begun, goes_on = threading.Event(), threading.Event()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        handled.append(message.body)
        begun.set()
        assert goes_on.wait(WAIT_S)
        if wants_to_end:
            raise SystemExit

    consumer = broker.pop_consumer(topic, topic, invisible_s=10 * WAIT_S)
    with ThreadPoolExecutor(2) as pool, consumer:
        run = pool.submit(consumer.run, handle, concurrency=1)
        assert begun.wait(WAIT_S)
        until(lambda: waiting_in(consumer) > 0)
        if not wants_to_end:
            closed = pool.submit(consumer.close)
            until(lambda: is_ending(consumer))
        goes_on.set()
        if wants_to_end:
            with pytest.raises(SystemExit):
                run.result(WAIT_S)
        else:
            run.result(WAIT_S)
            closed.result(WAIT_S)
    assert len(handled) == 1
    left = sorted(set(bodies) - set(handled if not wants_to_end else ()))
    with broker.pop_consumer(topic, topic) as other:
        assert sorted(message.body for message in take(other, len(left), ack=True)) == left


def test_what_is_acknowledged_too_late_for_the_end_comes_again(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that does so ended with a traceback."""
    send(broker, topic, 1)
    begun, closed = threading.Event(), threading.Event()
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    consumer = broker.pop_consumer(topic, topic, invisible_s=2)
    ack = consumer.ack

    def late(*messages: Message) -> None:
        begun.set()
        closed.wait(WAIT_S)
        ack(*messages)

    monkeypatch.setattr(consumer, "ack", late)
    before = set(threading.enumerate())
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(consumer.run, lambda _message: None, end_timeout_s=0.1)
        assert begun.wait(WAIT_S)
        new = set(threading.enumerate()) - before
        (acker,) = [each for each in new if each.name == "cometmq acks"]
        consumer.close()
        run.result(WAIT_S)
    closed.set()
    acker.join(WAIT_S)
    assert not acker.is_alive()
    assert not failed
    assert "1 messages are not acknowledged: the consumer is closed" in caplog.text
    with broker.pop_consumer(topic, topic) as other:
        (again,) = take(other, 1, ack=True)
    assert again.reconsume_times > 0


# --- kills ---


@pytest.mark.slow
def test_processes_are_killed(tmp_path: Path) -> None:
    """What is acknowledged never comes again; what is out stays out until its time is over."""
    with RunningBroker(tmp_path / "store", {"flushDiskType": "SYNC_FLUSH"}) as running:
        running.create_topic("t", QUEUES)
        server = running.ready.name_server
        with Producer(server) as producer, PopConsumer(server, "g", "t") as consumer:
            for number in range(30):
                producer.send("t", b"%d" % number)
            messages = take(consumer, 30)
            random.Random(3).shuffle(messages)
            for role in ("coordinator", "scheduler", "commitlog", "reader-0", "dispatcher"):
                consumer.ack(*messages[:4])  # out of order: the offsets tell nothing of it
                del messages[:4]
                running.kill(role)
                assert consumer.poll(timeout_s=0.1) == []
            consumer.nack(messages.pop(), 1)
            running.kill("coordinator")
            take(consumer, 1, ack=True)
        left = {message.body for message in messages}
        running.kill_all()
    with RunningBroker(tmp_path / "store", {"flushDiskType": "SYNC_FLUSH"}) as running:
        server = running.ready.name_server
        with PopConsumer(server, "g", "t", invisible_s=1) as consumer:
            assert consumer.poll(timeout_s=0.1) == []
            consumer.ack(*())
            channel = running.channel(running.endpoints.coordinator)
            acks = [
                PopAck("t", each.queue_id, handle_of(each), each.queue_offset, 1)
                for each in messages[:-3]
            ]
            answer, _ = channel.ask(AckPopped("g", acks), timeout_s=WAIT_S)
            assert answer == PopsSettled([0] * len(acks))
        queue = [each for each in messages[-3:]]
        extensions = [
            PopExtension("t", each.queue_id, handle_of(each), 100)
            for each in {handle_of(each): each for each in queue}.values()
        ]
        channel.ask(ChangeInvisible("g", extensions), timeout_s=WAIT_S)
        with PopConsumer(server, "g", "t") as consumer:
            again = take(consumer, 3, ack=True)
            assert {each.body for each in again} == {each.body for each in queue} < left
            assert {each.reconsume_times for each in again} == {1}
            assert consumer.poll(timeout_s=0.1) == []


def handle_of(message: Message) -> int:
    from cometmq.client.popping.broker import taken_of

    return taken_of(message).popped.handle


# --- lies, and other users ---


def test_handles_are_not_believed(broker: Broker, topic: str) -> None:
    send(broker, topic, 4)
    with (
        broker.pop_consumer(topic, topic) as consumer,
        Channel(coordinator_of(broker), "coordinator") as channel,
    ):
        messages = take(consumer, 4)
        one = messages[0]
        handle = handle_of(one)
        mine = [each.queue_offset for each in messages if handle_of(each) == handle]
        lies = [
            PopAck(topic, one.queue_id, handle + 1, one.queue_offset, 1),
            PopAck(topic, one.queue_id, 0, one.queue_offset, 1),
            PopAck(topic, one.queue_id, -1, one.queue_offset, 1),
            PopAck(topic, one.queue_id, handle, one.queue_offset, len(mine) + 1),
            PopAck(topic, one.queue_id, handle, one.queue_offset, -1),
            PopAck(topic, one.queue_id, handle, -(2**63), 2**31 - 1),
            PopAck(topic, 99, handle, one.queue_offset, 1),
            PopAck("nowhere", one.queue_id, handle, one.queue_offset, 1),
        ]
        answer, _ = channel.ask(AckPopped(topic, lies), timeout_s=WAIT_S)
        unknown, illegal = errors.HandleUnknown.code, errors.OffsetIllegal.code
        assert answer == PopsSettled([unknown] * 3 + [illegal] * 3 + [unknown] * 2)
        answer, _ = channel.ask(AckPopped("other", lies[3:4]), timeout_s=WAIT_S)
        assert answer == PopsSettled([unknown])
        for bad in (
            PopMessages(topic, topic, -1),
            PopMessages(topic, topic, 2**31 - 1),
            PopMessages(topic, topic, 1, 99),
            PopMessages(topic, topic, 1, 2**63 - 1),
            AckPopped(topic, lies * 1_000),
        ):
            with pytest.raises(errors.ArgumentIllegal):
                channel.ask(bad, timeout_s=WAIT_S)
        with pytest.raises(errors.TopicNotExist):
            channel.ask(PopMessages(topic, "not-there"), timeout_s=WAIT_S)
        with pytest.raises(errors.NameIllegal):
            channel.ask(PopMessages("a b", topic), timeout_s=WAIT_S)
        answer, _ = channel.ask(PopMessages(topic, topic), timeout_s=WAIT_S)
        assert answer == PoppedMessages([])
        consumer.ack(*messages)


def coordinator_of(broker: Broker) -> str:
    with Admin(broker.name_server) as admin:
        (found,) = admin.brokers()
    return str(found.coordinator)


def test_a_group_with_members(broker: Broker, topic: str) -> None:
    with broker.consumer(topic, topic) as member, broker.pop_consumer(topic, topic) as consumer:
        until(lambda: bool(member.assignment))
        with pytest.raises(errors.GroupInUse, match="share its queues"):
            consumer.poll()


def test_a_member_of_a_group_that_is_popped(broker: Broker, topic: str) -> None:
    """It was let in, and ended the runs of all that popped. It is, once they have gone."""
    send(broker, topic, 3)
    with broker.pop_consumer(topic, topic) as consumer:
        found = take(consumer, 1, ack=True)
        with broker.consumer(topic, topic) as member:
            with pytest.raises(errors.GroupInUse, match="one by one"):
                member.poll(timeout_s=WAIT_S)
            found += take(consumer, 1, ack=True)
            consumer.close()
            until(lambda: bool(member.assignment))  # it has asked again
            found += member.poll(timeout_s=WAIT_S)
    assert sorted(each.body for each in found) == [b"0", b"1", b"2"]


def test_the_group_is_moved(broker: Broker, topic: str) -> None:
    """A reset counts: what was popped is forgotten."""
    send(broker, topic, 6)
    with broker.pop_consumer(topic, topic) as consumer:
        take(consumer, 3, ack=True)
        out = take(consumer, 3)
        with Admin(broker.name_server) as admin:
            admin.reset_offsets(topic, topic, "earliest")
        assert len(take(consumer, 6, ack=True)) == 6
        with pytest.raises(errors.HandleUnknown):
            consumer.extend(out[0], 5)
        assert consumer.poll(timeout_s=0) == []


def test_consumers_that_want_different_messages(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are shown, named, and refused where the group says so; those of other topics do not
    differ, and who has gone does not count."""
    other = f"{topic}-other"
    with Admin(broker.name_server) as admin:
        admin.create_topic(other, queues=1)
        admin.reset_offsets("from", topic, "latest")
        with (
            broker.pop_consumer(topic, topic, "b || a") as usual,
            broker.pop_consumer(topic, topic, "a||b") as like,
            broker.pop_consumer(topic, other, "c") as elsewhere,
        ):
            for each in (usual, like, elsewhere):
                assert each.poll(timeout_s=0) == []
            found = admin.describe_group(topic)
            assert len(found.members) == 3
            assert all(f"@{os.getpid()}@" in each for each in found.members)
            assert found.subscriptions[other] == "c"
            assert found.differences == []
            (overview,) = [each for each in admin.groups() if each.group == topic]
            assert overview.members == found.members
            with broker.pop_consumer(topic, topic, "a", sql="x > 1") as odd:
                odd.poll(timeout_s=0)
                (difference,) = admin.describe_group(topic).differences
                assert difference.member not in found.members
                assert difference[1:] == (topic, "a where x > 1", "a||b")
            assert admin.describe_group(topic).differences == []
            admin.update_group(topic, {"sameSubscriptions": True})
            with (
                broker.pop_consumer(topic, topic, "a") as refused,
                pytest.raises(
                    errors.SubscriptionsDiffer, match=r"sameSubscriptions.*subscribes to"
                ),
            ):
                refused.poll()
            assert len(admin.describe_group(topic).members) == 3
            for touches in (
                lambda: admin.delete_group(topic),
                lambda: admin.clone_offsets("from", topic),
            ):
                with pytest.raises(errors.GroupInUse, match=rf"{topic} has members: .* and 2 more"):
                    touches()
            for each in (usual, like, elsewhere):  # they are as they were
                assert each.poll(timeout_s=0) == []
        with broker.pop_consumer(topic, topic, "a") as next_one:
            assert next_one.poll(timeout_s=0) == []
            (left,) = admin.describe_group(topic).members
        assert admin.describe_group(topic).members == []
        assert left != difference.member
        admin.delete_group(topic)


def name_of(pid: int) -> str:
    """As of own_process."""
    return f"{processes._here()}/{pid}/{processes._stat(pid)[processes._BEGAN]}"


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.slow
def test_a_consumer_that_is_gone_without_a_word(
    broker: Broker, topic: str, is_killed: bool
) -> None:
    """It counts no longer: at once where its process was on this machine, else by its time."""
    with Admin(broker.name_server) as admin:
        admin.create_group(topic, {"sameSubscriptions": True})
        process = subprocess.Popen(["sleep", "600"]) if is_killed else None
        its = name_of(process.pid) if process is not None else ""
        invisible_ms = 600_000 if is_killed else 100
        command = PopMessages(topic, topic, 1, invisible_ms, consumer="gone", tags="x", process=its)
        with Channel(coordinator_of(broker), "coordinator") as channel:
            channel.ask(command, timeout_s=WAIT_S)
        assert admin.describe_group(topic).members == ["gone"]
        with broker.pop_consumer(topic, topic) as consumer:
            if is_killed:
                with pytest.raises(errors.SubscriptionsDiffer):
                    consumer.poll()
                assert process is not None
                process.kill()
                process.wait()
            until(lambda: admin.describe_group(topic).members == [])
            assert consumer.poll(timeout_s=0) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"consumer": "x" * 256},
        {"consumer": "a\n"},
        {"consumer": "a", "tags": "||"},
        {"consumer": "a", "sql": "amount >"},
        {"sql": "amount >"},
        {"tags": "a||*"},
        {"consumer": "a", "sql": "x" * 100_000},
    ],
)
def test_what_a_consumer_may_want(broker: Broker, topic: str, wrong: dict[str, str]) -> None:
    refusals = errors.ArgumentIllegal, errors.SubscriptionIllegal, errors.FilterIllegal
    with Channel(coordinator_of(broker), "coordinator") as channel, pytest.raises(refusals):
        channel.ask(PopMessages(topic, topic, **wrong), timeout_s=WAIT_S)  # type: ignore[arg-type]
    with Admin(broker.name_server) as admin:
        assert admin.describe_group(topic).members == []


def test_so_many_consumers_by_one_connection(broker: Broker, topic: str) -> None:
    with Channel(coordinator_of(broker), "coordinator") as channel:
        for number in range(1_000):
            channel.ask(PopMessages(topic, topic, consumer=f"c{number}"), timeout_s=WAIT_S)
        with pytest.raises(errors.SystemBusy, match="1000"):
            channel.ask(PopMessages(topic, topic, consumer="one more"), timeout_s=WAIT_S)
        channel.ask(PopMessages(topic, topic, consumer="c7"), timeout_s=WAIT_S)
        channel.ask(StopPopping(topic, "c7"), timeout_s=WAIT_S)
        channel.ask(PopMessages(topic, topic, consumer="one more"), timeout_s=WAIT_S)


def test_arguments(broker: Broker, topic: str) -> None:
    for options in ({"invisible_s": 0}, {"invisible_s": float("nan")}, {"invisible_s": 1e9},
                    {"start": "now"}, {"max_reconsume_times": -1}, {"timeout_s": "1"}):  # fmt: skip
        with pytest.raises(errors.ArgumentIllegal):
            broker.pop_consumer(topic, topic, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.NameIllegal):
        broker.pop_consumer("a b", topic)
    with broker.pop_consumer(topic, topic) as consumer, broker.consumer(None) as reader:
        for count in (0, 10_000):
            with pytest.raises(errors.ArgumentIllegal):
                consumer.poll(count)
        send(broker, topic, 1)
        reader.assign(topic)
        reader.seek("earliest")
        message = None
        while message is None:
            message = next(iter(reader.poll(1, WAIT_S)), None)
        with pytest.raises(errors.ArgumentIllegal, match="was not popped"):
            consumer.ack(message)
        for junk in ("x", None, [message]):
            with pytest.raises(errors.ArgumentIllegal, match="message is"):
                consumer.ack(junk)  # type: ignore[arg-type]
        with pytest.raises(errors.ArgumentIllegal):
            consumer.run(lambda _message: None, concurrency=0)
        assert isinstance(reader, Consumer)
