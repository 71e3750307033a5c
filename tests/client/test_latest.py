"""`start="latest"`: messages sent after the constructor, and all messages of queues that are added
later (Fault 6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from patience import patient

from cometmq import Admin, Broker
from cometmq.client import AsyncConsumer, AsyncPopConsumer, Consumer, Message, PopConsumer
from cometmq.client.receiving.beginning import Beginning
from cometmq.protocol.commands import BeginGroup, Command
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.wire.channel import Channel
from cometmq.testing import Sandbox

WAIT_S = patient(60)
KINDS = ["group", "assigned", "broadcast"]


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    name = cometmq.topic("latest", queues=2)
    send(cometmq.broker, name, 2, "old")
    return name


def send(broker: Broker, topic: str, queues: int, what: str = "new") -> list[str]:
    """Send five messages to each of the first `queues` queues."""
    with broker.producer() as producer:
        for queue_id in range(queues):
            for number in range(5):
                producer.send(topic, f"{what}-{queue_id}-{number}".encode(), queue_id=queue_id)
    return sorted(f"{what}-{queue}-{number}" for queue in range(queues) for number in range(5))


def consumer_of(broker: Broker, kind: str, topic: str, folder: Path, start: Any) -> Consumer:
    options: dict[str, Any] = {"start": start}
    if kind == "broadcast":
        options["broadcast"] = folder
    if kind == "assigned":
        consumer = Consumer(broker.name_server, topic, **options)
        consumer.assign(topic)
        return consumer
    return Consumer(broker.name_server, None if kind == "alone" else topic, topic, **options)


def read(poll: Callable[[], list[Message]], count: int) -> list[str]:
    """Return `count` messages, and any that arrive shortly after them."""
    found: list[str] = []
    deadline = time.monotonic() + WAIT_S
    while True:
        messages = poll()
        found += [message.body.decode() for message in messages]
        if not messages and len(found) >= count:
            return sorted(found)
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages have come"


def polling(consumer: Consumer | PopConsumer) -> Callable[[], list[Message]]:
    def poll() -> list[Message]:
        messages = consumer.poll(1024, timeout_s=0.5)
        if not isinstance(consumer, Consumer):
            consumer.ack(*messages)
        elif consumer.group is not None:
            consumer.ack(messages)
        return messages

    return poll


@pytest.mark.parametrize("start", ["latest", "time"])
@pytest.mark.parametrize("kind", [*KINDS, "alone"])
def test_what_is_sent_after_the_constructor_comes(
    broker: Broker, topic: str, tmp_path: Path, kind: str, start: str
) -> None:
    at = "latest" if start == "latest" else datetime.now(UTC)
    for _ in range(3):
        with consumer_of(broker, kind, topic, tmp_path, at) as consumer:
            sent = send(broker, topic, 2)
            assert read(polling(consumer), 10) == sent
        if kind == "alone":
            at = "latest" if start == "latest" else datetime.now(UTC)


@pytest.mark.parametrize("start", ["latest", "time"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_group_gets_all_of_new_queues(
    broker: Broker, topic: str, tmp_path: Path, kind: str, start: str
) -> None:
    """A group without consumers while queues were added receives all of their messages."""
    with consumer_of(broker, kind, topic, tmp_path, "latest") as consumer:
        assert read(polling(consumer), 0) == []
    with Admin(broker.name_server) as admin:
        admin.update_topic(topic, queues=6)
    sent = send(broker, topic, 6)
    at = "latest" if start == "latest" else datetime.now(UTC)
    with consumer_of(broker, kind, topic, tmp_path, at) as consumer:
        assert read(polling(consumer), 30) == sent


def test_members_of_a_new_group_share_one_beginning(broker: Broker, topic: str) -> None:
    """Both members begin at the same offsets, also in queues without commits of the first one."""
    with (
        Consumer(broker.name_server, topic, topic, start="latest") as one,
        Consumer(broker.name_server, topic, topic, start="latest") as two,
    ):
        sent = send(broker, topic, 2)
        polls = [polling(one), polling(two)]
        assert read(lambda: [*polls[0](), *polls[1]()], 10) == sent


def test_a_new_member_brings_no_old_messages(broker: Broker, topic: str) -> None:
    with Consumer(broker.name_server, topic, topic, start="latest"):
        pass
    with Consumer(broker.name_server, topic, topic, start="earliest") as consumer:
        sent = send(broker, topic, 2)
        assert read(polling(consumer), 10) == sent


@pytest.mark.parametrize("orderly", [False, True])
def test_pop_consumer_begins_in_its_constructor(broker: Broker, topic: str, orderly: bool) -> None:
    with PopConsumer(broker.name_server, topic, topic, start="latest", orderly=orderly) as consumer:
        sent = send(broker, topic, 2)
        assert read(polling(consumer), 10) == sent
    with Admin(broker.name_server) as admin:
        admin.update_topic(topic, queues=6)
    sent = send(broker, topic, 6, "more")
    with PopConsumer(broker.name_server, topic, topic, start="latest", orderly=orderly) as consumer:
        assert read(polling(consumer), 30) == sent


@pytest.mark.parametrize("kind", [AsyncConsumer, AsyncPopConsumer])
def test_asyncio_begins_with_async_with(broker: Broker, topic: str, kind: Any) -> None:
    async def work() -> list[str]:
        async with kind(broker.name_server, topic, topic, start="latest") as consumer:
            await asyncio.to_thread(send, broker, topic, 2)
            found: list[str] = []
            while len(found) < 10:
                found += [m.body.decode() for m in await consumer.poll(100, timeout_s=0.5)]
            return sorted(found)

    found = asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert found == sorted(f"new-{queue}-{number}" for queue in range(2) for number in range(5))


def test_a_broker_that_did_not_answer_in_the_constructor(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group begins by time when it joins."""
    begin_at = Beginning._begin_at

    def away(*_: object) -> None:
        monkeypatch.setattr(Beginning, "_begin_at", begin_at)
        raise BadRequest("away")

    monkeypatch.setattr(Beginning, "_begin_at", away)
    time.sleep(0.01)  # the old messages are older than the constructor, by the millisecond
    with Consumer(broker.name_server, topic, topic, start="latest") as consumer:
        sent = send(broker, topic, 2)
        assert read(polling(consumer), 10) == sent


def test_an_older_broker(broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older broker a member begins at the ends of the queues when it joins."""
    ask = Channel.ask

    def older(channel: Channel, command: Command, *rest: Any, **options: Any) -> Any:
        if isinstance(command, BeginGroup):
            raise BadRequest("not a command: Invalid value 179 - at `$[1][0]`")
        return ask(channel, command, *rest, **options)

    monkeypatch.setattr(Channel, "ask", older)
    with Consumer(broker.name_server, topic, topic, start="latest") as consumer:
        assert read(polling(consumer), 0) == []
        sent = send(broker, topic, 2)
        assert read(polling(consumer), 10) == sent
