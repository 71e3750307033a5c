"""Transactions of asyncio tasks, which share batches and commands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import pytest
from client_fakes import FakeBroker, Handle, fake_broker
from patience import patient

from cometmq.client import AsyncProducer
from cometmq.client.sending import in_loop, loop_transaction
from cometmq.client.sending.receipt import Batch
from cometmq.protocol.commands import EndTransactions, SendMessages
from cometmq.protocol.errors import (
    CometError,
    MessageIllegal,
    MessageTooLarge,
    NoPermission,
    NotConfirmed,
    SystemBusy,
)

TASKS = 64


@pytest.fixture
def fake() -> Iterator[Handle]:
    with fake_broker(topics=["t", "u"], queues=4) as handle:
        yield handle


def producer_of(fake: Handle, **options: object) -> AsyncProducer:
    return AsyncProducer(fake.address, name="shop", **options)  # type: ignore[arg-type]


async def commit(producer: AsyncProducer, body: bytes, topic: str = "t", **options: str) -> str:
    async with producer.transaction(topic, body, **options) as transaction:  # type: ignore[arg-type]
        return transaction.id


async def known(producer: AsyncProducer) -> None:
    """Whatever is asked before the first message is known."""
    for topic in ("t", "u"):
        await commit(producer, b"first", topic)


def sections(fake: Handle) -> list[list[tuple[str, int]]]:
    return [
        [(section.topic, section.count) for section in command.sections]
        for command in fake.broker.commands
        if isinstance(command, SendMessages)
    ]


def ends(fake: Handle) -> list[list[str]]:
    return [
        command.transactions
        for command in fake.broker.commands
        if isinstance(command, EndTransactions)
    ]


def test_what_begins_and_ends_in_one_turn_shares_commands(fake: Handle) -> None:
    async def work() -> list[str]:
        async with producer_of(fake) as producer:
            await known(producer)
            fake.wait_for(lambda _: len(ends(fake)) == 2)  # noted behind their answers
            fake.do(lambda broker: broker.commands.clear())
            return await asyncio.gather(
                *(commit(producer, b"%d" % number) for number in range(TASKS)),
                *(commit(producer, b"%d" % number, "u") for number in range(TASKS)),
            )

    ids = asyncio.run(work())
    fake.wait_for(lambda _: len([*chain.from_iterable(ends(fake))]) >= len(ids))
    assert len(set(ids)) == 2 * TASKS
    assert [*chain.from_iterable(sections(fake))] == [("t", TASKS), ("u", TASKS)]
    assert sorted(chain.from_iterable(ends(fake))) == sorted(ids)
    assert len(ends(fake)) <= 4
    by_id = {end.transaction_id: end for end in fake.broker.ends}
    assert all(by_id[each].commit for each in ids)
    for topic, some in ("t", ids[:TASKS]), ("u", ids[TASKS:]):
        parts = [part for each in some for part in by_id[each].parts]
        assert {part.topic for part in parts} == {topic}
        first = parts[0].queue_offset
        assert [part.queue_offset for part in parts] == list(range(first, first + TASKS))


def test_others_than_plain_ones_begin_beside_them(fake: Handle) -> None:
    async def work() -> list[str]:
        async with producer_of(fake, batch_bytes=2_000) as producer:
            await known(producer)
            some: list[dict[str, str]] = [{}, {"tags": "a"}, {"keys": "k"}]
            return await asyncio.gather(
                *(commit(producer, b"x" * 300, **some[number % 3]) for number in range(TASKS)),
                commit(producer, b"x" * 3_000),
            )

    ids = asyncio.run(work())
    assert sorted(ids) == sorted(end.transaction_id for end in fake.broker.ends[2:])
    assert sorted(end.parts[0].queue_offset for end in fake.broker.ends if end.parts)


def test_what_cannot_be_sent_is_told_to_its_task_alone(fake: Handle) -> None:
    async def work() -> list[object]:
        async with producer_of(fake, max_message_bytes=1_000) as producer:
            await known(producer)
            tasks = (commit(producer, body) for body in (b"", b"x", b"x" * 1_001, b"x" * 1_000))
            return await asyncio.gather(*tasks, return_exceptions=True)

    empty, one, large, most = asyncio.run(work())
    assert isinstance(empty, MessageIllegal)
    assert isinstance(large, MessageTooLarge)
    assert isinstance(one, str)
    assert isinstance(most, str)


def test_a_refused_batch_is_told_to_all_its_tasks(fake: Handle) -> None:
    async def work() -> list[object]:
        async with producer_of(fake) as producer:
            await known(producer)
            fake.broker.faults = [NoPermission("not now")]
            found = await asyncio.gather(
                *(commit(producer, b"x") for _ in range(3)), return_exceptions=True
            )
            await commit(producer, b"later")
            assert not producer._producer._transactions.open
            return found

    found = asyncio.run(work())
    assert [type(each) for each in found] == [NoPermission] * 3
    assert len({id(each) for each in found}) == 3


def test_a_closed_producer_says_so(fake: Handle) -> None:
    async def work() -> None:
        producer = producer_of(fake)
        await known(producer)
        late = producer.transaction("t", b"late")
        await producer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await late.__aenter__()

    asyncio.run(work())


def test_a_task_that_is_cancelled_leaves_the_others_alone(fake: Handle) -> None:
    async def work() -> None:
        async with producer_of(fake) as producer:
            await known(producer)
            fake.broker.hold.clear()
            tasks = [asyncio.create_task(commit(producer, b"%d" % each)) for each in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()  # in the turn in which it began
            await asyncio.sleep(0)
            fake.do(FakeBroker.release)
            await tasks[0], await tasks[2]
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            assert not producer._producer._transactions.open

    asyncio.run(work())
    assert len(fake.broker.ends) == 2 + 2


def test_a_task_that_is_cancelled_when_its_answer_is_there_leaves_nothing_open(
    fake: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the checker of this process would never be asked."""
    tasks: list[asyncio.Task[str]] = []
    stored = in_loop._One.stored

    def stored_and_cancelled(one: in_loop._One, batch: Batch) -> None:
        stored(one, batch)
        for task in tasks:
            task.cancel()

    monkeypatch.setattr(in_loop._One, "stored", stored_and_cancelled)

    async def work() -> None:
        async with producer_of(fake) as producer:
            await known(producer)
            tasks.append(asyncio.create_task(commit(producer, b"x")))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert not producer._producer._transactions.open

    asyncio.run(work())
    assert len(fake.broker.ends) == 2


def test_an_end_is_sent_although_its_task_is_cancelled(fake: Handle) -> None:
    async def work() -> None:
        async with producer_of(fake) as producer:
            await known(producer)
            transaction = await producer.transaction("t", b"x").__aenter__()
            task = asyncio.create_task(transaction.commit())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await commit(producer, b"behind it")
            assert not producer._producer._transactions.open
            assert transaction.id in {end.transaction_id for end in fake.broker.ends}

    asyncio.run(work())


def test_an_end_without_an_answer_is_sent_again(
    fake: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_transaction, "ATTEMPT_S", 0.2)

    async def work() -> None:
        async with producer_of(fake, timeout_s=patient(30)) as producer:
            await known(producer)
            fake.wait_for(lambda _: len(ends(fake)) == 2)
            fake.broker.tells_ends = False
            tasks = [asyncio.create_task(commit(producer, b"x")) for _ in range(2)]
            while len(ends(fake)) < 3:
                await asyncio.sleep(0.01)
            assert len(producer._producer._transactions.open) == 2
            fake.broker.tells_ends = True
            await asyncio.gather(*tasks)
            assert not producer._producer._transactions.open

    asyncio.run(work())
    first, *others = ends(fake)[2:]
    assert len(first) == 2
    assert all(set(each) <= set(first) for each in others)


@pytest.mark.slow
def test_an_end_that_nobody_confirms_raises(fake: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_transaction, "ATTEMPT_S", 0.1)

    async def work() -> None:
        async with producer_of(fake, timeout_s=2.0) as producer:
            with suppress(CometError):
                await known(producer)
            fake.broker.tells_ends = False
            transaction = await producer.transaction("t", b"x").__aenter__()
            with pytest.raises(NotConfirmed, match=f"transaction {transaction.id} is rolled back"):
                await transaction.rollback()
            fake.broker.tells_ends = True
            with pytest.raises(RuntimeError, match="rolled back already"):
                await transaction.commit()

    asyncio.run(work())


def test_an_exception_rolls_back_and_a_transaction_is_entered_once(fake: Handle) -> None:
    async def work() -> None:
        async with producer_of(fake) as producer:
            await known(producer)
            transaction = producer.transaction("t", b"x")
            with pytest.raises(SystemBusy):
                async with transaction:
                    raise SystemBusy("mine")
            with pytest.raises(RuntimeError, match="once"):
                await transaction.__aenter__()
            await transaction.rollback()  # it is
            with pytest.raises(RuntimeError, match="begun"):
                await producer.transaction("t", b"x").commit()

    asyncio.run(work())
    assert [end.commit for end in fake.broker.ends] == [True, True, False]


def test_another_loop_goes_on_with_the_producer(fake: Handle) -> None:
    producer = producer_of(fake)
    asyncio.run(known(producer))
    asyncio.run(known(producer))
    asyncio.run(producer.close())
    assert len(fake.broker.ends) == 4


def test_a_task_that_ends_the_loop_leaves_the_others_alone(fake: Handle) -> None:
    async def interrupt(producer: AsyncProducer) -> None:
        async with producer.transaction("t", b"x"):
            raise KeyboardInterrupt

    async def begin(producer: AsyncProducer) -> object:
        async with producer.transaction("t", b"x") as transaction:
            return transaction.id

    loop = asyncio.new_event_loop()
    producer = producer_of(fake)
    loop.run_until_complete(known(producer))
    tasks = [
        loop.create_task(interrupt(producer) if number == 1 else begin(producer))
        for number in range(5)
    ]
    together = asyncio.gather(*tasks, return_exceptions=True)
    # The end is asked for first: a rollback is awaited, and then the loop ends.
    with suppress(KeyboardInterrupt):
        loop.run_until_complete(together)
    others = [task for number, task in enumerate(tasks) if number != 1]
    found = loop.run_until_complete(asyncio.gather(*others))
    assert len(set(found)) == 4
    loop.run_until_complete(producer.close())
    loop.close()


def test_a_time_out_while_it_begins_leaves_nothing_open(fake: Handle) -> None:
    async def work() -> None:
        async with producer_of(fake) as producer:
            await known(producer)
            fake.broker.hold.clear()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), producer.transaction("t", b"x"):
                    raise AssertionError("it is not begun")
            fake.do(FakeBroker.release)
            await commit(producer, b"behind it")
            assert not producer._producer._transactions.open

    asyncio.run(work())
