"""Several brokers at one name server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from client_fakes import Handle, fake_broker

from cometmq.client import Admin, Consumer, Message, Producer
from cometmq.client.routes import parse_addresses


@pytest.fixture
def brokers() -> Iterator[tuple[Handle, Handle]]:
    """The first is the name server as well."""
    with fake_broker(name="a", port=1) as first, fake_broker(name="b", port=2) as second:
        first.broker.peers = [second.broker]
        yield first, second


def stored(handle: Handle) -> int:
    return sum(len(bodies) for bodies in handle.broker.records.values())


def test_a_new_topic_is_created_everywhere_and_spread(brokers: tuple[Handle, Handle]) -> None:
    first, second = brokers
    with Producer(first.address) as producer:
        receipts = [producer.send("t", b"x") for _ in range(80)]
    assert [stored(first), stored(second)] == [40, 40]
    places = [(each.broker, each.queue_id) for each in receipts]
    assert all(places.count((name, i)) == 10 for name in "ab" for i in range(4))


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_what_any_queue_will_do_for_goes_to_the_broker_that_is_there(
    brokers: tuple[Handle, Handle], linger_ms: float
) -> None:
    first, second = brokers
    with Producer(first.address, timeout_s=30, linger_ms=linger_ms) as producer:
        producer.send("t", b"x").wait()
        second.broker.faults = [14] * 1_000
        for _ in range(20):
            assert producer.send("t", b"x").wait().broker == "a"


def test_acknowledgements_find_their_broker(brokers: tuple[Handle, Handle]) -> None:
    """Both have a queue 0 of the topic."""
    first, _ = brokers
    with Producer(first.address) as producer:
        producer.send_many("t", [b"x"] * 8_000)
        with Producer(first.address, batch_count=1) as single:
            single.send_many("t", [b"y"] * 80)
    with Consumer(first.address, "g", "t", auto_commit_ms=3_600_000) as consumer:
        messages: list[Message] = []
        deadline = time.monotonic() + 60
        while len(messages) < 8_080:
            messages += consumer.poll()
            assert time.monotonic() < deadline
        consumer.ack(messages[:5_000])
        for message in messages[5_000:]:
            consumer.ack(message)
        consumer.commit()
    for handle in brokers:
        for queue_id in range(4):
            count = len(handle.broker.records["t", queue_id])
            assert handle.broker.offsets["g", "t", queue_id] == count > 0


def test_admin_looks_everywhere(brokers: tuple[Handle, Handle]) -> None:
    first, _ = brokers
    with Producer(first.address) as producer:
        producer.send_many("t", [b"x"] * 100)
    with Admin(first.address) as admin:
        topic = admin.describe_topic("t")
        assert (topic.write_queues, topic.message_count) == (8, 100)
        moved = admin.reset_offsets("g", "t", "latest")
        assert sum(moved.values()) == 100
        assert admin.committed("g", "t") == moved
        with pytest.raises(ValueError, match="no broker 'c'"):
            admin.create_topic("u", broker="c")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("host", ["tcp://host:9876"]),
        ("host:1", ["tcp://host:1"]),
        ("tcp://host:1", ["tcp://host:1"]),
        ("ipc:///tmp/x", ["ipc:///tmp/x"]),
        ("a;b:2 ; ", ["tcp://a:9876", "tcp://b:2"]),
        (["a", "tcp://b:2"], ["tcp://a:9876", "tcp://b:2"]),
        ("[::1]:2", ["tcp://[::1]:2"]),
        ("[::1]", ["tcp://[::1]:9876"]),
    ],
)
def test_addresses(given: str | list[str], meant: list[str]) -> None:
    assert list(parse_addresses(given)) == meant


def test_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="no name server"):
        parse_addresses(" ; ")


@pytest.mark.slow
def test_a_name_server_that_is_away_is_passed_over(brokers: tuple[Handle, Handle]) -> None:
    first, _ = brokers
    with Producer(["tcp://127.0.0.1:1", first.address], timeout_s=10) as producer:
        assert producer.send("t", b"x").done
