"""An AsyncProducer whose event loop was closed with something under way goes on in another one."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from client_fakes import Handle, fake_broker
from patience import patient

from cometmq.client import AsyncProducer

# Of tasks of a loop that was closed, as they are collected.
pytestmark = pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")

Work = Callable[[AsyncProducer], Coroutine[Any, Any, object]]


@pytest.fixture
def fake() -> Iterator[Handle]:
    with fake_broker(topics=["t", "u"], queues=1) as handle:
        yield handle


async def send(producer: AsyncProducer) -> object:
    return await producer.send("t", b"x")


async def learn(producer: AsyncProducer) -> object:
    return await producer.send("u", b"x")  # a topic that nobody knows yet


async def commit(producer: AsyncProducer) -> object:
    async with producer.transaction("t", b"x") as transaction:
        return transaction.id


async def leave(producer: AsyncProducer, work: Work, tasks: list[asyncio.Task[object]]) -> None:
    """It stops in the turn in which something was begun, and nothing of it has left."""
    tasks += [asyncio.create_task(work(producer)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)


def close_with_work(producer: AsyncProducer, work: Work) -> list[asyncio.Task[object]]:
    """The tasks that were left."""
    tasks: list[asyncio.Task[object]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(commit(producer), patient(30)))
    with pytest.raises(RuntimeError, match="stopped before"):
        loop.run_until_complete(leave(producer, work, tasks))
    for task in asyncio.all_tasks(loop):  # they never end, which is not to be said
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine = task.get_coro()
        if (
            inspect.iscoroutine(coroutine)
            and inspect.getcoroutinestate(coroutine) == "CORO_CREATED"
        ):
            coroutine.close()
    loop.close()
    return tasks


@pytest.mark.parametrize("first", [send, commit, learn])
@pytest.mark.parametrize("second", [send, commit, learn])
@pytest.mark.slow
def test_it_goes_on_in_another(first: Work, second: Work, fake: Handle) -> None:
    producer = AsyncProducer(fake.address, name="shop")
    left = close_with_work(producer, first)

    async def go_on() -> None:
        for _ in range(2):
            assert await asyncio.wait_for(second(producer), patient(10))
        await asyncio.gather(*(second(producer) for _ in range(5)))
        await producer.close()

    asyncio.run(go_on())
    assert not any(task.done() for task in left)
    assert not producer._producer._transactions.open
    del left
    gc.collect()
