"""Bodies that a producer compresses, and what every reader makes of them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest
from cli_process import run
from patience import patient
from shared_data import data_path

from cometmq import Admin, AsyncConsumer, AsyncProducer, Broker, Consumer, Message, Producer
from cometmq.errors import ArgumentIllegal, BodyIllegal, CodecMissing, MessageTooLarge
from cometmq.protocol.commands import Section, SendMessages, SendResult
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchEncoder

CODECS = {"zlib": 3, "lz4": 1, "zstd": 2}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("compressed") / "store", profile="test") as broker:
        yield broker


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    """Real lines, and pages of them: below and above the threshold, in turn."""
    found = next(data_path("loghub").rglob("HDFS*.log")).read_bytes().splitlines()[:400]
    pages = [b"\n".join(found[at : at + 40 + at % 7]) for at in range(0, 200, 5)]
    return [body for pair in zip(found, pages, strict=False) for body in pair]


def drain(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        messages = consumer.poll(timeout_s=patient(30))
        assert messages, f"{len(found)} of {count}"
        found += messages
    return found


@pytest.mark.parametrize("transport", ["mapped", "zmq"])
@pytest.mark.parametrize("name", CODECS)
def test_every_way_of_sending_and_reading(
    broker: Broker, lines: list[bytes], name: str, transport: str
) -> None:
    topic = f"ways-{name}-{transport}"
    with broker.producer(compress=name) as producer:
        for body in lines:
            producer.send(topic, body, queue_id=0)
        producer.send_many(topic, lines, queue_id=0)
    with broker.producer(compress=name, linger_ms=2) as producer:
        receipts = [producer.send(topic, body, queue_id=0) for body in lines]
        assert [each.queue_offset for each in receipts] == list(
            range(2 * len(lines), 3 * len(lines))
        )
    with Consumer(broker.name_server, f"g-{topic}", topic, transport=transport) as consumer:
        messages = drain(consumer, 3 * len(lines))
    assert [message.body for message in messages] == lines * 3
    for message in messages:
        is_large = len(message.body) >= 4_096
        assert message.sys_flag & 0x701 == (1 | CODECS[name] << 8 if is_large else 0)
        assert (len(message.stored_body) < len(message.body)) == is_large
    large = next(message for message in messages if message.sys_flag & 1)
    assert large.body is large.body  # unfolded once


def test_asyncio(broker: Broker, lines: list[bytes]) -> None:
    async def both() -> list[bytes]:
        async with AsyncProducer(broker.name_server, compress="zstd", compress_over=1) as producer:
            for body in [b"".join(lines), *lines[:20]]:
                await producer.send("asyncio", body, queue_id=0)
        async with AsyncConsumer(broker.name_server, "g-asyncio", "asyncio") as consumer:
            found: list[Message] = []
            while len(found) < 21:
                found += await consumer.poll(timeout_s=patient(30))
        return [message.body for message in found]

    assert asyncio.run(both()) == [b"".join(lines), *lines[:20]]


def test_a_compressed_body_may_be_delayed(broker: Broker) -> None:
    with broker.producer(compress="zlib") as producer:
        producer.send("delayed", bytes(9_000), delay_level=1)
    with broker.consumer("g-delayed", "delayed") as consumer:
        [message] = drain(consumer, 1)
    assert message.sys_flag & 1
    assert message.body == bytes(9_000)


def test_what_compression_makes_no_smaller_goes_as_it_is(broker: Broker) -> None:
    noise = bytes(range(1, 256))
    with broker.producer(compress="zlib", compress_over=1) as producer:
        producer.send("noise", noise)
        producer.send("noise", memoryview(bytes(300)))
        with pytest.raises(ArgumentIllegal):
            producer.send("noise", list(range(200)))  # type: ignore[arg-type]
    with broker.consumer("g-noise", "noise") as consumer:
        found = {message.body: message.sys_flag & 1 for message in drain(consumer, 2)}
    assert found == {noise: 0, bytes(300): 1}


def test_limits_are_of_plain_bodies(broker: Broker) -> None:
    with broker.producer(compress="zlib", max_message_bytes=5_000) as producer:
        with pytest.raises(MessageTooLarge):
            producer.send("limits", bytes(5_001))
        with pytest.raises(MessageTooLarge):
            producer.send_many("limits", [bytes(4_500), bytes(5_001)])


def test_arguments_and_missing_extras(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"compress": "gzip"}, {"compress_level": 3}, {"compress_over": 0}):
        with pytest.raises(ArgumentIllegal):
            Producer(broker.name_server, **options)  # type: ignore[arg-type]
    with broker.producer(compress="lz4") as producer:
        producer.send("extras", bytes(9_000), queue_id=0)
        producer.send("extras", b"plain", queue_id=0)
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(CodecMissing, match=r"cometmq\[lz4\]"):
        Producer(broker.name_server, compress="lz4")
    with broker.consumer("g-extras", "extras") as consumer:
        folded, plain = drain(consumer, 2)
    with pytest.raises(CodecMissing, match=r"extras/0 @0 .*cometmq\[lz4\]"):
        _ = folded.body
    assert plain.body == b"plain"


def test_what_only_says_that_it_is_compressed(broker: Broker) -> None:
    """It is delivered, named by the error, and the others go on; a command shows it as it is."""
    with broker.producer() as producer:
        receipt = producer.send("liar", b"first", queue_id=0)
    encoder = BatchEncoder(size_max=1 << 16, count_max=10)
    encoder.add(b"no frame at all", None, None, None, 0)
    with Admin(broker.name_server) as admin:
        [master] = admin.brokers()
    with Channel(master.commitlog, "broker") as channel:
        section = Section("liar", 0, 1, 0x201)
        answer, _ = channel.ask(SendMessages([section], 0), [encoder.take()])
    assert isinstance(answer, SendResult)
    assert answer.results[0].code == 0
    with broker.producer() as producer:
        producer.send("liar", b"last", queue_id=0)
    with broker.consumer("g-liar", "liar") as consumer:
        first, liar, last = drain(consumer, 3)
    assert (first.body, last.body, first.msg_id) == (b"first", b"last", receipt.msg_id)
    with pytest.raises(BodyIllegal, match=r"liar/0 @1 .*not ZSTD"):
        _ = liar.body
    assert liar.stored_body == b"no frame at all"
    shown = run(
        "msg", "tail", "-t", "liar", "-n", "3", "-o", "json", "--name-server", broker.name_server
    )
    bodies = [json.loads(line)["body"] for line in shown.stdout.splitlines()]
    assert bodies == ["first", "no frame at all", "last"], shown
    assert b"liar/0 @1" in shown.stderr
