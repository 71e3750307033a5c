"""Two messages and eight queues: what order means, and that one poll brings all there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq import Admin, Broker

WAIT_S = 30


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_a_poll_gathers_from_all_queues(transport: str, tmp_path: Path) -> None:
    with Broker(tmp_path, profile="test") as broker:
        with broker.producer() as producer:
            for number in range(16):
                producer.send("t", b"%d" % number)
        options = {"start": "earliest", "transport": transport}
        with broker.consumer("g", "t", **options) as consumer:
            messages = consumer.poll(timeout_s=WAIT_S)
            if transport == "mapped":
                assert len({message.queue_id for message in messages}) == 8
            while len(messages) < 16:
                messages += consumer.poll(timeout_s=WAIT_S)
        assert {message.body for message in messages} == {b"%d" % number for number in range(16)}


def test_a_key_puts_messages_in_order(tmp_path: Path) -> None:
    with Broker(tmp_path, profile="test") as broker:
        with broker.producer() as producer:
            for number in range(40):
                producer.send("t", b"%d" % number, sharding_key=f"o-{number % 4}")
        with broker.consumer("g", "t", start="earliest") as consumer:
            seen: dict[int, list[int]] = {}
            while sum(map(len, seen.values())) < 40:
                for message in consumer.poll(timeout_s=WAIT_S):
                    seen.setdefault(int(message.body) % 4, []).append(int(message.body))
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_one_queue_has_one_order(tmp_path: Path) -> None:
    with Broker(tmp_path, profile="test") as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("t", queues=1)
        with broker.producer() as producer:
            for number in range(20):
                producer.send("t", b"%d" % number)
        with broker.consumer("g", "t", start="earliest") as consumer:
            found: list[int] = []
            while len(found) < 20:
                found += [int(message.body) for message in consumer.poll(timeout_s=WAIT_S)]
    assert found == list(range(20))
