"""A consumer that is stopped for longer than its session moves nobody's offset when it goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import paused_child
import pytest
from patience import patient

from cometmq.broker import Broker
from cometmq.client import Admin, Consumer, Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COUNT = 200
KEY = ("broker-a", 0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"consumerSessionTimeout": 3_000, "mappedFileSizeCommitLog": 64 * 1_048_576}
    with Broker(tmp_path_factory.mktemp("broker") / "store", settings=settings) as broker:
        yield broker


def fill(broker: Broker, topic: str) -> None:
    """One queue with `COUNT` messages."""
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic(topic, queues=1)
        producer.send_many(topic, [str(i).encode() for i in range(COUNT)], queue_id=0)


def committed(broker: Broker, group: str, topic: str) -> int:
    with Admin(broker.name_server) as admin:
        (offset,) = admin.committed(group, topic).values()
        return offset


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + patient(30)
    while len(found) < count:
        found += consumer.poll(count - len(found))
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def next_report(line: Connection, kind: str) -> Any:
    assert line.poll(30), f"the child does not report {kind!r}"
    found, value = line.recv()
    assert found == kind, (found, value)
    return value


@contextmanager
def paused(
    target: Callable[..., None], broker: Broker, group: str, topic: str
) -> Iterator[tuple[int, Connection]]:
    """The child's process id, once it has stopped itself, and its line."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(broker.name_server, group, topic, theirs))
    child.start()
    assert child.pid is not None
    try:
        yield child.pid, ours
    finally:
        child.kill()
        child.join()


def test_the_first_offset_of_a_paused_consumer_hides_no_messages(broker: Broker) -> None:
    """It was about to begin at the end when it was stopped; another one has begun at the front."""
    fill(broker, "begun")
    with paused(paused_child.start_at_the_end, broker, "late", "begun") as (pid, line):
        assert next_report(line, "stops") == [COUNT]
        with broker.consumer("late", "begun", member="b", auto_commit_ms=3_600_000) as other:
            other.ack(take(other, COUNT)[:70])
            other.commit()
            assert committed(broker, "late", "begun") == 70
            os.kill(pid, signal.SIGCONT)
            # The queue goes back to it, by its name; it reads on where the group has come to.
            assert next_report(line, "read") == 70
            assert committed(broker, "late", "begun") == 70


def test_a_seek_of_a_paused_consumer_moves_nothing(broker: Broker) -> None:
    fill(broker, "sought")
    with paused(paused_child.seek, broker, "seekers", "sought") as (pid, line):
        assert next_report(line, "stops") == [0]
        with broker.consumer("seekers", "sought", member="b") as other:
            other.ack(take(other, COUNT))
            other.commit()
            os.kill(pid, signal.SIGCONT)
            assert next_report(line, "refused") == "NotOwner"
            assert committed(broker, "seekers", "sought") == COUNT
