"""Several brokers at one name server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from client_fakes import Handle, fake_broker
from patience import patient

from cometmq.client import Admin, Consumer, Message, Producer
from cometmq.client.routes import parse_addresses
from cometmq.client.sending import standing
from cometmq.client.sending.standing import Standing
from cometmq.protocol.errors import MessageIllegal, NotConfirmed, SystemBusy


@pytest.fixture
def brokers() -> Iterator[tuple[Handle, Handle]]:
    """The first is the name server as well."""
    with fake_broker(name="a", port=1) as first, fake_broker(name="b", port=2) as second:
        first.broker.peers = [second.broker]
        yield first, second


@pytest.fixture
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any answer may take so long that its broker is avoided for a while."""
    monkeypatch.setattr(standing, "AVOIDED", ((0.0, 0.0),))


def close_quietly(producer: Producer) -> None:
    with suppress(NotConfirmed):  # of what was not waited for, or has failed before
        producer.close()


def stored(handle: Handle) -> int:
    return sum(len(bodies) for bodies in handle.broker.records.values())


@pytest.mark.usefixtures("nobody_is_late")
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
    with Producer(first.address, timeout_s=patient(30), linger_ms=linger_ms) as producer:
        producer.send("t", b"x").wait()
        second.broker.faults = [14] * 1_000
        for _ in range(20):
            assert producer.send("t", b"x").wait().broker == "a"


@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_not_chosen_again(
    brokers: tuple[Handle, Handle], linger_ms: float
) -> None:
    """What it has may be stored, and fails in the end; what comes later goes to the other one."""
    first, second = brokers
    producer = Producer(first.address, timeout_s=1.5, linger_ms=linger_ms)
    with ExitStack() as stack:
        stack.callback(close_quietly, producer)
        producer.send("t", b"x").wait()
        second.broker.faults = ["silent"] * 1_000

        def until_it_fails() -> None:
            for _ in range(8):
                producer.send("t", b"y").wait()

        with pytest.raises(NotConfirmed):
            until_it_fails()
        for number in range(40):
            assert producer.send("t", b"z").wait().broker == "a", number
        # What has a place of its own goes there all the same.
        with pytest.raises(NotConfirmed):
            producer.send("t", b"k", ordering_key="d").wait()


def test_how_long_a_broker_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr(standing, "monotonic", lambda: now[0])
    for waited_s, avoided_s in (
        (0.0, 0), (0.549, 0), (0.55, 2), (1.799, 2), (1.8, 5), (2.999, 5), (3, 6), (5, 10),
        (15, 30),
    ):  # fmt: skip
        known = Standing()
        known.heard("a", waited_s, None)
        assert bool(known.avoided()) == bool(avoided_s), waited_s
        now[0] += avoided_s - 0.001 * bool(avoided_s)
        assert bool(known.avoided()) == bool(avoided_s), waited_s
        now[0] += 0.001
        assert not known.avoided()
    known.heard("a", 0.0, SystemBusy("full"))
    known.heard("b", 0.0, MessageIllegal("too long"))  # no broker would take it
    assert known.avoided() == {"a"}
    known.heard("a", 0.001, None)
    assert not known.avoided()
    known.heard("a", 0.0, SystemBusy("full"))
    now[0] += 10
    assert not known.avoided()


def test_of_brokers_that_are_all_slow_each_has_its_turn(brokers: tuple[Handle, Handle]) -> None:
    first, _ = brokers
    with Producer(first.address) as producer:
        producer.send("t", b"x").wait()
        for broker in "ab":
            producer._sender.delivery.standing.heard(broker, 20.0, None)
            places = [producer.send("t", b"x", wait=False) for _ in range(8)]
            found = {receipt.wait().broker for receipt in places}
            assert found == ({"b"} if broker == "a" else {"a", "b"})


@pytest.mark.usefixtures("nobody_is_late")
def test_acknowledgements_find_their_broker(brokers: tuple[Handle, Handle]) -> None:
    """Both have a queue 0 of the topic."""
    first, _ = brokers
    with Producer(first.address) as producer:
        producer.send_many("t", [b"x"] * 8_000)
        with Producer(first.address, batch_count=1) as single:
            single.send_many("t", [b"y"] * 80)
    with Consumer(first.address, "g", "t", auto_commit_ms=3_600_000) as consumer:
        messages: list[Message] = []
        deadline = time.monotonic() + patient(60)
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
    with Producer(["tcp://127.0.0.1:1", first.address], timeout_s=patient(10)) as producer:
        assert producer.send("t", b"x").done
