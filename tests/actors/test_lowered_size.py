"""A `maxMessageSize` that is lowered is for what clients send: what is stored stays and goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from inside import wait_dispatched
from patience import patient
from ports import free_ports
from receiving import take

from cometmq.client import Consumer, Message, PopConsumer, Producer
from cometmq.protocol.commands import (
    EndTransactions,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.protocol.errors import MessageTooLarge
from cometmq.shm.live.control import CONTROL_FILE, Counter
from cometmq.shm.tools.verify import verify_store

WAIT_S = patient(30)
LARGE = b"L" * 200_000
SMALL = b"small"
LEVELS = {"messageDelayLevel": "1s 6s 1s 1s 1s"}
LOWERED = LEVELS | {"maxMessageSize": 4_096}


@contextmanager
def running(store: Path, settings: dict[str, Any]) -> Iterator[tuple[RunningBroker, str]]:
    with RunningBroker(store, settings) as broker:
        yield broker, broker.ready.name_server


def sizes(messages: list[Any]) -> list[int]:
    return sorted(len(each.body) for each in messages)


BOTH = sorted(map(len, (LARGE, SMALL)))


@pytest.mark.slow
def test_what_waits_comes_when_it_is_due(tmp_path: Path) -> None:
    """It stopped its delay level, and all timers, for ever."""
    with running(tmp_path / "store", LEVELS) as (_, names), Producer(names) as producer:
        for body in (LARGE, SMALL):
            producer.send("delayed", body, delay_level=2)
            producer.send("timed", body, deliver_after=6 if body is LARGE else 7)
    with running(tmp_path / "store", LOWERED) as (_, names), Producer(names) as producer:
        with pytest.raises(MessageTooLarge, match="4096"):
            producer.send("delayed", LARGE, delay_level=2)
        for topic in ("delayed", "timed"):
            with Consumer(names, f"of-{topic}", topic) as consumer:
                assert sizes(take(consumer, 2)) == BOTH, topic


def test_what_is_given_back_comes_again_and_is_a_dead_letter_then(tmp_path: Path) -> None:
    with running(tmp_path / "store", LEVELS) as (_, names), Producer(names) as producer:
        for topic in ("read", "popped"):
            producer.send_many(topic, [LARGE, SMALL], queue_id=0)
    with running(tmp_path / "store", LOWERED) as (broker, names), ExitStack() as stack:
        came: dict[str, list[Message]] = {"read": [], "popped": []}
        for each in (
            Consumer(names, "read", "read", max_reconsume_times=1),
            PopConsumer(names, "popped", "popped", invisible_s=1, max_reconsume_times=1),
        ):

            def fail(message: Message) -> None:
                came[message.topic].append(message)
                raise ValueError("as it is to be")

            thread = threading.Thread(target=each.run, args=(fail,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(each.close)
        for topic in came:
            dead = broker.read_queue(f"%DLQ%{topic}", 0, 2)
            assert sizes(dead) == BOTH, topic
            assert sizes(came[topic]) == sorted(BOTH * 2), topic


def test_a_half_is_committed_and_no_larger_one_is_taken(tmp_path: Path) -> None:
    with running(tmp_path / "store", {}) as (_, names), Producer(names, name="shop") as producer:
        ends = []
        for body in (LARGE, SMALL):
            transaction = producer.transaction("orders", body).__enter__()
            ends.append(TransactionEnd(transaction.id, True, transaction._parts))
        producer._transactions.open.clear()  # as if this process had died
    with (
        running(tmp_path / "store", LOWERED) as (broker, names),
        Producer(names, name="shop") as producer,
    ):
        answer, _ = broker.commitlog.ask(EndTransactions.of("shop", ends), timeout_s=WAIT_S)
        assert isinstance(answer, TransactionsEnded)
        assert answer.codes == [0, 0], answer.texts
        with Consumer(names, "g", "orders") as consumer:
            assert sizes(take(consumer, 2)) == BOTH
        with (
            pytest.raises(MessageTooLarge, match="4096"),
            producer.transaction("orders", b"x" * 4_097),
        ):
            pass


@pytest.mark.parametrize("end", ["clean", "killed", "scanned"])
@pytest.mark.slow
def test_recovery_loses_none(end: str, tmp_path: Path) -> None:
    """Neither is the log cut at such a record, nor is it damage; the counters of a killed run are
    believed, behind a large record as well."""
    store = tmp_path / "store"
    with RunningBroker(store) as broker:
        broker.create_topic("t")
        sent = broker.send("t", 0, [SMALL, LARGE, SMALL])
        sent += broker.send("t", 0, [LARGE] * 9)
        broker.kill_all()
    for number in range(3):
        with RunningBroker(store, LOWERED) as broker:
            broker.until_logged("0 damaged stretches")
            broker.assert_stored(sent)
            if number == 2:
                sent += broker.send("t", 0, [SMALL])
                broker.assert_stored(sent)
            if end != "clean":
                wait_dispatched(broker)  # or verify_store finds that the last entry is missing
                broker.kill_all()
        if end == "scanned":
            (store / CONTROL_FILE).unlink(missing_ok=True)
    assert not verify_store(store).findings


def test_a_slave_whose_own_is_lower_follows(tmp_path: Path) -> None:
    port = free_ports(1)
    its = {"brokerName": "pair", "brokerRole": "ASYNC_MASTER", "haListenPort": port}
    lower = {
        "brokerName": "pair",
        "brokerRole": "SLAVE",
        "brokerId": 1,
        "haMasterAddress": f"127.0.0.1:{port}",
        "maxMessageSize": 4_096,
    }
    with RunningBroker(tmp_path / "master", its) as master:
        master.create_topic("t")
        sent = master.send("t", 0, [LARGE, SMALL])
        with RunningBroker(tmp_path / "slave", lower) as slave:
            end, deadline = master.counter(Counter.WROTE), time.monotonic() + WAIT_S
            while slave.counter(Counter.WROTE) < end:
                assert time.monotonic() < deadline, slave.log
                time.sleep(0.02)
            slave.assert_stored(sent)
