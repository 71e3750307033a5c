"""What is called with arguments of the wrong kind says so, in an error of ours, before it acts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import sentinel

import pytest
from client_fakes import Handle, fake_broker

from cometmq import Broker
from cometmq.client import Admin, AsyncConsumer, AsyncProducer, Consumer, Producer
from cometmq.protocol.commands import SendMessages
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageIllegal,
    NameIllegal,
    NotReachable,
    SubscriptionIllegal,
)
from cometmq.protocol.wire.channel import Channel


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


ADDRESSES: list[Any] = [
    "http://127.0.0.1:9876",
    "https://broker.example",
    "tcp://",
    "tcp://:9876",
    "tcp://host:0",
    "tcp://host:70000",
    "host:port",
    "host:98 76",
    "two words",
    "host/path",
    "user@host:1",
    "inproc://x",
    "ipc://",
    "",
    {"host": "127.0.0.1"},
    {},
    [],
    [5],
    ["127.0.0.1", None],
    None,
    5,
    9876.0,
    b"127.0.0.1:9876",
    sentinel.address,
]


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        Producer,
        Admin,
        AsyncProducer,
        lambda at: Consumer(at, "g"),
        lambda at: AsyncConsumer(at, "g"),
    ],
    ids=["Producer", "Admin", "AsyncProducer", "Consumer", "AsyncConsumer"],
)
def test_an_address_that_is_none(make: Callable[[Any], Any], address: Any) -> None:
    with pytest.raises(ArgumentIllegal, match=r"name.server"):
        make(address)


def test_an_address_that_only_zeromq_finds_fault_with() -> None:
    with pytest.raises(NotReachable, match="no address to connect to"):
        Channel("nothing://here")


SETTINGS: list[dict[str, Any]] = [
    {"linger_ms": "5"},
    {"linger_ms": -1},
    {"linger_ms": None},
    {"linger_ms": float("nan")},
    {"timeout_s": float("nan")},
    {"wait_for_broker": float("nan")},
    {"timeout_s": "3"},
    {"timeout_s": 0},
    {"retry_max": 1.5},
    {"batch_bytes": "1 MiB"},
    {"batch_bytes": 0},
    {"batch_count": 0},
    {"max_in_flight_bytes": None},
    {"max_message_bytes": True},
    {"transport": 5},
    {"transport": "udp"},
    {"transprot": "zmq"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_settings_of_a_producer(kind: type, settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentIllegal, match=next(iter(settings))):
        kind("127.0.0.1", **settings)


def without_addresses(value: object) -> str:
    """An id that is the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


SENT: list[tuple[dict[str, Any], type[CometError]]] = [
    ({"topic": ["t"]}, NameIllegal),
    ({"topic": None}, NameIllegal),
    ({"topic": {"t": 1}}, NameIllegal),
    ({"topic": b"t"}, NameIllegal),
    ({"topic": ""}, NameIllegal),
    ({"body": "text"}, ArgumentIllegal),
    ({"body": None}, ArgumentIllegal),
    ({"body": 5}, ArgumentIllegal),
    ({"body": [1, 2]}, ArgumentIllegal),
    ({"body": {"a": 1}}, ArgumentIllegal),
    ({"body": memoryview(b"abcdef")[::2]}, ArgumentIllegal),
    ({"tags": "\ud800"}, MessageIllegal),
    ({"ordering_key": "\ud800"}, MessageIllegal),
    ({"keys": "\ud800"}, MessageIllegal),
    ({"keys": ["a", "\ud800"]}, MessageIllegal),
    ({"properties": {"a": "\ud800"}}, MessageIllegal),
    ({"properties": {"\ud800": "a"}}, MessageIllegal),
    ({"tags": ["a"]}, ArgumentIllegal),
    ({"tags": b"a"}, ArgumentIllegal),
    ({"tags": "a || b"}, MessageIllegal),
    ({"tags": "a||b"}, MessageIllegal),
    ({"keys": 5}, ArgumentIllegal),
    ({"keys": [5]}, ArgumentIllegal),
    ({"keys": b"k"}, ArgumentIllegal),
    ({"properties": ["a"]}, ArgumentIllegal),
    ({"properties": "a=b"}, ArgumentIllegal),
    ({"properties": {"a": 5}}, ArgumentIllegal),
    ({"properties": {5: "a"}}, ArgumentIllegal),
    ({"properties": {"DELAY": "3"}}, MessageIllegal),
    ({"properties": {"a": "b", "TIMER_DELIVER_MS": "3"}}, MessageIllegal),
    ({"properties": {"TIMER_DELAY_MS": "3"}}, MessageIllegal),
    ({"properties": {"TIMER_DELAY_SEC": "3"}}, MessageIllegal),
    ({"properties": {"TRAN_MSG": "true"}}, MessageIllegal),
    ({"properties": {"TAGS": "a"}}, MessageIllegal),
    ({"ordering_key": 5}, ArgumentIllegal),
    ({"queue_id": "0"}, ArgumentIllegal),
    ({"queue_id": True}, ArgumentIllegal),
    ({"queue_id": 99}, ArgumentIllegal),
    ({"flag": "1"}, ArgumentIllegal),
    ({"flag": 1 << 31}, ArgumentIllegal),
    ({"wait": "yes"}, ArgumentIllegal),
]


@pytest.mark.parametrize(("given", "kind"), SENT, ids=without_addresses)
@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.slow
def test_what_is_sent(
    broker: Handle, given: dict[str, Any], kind: type[CometError], linger_ms: float
) -> None:
    arguments: dict[str, Any] = {"topic": "t", "body": b"x"} | given
    with Producer(broker.address, linger_ms=linger_ms) as producer:
        for _ in range(2):  # into an open batch as well
            for method in (producer.send, producer.send_async):
                with pytest.raises(kind):
                    method(**arguments)
            if "wait" not in given:
                with pytest.raises(kind):
                    producer.send_oneway(**arguments)
            if given.get("body", b"x") == b"x":
                many = {**arguments, "bodies": [b"x"]}
                del many["body"]
            else:
                many = {**arguments, "bodies": [b"x", arguments.pop("body")]}
                arguments["body"] = given["body"]
                del many["body"]
            with pytest.raises(kind):
                producer.send_many(**many)
            if not linger_ms:
                continue
            assert producer.send("t", b"fine", queue_id=0).wait()
        assert broker.broker.bodies("t", 0) == [b"fine"] * (2 if linger_ms else 0)
        assert linger_ms or not broker.asked(SendMessages)

    async def main() -> None:
        async with AsyncProducer(broker.address, linger_ms=linger_ms) as twin:
            with pytest.raises(kind):
                await twin.send(**arguments)
            with pytest.raises(kind):
                await (await twin.send_async(**arguments))

    asyncio.run(main())


@pytest.mark.parametrize("bodies", [b"x", "text", 5, None, {"a": b"x"}, (b"x" for _ in range(2))])
def test_many_that_are_no_sequence(broker: Handle, bodies: Any) -> None:
    with Producer(broker.address) as producer, pytest.raises(ArgumentIllegal, match="bodies"):
        producer.send_many("t", bodies)


CONSUMED: list[tuple[dict[str, Any], type[CometError]]] = [
    ({"group": ["g"]}, NameIllegal),
    ({"group": ""}, NameIllegal),
    ({"group": None, "broadcast": True}, ArgumentIllegal),
    ({"broadcast": 5}, ArgumentIllegal),
    ({"topic": ["t"]}, NameIllegal),
    ({"topic": 5}, NameIllegal),
    ({"tags": ["a"]}, SubscriptionIllegal),
    ({"start": "newest"}, ArgumentIllegal),
    ({"start": None}, ArgumentIllegal),
    ({"auto_commit_ms": "5"}, ArgumentIllegal),
    ({"pull_bytes": 1.5}, ArgumentIllegal),
    ({"prefetch_count": None}, ArgumentIllegal),
    ({"member": 5}, ArgumentIllegal),
    ({"transport": 5}, ArgumentIllegal),
    ({"spin_us": "1"}, ArgumentIllegal),
]


@pytest.mark.parametrize(("given", "kind"), CONSUMED, ids=repr)
def test_what_a_consumer_is_made_of(
    broker: Handle, given: dict[str, Any], kind: type[CometError]
) -> None:
    arguments: dict[str, Any] = {"group": "g", "topic": "t"} | given
    with pytest.raises((kind, ArgumentIllegal)):
        Consumer(broker.address, **arguments)


def test_what_a_consumer_is_asked(broker: Handle) -> None:
    with Consumer(broker.address, "g", "t") as consumer:
        ask: Any = consumer
        calls: list[Callable[[], object]] = [
            lambda: ask.poll("5"),
            lambda: ask.poll(5, "1"),
            lambda: ask.poll(5, float("nan")),
            lambda: ask.ack(5),
            lambda: ask.ack("text"),
            lambda: ask.subscribe(["a", "b"]),
            lambda: ask.subscribe("t", ["a"]),
            lambda: ask.unsubscribe(5),
            lambda: ask.seek([1]),
            lambda: ask.seek("middle"),
            lambda: ask.seek(5),
            lambda: ask.seek("earliest", ["t"]),
            lambda: ask.seek("earliest", "not-read"),
            lambda: ask.seek("earliest", "t", "0"),
        ]
        for call in calls:
            with pytest.raises((ArgumentIllegal, NameIllegal, SubscriptionIllegal)):
                call()


def test_what_an_admin_is_asked(broker: Handle) -> None:
    with pytest.raises(ArgumentIllegal, match="timeout_s"):
        Admin(broker.address, timeout_s="3")  # type: ignore[arg-type]
    with Admin(broker.address) as admin:
        ask: Any = admin
        calls: list[Callable[[], object]] = [
            lambda: ask.create_topic(["a"]),
            lambda: ask.create_topic("a", "8"),
            lambda: ask.create_topic("a", 8, perm="rw"),
            lambda: ask.create_topic("a", 8, broker=5),
            lambda: ask.create_topic("a", quues=8),
            lambda: ask.delete_topic(None),
            lambda: ask.describe_topic({"a": 1}),
            lambda: ask.describe_group(["g"]),
            lambda: ask.queue_range("t", "0"),
            lambda: ask.get_message(5),
            lambda: ask.get_message("no id"),
        ]
        for call in calls:
            with pytest.raises((ArgumentIllegal, NameIllegal)):
                call()
        with Channel(broker.address) as channel, pytest.raises(ArgumentIllegal, match="cannot be"):
            channel.ask(SendMessages([object()], 5))  # type: ignore[list-item]


def test_an_appender_refuses_what_would_be_delivered_at_once(tmp_path: Path) -> None:
    with Broker(tmp_path / "store", settings={"logLevel": "ERROR"}, writer="here") as broker:
        with broker.producer() as producer:
            producer.send("T", b"x", queue_id=0)
        appender = broker.appender("T")
        for tags in ("a || b", "a||b"):
            with pytest.raises(MessageIllegal, match="one tag"):
                appender.append(b"x", tags)
            with pytest.raises(MessageIllegal, match="one tag"):
                appender.append_many([b"x"], tags)
            with pytest.raises(MessageIllegal, match="one tag"):
                appender.append(b"x", tags, properties={"a": "b"})
        for name in ("DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TRAN_MSG"):
            with pytest.raises(MessageIllegal, match="at once"):
                appender.append(b"x", properties={name: "1"})
            with pytest.raises(MessageIllegal, match="at once"):
                appender.append_many([b"x"], properties={name: "1"})
        assert appender.append(b"x", "a") == 1
