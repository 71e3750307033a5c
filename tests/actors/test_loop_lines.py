"""Lines that an event loop reads: answers come in its own thread; where it is held up, or over, the
channel's own thread hears them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest
from inside import channel_of, commitlog_of
from patience import patient

from cometmq import AsyncProducer, Broker
from cometmq.client.sending import delivery
from cometmq.protocol.errors import NotConfirmed
from cometmq.protocol.wire.line import Line
from cometmq.protocol.wire.pending import Pending
from cometmq.testing import OwnBroker

WAIT_S = patient(60)


@pytest.fixture
def heard_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads in which answers of sends were heard."""
    found: list[int] = []
    answered = delivery.Delivery._answered

    def noted(self: delivery.Delivery, flight: object, pending: Pending) -> None:
        found.append(threading.get_ident())
        answered(self, flight, pending)  # type: ignore[arg-type]

    monkeypatch.setattr(delivery.Delivery, "_answered", noted)
    return found


def line_of(producer: AsyncProducer) -> Line | None:
    return channel_of(producer._producer)._shortcut.line


async def read_by_loop(producer: AsyncProducer, topic: str, heard_in: list[int]) -> None:
    """Once its answers come in the thread of the loop."""
    while not heard_in or heard_in[-1] != threading.get_ident():
        await producer.send(topic, b"x")


def test_answers_come_in_the_thread_of_the_loop(
    broker: Broker, topic: str, heard_in: list[int]
) -> None:
    async def work() -> None:
        async with broker.async_producer(name="shop", transport="local") as producer:
            await read_by_loop(producer, topic, heard_in)
            heard_in.clear()
            for _ in range(20):
                await producer.send(topic, b"x")
                async with producer.transaction(topic, b"x"):
                    pass
            here = heard_in.count(threading.get_ident())
            assert here > len(heard_in) / 2, heard_in  # on a busy machine the other may be sooner

    asyncio.run(work())


def test_a_loop_that_is_held_up_does_not_keep_answers_from_others(
    broker: Broker, topic: str, heard_in: list[int]
) -> None:
    async def work() -> None:
        async with broker.async_producer(transport="local") as producer:
            await read_by_loop(producer, topic, heard_in)
            while True:
                heard_in.clear()
                waiting = await producer.send_async(topic, b"held up")
                await asyncio.sleep(0)  # it has left
                if not heard_in:
                    break
                await waiting  # where the loop comes to it late, it has heard the answer, too
            until = time.monotonic() + WAIT_S
            while not heard_in and time.monotonic() < until:
                time.sleep(0.01)
            assert heard_in
            assert heard_in[0] != threading.get_ident()
            assert (await waiting).queue_offset >= 0

    asyncio.run(work())


def test_a_loop_that_watches_no_descriptors_gets_its_answers_from_the_channel(
    broker: Broker, topic: str, heard_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with broker.async_producer(transport="local") as producer:

            def cannot(*_: object) -> None:
                raise NotImplementedError

            monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", cannot)
            for _ in range(10):
                await producer.send(topic, b"x")
            assert threading.get_ident() not in heard_in
            assert channel_of(producer._producer)._lent is None  # or each would take 0.1 s

    asyncio.run(work())


def test_what_a_loop_that_is_over_has_asked_is_heard(
    broker: Broker, topic: str, heard_in: list[int]
) -> None:
    producer = broker.async_producer(transport="local")

    async def leave() -> None:
        await read_by_loop(producer, topic, heard_in)
        await producer.send_async(topic, b"left")
        await asyncio.sleep(0)

    asyncio.run(leave())
    producer._producer.flush()  # nobody waits for the loop
    asyncio.run(read_by_loop(producer, topic, heard_in))  # in another one
    asyncio.run(producer.close())


def test_a_writer_that_is_killed_costs_no_more_than_what_was_on_its_way(
    cometmq_own_broker: OwnBroker,
) -> None:
    broker, topic = cometmq_own_broker.broker, cometmq_own_broker.topic()

    async def work() -> None:
        async with broker.async_producer(
            name="shop", transport="local", timeout_s=WAIT_S
        ) as producer:
            ids: list[str] = []

            async def commit(count: int) -> None:
                for _ in range(count):
                    try:
                        async with producer.transaction(topic, b"x") as transaction:
                            pass
                    except NotConfirmed:
                        continue
                    ids.append(transaction.id)

            await commit(5)
            line = line_of(producer)
            tasks = [asyncio.create_task(commit(20)) for _ in range(8)]
            await asyncio.sleep(0)
            commitlog_of(broker).send_signal(signal.SIGKILL)
            await asyncio.gather(*tasks)
            while line_of(producer) in (None, line):
                await commit(1)
            assert ids

    asyncio.run(work())
