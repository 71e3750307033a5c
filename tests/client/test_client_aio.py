"""The asyncio twins against a broker that does as it is told."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest
from client_fakes import Handle, fake_broker
from patience import patient

import cometmq.client
from cometmq.client import Admin, AsyncConsumer, AsyncProducer, Consumer, Producer
from cometmq.client.options import (
    ConsumerOptions,
    OnewayOptions,
    PopOptions,
    ProducerOptions,
    SendOptions,
)
from cometmq.client.popping.aio import AsyncPopConsumer
from cometmq.client.popping.consumer import PopConsumer
from cometmq.protocol import errors
from cometmq.protocol.commands import SendMessages


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(work(), patient(30))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("twin", "original"),
    [(AsyncProducer, Producer), (AsyncConsumer, Consumer), (AsyncPopConsumer, PopConsumer)],
)
def test_the_twins_have_the_same_names(twin: type, original: type) -> None:
    names = {name for name in vars(original) if not name.startswith("_")}
    assert names == {name for name in vars(twin) if not name.startswith("_")}
    for name in names:
        theirs, ours = getattr(original, name), getattr(twin, name)
        if callable(theirs):
            wanted = [each for each in keywords_of(theirs) if each != "callback"]
            assert list(keywords_of(ours)) == wanted, name


def keywords_of(method: Callable[..., Any]) -> dict[str, Any]:
    """What may be given to it, with types; also what stands in a TypedDict."""
    hints = get_type_hints(method)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (options,) = get_args(hints[name])
            found |= get_type_hints(options)
        else:
            found[name] = hints.get(name)
    return found


@pytest.mark.parametrize(
    ("options", "method", "without"),
    [
        (ProducerOptions, Producer.__init__, {"self", "name_server"}),
        (ConsumerOptions, Consumer.__init__, {"self", "name_server", "group", "topic", "tags"}),
        (PopOptions, PopConsumer.__init__, {"self", "name_server", "group", "topic", "tags"}),
        (SendOptions, Producer.send, {"self", "topic", "body"}),
        (SendOptions, Producer.send_many, {"self", "topic", "bodies"}),
        (OnewayOptions, Producer.send_oneway, {"self", "topic", "body"}),
    ],
)
def test_options_are_the_keyword_arguments(
    options: type, method: Callable[..., Any], without: set[str]
) -> None:
    declared = keywords_of(method)
    assert get_type_hints(options) == {
        name: hint for name, hint in declared.items() if name not in without
    }


SENDING = (
    "close connected flush late_replies recall request send send_async send_many send_oneway "
    "transaction wait_for_broker"
)
RECEIVING = (
    "ack assign assignment close commit connected group member pause "
    "poll position resume run seek seek_to_time subscribe unsubscribe wait_for_broker"
)
POPPING = "ack close extend group nack poll reject release run"


def test_public_classes_show_public_methods(broker: Handle) -> None:
    """The inside is behind one private object: nothing stands beside the methods for users."""

    def public(thing: object) -> list[str]:
        return [name for name in dir(thing) if not name.startswith("_")]

    with Producer(broker.address, linger_ms=1) as producer:
        assert public(producer) == SENDING.split()
    with Consumer(broker.address, "g", "t") as consumer:
        assert public(consumer) == RECEIVING.split()
    assert public(AsyncProducer) == SENDING.split()
    assert public(AsyncConsumer) == RECEIVING.split()
    assert public(PopConsumer) == public(AsyncPopConsumer) == POPPING.split()
    kinds = (Producer, Consumer, AsyncProducer, AsyncConsumer, Admin, PopConsumer, AsyncPopConsumer)
    for kind in kinds:
        for name in public(kind):
            assert inspect.getdoc(getattr(kind, name)), f"{kind.__name__}.{name}"


def test_all_is_what_is_promised() -> None:
    names = cometmq.client.__all__
    assert dir(cometmq.client) == names == sorted(names) == sorted(cometmq.client._HOME)
    for name in names:
        assert getattr(cometmq.client, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Prodcuer'"):
        cometmq.client.Prodcuer  # noqa: B018


@pytest.mark.parametrize("linger_ms", [0, 2])
def test_sending_together(broker: Handle, linger_ms: float) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.address, linger_ms=linger_ms) as producer:
            receipts = await asyncio.gather(
                *(producer.send("t", str(i).encode(), queue_id=0) for i in range(500))
            )
            assert [receipt.queue_offset for receipt in receipts] == list(range(500))
            many = await producer.send_many("t", [b"x"] * 100, queue_id=1)
            assert len(many) == 100
            future = await producer.send_async("t", b"y", queue_id=1)
            assert (await future).queue_offset == 100
            await producer.send_oneway("t", b"z", queue_id=2)
            await producer.flush()

    in_loop(work)
    assert [int(body) for body in broker.broker.bodies("t", 0)] == list(range(500))
    assert len(broker.asked(SendMessages)) < 200  # they shared batches


def test_what_is_sent_in_one_turn_of_the_loop_leaves_together(broker: Handle) -> None:
    """Also where some of it is illegal; each queue gets its own batch, and keeps its order."""

    async def work() -> None:
        async with AsyncProducer(broker.address) as producer:
            await producer.send("t", b"known", queue_id=0)
            before = len(broker.asked(SendMessages))
            calls = [producer.send("t", b"%d" % n, queue_id=n % 2) for n in range(10)]
            calls.insert(5, producer.send("t", b""))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(answers.pop(5), errors.MessageIllegal)
            assert [each.queue_offset for each in answers] == [1, 0, 2, 1, 3, 2, 4, 3, 5, 4]
            assert len(broker.asked(SendMessages)) == before + 1
            with pytest.raises(errors.MessageIllegal):
                await producer.send("t", b"")
            await producer.send("t", b"alone", queue_id=0)
            assert len(broker.asked(SendMessages)) == before + 2

    in_loop(work)
    assert [int(body) for body in broker.broker.bodies("t", 1)] == [1, 3, 5, 7, 9]


def test_what_a_loop_that_has_ended_held_leaves_all_the_same(broker: Handle) -> None:
    async def leave(producer: AsyncProducer) -> None:
        await producer.send("t", b"known", queue_id=0)
        await producer.send_async("t", b"last", queue_id=0)
        asyncio.get_running_loop().stop()  # before its next turn

    producer = AsyncProducer(broker.address)
    loop = asyncio.new_event_loop()
    task = loop.create_task(leave(producer))
    loop.run_forever()
    loop.close()
    assert task.done()
    in_loop(producer.close)
    assert broker.broker.bodies("t", 0) == [b"known", b"last"]


def test_errors_come_home(broker: Handle) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.address, retry_max=0) as producer:
            await producer.send("t", b"x")
            broker.broker.faults = [errors.DiskFull.code]
            with pytest.raises(errors.DiskFull):
                await producer.send("t", b"x")
            with pytest.raises(errors.MessageIllegal):
                await producer.send("t", b"")

    in_loop(work)


def test_a_task_that_is_cancelled_harms_nobody(broker: Handle) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.address) as producer:
            await producer.send("t", b"0", queue_id=0)
            broker.broker.hold.clear()
            first = asyncio.create_task(producer.send("t", b"1", queue_id=0))
            second = asyncio.create_task(producer.send("t", b"2", queue_id=0))
            await asyncio.sleep(0.05)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            broker.do(lambda fake: fake.release())
            assert (await second).queue_offset == 2

    in_loop(work)
    assert broker.broker.bodies("t", 0) == [b"0", b"1", b"2"]


def test_full_of_unanswered_messages_the_loop_still_runs(broker: Handle) -> None:
    async def work() -> None:
        async with AsyncProducer(
            broker.address, max_in_flight_bytes=3_000, batch_bytes=1_000, timeout_s=patient(20)
        ) as producer:
            await producer.send("t", b"0")
            broker.broker.hold.clear()
            tasks = [asyncio.create_task(producer.send("t", b"x" * 500)) for _ in range(50)]
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in tasks)
            broker.do(lambda fake: fake.release())
            await asyncio.gather(*tasks)

    in_loop(work)


def test_a_cancelled_poll_has_taken_nothing(broker: Handle) -> None:
    async def work() -> None:
        async with (
            AsyncProducer(broker.address) as producer,
            AsyncConsumer(broker.address, "g", "t") as consumer,
        ):
            for i in range(20):
                waiting = asyncio.create_task(consumer.poll(timeout_s=patient(30)))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await producer.send("t", str(i).encode())
                (message,) = await consumer.poll(timeout_s=patient(30))
                assert int(message.body) == i

    in_loop(work)


def test_a_loop_that_is_left_goes_on_later_and_ends_with_close(broker: Handle) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.address) as producer:
            await producer.send_many("t", [str(i).encode() for i in range(1_000)], queue_id=0)
        consumer = AsyncConsumer(broker.address, "g")
        await consumer.subscribe("t")
        seen: list[int] = []
        async for message in consumer:
            seen.append(int(message.body))
            if len(seen) == 700:
                break
        seen += [int(message.body) for message in await consumer.poll(100)]

        async def rest() -> None:
            async for message in consumer:
                seen.append(int(message.body))
                consumer.ack(message)

        task = asyncio.create_task(rest())
        while len(seen) < 1_000:
            await asyncio.sleep(0.01)
        await consumer.close()
        await task
        assert seen == list(range(1_000))

    in_loop(work)
