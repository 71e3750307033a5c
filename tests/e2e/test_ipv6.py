"""A broker and its clients over IPv6 (Fault 24)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import cli_process
import pytest
import zmq
from patience import patient

from cometmq import Admin, Broker, Consumer, PopConsumer, Producer
from cometmq.protocol.wire.addresses import allow_ipv6, is_ipv6


def why_not() -> str:
    """Return why this machine has no IPv6; empty: it has."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"::1 cannot be bound on this machine: {error}"
    return ""


needs_ipv6 = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it has IPv6")
SETTINGS: list[dict[str, object]] = [
    {"bindAddress": "::1"},
    {"bindAddress": "[::1]"},
    {"bindAddress": "::", "brokerIP1": "::1"},
]


@pytest.fixture(params=SETTINGS, ids=lambda each: "-".join(each.values()))
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "store", settings=request.param, profile="test") as running:
        yield running


@needs_ipv6
def test_clients_of_all_kinds_work_by_ipv6(broker: Broker) -> None:
    address = broker.name_server
    port = address.rpartition(":")[2]
    assert address == f"tcp://[::1]:{port}"
    with Producer(f"[::1]:{port}", transport="zmq") as producer:
        assert producer.send("t", b"x", queue_id=0).queue_offset == 0
        producer.send_many("t", [b"y"] * 3, queue_id=0)
    with Consumer(address, "g", "t", transport="zmq") as consumer:
        count = 0
        while count < 4:
            messages = consumer.poll(timeout_s=patient(30))
            assert {message.store_host for message in messages} <= {"[0:0:0:0:0:0:0:1]:10911"}
            count += len(messages)
            consumer.ack(messages)
        consumer.commit()
    with PopConsumer(address, "popping", "t") as popping:
        popped = 0
        while popped < 4:
            messages = popping.poll(timeout_s=patient(30))
            popping.ack(*messages)
            popped += len(messages)
    with Admin(address) as admin:
        (endpoints,) = admin.brokers()
        for each in (endpoints.commitlog, endpoints.coordinator, *endpoints.readers):
            assert each.startswith("tcp://[::1]:")
        assert admin.describe_group("g").lag == 0
    done = cli_process.run("topic", "list", "--name-server", f"[::1]:{port}")
    assert done.returncode == 0, done.stderr
    assert b"t" in done.stdout


@needs_ipv6
def test_address_of_all_interfaces_takes_both_kinds(tmp_path: Path) -> None:
    """bindAddress=:: accepts IPv4 as well, with an advertised IPv4 address."""
    settings = {"bindAddress": "::", "brokerIP1": "127.0.0.1"}
    with Broker(tmp_path / "store", settings=settings, profile="test") as broker:
        assert broker.name_server.startswith("tcp://127.0.0.1:")
        with broker.producer(transport="zmq") as producer:
            assert producer.send("t", b"x").queue_offset == 0


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://[::1]:1", True),
        ("tcp://[fe80::1%eth0]:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", True),
        ("tcp://broker.example:1", None),
        ("ipc://x", False),
    ],
)
def test_kinds_of_addresses(endpoint: str, expected: bool | None) -> None:
    assert is_ipv6(endpoint) is expected


def test_name_is_tried_by_both_kinds_in_turn() -> None:
    """A name is tried over IPv4 and IPv6 in turn, since ZeroMQ resolves only one kind."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        for attempt in range(4):
            allow_ipv6(made, "tcp://broker.example:1", attempt)
            found.append(bool(made.get(zmq.IPV6)))
    assert found == [False, True, False, True]
