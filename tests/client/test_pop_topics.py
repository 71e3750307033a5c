"""One group without queues, several topics: nobody is given, or has done with, another topic's
messages."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from patience import patient

from cometmq import Admin, Broker, Message, PopConsumer
from cometmq.protocol.names import GROUP_MAX, TOPIC_MAX, pop_retry_topic

WAIT_S = patient(60)


def pop(consumer: PopConsumer, timeout_s: float = WAIT_S) -> list[Message]:
    return consumer.poll(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("group", "invoices", "orders"),
    [
        ("billing", "invoices", "orders"),
        ("g" * GROUP_MAX, "i" * TOPIC_MAX, "o" * TOPIC_MAX),
        ("a", "b", "b_c"),
    ],
)
@pytest.mark.slow
def test_what_comes_again_comes_to_whoever_reads_its_topic(
    tmp_path: Path, group: str, invoices: str, orders: str
) -> None:
    with Broker(tmp_path / "store", profile="test") as broker, broker.producer() as producer:
        producer.send(invoices, b"given back", tags="new")
        producer.send(invoices, b"forgotten", tags="new")
        producer.send(orders, b"order", tags="old")
        first = broker.pop_consumer(group, invoices, "new", invisible_s=2)
        other = broker.pop_consumer(group, orders, "old", sql="TAGS = 'old'")
        with first, other:
            (order,) = pop(other)
            given = pop(first)
            while len(given) < 2:
                given += pop(first)
            for message in given:
                if message.body == b"given back":
                    first.nack(message, after=0)
            again: dict[bytes, Message] = {}
            deadline = time.monotonic() + WAIT_S
            while len(again) < 2 and time.monotonic() < deadline:
                assert pop(other, 0.1) == []
                for message in pop(first, 0.1):
                    again[message.body] = message
                    first.ack(message)
            assert {body: (each.topic, each.reconsume_times) for body, each in again.items()} == {
                b"given back": (invoices, 1),
                b"forgotten": (invoices, 1),
            }
            other.ack(order)
        with Admin(broker.name_server) as admin:
            assert not [each for each in admin.describe_group(group).queues if each.lag]
            assert pop_retry_topic(group, invoices) in admin.topics()
            admin.delete_group(group)
            assert not [each for each in admin.topics() if each.startswith("%RETRY%")]


def test_what_was_pulled_before_is_not_left_out(tmp_path: Path) -> None:
    """Retries of members, who had all topics in one, are not done with because of a tag."""
    soon = {"messageDelayLevel": "1s " * 18}
    with (
        Broker(tmp_path / "store", profile="test", settings=soon) as broker,
        broker.producer() as producer,
    ):
        producer.send("invoices", b"1", tags="new")
        with broker.consumer("billing", "invoices") as consumer:

            def fail(message: Message) -> None:
                consumer.close()
                raise ValueError("it is tried again")

            consumer.run(fail)
        with broker.pop_consumer("billing", "orders", "old") as popper:
            (message,) = pop(popper)
            assert (message.topic, message.body, message.reconsume_times) == ("invoices", b"1", 1)
            popper.ack(message)
