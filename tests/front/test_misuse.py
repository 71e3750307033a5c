"""Public callables with arguments that they cannot take: one typed error that says what to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

from cometmq import Broker
from cometmq.actors.launch.binding import bind_error
from cometmq.conf import BrokerSettings
from cometmq.errors import (
    ArgumentIllegal,
    CometError,
    ConfigError,
    MessageIllegal,
    ShuttingDown,
)

SMALL = {"mappedFileSizeCommitLog": 8 << 20, "maxMessageSize": 65_536, "mlockEnable": False}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("misuse") / "store"
    with Broker(folder, settings=SMALL, writer="here") as running:
        yield running


# --- Broker: nothing is started -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ({"settings": "flushDiskType=SYNC_FLUSH"}, ArgumentIllegal, "a dict by RocketMQ's keys"),
        ({"settings": ["flushDiskType=SYNC_FLUSH"]}, ArgumentIllegal, "a dict by RocketMQ's keys"),
        ({"settings": {3: 4}}, ArgumentIllegal, "a dict by RocketMQ's keys"),
        ({"settings": BrokerSettings()}, ArgumentIllegal, "a dict by RocketMQ's keys"),
        ({"settings": {"flushDiskType": None}}, ConfigError, "must be ASYNC_FLUSH or SYNC_FLUSH"),
        ({"settings": {"flush_disk_type": "x"}}, ConfigError, "did you mean flushDiskType"),
        ({"settings": {"bindAddress": "0.0.0.0"}}, ConfigError, "set brokerIP1"),
        ({"settings": {"storePathRootDir": "x"}}, ArgumentIllegal, "is the argument `store`"),
        ({"settings": {"port": 1}}, ArgumentIllegal, "is the argument `port`"),
        ({"port": "abc"}, ConfigError, "port = abc: must be a whole number"),
        ({"port": None}, ConfigError, "must be a whole number"),
        ({"port": 70_000}, ConfigError, "must be at most 65535"),
        ({"writer": "there"}, ArgumentIllegal, "'apart' or 'here'"),
    ],
)
def test_arguments_of_a_broker(
    arguments: dict[str, Any], kind: type[CometError], told: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with pytest.raises(kind) as raised:
        Broker(store, **arguments)
    assert told in str(raised.value)
    assert not store.exists()


@pytest.mark.parametrize("store", [None, 3, "", b"/tmp/x", ["store"]])
def test_what_is_no_folder(store: Any) -> None:
    with pytest.raises(ArgumentIllegal, match="the path of a directory"):
        Broker(store)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_store_that_is_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CometError, match=r"a store is a directory|Not a directory"):
        Broker(tmp_path / name, settings=SMALL)
    assert (tmp_path / "file").read_text() == "x"


# --- addresses ------------------------------------------------------------------------------------


def test_an_address_that_the_machine_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:  # of a network for documentation
        Broker(tmp_path / "store", settings=SMALL | {"bindAddress": "203.0.113.7"})
    assert not (tmp_path / "store").exists()
    assert str(raised.value).startswith("bindAddress = 203.0.113.7: ")
    assert "this machine has no such address (Cannot assign requested address); 127" in str(
        raised.value
    )


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = free_ports(4)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError) as raised:
            Broker(tmp_path / "store", port=port, settings=SMALL)
    assert str(raised.value).startswith(f"port = {port}: ")
    assert f"port {port} is taken by process {os.getpid()} (" in str(raised.value)


def test_what_a_child_says_about_its_address() -> None:
    settings = BrokerSettings(port=80)
    said = bind_error(
        "namesrv",
        "tcp://127.0.0.1:80",
        "Permission denied (addr='tcp://127.0.0.1:80')",
        settings,
    )
    assert str(said) == (
        "port = 80: namesrv: this user may not listen on port 80; choose one above 1023"
    )
    assert bind_error("flush", None, "Address already in use", settings) is None
    assert bind_error("namesrv", "tcp://127.0.0.1:80", "out of memory", settings) is None
    said = bind_error("namesrv", "tcp://x:*", "No such device (addr='tcp://x:*')", settings)
    assert str(said).startswith("bindAddress = 127.0.0.1: namesrv: this machine has no such")
    assert (
        bind_error("commitlog", "tcp://127.0.0.1:81", "Permission denied: lock", settings) is None
    )


# --- methods of a broker --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((None,), "topic is one name, not NoneType"),
        ((["a"],), "topic is one name, not list"),
        (("t", "0"), "queue_id is a number from 0, not str"),
        (("t", None), "queue_id is a number from 0, not NoneType"),
        (("t", True), "queue_id is a number from 0, not bool"),
    ],
)
def test_arguments_of_an_appender(broker: Broker, arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ArgumentIllegal, match=f"^{told}$"):
        broker.appender(*arguments)


def test_an_actor_that_is_not_there(broker: Broker) -> None:
    with pytest.raises(ArgumentIllegal, match=r"no role 'reader': it is one of broker, .*reader-0"):
        broker.actor("reader")
    for role in ("broker", "commitlog", "reader-0"):
        broker.actor(role).stop()


def test_a_closed_broker_says_so(tmp_path: Path) -> None:
    closed = Broker(tmp_path / "store", settings=SMALL)
    try:
        with pytest.raises(ArgumentIllegal, match='writer="here"'):
            closed.appender("t")
    finally:
        closed.close()
    calls: list[Callable[[], object]] = [
        closed.producer,
        closed.async_producer,
        lambda: closed.consumer("g", "t"),
        lambda: closed.async_consumer("g", "t"),
        lambda: closed.appender("t"),
        lambda: closed.actor("commitlog"),
    ]
    for call in calls:
        with pytest.raises(ShuttingDown, match="was closed"):
            call()


# --- appending ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ({"body": "text"}, ArgumentIllegal, "a body is bytes-like, not str: encode it first"),
        ({"body": None}, ArgumentIllegal, "a body is bytes-like, not NoneType"),
        ({"body": 3}, ArgumentIllegal, "a body is bytes-like, not int"),
        ({"body": b""}, MessageIllegal, "at least one byte"),
        ({"tags": 3}, ArgumentIllegal, "tags is a text, not int"),
        ({"tags": "a\2b"}, MessageIllegal, "holds 0x01 or 0x02"),
        ({"tags": "\ud800"}, MessageIllegal, "surrogates not allowed"),
        ({"keys": ["a", "b"]}, ArgumentIllegal, "keys is a text, not list; its words stand apart"),
        ({"properties": "a"}, ArgumentIllegal, "properties is a dict of texts, not str"),
        ({"properties": {"a": 1}}, ArgumentIllegal, "property 'a': names and values are text"),
        ({"properties": {1: "a"}}, ArgumentIllegal, "property 1: names and values are text"),
    ],
)
def test_what_is_no_message(
    broker: Broker, arguments: dict[str, Any], kind: type[CometError], told: str
) -> None:
    appender = broker.appender("t")
    first = appender.append(b"before")
    with pytest.raises(kind) as raised:
        appender.append(**{"body": b"x", **arguments})
    assert told in str(raised.value)
    if "body" not in arguments:
        with pytest.raises(kind):
            appender.append_many([b"x"], **arguments)
    assert appender.append(b"after") == first + 1


@pytest.mark.parametrize(
    ("bodies", "told"),
    [
        ("abc", "a body is bytes-like, not str"),
        (b"abc", "append_many takes a list of bodies; append takes one"),
        (None, "not NoneType"),
        ([b"a", "b"], "a body in the list is no bytes"),
        ([b"a", None], "a body in the list is no bytes"),
        (("a" for _ in range(2)), "not generator"),
    ],
)
def test_what_are_no_bodies(broker: Broker, bodies: Any, told: str) -> None:
    appender = broker.appender("t")
    first = appender.append(b"before")
    with pytest.raises(ArgumentIllegal, match=told):
        appender.append_many(bodies)
    assert appender.append(b"after") == first + 1  # all or none
