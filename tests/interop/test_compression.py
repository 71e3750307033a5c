"""Compressed bodies: RocketMQ's classes read ours, and ours reads theirs."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from interop import rocketmq
from interop.rocketmq import append_messages, list_store
from patience import patient

from cometmq import Broker
from cometmq.protocol.compression import CODECS

BODIES = [f"a line of number {index} ".encode() * (300 + index * 90) for index in range(12)]
SETTINGS = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6_000}


@pytest.mark.jvm
@pytest.mark.slow
@pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 120)
@pytest.mark.parametrize("name", CODECS)
def test_both_ways(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        Broker(store, settings=SETTINGS, profile="test") as broker,
        broker.producer(compress=name) as producer,
    ):
        producer.send_many("ours", BODIES, queue_id=0)
    append_messages(store, SETTINGS, "theirs", BODIES, compress=name.upper())
    listing = list_store(store, segment_bytes=1 << 20, queue_segment_bytes=6_000)
    for topic in ("ours", "theirs"):
        found = [each for each in listing["messages"] if each["topic"] == topic]
        flags = {each["sysFlag"] & 0x701 for each in found}
        assert flags == {1 | CODECS[name].number << 8}
        assert [base64.b64decode(each["bodyDecompressed"]) for each in found] == BODIES
    with (
        Broker(store, settings=SETTINGS, profile="test") as broker,
        broker.consumer("g", "theirs") as consumer,
    ):
        bodies: list[bytes] = []
        while len(bodies) < len(BODIES):
            messages = consumer.poll(timeout_s=patient(30))
            assert messages, f"{len(bodies)} messages came"
            bodies += [message.body for message in messages]
        assert bodies == BODIES
