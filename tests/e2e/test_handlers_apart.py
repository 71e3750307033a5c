"""Handlers in processes of their own, which are stopped, killed and interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import handler_child
import pytest
from patience import patient
from still import wait_stopped

from cometmq.broker import Broker
from cometmq.client import Admin, Message

pytestmark = [pytest.mark.timeout(120)]

COUNT = 100
WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"consumerSessionTimeout": 3_000}
    store = tmp_path_factory.mktemp("apart") / "store"
    with Broker(store, profile="test", settings=settings) as running:
        yield running


def fill(broker: Broker, topic: str, queues: int = 1) -> None:
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic(topic, queues=queues)
        for number in range(COUNT):
            producer.send(topic, b"%d" % number, queue_id=number % queues)


@contextmanager
def child_of(
    target: Callable[..., None], broker: Broker, group: str, topic: str
) -> Iterator[tuple[SpawnProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(broker.name_server, group, topic, theirs))
    child.start()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


def heard(line: Connection) -> tuple[str, Any]:
    assert line.poll(WAIT_S), "the child says nothing"
    found: tuple[str, Any] = line.recv()
    return found


def committed(broker: Broker, group: str, topic: str) -> list[int]:
    with Admin(broker.name_server) as admin:
        return list(admin.committed(group, topic).values())


def test_a_stopped_member_hands_out_nothing_more_of_what_it_lost(broker: Broker) -> None:
    fill(broker, "stopped")
    with child_of(handler_child.stop_in_the_sixth, broker, "g", "stopped") as (child, line):
        for number in range(handler_child.STOP_AT + 1):
            assert heard(line) == ("handles", number)
        assert child.pid is not None
        wait_stopped(child.pid)
        over = threading.Event()
        seen: list[int] = []

        def handle(message: Message) -> None:
            seen.append(message.queue_offset)
            if message.queue_offset == COUNT - 1:
                over.set()

        with broker.consumer("g", "stopped", member="a") as other:
            thread = threading.Thread(target=lambda: other.run(handle, orderly=True))
            thread.start()
            assert over.wait(WAIT_S)
            os.kill(child.pid, signal.SIGCONT)
            assert heard(line) == ("lost", None)  # and nothing else before
            assert heard(line) == ("ended", None)
            other.close()
            thread.join(WAIT_S)
        assert seen == list(range(seen[0], COUNT))
        assert seen[0] <= handler_child.STOP_AT
    assert committed(broker, "g", "stopped") == [COUNT]


def test_ctrl_c_finishes_what_is_at_work(broker: Broker) -> None:
    fill(broker, "interrupted")
    with child_of(handler_child.wait_for_ctrl_c, broker, "g", "interrupted") as (child, line):
        assert heard(line) == ("at work", None)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        assert heard(line) == ("interrupted", None)
        child.join(WAIT_S)
        assert child.exitcode == 0
    assert committed(broker, "g", "interrupted") == [4]  # nobody began anything more


def test_a_member_that_is_killed(broker: Broker) -> None:
    """What it had not done is done by the other; nothing is left out."""
    fill(broker, "killed", queues=4)
    done: set[int] = set()
    with child_of(handler_child.hang_after_ten, broker, "g", "killed") as (first, line):
        for _ in range(10):
            done.add(heard(line)[1])
        with child_of(handler_child.handle_all, broker, "g", "killed") as (_, other):
            first.kill()
            first.join()
            while len(done) < COUNT:
                done.add(heard(other)[1])
    assert done == set(range(COUNT))
