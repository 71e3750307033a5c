"""Errors of a closed client: they say that it is closed (Fault 27)."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_fakes import FakeBroker, Handle
from patience import patient

from cometmq import (
    Admin,
    AsyncConsumer,
    AsyncPopConsumer,
    AsyncProducer,
    Broker,
    Consumer,
    PopConsumer,
    Producer,
)
from cometmq.errors import ClientClosed, ClosedUnconfirmed, CometError, NotConfirmed
from cometmq.protocol.commands import SendMessages

PRODUCER: dict[str, Callable[[Any], Any]] = {
    "send": lambda each: each.send("t", b"x"),
    "send to another topic": lambda each: each.send("u", b"x"),
    "send_many": lambda each: each.send_many("t", [b"x"]),
    "send_many of none": lambda each: each.send_many("t", []),
    "send_async": lambda each: each.send_async("t", b"x"),
    "send_oneway": lambda each: each.send_oneway("t", b"x"),
    "request": lambda each: each.request("t", b"x"),
    "transaction": lambda each: each.transaction("t", b"x"),
    "flush": lambda each: each.flush(),
    "wait_for_broker": lambda each: each.wait_for_broker(5),
    "with": lambda each: each.__enter__(),
}
CONSUMER: dict[str, Callable[[Any], Any]] = {
    "poll": lambda each: each.poll(timeout_s=0),
    "subscribe": lambda each: each.subscribe("u"),
    "unsubscribe": lambda each: each.unsubscribe("t"),
    "assign": lambda each: each.assign("t"),
    "pause": lambda each: each.pause([]),
    "resume": lambda each: each.resume([]),
    "position": lambda each: each.position(("b", "t", 0)),
    "ack": lambda each: each.ack([]),
    "commit": lambda each: each.commit(),
    "seek": lambda each: each.seek("latest"),
    "seek_to_time": lambda each: each.seek_to_time(0),
    "run": lambda each: each.run(print),
    "iterate": lambda each: next(iter(each)),
    "wait_for_broker": lambda each: each.wait_for_broker(5),
    "with": lambda each: each.__enter__(),
}
POP_CONSUMER: dict[str, Callable[[Any], Any]] = {
    "poll": lambda each: each.poll(timeout_s=0),
    "ack": lambda each: each.ack(),
    "run": lambda each: each.run(print),
    "with": lambda each: each.__enter__(),
}
ADMIN: dict[str, Callable[[Any], Any]] = {
    "topics": lambda each: each.topics(),
    "create_topic": lambda each: each.create_topic("u"),
    "describe_group": lambda each: each.describe_group("g"),
    "brokers": lambda each: each.brokers(),
    "dead_letters": lambda each: each.dead_letters("g"),
    "scheduled": lambda each: each.scheduled(),
    "with": lambda each: each.__enter__(),
}


def open_client(kind: type, broker: Broker) -> Any:
    if kind is Producer:
        producer = Producer(broker.name_server, name="p")
        producer.send("t", b"x")
        return producer
    return (
        Admin(broker.name_server) if kind is Admin else kind(broker.name_server, kind.__name__, "t")
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, calls in (
            (Producer, PRODUCER),
            (Consumer, CONSUMER),
            (PopConsumer, POP_CONSUMER),
            (Admin, ADMIN),
        )
        for name in calls
    ],
)
def test_closed_client_says_so(broker: Broker, kind: type, name: str) -> None:
    """Each method raises ClientClosed; a closed Admin said that no name server answers."""
    calls = {Producer: PRODUCER, Consumer: CONSUMER, PopConsumer: POP_CONSUMER, Admin: ADMIN}
    client = open_client(kind, broker)
    client.close()
    client.close()  # may be called twice
    with pytest.raises(ClientClosed, match="closed"):
        calls[kind][name](client)


ASYNC: dict[type, dict[str, Callable[[Any], Any]]] = {
    AsyncProducer: {
        "send": lambda each: each.send("t", b"x"),
        "send_async": lambda each: each.send_async("t", b"x"),
        "send_many": lambda each: each.send_many("t", [b"x"]),
        "send_oneway": lambda each: each.send_oneway("t", b"x"),
        "request": lambda each: each.request("t", b"x"),
        "flush": lambda each: each.flush(),
        "with": lambda each: each.__aenter__(),
    },
    AsyncConsumer: {
        "poll": lambda each: each.poll(timeout_s=0),
        "commit": lambda each: each.commit(),
        "ack": lambda each: each.ack([]),
        "subscribe": lambda each: each.subscribe("u"),
        "unsubscribe": lambda each: each.unsubscribe("t"),
        "seek": lambda each: each.seek("latest"),
        "iterate": lambda each: anext(aiter(each)),
        "run": lambda each: each.run(_handle),
        "with": lambda each: each.__aenter__(),
    },
    AsyncPopConsumer: {
        "poll": lambda each: each.poll(timeout_s=0),
        "ack": lambda each: each.ack(),
        "run": lambda each: each.run(_handle),
        "with": lambda each: each.__aenter__(),
    },
}


async def _handle(_message: object) -> None: ...


async def _call(method: Callable[[Any], Any], client: object) -> None:
    found = method(client)
    if inspect.isawaitable(found):
        await found


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, calls in ASYNC.items() for name in calls]
)
def test_closed_asyncio_client_says_so(broker: Broker, kind: type, name: str) -> None:
    async def run() -> None:
        if kind is AsyncProducer:
            client: Any = AsyncProducer(broker.name_server)
        else:
            client = kind(broker.name_server, kind.__name__, "t")
        async with client:
            if kind is AsyncProducer:
                await client.send("t", b"x")
        with pytest.raises(ClientClosed, match="closed"):
            await _call(ASYNC[kind][name], client)

    asyncio.run(run())


@pytest.fixture
def silent() -> Iterator[Handle]:
    """A broker that never answers sends."""
    handle = Handle(FakeBroker.start(topics=["t"], faults=[None, "silent", "silent", "silent"]))
    yield handle
    handle.stop()


def test_send_that_is_under_way_says_that_it_may_be_stored(silent: Handle) -> None:
    producer = Producer(silent.address, timeout_s=patient(60))
    producer.send("t", b"first")
    raised: list[CometError] = []

    def send() -> None:
        try:
            producer.send("t", b"second")
        except CometError as error:
            raised.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    silent.wait_for(lambda _: len(silent.asked(SendMessages)) > 1)
    producer.close()
    thread.join(patient(30))
    (error,) = raised
    assert isinstance(error, ClosedUnconfirmed)
    assert isinstance(error, ClientClosed)
    assert isinstance(error, NotConfirmed)
    assert not error.retriable


def test_question_of_another_thread_ends_when_the_client_is_closed() -> None:
    admin = Admin("tcp://127.0.0.1:1", timeout_s=patient(60))  # no server listens there
    raised: list[CometError] = []

    def ask() -> None:
        try:
            admin.topics()
        except CometError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not admin._routes._channels:
        thread.join(0.01)
    admin.close()
    thread.join(patient(30))
    assert [type(each) for each in raised] == [ClientClosed]


def test_it_is_still_a_runtime_error() -> None:
    """ClientClosed is a RuntimeError, which earlier releases raised."""
    assert issubclass(ClientClosed, RuntimeError)
