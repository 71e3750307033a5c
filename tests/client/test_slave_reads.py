"""Reading from slaves: when the master says so, and while it does not answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from client_fakes import Handle, fake_broker
from family import RunningBroker
from patience import patient
from receiving import take

from cometmq.client import Consumer, Message, Producer
from cometmq.client.receiving import replicas
from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.pulling import Puller
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    JoinGroup,
    PullMessages,
    PullStatus,
)
from cometmq.protocol.errors import NotConfirmed, NotReachable, ServiceNotAvailable
from cometmq.shm.os.memory import memory_of
from cometmq.shm.reading.mapped_reader import Found

QUEUES = 2


@dataclass
class Pair:
    """A name server that goes on whoever dies, a master, and a slave of it."""

    names: Handle
    master: Handle
    slave: Handle

    def send(self, count: int) -> None:
        """To the master; the slave has it, too."""
        with Producer(self.names.address) as producer:
            for number in range(count):
                producer.send("t", str(number).encode(), queue_id=number % QUEUES).wait()
        copy(self.master, self.slave, count)


def copy(source: Handle, target: Handle, count: int) -> None:
    """The first so many records of all queues together; who waits for them gets them."""
    share = count // QUEUES
    records = {key: found[:share] for key, found in source.broker.records.items()}
    target.do(lambda fake: fake.records.update(records))
    target.do(lambda fake: fake._serve_parked())


@pytest.fixture
def pair() -> Iterator[Pair]:
    served = {"queues": QUEUES, "topics": ["t"]}
    with (
        fake_broker(name="names", create=False) as names,
        fake_broker(name="b", **served) as master,
        fake_broker(name="b", broker_id=1, **served) as slave,
    ):
        names.broker.peers = [master.broker, slave.broker]
        yield Pair(names, master, slave)


def numbers(messages: list[Message]) -> list[int]:
    return sorted(int(each.body) for each in messages)


def test_the_master_is_read_while_it_answers(pair: Pair) -> None:
    pair.send(20)
    with Consumer(pair.names.address, "g", "t") as consumer:
        assert numbers(take(consumer, 20)) == list(range(20))
    assert not pair.slave.asked(PullMessages)


def test_a_slave_is_read_while_the_master_is_away(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "PASSED_OVER_S", 0.01)
    caplog.set_level(logging.INFO, "cometmq.client.receiving.replicas")
    pair.send(30)
    with fake_broker(name="all") as kept:  # what the master has had
        copy(pair.master, kept, 30)
        copy(kept, pair.master, 10)
        copy(kept, pair.slave, 20)
        with Consumer(pair.names.address, "g", "t", auto_commit_ms=3_600_000) as consumer:
            first = take(consumer, 10)
            pair.master.stop()
            second = take(consumer, 10)
            assert numbers(first + second) == list(range(20))
            consumer.ack(first + second)
            with fake_broker(pair.master.address, name="b", topics=["t"], queues=QUEUES) as again:
                pair.names.broker.peers = [again.broker, pair.slave.broker]
                copy(kept, again, 30)
                copy(kept, pair.slave, 22)  # one of each queue: then the master is asked
                assert numbers(take(consumer, 10)) == list(range(20, 30))
                assert again.asked(PullMessages)
                consumer.commit()
                assert sum(again.broker.offsets.values()) == 20
    texts = [each.getMessage() for each in caplog.records if each.name == replicas.__name__]
    assert [text.partition(":")[0] for text in texts] == [
        "broker b does not answer", "the master of broker b is read again",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_member_keeps_its_queues_when_the_name_server_has_lost_the_master(pair: Pair) -> None:
    """Commits wait for a master; no slave is asked for them."""
    pair.send(20)
    copy(pair.slave, pair.master, 10)
    with Consumer(pair.names.address, "g", "t", auto_commit_ms=50) as consumer:
        found = take(consumer, 10)
        pair.master.stop()
        pair.names.broker.peers = [pair.slave.broker]
        consumer.ack(found + take(consumer, 10))
        with pytest.raises((NotConfirmed, NotReachable)):
            consumer.commit()
        assert len(consumer.assignment) == QUEUES
        assert not pair.slave.asked(JoinGroup)
        assert not pair.slave.asked(CommitOffsets)


def test_a_group_is_joined_when_its_broker_has_a_master(
    pair: Pair,
) -> None:
    pair.send(10)
    pair.names.broker.peers = [pair.slave.broker]
    pair.slave.broker.join_error = ServiceNotAvailable("a slave")
    with Consumer(pair.names.address, "g", "t") as consumer:
        pair.slave.wait_for(lambda fake: any(isinstance(x, JoinGroup) for x in fake.commands))
        assert not consumer.poll(timeout_s=0.2)
        pair.names.broker.peers = [pair.master.broker, pair.slave.broker]
        assert len(take(consumer, 10)) == 10


@pytest.mark.slow
def test_without_a_group_a_slave_is_enough(pair: Pair) -> None:
    pair.send(20)
    pair.master.stop()
    with Consumer(pair.names.address, None) as consumer:
        consumer.assign("t")
        assert numbers(take(consumer, 20)) == list(range(20))


def test_a_slave_that_is_behind_moves_nobody(pair: Pair) -> None:
    """It has no message yet of what the master has handed out: that is no reason to go back."""
    pair.send(20)
    with Consumer(pair.names.address, "g", "t") as consumer:
        assert len(take(consumer, 20)) == 20
        pair.slave.do(lambda fake: fake.records.clear())
        pair.master.stop()
        deadline = time.monotonic() + patient(30)
        while not pair.slave.asked(PullMessages):
            assert not consumer.poll(timeout_s=0.1)
            assert time.monotonic() < deadline
        assert not consumer.poll(timeout_s=0.5)


@pytest.mark.parametrize("far_from", [1, 0])
def test_what_lies_far_back_is_read_where_the_group_says(pair: Pair, far_from: int) -> None:
    pair.master.broker.far_behind = True
    pair.master.broker.reads = 0, far_from
    pair.send(20)
    with Consumer(pair.names.address, "g", "t", pull_bytes=150) as consumer:
        assert numbers(take(consumer, 20)) == list(range(20))
    assert bool(pair.slave.asked(PullMessages)) == bool(far_from)
    assert pair.master.asked(PullMessages)


def test_a_group_that_reads_from_a_slave_as_a_rule(pair: Pair) -> None:
    pair.master.broker.reads = 1, 1
    pair.send(20)
    with Consumer(pair.names.address, "g", "t", pull_bytes=150) as consumer:
        assert numbers(take(consumer, 20)) == list(range(20))
    assert pair.slave.asked(PullMessages)


# --- what a real broker says ---


@pytest.mark.slow
@pytest.mark.parametrize(("reads_from", "moves"), [("slave", False), ("master", True)])
def test_a_mapped_slave_that_is_behind_moves_nobody(reads_from: str, moves: bool) -> None:
    """Nor does one whose store is mapped: it may know less to be confirmed than the master did."""
    queue = Mock(spec=Queue, next_offset=316, failures=0, epoch=0, replica=1)
    queue.reads_from.return_value, queue.endpoints.return_value = reads_from, "master"
    queue.chunks, queue.doubtful, queue.seen = set(), False, None
    queue.doubt.side_effect = lambda: setattr(queue, "doubtful", True)
    puller = Mock(spec=Puller, _lock=threading.Lock(), _mapped=None)
    for name in ("_take", "_moved", "_doubt"):
        setattr(puller, name, partial(getattr(Puller, name), puller))
    Puller.take_found(puller, queue, 0, Found(PullStatus.OFFSET_MOVED, 315, 0, 315, [], 0))
    assert queue.doubtful == moves
    assert puller.failed.called != moves


@pytest.mark.parametrize("advises", [True, False])
@pytest.mark.slow
def test_a_broker_says_what_lies_far_back(tmp_path: Path, advises: bool) -> None:
    settings = {
        "slaveReadEnable": advises,
        "accessMessageInMemoryMaxRatio": 1,
        "mappedFileSizeCommitLog": 64 << 20,
        "maxMessageSize": 1 << 20,
    }
    body = bytes(1_000_000)
    count = memory_of("MemTotal") // 100 // len(body) + 8
    with RunningBroker(tmp_path / "store", settings) as broker:
        with Producer(broker.address("namesrv")) as producer:
            producer.send_many("far", [body] * count, queue_id=0)
        reader = broker.reader
        said = [
            reader.ask(PullMessages("far", 0, at, 1), timeout_s=patient(60))[0].far_behind
            for at in (0, count - 1)
        ]
    assert said == [advises, False]


# --- the rule ---


def ends(broker_id: int) -> BrokerEndpoints:
    at = f"tcp://127.0.0.1:{7_000 + broker_id}"
    return BrokerEndpoints("c", "b", broker_id, at, [at], at)


def test_the_first_that_answers_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now[0])
    found = Replicas([ends(0), ends(1), ends(3)])
    assert found.answered(0, is_far_behind=False) == 0
    assert found.answered(0, is_far_behind=True) == 1
    assert found.answered(1, is_far_behind=False) == 0  # it has caught up
    assert found.missed(0) == 1
    assert found.missed(1) == 3
    assert found.missed(3) == 0  # none answers: the master, as ever
    now[0] += replicas.PASSED_OVER_S
    assert found.answered(3, is_far_behind=False) == 0
    found.far = 2  # which is not there
    assert found.answered(0, is_far_behind=True) == 0


def test_a_master_that_is_not_in_the_route_is_still_the_master() -> None:
    found = Replicas([ends(0), ends(1)])
    found.update([ends(1), ends(2)])
    assert found.master == ends(0)
    assert [each.broker_id for each in found.all()] == [0, 1, 2]
    assert (found.at(2), found.at(7)) == (ends(2), ends(0))
    found.update([ends(0)])
    assert found.all() == (ends(0),)


def test_of_slaves_alone_the_first_counts_until_there_is_a_master() -> None:
    found = Replicas([ends(1), ends(2)])
    assert found.master == ends(1)
    found.update([ends(2)])
    assert found.master == ends(2)
    found.update([ends(0), ends(2)])
    assert found.master == ends(0)
