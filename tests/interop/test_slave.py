"""A slave of ours follows a real RocketMQ master: its copy has the master's bytes."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from interop.peers import require
from patience import patient
from scripted_master import log_of, slave_settings

from cometmq.bench.peers.rocketmq import LOOPBACK, RocketMQ
from cometmq.bench.systems import Durability
from cometmq.protocol.commands import ListTopics, TopicList
from cometmq.shm.kernel.codec import Message
from cometmq.shm.live.control import Counter

pytestmark = [pytest.mark.jvm, pytest.mark.slow, pytest.mark.timeout(500)]

SEGMENT_BYTES = 1 << 20
SEND_MESSAGE = 10
ANSWER_S = patient(30.0)
COUNT, QUEUES = 3_000, 4


class Sender:
    """Sends to RocketMQ by its remoting protocol, one message after the other."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection((LOOPBACK, port), timeout=ANSWER_S)
        self._answers = self._connection.makefile("rb")
        self._opaque = 0

    def send(self, topic: str, queue_id: int, body: bytes, properties: str = "") -> int:
        """Its queue offset."""
        self._opaque += 1
        fields = {
            "producerGroup": "test", "topic": topic, "defaultTopic": "TBW102",
            "defaultTopicQueueNums": QUEUES, "queueId": queue_id, "sysFlag": 0,
            "bornTimestamp": int(time.time() * 1000), "flag": 0, "properties": properties,
            "reconsumeTimes": 0, "unitMode": "false", "batch": "false",
        }  # fmt: skip
        header = json.dumps(
            {"code": SEND_MESSAGE, "flag": 0, "language": "OTHER", "opaque": self._opaque,
             "version": 0, "serializeTypeCurrentRPC": "JSON",
             "extFields": {name: str(value) for name, value in fields.items()}}
        ).encode()  # fmt: skip
        size = 4 + len(header) + len(body)
        self._connection.sendall(struct.pack(">ii", size, len(header)) + header + body)
        size, header_size = struct.unpack(">ii", self._answers.read(8))
        content = self._answers.read(size - 4)
        found = json.loads(content[: header_size & 0xFFFFFF])
        assert found["code"] == 0, found
        return int(found["extFields"]["queueOffset"])

    def close(self) -> None:
        self._answers.close()
        self._connection.close()


@pytest.fixture
def rocketmq(tmp_path: Path) -> Iterator[RocketMQ]:
    require("rocketmq")
    server = RocketMQ(
        {
            "brokerName": "copied",
            "mappedFileSizeCommitLog": str(SEGMENT_BYTES),
            "maxMessageSize": str(256 << 10),
            "brokerRole": "ASYNC_MASTER",
        }
    )
    try:
        server.start(tmp_path / "rocketmq", Durability.PAGE_CACHE)
        yield server
    finally:
        server.stop()


def read_all(slave: RunningBroker, topic: str, counts: list[int]) -> list[list[Message]]:
    return [slave.read_queue(topic, queue_id, count) for queue_id, count in enumerate(counts)]


def test_it_follows_a_real_master(rocketmq: RocketMQ, tmp_path: Path) -> None:
    """From the beginning, over roll-overs, restarts and kills; and queues of topics that nobody
    has told this broker of can be read."""
    port: int = rocketmq._listen
    rocketmq.create("orders", QUEUES)
    sender = Sender(port)
    bodies: list[list[bytes]] = [[] for _ in range(QUEUES)]

    def send(count: int) -> None:
        for number in range(count):
            body = f"{number} ".encode() * (number * 37 % 700 + 1)
            queue_id = number % QUEUES
            offset = sender.send("orders", queue_id, body, f"TAGS\x01a\x02KEYS\x01k{number}\x02")
            assert offset == len(bodies[queue_id])
            bodies[queue_id].append(body)

    send(200)  # within the first segment: what an empty slave is given begins with the last one
    settings: dict[str, Any] = {
        **slave_settings(f"{LOOPBACK}:{port + 1}"),
        "haSendHeartbeatInterval": 1_000,
        "mappedFileSizeCommitLog": SEGMENT_BYTES,
    }
    store = tmp_path / "slave"
    with RunningBroker(store, settings) as slave:
        loading = threading.Thread(target=send, args=(COUNT,))
        loading.start()
        for role in ("commitlog", "dispatcher", "coordinator"):
            slave.kill(role)
        loading.join()
        counts = [len(each) for each in bodies]
        found = read_all(slave, "orders", counts)
        assert [[message.body for message in each] for each in found] == bodies
        told = slave.coordinator.ask(ListTopics())[0]
        assert isinstance(told, TopicList)
        assert "orders" not in {info.topic for info in told.topics}
        before = slave.counter(Counter.WROTE)
    send(300)
    with RunningBroker(store, settings) as slave:
        counts = [len(each) for each in bodies]
        found = read_all(slave, "orders", counts)
        assert [[message.body for message in each] for each in found] == bodies
        end = slave.counter(Counter.WROTE)
        assert end > before > 3 * SEGMENT_BYTES
    sender.close()
    mine = log_of(store, end, SEGMENT_BYTES)
    masters = log_of(tmp_path / "rocketmq" / "store", end, SEGMENT_BYTES)
    assert mine.begin == masters.begin == 0
    assert mine.content == masters.content
