"""What a group has out that takes its messages in order goes from a broker of ours to a real
RocketMQ, which keeps it, and comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from family import RunningBroker
from interop import peers, rocketmq
from interop.handover import OURS, THEIRS
from interop.real import RealRocketMQ
from patience import patient

from cometmq.actors.coordination.order_file import OrderFile
from cometmq.client import Admin, PopConsumer, Producer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jvm,
    pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 300),
]
WAIT_S = patient(60.0)


def test_there_and_back(tmp_path: Path) -> None:
    peers.require("rocketmq")
    store = tmp_path / "store"
    with RunningBroker(store, OURS) as broker, Admin(broker.ready.name_server) as admin:
        admin.create_topic("steps", queues=1)
        with Producer(broker.ready.name_server) as producer:
            producer.send_many("steps", [b"%d" % number for number in range(6)], queue_id=0)
        server = broker.ready.name_server
        with PopConsumer(server, "walk", "steps", orderly=True, invisible_s=2) as consumer:
            first, second, third, fourth = consumer.poll(4, WAIT_S)
            consumer.ack(second, fourth)
    ours = OrderFile(store / "config").book.get(("walk", "steps", 0))
    assert ours is not None
    assert ours.left == ((first.queue_offset, 0), (third.queue_offset, 0))
    with RealRocketMQ(tmp_path / "jvm") as rocket:
        rocket.start(store, THEIRS, "steps")
        rocket.stop()
    text = (store / "config" / "consumerOrderInfo.json").read_text()
    assert '"h"' not in text, "RocketMQ has not written it anew"
    theirs = OrderFile(store / "config").book.get(("walk", "steps", 0))
    assert theirs is not None
    assert (theirs.left, theirs.end, theirs.until_ms) == (ours.left, ours.end, ours.until_ms)
    with RunningBroker(store, OURS) as broker:
        server = broker.ready.name_server
        with PopConsumer(server, "walk", "steps", orderly=True) as consumer:
            deadline = time.monotonic() + WAIT_S
            found: list[tuple[int, int]] = []
            while len(found) < 4:
                assert time.monotonic() < deadline, found
                for message in consumer.poll():
                    found.append((message.queue_offset, message.reconsume_times))
                    consumer.ack(message)
    assert found == [(0, 1), (2, 1), (4, 0), (5, 0)]
