"""Stores in which a RocketMQ 5.3.3 broker had popped messages: what nobody acknowledged comes
again, as it did from that broker when it was started a day later."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import golden
import pytest
from patience import patient

from cometmq import Admin, Broker
from cometmq.actors.scheduling.revival import GROUP

WAIT_S = patient(90)
KEYS = (
    "brokerClusterName", "mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize",
    "maxHashSlotNum", "maxIndexNum", "fileReservedTime", "mappedFileSizeTimerLog",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pop", "pop-killed"])
def test_what_rocketmq_had_popped(name: str, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    meta = golden.meta(name, golden.BROKERS)
    settings = {key: meta["settings"][key] for key in KEYS if key in meta["settings"]}
    rows = golden.expected(name)["restarts"]["late"]["deliveries"]["PopGroup"]["messages"]
    certain = Counter(attempt(row) for row in rows if "onlyInRuns" not in row)
    possible = Counter(attempt(row) for row in rows)
    seen: Counter[tuple[str, int]] = Counter()
    with Broker(store, profile="test", settings=settings) as broker:
        with broker.pop_consumer("PopGroup", "PopA") as consumer:
            deadline = time.monotonic() + WAIT_S
            while certain - seen:
                assert time.monotonic() < deadline, certain - seen
                messages = consumer.poll(32)
                consumer.ack(*messages)
                for message in messages:
                    seen[message.properties["gid"], message.reconsume_times] += 1
            assert not seen - possible
            assert {message.topic for message in messages} <= {"PopA"}
        until_settled(broker, settings["brokerClusterName"])
    with (
        Broker(store, profile="test", settings=settings) as broker,
        broker.pop_consumer("PopGroup", "PopA") as consumer,
    ):
        assert consumer.poll(timeout_s=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pop", "pop-killed"])
def test_what_rocketmq_had_taken_in_order(name: str, tmp_path: Path) -> None:
    """By consumerOrderInfo.json: the same messages first, with the same counts as from RocketMQ."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    meta = golden.meta(name, golden.BROKERS)
    settings = {key: meta["settings"][key] for key in KEYS if key in meta["settings"]}
    rows = golden.expected(name)["restarts"]["soon"]["deliveries"]["PopFifoGroup"]["messages"]
    wanted = [(row["queueId"], row["queueOffset"], row["reconsumeTimes"]) for row in rows]
    found: list[tuple[int, int, int]] = []
    with (
        Broker(store, profile="test", settings=settings) as broker,
        broker.pop_consumer("PopFifoGroup", "PopFifo", orderly=True) as consumer,
    ):
        deadline = time.monotonic() + WAIT_S
        while len(found) < len(wanted):
            assert time.monotonic() < deadline, found
            for message in consumer.poll(32):
                found.append((message.queue_id, message.queue_offset, message.reconsume_times))
                consumer.ack(message)
    assert sorted(found) == sorted(wanted)
    for queue in range(2):
        offsets = [each[1] for each in found if each[0] == queue]
        assert offsets == sorted(offsets)


def attempt(row: dict[str, Any]) -> tuple[str, int]:
    return row["gid"], row["reconsumeTimes"]


def until_settled(broker: Broker, cluster: str) -> None:
    """Every record of the revive topic is done with."""
    deadline = time.monotonic() + WAIT_S
    with Admin(broker.name_server) as admin:
        while True:
            queues = [
                each for each in admin.describe_group(GROUP).queues
                if each.topic == f"rmq_sys_REVIVE_LOG_{cluster}"
            ]  # fmt: skip
            if queues and all(each.lag <= 1 for each in queues):  # RocketMQ names the last one
                return
            assert time.monotonic() < deadline, queues
            time.sleep(0.1)
