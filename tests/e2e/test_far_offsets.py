"""Offsets behind the end of a queue: no group is held up by one (Fault 17)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from family import RunningBroker
from patience import patient

from cometmq import Consumer, PopConsumer, Producer
from cometmq.protocol.commands import (
    BeginGroup,
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
)

WAIT_S = patient(60)
FAR = [(1 << 63) - 1, 1 << 62, 1_000_000]
_names = (f"far-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("far") / "store") as running:
        yield running


@pytest.fixture
def name(broker: RunningBroker) -> str:
    """Of a topic with one queue and one message, and of a group."""
    found = next(_names)
    broker.create_topic(found, 1)
    with Producer(broker.ready.name_server) as producer:
        producer.send(found, b"before")
    return found


def progress(broker: RunningBroker, name: str) -> int:
    answer = broker.ask("coordinator", FetchOffsets(name, [QueueKey(name, 0)]))
    assert isinstance(answer, GroupOffsets)
    return answer.offsets[0].queue_offset


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("command", [BeginGroup, CommitOffsets])
def test_pop_group_goes_on_at_the_end(
    broker: RunningBroker, name: str, command: type[BeginGroup | CommitOffsets], orderly: bool,
    far: int,
) -> None:  # fmt: skip
    if orderly:
        with PopConsumer(broker.ready.name_server, name, name, orderly=True) as consumer:
            (message,) = consumer.poll(1, timeout_s=WAIT_S)
            consumer.ack(message)
    broker.ask("coordinator", command(name, [QueueOffset(name, 0, far)]))
    with (
        PopConsumer(broker.ready.name_server, name, name, orderly=orderly) as consumer,
        Producer(broker.ready.name_server) as producer,
    ):
        assert consumer.poll(1, timeout_s=0) == []
        for number in range(3):
            producer.send(name, b"%d" % number)
            (message,) = consumer.poll(1, timeout_s=WAIT_S)
            assert message.body == b"%d" % number
            consumer.ack(message)
    assert progress(broker, name) == 4


@pytest.mark.parametrize("far", FAR)
def test_group_that_shares_queues_goes_on_at_the_end(
    broker: RunningBroker, name: str, far: int
) -> None:
    broker.ask("coordinator", CommitOffsets(name, [QueueOffset(name, 0, far)]))
    with Producer(broker.ready.name_server) as producer:
        for number in range(2):
            with Consumer(broker.ready.name_server, name, name) as consumer:
                if not number:
                    assert consumer.poll(1, timeout_s=0.5) == []  # it looks where the queue ends
                producer.send(name, b"%d" % number)
                (message,) = consumer.poll(1, timeout_s=WAIT_S)
                assert message.body == b"%d" % number
                consumer.ack(message)
                consumer.commit()
            assert progress(broker, name) == 2 + number
