"""Transactions of a running broker: both or neither, once, as RocketMQ keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
from family import RunningBroker, encode_batch
from hypothesis import given
from hypothesis import strategies as st
from ordering import program
from paths import SEARCH
from patience import patient
from still import stop, stopped
from transacting import SETTINGS, Decisions, Transacting, assert_agrees
from waiting import until

from cometmq.actors.tables.delays import Now
from cometmq.actors.tables.transactions import (
    FIRST,
    Halves,
    OpQueue,
    Outcome,
    Rules,
    Verdict,
    copy_properties,
    first_of,
    judge,
    last_of,
    op_of,
    read_op,
)
from cometmq.actors.writer.answers import late
from cometmq.client import AsyncProducer, Consumer, PendingTransaction, Producer
from cometmq.protocol.commands import (
    EndTransactions,
    HalvesPassed,
    PassedHalf,
    PassHalves,
    Section,
    SendMessages,
    SendResult,
    TransactionEnd,
    TransactionPart,
    TransactionsEnded,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    MessageIllegal,
    MessageTooLarge,
    NameIllegal,
    NotConfirmed,
    SlaveNotAvailable,
    TransactionFinished,
    TransactionIncomplete,
    TransactionUnknown,
    UnknownCommand,
)
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC
from cometmq.protocol.uptime import Uptime, uptime_of, without_uptime
from cometmq.shm.kernel.codec import Message

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transactions.md"
WAIT_S = patient(60)
DAY_MS = 86_400_000
NOW = Now(100, Uptime("0123abcd", 5_000))
SOON = {"transactionTimeOut": 100, "transactionCheckInterval": 200, "transactionCheckMax": 4}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("transactions") / "store", SOON) as running:
        for topic in ("orders", "invoices"):
            running.create_topic(topic, 1)
        yield running


@pytest.fixture(scope="module")
def slow_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One that does not ask while a test looks."""
    with RunningBroker(tmp_path_factory.mktemp("unasked") / "store") as running:
        for topic in ("orders", "invoices"):
            running.create_topic(topic, 1)
        yield running


def server(broker: RunningBroker) -> str:
    return broker.ready.name_server


def bodies(broker: RunningBroker, topic: str) -> list[bytes]:
    return [message.body for message in broker.read_queue(topic, 0)]


def begin(producer: Producer, body: bytes, topic: str = "orders") -> TransactionEnd:
    """A transaction of which nobody hears again; a commit of it."""
    transaction = producer.transaction(topic, body).__enter__()
    producer._transactions.open.clear()  # as if this process had died
    return TransactionEnd(transaction.id, True, transaction._parts)


def end(broker: RunningBroker, group: str, *ends: TransactionEnd) -> list[tuple[int, str]]:
    answer, _ = broker.commitlog.ask(EndTransactions.of(group, ends), timeout_s=WAIT_S)
    assert isinstance(answer, TransactionsEnded)
    return list(zip(answer.codes, answer.texts, strict=True))


def otherwise(commit: TransactionEnd) -> TransactionEnd:
    return TransactionEnd(commit.transaction_id, False, commit.parts)


# --- rules ---


def test_what_has_become_of_halves() -> None:
    halves = Halves(10)
    ops = OpQueue(3)
    assert (halves.find(9), halves.find(10), halves.low) == (Outcome.ENDED, Outcome.PENDING, 10)
    ended = [(11, Outcome.COMMITTED), (13, Outcome.ROLLED_BACK)]
    halves.take(ended)
    ops.take(3, last_of(ended), halves)
    assert (halves.low, ops.low, halves.pending(11, 20), halves.pending(13, 20)) == (10, 3, 12, 14)
    for op, queue_offset in enumerate((10, 12), 4):
        halves.take([(queue_offset, Outcome.COPIED)])
        ops.take(op, queue_offset, halves)
    assert (halves.low, ops.low, halves.pending(0, 14)) == (14, 6, 14)
    halves.take([(12, Outcome.COMMITTED), (1 << 60, Outcome.COMMITTED), (3, Outcome.COMMITTED)])
    assert (halves.find(12), halves.low) == (Outcome.COMMITTED, 14)


@given(
    st.lists(st.tuples(st.integers(0, (1 << 63) - 1), st.sampled_from([*Outcome][1:5])), max_size=9)
)
def test_an_op_has_its_numbers_one_by_one(ended: list[tuple[int, Outcome]]) -> None:
    body, properties = op_of(ended)
    assert body == "".join(f"{number}," for number, _ in ended).encode()
    letters = "".join("crmg"[outcome - 1] for _, outcome in ended)
    assert properties.endswith(b"\1%b\2" % letters.encode())


def test_an_op_of_what_cannot_be_is_not_made() -> None:
    for ended in [(-1, Outcome.COMMITTED)], [(1, 7)]:
        with pytest.raises(ValueError, match="has ended as"):
            op_of(ended)  # type: ignore[arg-type]


def test_an_op_says_which_and_how() -> None:
    ended = [(7, Outcome.COMMITTED), (9, Outcome.COPIED), (12, Outcome.GIVEN_UP)]
    body, properties = op_of(ended)
    pairs = dict(pair.split("\1") for pair in properties.decode().split("\2")[:-1])
    assert body == b"7,9,12,"
    assert list(read_op(body, pairs)) == ended
    theirs = {"TAGS": "d"}  # RocketMQ says not how; before 5.1 it said one, without a comma
    assert list(read_op(b"5", theirs)) == [(5, Outcome.ENDED)]
    assert list(read_op(b"5,x,-1,\xb2," + b"9" * 40, theirs)) == [(5, Outcome.ENDED)]
    assert not list(read_op(b"5", {}))


def pairs_of(raw: bytes) -> dict[str, str]:
    return dict(pair.split("\1", 1) for pair in raw.decode().split("\2")[:-1])


@pytest.mark.parametrize("wall_ms", [-DAY_MS, 100, DAY_MS])
def test_how_old_a_half_is_no_wall_clock_says(wall_ms: int) -> None:
    """A half, a copy of it that is renewed, and copies of that."""
    rules = Rules(10, 3, 1_000, 50)

    def asked(properties: dict[str, str], up_ms: int) -> Verdict:
        now = Now(wall_ms, NOW.up._replace(ms=up_ms))
        return judge(properties, 100, 100, now, rules)

    patient = Uptime(NOW.up.clock, 5_000)
    half = pairs_of(b"CHECK_IMMUNITY_TIME_IN_SECONDS\0011\2" + patient.as_property())
    assert [asked(half, at) for at in (5_049, 5_050, 5_999)] == [
        Verdict.WAIT, Verdict.RENEW, Verdict.RENEW
    ]  # fmt: skip
    plain = pairs_of(patient.as_property())
    assert [asked(plain, at) for at in (5_009, 5_010, 5_999, 6_000)] == [
        Verdict.WAIT, Verdict.CHECK, Verdict.CHECK, Verdict.GIVE_UP
    ]  # fmt: skip
    raw = "".join(f"{name}\1{value}\2" for name, value in half.items()).encode()
    copy = pairs_of(copy_properties(raw, half, 3, 0, patient._replace(ms=5_060)))
    assert [asked(copy, at) for at in (5_109, 5_110)] == [Verdict.WAIT, Verdict.RENEW]
    raw = "".join(f"{name}\1{value}\2" for name, value in copy.items()).encode()
    copy = pairs_of(copy_properties(raw, copy, 3, 0, patient._replace(ms=5_110)))
    assert uptime_of(copy) == (NOW.up.clock, 5_110, 5_000)
    assert [asked(copy, at) for at in (5_159, 5_999)] == [Verdict.WAIT, Verdict.RENEW]
    assert asked(copy, 6_000) is Verdict.GIVE_UP  # as old as messages get


@pytest.mark.parametrize(
    ("properties", "born", "stored", "verdict"),
    [
        ({}, 0, 95, Verdict.WAIT),  # what its producer says of its birth does not count
        ({}, 999, 90, Verdict.CHECK),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"}, 0, 60, Verdict.WAIT),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"}, 0, 50, Verdict.RENEW),
        ({"CHECK_IMMUNITY_TIME_IN_SECONDS": "x"}, 0, 90, Verdict.CHECK),
        ({"TRANSACTION_CHECK_TIMES": "2"}, 0, 99, Verdict.CHECK),
        ({"TRANSACTION_CHECK_TIMES": "3"}, 0, 99, Verdict.GIVE_UP),
        ({FIRST: "1"}, 95, 99, Verdict.WAIT),
        ({}, 0, -910, Verdict.GIVE_UP),
    ],
)
def test_when_a_producer_is_asked(
    properties: dict[str, str], born: int, stored: int, verdict: Verdict
) -> None:
    assert judge(properties, born, stored, NOW, Rules(10, 3, 1_000, 50)) is verdict


def test_a_copy_knows_the_first() -> None:
    old = b"a\1b\2TRANSACTION_CHECK_TIMES\0011\2c\1d"
    raw = copy_properties(old, pairs_of(old + b"\2"), 17, 2, NOW.up)
    pairs = pairs_of(raw)
    here = pairs.pop("COMETMQ_UP")
    assert here == "0123abcd-000000005000"
    assert pairs == {"a": "b", "c": "d", "TRANSACTION_CHECK_TIMES": "2", FIRST: "17"}
    assert [first_of(pairs, 30), first_of(pairs, 3), first_of({FIRST: "²"}, 3)] == [17, 3, 3]


# --- producers ---


def test_a_block_commits_or_rolls_back(slow_broker: RunningBroker) -> None:
    broker = slow_broker
    before = len(bodies(broker, "orders")), len(bodies(broker, "invoices"))
    with Producer(server(broker), name="shop") as producer:
        with producer.transaction(
            "orders", b"one", keys="k", tags="t", properties={"p": "v"}
        ) as tx:
            tx.send("invoices", b"two")
            tx.send("orders", b"three", ordering_key="x")
            assert (len(bodies(broker, "orders")), len(bodies(broker, "invoices"))) == before
        with contextlib.suppress(KeyError), producer.transaction("orders", b"never") as other:
            other.send("invoices", b"never, either")
            raise KeyError
        with producer.transaction("orders", b"never", queue_id=0) as third:
            third.rollback()
        with pytest.raises(RuntimeError):
            third.commit()
        with pytest.raises(RuntimeError):
            third.send("orders", b"late")
    orders = broker.read_queue("orders", 0)[before[0] :]
    invoices = broker.read_queue("invoices", 0)[before[1] :]
    assert [m.body for m in orders + invoices] == [b"one", b"three", b"two"]
    halves = {m.physical_offset: m for m in broker.read_queue(HALF_TOPIC, 0)}
    for message in orders + invoices:
        half = halves[message.prepared_transaction_offset]
        assert (message.sys_flag, half.sys_flag) == (8, 0)
        assert message.raw_properties == without_uptime(half.raw_properties)
        assert message.properties["__transactionId__"] == tx.id == orders[0].msg_id
        assert (message.properties["PGROUP"], message.properties["TRAN_MSG"]) == ("shop", "true")
    assert (orders[0].tags, orders[0].keys, orders[0].properties["p"]) == ("t", "k", "v")


def test_of_asyncio_many_at_once(slow_broker: RunningBroker) -> None:
    broker = slow_broker
    before = len(bodies(broker, "invoices"))

    async def order(producer: AsyncProducer, number: int) -> None:
        async with producer.transaction("invoices", b"%d" % number) as tx:
            if number % 4 == 0:
                await tx.send("invoices", b"more of %d" % number)
            if number % 3 == 0:
                raise KeyError

    async def work() -> None:
        async with AsyncProducer(server(broker), name="shop", linger_ms=1) as producer:
            tasks = [order(producer, number) for number in range(100)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(each, KeyError) for each in results] == [
                number % 3 == 0 for number in range(100)
            ]

    asyncio.run(work())
    wanted = [b"%d" % n for n in range(100) if n % 3]
    wanted += [b"more of %d" % n for n in range(0, 100, 4) if n % 3]
    assert sorted(bodies(broker, "invoices")[before:]) == sorted(wanted)


def test_of_threads_many_at_once(slow_broker: RunningBroker) -> None:
    before = len(bodies(slow_broker, "invoices"))
    with Producer(server(slow_broker), name="shop") as producer:

        def work(number: int) -> None:
            for each in range(5):
                with producer.transaction("invoices", b"%d %d" % (number, each)):
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = Counter(bodies(slow_broker, "invoices")[before:])
    assert found == Counter(b"%d %d" % (n, e) for n in range(16) for e in range(5))


def test_what_a_transaction_cannot_be(slow_broker: RunningBroker) -> None:
    with Producer(server(slow_broker)) as nameless:
        with pytest.raises(ArgumentIllegal, match="name"):
            nameless.transaction("orders", b"x")
        with pytest.raises(MessageIllegal, match="TRAN_MSG"):
            nameless.send("orders", b"x", properties={"TRAN_MSG": "true"})
    with pytest.raises(ArgumentIllegal, match="name="):
        Producer(server(slow_broker), checker=lambda _: True)
    with pytest.raises(NameIllegal):
        Producer(server(slow_broker), name="no/name")
    with Producer(server(slow_broker), name="shop") as producer:
        with pytest.raises(ArgumentIllegal, match="__transactionId__"):
            producer.transaction("orders", b"x", properties={"__transactionId__": "mine"})
        before = bodies(slow_broker, "orders")
        incomplete = producer.transaction("orders", b"x").__enter__()
        with pytest.raises(NameIllegal):
            incomplete.send(HALF_TOPIC, b"x")
        with pytest.raises(TransactionIncomplete):
            incomplete.send("orders", b"x")
        with pytest.raises(TransactionIncomplete):
            incomplete.commit()
        with pytest.raises(TransactionIncomplete, match="rolled back"):
            incomplete.__exit__(None, None, None)
        assert bodies(slow_broker, "orders") == before
        with pytest.raises(MessageTooLarge), producer.transaction("orders", b"x") as tx:
            tx.send("orders", bytes(3 << 20))


def test_the_writer_takes_halves_from_nobody_else(slow_broker: RunningBroker) -> None:
    def send(section: Section, **options: Any) -> int:
        answer, _ = slow_broker.commitlog.ask(
            SendMessages([section], 1), [encode_batch([b"x"], **options)], timeout_s=WAIT_S
        )
        assert isinstance(answer, SendResult)
        return answer.results[0].code

    end(slow_broker, "shop")  # the topics are there now
    assert send(Section("orders", 0, 1, producer_group="shop")) == 0
    for topic in (HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC):
        assert send(Section(topic, 0, 1)) == NameIllegal.code
    assert send(Section("orders", 0, 1, producer_group="a/b")) == NameIllegal.code
    both = Section("orders", 0, 1, producer_group="shop", delay_level=1)
    assert send(both) == MessageIllegal.code


# --- ends ---


def test_an_end_is_confirmed_once_and_repeated_alike(slow_broker: RunningBroker) -> None:
    broker = slow_broker
    before = bodies(broker, "orders")
    with Producer(server(broker), name="shop") as producer:
        commit, other = begin(producer, b"kept"), begin(producer, b"dropped")
    assert end(broker, "shop", commit, commit, otherwise(other)) == [(0, "")] * 3
    assert end(broker, "shop", commit, otherwise(other)) == [(0, "")] * 2
    (code, text), (second, other_text) = end(broker, "shop", otherwise(commit), other)
    assert (code, second) == (TransactionFinished.code, TransactionFinished.code)
    assert "to be rolled back, but is committed" in text
    assert "to be committed, but is rolled back" in other_text
    broker.kill("commitlog")  # the next one reads what has ended
    assert end(broker, "shop", commit, otherwise(other), other)[:2] == [(0, "")] * 2
    assert bodies(broker, "orders") == [*before, b"kept"]


def test_an_end_of_what_is_none(slow_broker: RunningBroker) -> None:
    with Producer(server(slow_broker), name="shop") as producer:
        commit = begin(producer, b"mine")
        at = producer.send("orders", b"plain")
    part = commit.parts[0]
    plain = slow_broker.read_queue("orders", 0)[at.queue_offset]
    wrong = [
        TransactionPart(part.topic, part.queue_offset, part.physical_offset + 1),
        TransactionPart(part.topic, part.queue_offset + 1, part.physical_offset),
        TransactionPart("invoices", part.queue_offset, part.physical_offset),
        TransactionPart("orders", plain.queue_offset, plain.physical_offset),
        TransactionPart("orders", -1, -1),
        TransactionPart("orders", 1 << 62, 1 << 62),
    ]
    ends = [TransactionEnd(commit.transaction_id, True, [each]) for each in wrong]
    ends += [TransactionEnd("another", True, commit.parts)]
    for code, text in end(slow_broker, "shop", *ends) + end(slow_broker, "others", commit):
        assert code == TransactionUnknown.code
        assert "no half message of group" in text
    assert "transaction 'another'" not in text
    with pytest.raises(ArgumentIllegal):
        end(slow_broker, "shop", TransactionEnd("x", True, commit.parts * 300))
    assert end(slow_broker, "shop", otherwise(commit)) == [(0, "")]


def test_an_end_waits_until_it_is_known_what_is_pending(slow_broker: RunningBroker) -> None:
    """A commitlog process that has just begun asks the coordinator, and takes sends meanwhile."""
    broker = slow_broker
    with Producer(server(broker), name="shop") as producer:
        commit = begin(producer, b"held")
    broker.kill("commitlog")
    coordinator = broker.pids()["coordinator"]
    stop(coordinator)
    try:
        ends = EndTransactions.of("shop", [commit])
        pending = [broker.commitlog.request(ends) for _ in range(2)]
        section = Section("orders", 0, 1)
        answer, _ = broker.commitlog.ask(
            SendMessages([section], 1), [encode_batch([b"sent meanwhile"])], timeout_s=WAIT_S
        )
        assert isinstance(answer, SendResult)
        assert answer.results[0].code == 0
        assert not any(each.done for each in pending)
    finally:
        os.kill(coordinator, signal.SIGCONT)
    for each in pending:
        assert broker.commitlog.wait(each, WAIT_S)
        assert each.result()[0] == TransactionsEnded([0], [""])
    assert bodies(broker, "orders")[-2:] == [b"sent meanwhile", b"held"]


def test_an_end_that_the_disk_has_not_confirmed_is_not_told() -> None:
    ended = TransactionsEnded([0, TransactionUnknown.code], ["", "unknown"])
    told = late(ended, FlushDiskTimeout, "not flushed within 5 ms")
    assert told == TransactionsEnded(
        [NotConfirmed.code, TransactionUnknown.code],
        ["stored, but not flushed within 5 ms", "unknown"],
    )
    assert late(ended, FlushSlaveTimeout, "late") == late(ended, SlaveNotAvailable, "away") == ended


def test_halves_that_are_passed_on_twice_are_passed_on_once(slow_broker: RunningBroker) -> None:
    """What a scheduler says again, or of what has ended, changes nothing."""
    broker = slow_broker
    with Producer(server(broker), name="shop") as producer:
        commit, ended, lost = (begin(producer, body) for body in (b"passed", b"ended", b"lost"))
    assert end(broker, "shop", otherwise(ended)) == [(0, "")]
    half, over, gone = (
        PassedHalf(each.parts[0].queue_offset, each.parts[0].physical_offset, 1, each is lost)
        for each in (commit, ended, lost)
    )
    wrong = PassedHalf(half.queue_offset, gone.physical_offset, 1, False)
    first = broker.ask("commitlog", PassHalves([gone, wrong, half, over, half]), WAIT_S)
    assert isinstance(first, HalvesPassed)
    copy = first.copies[2]
    nowhere = (-1, -1)
    assert first.copies == [nowhere, nowhere, copy, nowhere, nowhere] != [nowhere] * 5
    assert first.given_up == [True] + [False] * 4
    second = broker.ask("commitlog", PassHalves([gone, half]), WAIT_S)
    assert second == HalvesPassed([nowhere] * 2, [False] * 2)
    with pytest.raises(UnknownCommand):  # not from outside
        broker.commitlog.ask(PassHalves([half]), timeout_s=WAIT_S)
    again = TransactionEnd(commit.transaction_id, True, [TransactionPart("orders", *copy)])
    assert end(broker, "shop", commit, again, commit) == [(0, "")] * 3
    assert bodies(broker, "orders").count(b"passed") == 1
    ((code, text),) = end(broker, "shop", lost)
    assert (code, "given up" in text) == (TransactionFinished.code, True)


# --- checks ---


def test_a_lost_end_is_asked_of_any_producer(broker: RunningBroker) -> None:
    asked: list[PendingTransaction] = []

    def checker(pending: PendingTransaction) -> Any:
        asked.append(pending)
        if len(asked) == 1:
            raise KeyError("this checker raises")
        return "lies" if len(asked) == 2 else pending.body == b"lost"

    with Producer(server(broker), name="lost") as dying:
        commit = begin(dying, b"lost", "invoices")
        begin(dying, b"dropped", "invoices")
    with Producer(server(broker), name="lost", checker=checker):
        until(
            lambda: broker.statistics("commitlog")["transactions_rolled_back"],
            says="both are ended",
        )
        until(lambda: b"lost" in bodies(broker, "invoices"), says="it is committed")
        # Whoever comes back with the end that was lost hears that it is so.
        assert end(broker, "lost", commit) == [(0, "")]
        assert end(broker, "lost", otherwise(commit))[0][0] == TransactionFinished.code
    assert b"dropped" not in bodies(broker, "invoices")
    first = next(each for each in asked if each.id == commit.transaction_id)
    assert (first.topic, first.body, first.message_count) == ("invoices", b"lost", 1)
    assert asked[-1].times > 1


def test_a_producer_is_asked_when_that_is_due(tmp_path: Path) -> None:
    """Fault 32: the first check is on time; it was up to an interval (30 s) late."""
    asked: dict[bytes, list[float]] = {}
    settings = {"transactionTimeOut": 2_000, "transactionCheckInterval": 600_000}
    with RunningBroker(tmp_path / "store", settings) as broker:
        began: dict[bytes, float] = {}

        def checker(pending: PendingTransaction) -> None:
            asked.setdefault(pending.body, []).append(time.monotonic())

        with (
            Producer(server(broker), name="due") as dying,
            Producer(server(broker), name="due", checker=checker),
        ):
            for body in (b"one", b"two"):
                began[body] = time.monotonic()
                begin(dying, body, "invoices")
                until(lambda body=body: body in asked, says="it is asked")
        for body, (at,) in asked.items():  # once
            assert 2.0 <= at - began[body] < 60
        assert broker.statistics("scheduler")["transactions_checked"] == 2


def test_a_checker_that_hangs_harms_no_other(broker: RunningBroker) -> None:
    hangs = threading.Event()
    let_go = threading.Event()

    def hanging(_pending: PendingTransaction) -> bool:
        hangs.set()
        let_go.wait(WAIT_S)
        return False

    async def coroutine(_pending: PendingTransaction) -> bool:
        return True

    async def help_out() -> None:
        async with AsyncProducer(server(broker), name="hangs", checker=coroutine) as helper:
            async with helper.transaction("invoices", b"plain"):
                pass
            begin(helper._producer, b"another", "invoices")
            await asyncio.to_thread(
                until, lambda: b"another" in bodies(broker, "invoices"), says="another answers"
            )

    with Producer(server(broker), name="hangs", checker=hanging) as producer:
        begin(producer, b"hangs", "invoices")
        assert hangs.wait(WAIT_S)
        asyncio.run(help_out())
        let_go.set()


def test_what_nobody_ends_is_given_up(broker: RunningBroker) -> None:
    with Producer(server(broker), name="gone") as producer:
        commit = begin(producer, b"given up")
    until(lambda: b"given up" in bodies(broker, GIVEN_UP_TOPIC), says="it is given up")
    ((code, text),) = end(broker, "gone", commit)
    assert code == TransactionFinished.code
    assert "was given up after too many checks" in text
    assert b"given up" not in bodies(broker, "orders")
    reader = Consumer(server(broker), "readers", GIVEN_UP_TOPIC, start="earliest")
    with reader as consumer:  # anybody may read it there
        assert consumer.poll(timeout_s=WAIT_S)[0].body == b"given up"


def test_a_large_one_behind_small_ones_hinders_no_check(tmp_path: Path) -> None:
    """What is due is stored anew by one write, which a segment has to hold."""
    settings = SOON | {"transactionTimeOut": 1, "transactionCheckMax": 1}
    settings |= {"maxMessageSize": 400_000, "mappedFileSizeCommitLog": 400_000}
    sizes = [9_000] * 10 + [380_000]
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders", 1)
        with (
            stopped(broker.pids()["scheduler"]),
            Producer(server(broker), name="gone") as producer,
        ):
            for size in sizes:
                begin(producer, bytes(size))
        until(
            lambda: sorted(map(len, bodies(broker, GIVEN_UP_TOPIC))) == sizes,
            says="they are given up",
        )


# --- stores of RocketMQ ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transactions", "transactions-killed"])
def test_a_store_of_rocketmq_goes_on(name: str, tmp_path: Path) -> None:
    """What was pending is asked for, delivered and given up as its own broker did it."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    theirs = golden.meta(name, golden.BROKERS)["settings"]
    keys = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize",
            "maxHashSlotNum", "maxIndexNum", "fileReservedTime", "transactionTimeOut",
            "transactionCheckMax")  # fmt: skip
    settings = {key: theirs[key] for key in keys} | {"transactionCheckInterval": 3_000}
    found = golden.expected(name)
    before = {queue: len(rows) for queue, rows in found["contentAtRestart"].items()}
    late = found["restarts"]["late"]
    asked: set[str] = set()

    def checker(pending: PendingTransaction) -> bool | None:
        asked.add(pending.properties["gid"])
        return (True, False, None)[int(pending.properties["gid"][2:]) % 3]

    def stored(broker: RunningBroker, queue: str) -> list[Message]:
        topic, _, queue_id = queue.rpartition("@")
        return broker.read_queue(topic, int(queue_id))[before.get(queue, 0) :]

    given_up = f"{GIVEN_UP_TOPIC}@0"
    wanted = {row["gid"] for row in late["stored"][given_up]}
    with RunningBroker(store, settings) as broker, \
            Producer(server(broker), name="TxProducer", checker=checker):  # fmt: skip
        until(
            lambda: wanted <= {each.properties["gid"] for each in stored(broker, given_up)},
            says="as much is given up",
        )
        assert asked == {row["gid"] for row in late["checks"]}
        for queue, rows in late["stored"].items():
            if not queue.startswith(("RMQ_SYS", GIVEN_UP_TOPIC)):
                assert sorted(map(_seen, stored(broker, queue)), key=str) == sorted(
                    map(_told, rows), key=str
                )
        copies = [message.properties["gid"] for message in stored(broker, f"{HALF_TOPIC}@0")]
        told = [row["gid"] for row in late["stored"][f"{HALF_TOPIC}@0"]]
        assert not Counter(told) - Counter(copies)
    offsets = json.loads(_quoted((store / "config" / "consumerOffset.json").read_text()))
    assert (
        offsets["offsetTable"][f"{HALF_TOPIC}@CID_RMQ_SYS_TRANS"]["0"] > before[f"{HALF_TOPIC}@0"]
    )


def _quoted(text: str) -> str:
    """RocketMQ writes numbers for keys."""
    import re

    return re.sub(r"([{,])(\d+):", r'\1"\2":', text)


def _told(row: dict[str, Any]) -> tuple[object, ...]:
    return row["gid"], row["sysFlag"], row["bornTimestamp"], _sorted(row["properties"])


def _seen(message: Message) -> tuple[object, ...]:
    properties = message.properties
    return properties["gid"], message.sys_flag, message.born_timestamp_ms, _sorted(properties)


def _sorted(properties: dict[str, str]) -> list[tuple[str, str]]:
    """RocketMQ notes the first half for those with an immunity time, and we for all copies."""
    return sorted(each for each in properties.items() if each[0] != FIRST)


# --- faults ---


@pytest.mark.slow
def test_once_whatever_is_killed(tmp_path: Path) -> None:
    """Transactions go on while the processes that have to do with them are killed."""
    decisions = Decisions()
    with RunningBroker(tmp_path / "store", SETTINGS) as broker:
        broker.create_topic("once", 2)
        with Transacting(broker, decisions):
            for role in ("scheduler", "commitlog", "coordinator", "scheduler", "dispatcher"):
                broker.kill(role)
                done = len(decisions.confirmed)
                until(lambda: len(decisions.confirmed) > done + 8, says="it goes on")  # noqa: B023
        assert_agrees(broker, decisions)


@pytest.mark.slow
def test_the_program_of_the_page_dies_at_every_line(broker: RunningBroker, tmp_path: Path) -> None:
    """A row of the order and a message of it: both or neither, whatever is killed where."""
    broker.create_topic("shop", 1)
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace('transaction("orders"', 'transaction("shop"'))
    database = str(tmp_path / "shop.db")
    shop = program(page, server(broker), database)
    shop["prepare"]()
    with Producer(server(broker), name="shop", checker=shop["decided"]):
        run = subprocess.run(
            [sys.executable, str(Path(__file__).parents[1] / "kit" / "ordering.py"),
             str(page), server(broker), database, "1000"],
            env={**os.environ, "PYTHONPATH": SEARCH}, capture_output=True, text=True,
            timeout=patient(280),
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        told = json.loads(run.stdout)
        assert told["died"] > 100, told
        rows = _rows(database)
        until(lambda: set(rows) <= set(bodies(broker, "shop")), says="all orders are delivered")
        until(lambda: _pending(broker) == 0, says="nothing is pending")
    assert sorted(bodies(broker, "shop")) == sorted(rows) == sorted(_rows(database))
    assert 0 < len(rows) < told["orders"]


def _rows(database: str) -> list[bytes]:
    with contextlib.closing(sqlite3.connect(database)) as db:
        return [str(what).encode() for (what,) in db.execute("select what from orders")]


def _pending(broker: RunningBroker) -> int:
    halves = broker.read_queue(HALF_TOPIC, 0)
    ended = {
        queue_offset
        for op in broker.read_queue(OP_TOPIC, 0)
        for queue_offset, _ in read_op(op.body, op.properties)
    }
    return len({half.queue_offset for half in halves} - ended)


def test_the_program_of_the_page(slow_broker: RunningBroker, tmp_path: Path) -> None:
    text = program(PAGE, server(slow_broker), str(tmp_path / "shop.db"))
    text["prepare"]()
    before = len(bodies(slow_broker, "orders"))
    with Producer(server(slow_broker), name="page", checker=text["decided"]) as producer:
        text["order"](producer, 1, "three apples")
    assert bodies(slow_broker, "orders")[before:] == [b"three apples"]
    assert _rows(str(tmp_path / "shop.db")) == [b"three apples"]
