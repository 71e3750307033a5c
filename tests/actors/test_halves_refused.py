"""A half message of which the log takes no copy hinders no other transaction, nor its own end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from family import RunningBroker
from transacting import SETTINGS, WAIT_S
from waiting import until

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.client import PendingTransaction, Producer
from cometmq.protocol.commands import (
    Cover,
    EndTransactions,
    TransactionEnd,
    TransactionPart,
    TransactionsEnded,
)
from cometmq.protocol.errors import MessageTooLarge
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.layout import PROPERTIES_MAX_BYTES

GROUP, TOPIC = "shop", "paid"
SEGMENT = 65_536
SMALL, LARGE, FULL, LAST = range(4)  # one that no segment holds with an op, one without room


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    settings = SETTINGS | {
        "mappedFileSizeCommitLog": SEGMENT,
        "maxMessageSize": SEGMENT,
        "transactionTimeOut": 2_000,
    }
    with RunningBroker(tmp_path / "store", settings) as running:
        running.create_topic(TOPIC, 1)
        yield running


def store_halves(broker: RunningBroker) -> list[TransactionPart]:
    """As RocketMQ has stored them, which goes by other limits."""
    for number in range(4):
        properties = (
            f"REAL_TOPIC\1{TOPIC}\2REAL_QID\x010\2TRAN_MSG\1true\2PGROUP\1{GROUP}\2"
            f"UNIQ_KEY\1ID{number}\2"
        ).encode()
        records = InnerRecords()
        body = b"%d" % number
        if number == FULL:
            properties += b"x\1" + b"y" * (PROPERTIES_MAX_BYTES - len(properties) - 3) + b"\2"
        if number == LARGE:
            body = body.ljust(SEGMENT - len(properties) - 150)
        records.encoder.add(records.queue(HALF_TOPIC, 0), body, properties)
        with Channel(broker.address("commitlog")) as channel:
            channel.ask(*records.take(Cover.POLICY), timeout_s=WAIT_S)
    halves = broker.read_queue(HALF_TOPIC, 0, 4)
    return [TransactionPart(TOPIC, each.queue_offset, each.physical_offset) for each in halves]


def committed(broker: RunningBroker) -> list[int]:
    return sorted(int(each.body) for each in broker.read_queue(TOPIC, 0))


def test_an_end_that_is_refused_hinders_no_other(broker: RunningBroker) -> None:
    """Of one command: neither those before it, which are in the same write, nor those behind."""
    parts = store_halves(broker)
    ends = [
        TransactionEnd(f"ID{number}", number != SMALL, [part]) for number, part in enumerate(parts)
    ]
    answer, _ = broker.commitlog.ask(EndTransactions.of(GROUP, ends), timeout_s=WAIT_S)
    assert isinstance(answer, TransactionsEnded)
    assert answer.codes == [0, MessageTooLarge.code, 0, 0], answer.texts
    assert committed(broker) == [FULL, LAST]


@pytest.mark.slow
def test_what_cannot_be_copied_is_asked_for_where_it_is(broker: RunningBroker) -> None:
    """And the others as ever; a word that cannot be carried out is asked for again."""
    asked: Counter[str] = Counter()
    twice = threading.Event()

    def check(pending: PendingTransaction) -> bool:
        asked[pending.id] += 1
        if pending.id != f"ID{LARGE}":
            return True
        if asked[pending.id] > 1:
            twice.set()
        return asked[pending.id] < 3

    server = broker.ready.name_server
    with Producer(server, name=GROUP, checker=check, timeout_s=2) as producer:
        with producer.transaction(TOPIC, b"9"):  # it is known what it sends to
            pass
        store_halves(broker)
        until(lambda: committed(broker) == [SMALL, FULL, LAST, 9], says="the others are there")
        assert twice.wait(WAIT_S)
        statistics = broker.statistics
        until(
            lambda: statistics("commitlog")["transactions_rolled_back"] == 1,
            says="it is rolled back",
        )
    assert not broker.read_queue(GIVEN_UP_TOPIC, 0)
    assert committed(broker) == [SMALL, FULL, LAST, 9]
