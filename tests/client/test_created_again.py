"""Running consumers of a topic that is deleted and created again miss none of its messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import wait_dispatched
from patience import patient

from cometmq import Admin, Broker
from cometmq.client import Consumer, PopConsumer

WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("again") / "store", profile="test") as running:
        yield running


def send(broker: Broker, topic: str, bodies: list[bytes]) -> list[bytes]:
    with broker.producer() as producer:
        for body in bodies:
            producer.send(topic, body)
    wait_dispatched(broker)
    return bodies


@pytest.mark.parametrize("kind", ["group", "broadcast", "alone", "pop", "pop in order"])
def test_latest_misses_nothing_of_a_topic_that_is_created_again(
    broker: Broker, kind: str, tmp_path: Path
) -> None:
    """Messages that are sent before the consumer asks for the new topic are delivered, each once;
    so may be those that the deleted topic has left in the log."""
    topic = kind.replace(" ", "-")
    options: dict[str, Any] = {"start": "latest"}
    if kind == "broadcast":
        options["broadcast"] = tmp_path
    if kind == "pop in order":
        options["orderly"] = True
    make: Any = PopConsumer if "pop" in kind else Consumer
    group = None if kind == "alone" else topic
    with Admin(broker.name_server) as admin:
        admin.create_topic(topic, queues=1)
        send(broker, topic, [b"left"] * 3)
        with make(broker.name_server, group, topic, **options) as consumer:
            assert consumer.poll(timeout_s=0) == []
            admin.delete_topic(topic)
            admin.create_topic(topic, queues=1)
            wanted = send(broker, topic, [b"%d" % number for number in range(5)])
            found: list[bytes] = []
            deadline = time.monotonic() + WAIT_S
            while len(found) < len(wanted):
                assert time.monotonic() < deadline, found
                messages = consumer.poll(timeout_s=1)
                found += [message.body for message in messages if message.body != b"left"]
                consumer.ack(*messages) if "pop" in kind else consumer.ack(messages)
            assert found == wanted
