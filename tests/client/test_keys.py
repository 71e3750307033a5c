"""Keys and properties that could not be found later: they are refused, or documented as omitted
(Fault 31)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import wait_dispatched
from patience import patient

from cometmq import Admin, AsyncProducer, Broker, Producer
from cometmq.errors import ArgumentIllegal

WAIT_S = patient(60)
BAD: list[Any] = [
    ["with blank", "y"], ("y", "with blank"), [" lead"], ["trail "], [""], ["a", ""],
]  # fmt: skip


@pytest.fixture
def producer(broker: Broker) -> Iterator[Producer]:
    with broker.producer(name="keys") as running:
        running.send("t", b"the topic is there")
        yield running


def refuses(keys: Any) -> Any:
    return pytest.raises(ArgumentIllegal, match="empty" if "" in keys else "space, which separates")


@pytest.mark.parametrize("keys", BAD, ids=repr)
def test_key_that_could_not_be_found_is_refused(producer: Producer, keys: Any) -> None:
    before = producer.send("t", b"before", queue_id=0).queue_offset
    with refuses(keys):
        producer.send("t", b"x", keys=keys)
    with refuses(keys):
        producer.send_many("t", [b"x", b"y"], keys=keys)
    with refuses(keys):
        producer.send_async("t", b"x", keys=keys)
    with refuses(keys):
        producer.request("t", b"x", keys=keys, timeout_s=1)
    with refuses(keys), producer.transaction("t", b"x", keys=keys):
        pass
    assert producer.send("t", b"after", queue_id=0).queue_offset == before + 1


@pytest.mark.parametrize("keys", BAD, ids=repr)
def test_asyncio_producer_refuses_it_too(broker: Broker, keys: Any) -> None:
    async def send() -> None:
        async with AsyncProducer(broker.name_server) as producer:
            with refuses(keys):
                await producer.send("t", b"x", keys=keys)
            with refuses(keys):
                await producer.send_many("t", [b"x"], keys=keys)

    asyncio.run(send())


def test_producer_that_stores_once_refuses_it_too(broker: Broker) -> None:
    with broker.producer(dedup="keys") as producer:
        for keys in (["a b"], "a b", [""], ["a", "b"]):
            with pytest.raises(ArgumentIllegal):
                producer.send("t", b"x", keys=keys)


def test_every_word_of_a_text_is_a_key(broker: Broker, producer: Producer) -> None:
    producer.send("t", b"text", keys="three  plain words")
    producer.send("t", b"several", keys=iter(["tab\tinside", "\u3000wide", "last"]))
    wait_dispatched(broker)
    with Admin(broker.name_server) as admin:
        for key, body in (
            ("three", b"text"), ("plain", b"text"), ("words", b"text"),
            ("tab\tinside", b"several"), ("\u3000wide", b"several"), ("last", b"several"),
        ):  # fmt: skip
            assert [each.body for each in found(admin, key)] == [body]


def found(admin: Admin, key: str) -> list[Any]:
    """Query by key until found: keys are indexed after the messages are stored."""
    deadline = time.monotonic() + WAIT_S
    while True:
        messages = admin.query_messages("t", key)
        if messages or time.monotonic() > deadline:
            return messages


def test_query_for_what_cannot_be_a_key_is_refused(broker: Broker, producer: Producer) -> None:
    with Admin(broker.name_server) as admin:
        for key in ("with blank", "", " "):
            with pytest.raises(ArgumentIllegal, match="it would not be found"):
                admin.query_messages("t", key)


def test_appender_takes_keys_as_one_text(tmp_path: Path) -> None:
    with Broker(tmp_path / "store", profile="test", writer="here") as here:
        appender = here.appender("here", 0)
        with pytest.raises(ArgumentIllegal, match="keys is a text"):
            appender.append(b"x", keys=["with blank", "y"])  # type: ignore[arg-type]
        assert appender.append(b"x", keys="two words", properties={"empty": ""}) == 0
        assert "without a value" in (type(appender).append.__doc__ or "")


def test_property_without_a_value_is_left_out(broker: Broker, producer: Producer) -> None:
    """An empty property is omitted, as documented: RocketMQ's decoder ignores it."""
    given = {"empty": "", "full": "x"}
    with broker.consumer("keys", "empties") as consumer:
        producer.send("empties", b"one", properties=given)
        producer.send_many("empties", [b"many"], properties=given)
        messages: list[Any] = []
        while len(messages) < 2:
            messages += consumer.poll(2, timeout_s=WAIT_S)
    for message in messages:
        assert b"empty" not in message.raw_properties
        assert message.properties["full"] == "x"
    assert "Empty values are omitted" in (Producer.send.__doc__ or "")
