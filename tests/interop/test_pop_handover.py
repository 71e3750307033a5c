"""Retries of a group without queues, handed over between CometMQ and a real RocketMQ, whose POP
consumers receive all of them (Fault 2)."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from interop import peers, rocketmq
from interop.handover import OURS, THEIRS
from interop.real import RealRocketMQ
from patience import patient
from waiting import until

from cometmq.client import Admin, PopConsumer, Producer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jvm,
    pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 400),
]
WAIT_S = patient(90.0)
GROUP, TOPIC = "workers", "jobs"
COUNT = 30
BODIES = [f"job {number}" for number in range(COUNT)]
CLUSTER = {"brokerClusterName": "interop"}
POPPING = {"defaultMessageRequestMode": "POP"}


def consumed(events: Iterable[dict[str, Any]]) -> set[str]:
    return {
        base64.b64decode(event["body"]).decode()
        for event in events
        if event["kind"] == "consumed" and event["group"] == GROUP
    }


def failed(events: Iterable[dict[str, Any]]) -> set[str]:
    return {
        base64.b64decode(event["body"]).decode() for event in events if event["kind"] == "failed"
    }


def consume_all(rocket: RealRocketMQ, store: Path, wanted: set[str], **settings: str) -> None:
    """Consume with RocketMQ's POP consumers until all wanted messages have arrived."""
    rocket.start(store, THEIRS | CLUSTER | POPPING | settings, TOPIC)
    rocket.consume(GROUP, {TOPIC: ""}, pop=1)
    rocket.wait(lambda events: wanted <= consumed(events))
    rocket.stop()


def test_what_our_consumers_give_back(tmp_path: Path) -> None:
    """A third each is acknowledged, given back, and left to expire: RocketMQ gets the last two.

    RocketMQ has enableRetryTopicV2 here; the next test shows that it finds them without it.
    """
    peers.require("rocketmq")
    store = tmp_path / "store"
    with RunningBroker(store, OURS | CLUSTER) as broker, Admin(broker.ready.name_server) as admin:
        server = broker.ready.name_server
        admin.create_topic(TOPIC, queues=2)
        with Producer(server) as producer:
            producer.send_many(TOPIC, [body.encode() for body in BODIES])
        taken = []
        with PopConsumer(server, GROUP, TOPIC, invisible_s=5) as consumer:
            while len(taken) < COUNT:
                taken += consumer.poll(COUNT, WAIT_S)
            third = COUNT // 3
            consumer.ack(*taken[:third])
            for message in taken[third : 2 * third]:
                consumer.nack(message, after=0)
        retry = f"%RETRY%{GROUP}_{TOPIC}"
        until(
            lambda: (
                retry in admin.topics() and admin.describe_topic(retry).message_count == 2 * third
            ),
            says="all are there again",
        )
    with RealRocketMQ(tmp_path / "jvm") as rocket:
        wanted = {message.body.decode() for message in taken[third:]}
        consume_all(rocket, store, wanted, enableRetryTopicV2="true")


def test_what_rocketmq_had_popped_comes_back_to_it(tmp_path: Path) -> None:
    """CometMQ revives messages from RocketMQ's check points; RocketMQ then gets all of them."""
    peers.require("rocketmq")
    store = tmp_path / "store"
    with RunningBroker(store, OURS | CLUSTER) as broker, Admin(broker.ready.name_server) as admin:
        admin.create_topic(TOPIC, queues=2)
        with Producer(broker.ready.name_server) as producer:
            for body in BODIES:
                producer.send(TOPIC, body.encode(), properties={"fails": "1"})
    with RealRocketMQ(tmp_path / "jvm") as rocket:
        rocket.start(store, THEIRS | CLUSTER | POPPING, TOPIC)
        rocket.consume(GROUP, {TOPIC: ""}, pop=1)
        rocket.wait(lambda events: len(failed(events)) == COUNT)
        rocket.stop()
        retry = f"%RETRY%{GROUP}_{TOPIC}"
        with (
            RunningBroker(store, OURS | CLUSTER) as broker,
            Admin(broker.ready.name_server) as admin,
        ):
            until(
                lambda: (
                    retry in admin.topics() and admin.describe_topic(retry).message_count >= COUNT
                ),
                says="all are revived",
            )
        consume_all(rocket, store, set(BODIES))


def test_what_rocketmq_gives_back_comes_to_ours(tmp_path: Path) -> None:
    """Retry topics of RocketMQ's second name are read; the first is the name that CometMQ uses."""
    peers.require("rocketmq")
    store = tmp_path / "store"
    with RunningBroker(store, OURS | CLUSTER) as broker:
        server = broker.ready.name_server
        with Admin(server) as admin, Producer(server) as producer:
            admin.create_topic(TOPIC, queues=1)
            for body in BODIES:
                producer.send(TOPIC, body.encode(), properties={"fails": "9"})
    retry = f"%RETRY%{GROUP}+{TOPIC}"
    with RealRocketMQ(tmp_path / "jvm") as rocket:
        rocket.start(store, THEIRS | CLUSTER | POPPING | {"enableRetryTopicV2": "true"}, TOPIC)
        rocket.consume(GROUP, {TOPIC: ""}, pop=1)
        rocket.wait(lambda events: len(failed(events)) == COUNT)
        until(lambda: retry in rocket.state()["topics"]["topicConfigTable"], says="one is revived")
        rocket.stop()
    found: set[str] = set()
    with (
        RunningBroker(store, OURS | CLUSTER) as broker,
        PopConsumer(broker.ready.name_server, GROUP, TOPIC) as consumer,
    ):
        deadline = time.monotonic() + WAIT_S
        while found < set(BODIES):
            assert time.monotonic() < deadline, set(BODIES) - found
            for message in consumer.poll(COUNT, timeout_s=1):
                found.add(message.body.decode())
                consumer.ack(message)
