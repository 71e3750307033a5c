"""Two messages and eight queues: what order means, and that one poll brings all there is."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cli_process
import pytest
from patience import patient

from cometmq import Admin, Broker, Message
from cometmq.shm.kernel.codec import java_hash

WAIT_S = patient(30)


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
                producer.send("t", b"%d" % number, ordering_key=f"o-{number % 4}")
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


def test_an_ordering_key_picks_the_queue_in_every_way_of_sending(tmp_path: Path) -> None:
    """Always the same one, and RocketMQ's."""
    key = "customer 7"
    queue = abs(java_hash(key)) % 8

    def answer(message: Message) -> None:
        found.append(message.queue_id)
        message.reply(b"%d" % message.queue_id)

    found: list[int] = []
    with Broker(tmp_path, profile="test") as broker, broker.producer(name="shop") as producer:
        with broker.consumer("answers", "asked") as consumer, ThreadPoolExecutor(1) as pool:
            running = pool.submit(consumer.run, answer)
            reply = producer.request("asked", b"?", timeout_s=WAIT_S, ordering_key=key)
            consumer.close()
            running.result(WAIT_S)
        assert (reply.body, found) == (b"%d" % queue, [queue])
        producer.send("t", b"sync", ordering_key=key)
        producer.send_many("t", [b"many"] * 3, ordering_key=key)
        producer.send_async("t", b"future", ordering_key=key).result(WAIT_S)
        producer.send_oneway("t", b"oneway", ordering_key=key)
        producer.send("t", b"later", ordering_key=key, deliver_after=0.1)
        with producer.transaction("t", b"half", ordering_key=key) as tx:
            tx.send("t", b"other half", ordering_key=key)
        with broker.producer(linger_ms=5) as lingering:
            lingering.send("t", b"linger", ordering_key=key)
        asyncio.run(_send_in_loop(broker, key))
        printed = cli_process.run(
            "msg", "send", "-t", "t", "--ordering-key", key, "--name-server", broker.name_server,
            input=b"line\n",
        )  # fmt: skip
        assert printed.returncode == 0, printed.stderr
        with broker.consumer("g", "t", start="earliest") as consumer:
            messages = list(itertools.islice(consumer, 17))
    assert {message.queue_id for message in messages} == {queue}
    assert Counter(message.body for message in messages)[b"many"] == 5


async def _send_in_loop(broker: Broker, key: str) -> None:
    async with broker.async_producer(name="shop") as producer:
        await producer.send("t", b"task", ordering_key=key)
        await (await producer.send_async("t", b"task, later", ordering_key=key))
        await producer.send_many("t", [b"many"] * 2, ordering_key=key)
        await producer.send_oneway("t", b"task, oneway", ordering_key=key)
        async with producer.transaction("t", b"task, half", ordering_key=key):
            pass
