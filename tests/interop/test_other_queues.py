"""RocketMQ's BatchCQ and COMPACTION topics: reported, not served, and left unchanged.

Fault 11. A folder of a BatchCQ topic in consumequeue/ keeps a RocketMQ from starting.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest
from family import RunningBroker
from interop import peers, rocketmq
from interop.handover import THEIRS
from interop.real import RealRocketMQ
from patience import patient
from waiting import until

from cometmq import Consumer
from cometmq.client import Admin
from cometmq.protocol.commands import DeleteTopic, EnsureTopic
from cometmq.protocol.configs import TopicConfig, why_not_served
from cometmq.protocol.errors import CometError, NoPermission
from cometmq.shm.log.recovery import find_end
from cometmq.shm.tools.repair import repair_store
from cometmq.shm.tools.verify import verify_store

BATCH, COMPACT = ("bcq_a", "bcq_b"), "compact"
SIZES = golden.meta("special-batchcq")["settings"]
SETTINGS = {
    key: SIZES[key]
    for key in ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize")
}


def prepared(tmp_path: Path, *, topics: bool = True) -> Path:
    """Create RocketMQ's store with two BatchCQ topics, and a COMPACTION topic with a queue."""
    store = golden.unpack("special-batchcq", tmp_path)
    config = store / "config"
    config.mkdir(exist_ok=True)
    queue = store / "consumequeue" / COMPACT / "0"
    queue.mkdir(parents=True)
    # An entry as if its record were in the log, which must not be read.
    unit = (1_000).to_bytes(8, "big") + (90).to_bytes(4, "big") + bytes(8)
    (queue / f"{0:020d}").write_bytes(unit.ljust(2_000, b"\0"))
    attributes = {name: {"queue.type": "BatchCQ"} for name in BATCH}
    attributes[COMPACT] = {"cleanup.policy": "COMPACTION"}
    table = {
        name: {"topicName": name, "readQueueNums": 2, "writeQueueNums": 2, "perm": 6,
               "attributes": found}
        for name, found in attributes.items()
    }  # fmt: skip
    if topics:
        (config / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    offsets = {f"{name}@g": {"0": 5} for name in table}
    (config / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))
    return store


def theirs(store: Path) -> dict[str, bytes]:
    """Return the files of these topics, and the offsets that the group has committed."""
    found = {
        str(path.relative_to(store)): path.read_bytes()
        for folder in ("batchconsumequeue", f"consumequeue/{COMPACT}")
        for path in sorted((store / folder).rglob("*"))
        if path.is_file()
    }
    for name in BATCH:
        assert not (store / "consumequeue" / name).exists()
    return found


def offsets(store: Path) -> dict[str, int]:
    table = json.loads((store / "config" / "consumerOffset.json").read_text().replace("\t", ""))
    return {key: next(iter(found.values())) for key, found in table["offsetTable"].items()}


@pytest.mark.parametrize(
    ("kill", "bad_end"), [(False, False), (True, True)], ids=["closed-clean", "killed-abort"]
)
def test_they_are_named_and_not_served(kill: bool, bad_end: bool, tmp_path: Path) -> None:
    store = prepared(tmp_path)
    before, end = theirs(store), find_end(store, SIZES["mappedFileSizeCommitLog"], clean=True)
    if bad_end:
        (store / "abort").touch()
    with RunningBroker(store, SETTINGS) as broker:
        for name, why in [(name, "queue.type=BatchCQ") for name in BATCH] + [
            (COMPACT, "cleanup.policy=COMPACTION")
        ]:
            assert f"topic {name} is not served: {why}" in broker.log
            with pytest.raises(CometError, match=f"{name} does not exist"):
                broker.send(name, 0, [b"ours"])
            with pytest.raises(NoPermission, match=why):
                broker.coordinator.ask(EnsureTopic(name), timeout_s=patient(30))
        with Admin(broker.ready.name_server) as admin:
            for name in (*BATCH, COMPACT):
                with pytest.raises(NoPermission, match="is not served"):
                    admin.create_topic(name)
                with pytest.raises(CometError, match=name):
                    admin.update_topic(name, queues=4)
                with pytest.raises(CometError, match=name):
                    admin.delete_topic(name)
                with pytest.raises(NoPermission, match="is not served"):
                    broker.coordinator.ask(DeleteTopic(name), timeout_s=patient(30))
        broker.create_topic("plain", 1)
        sent = broker.send("plain", 0, [b"one", b"two"])
        with Consumer(broker.ready.name_server, "readers", "plain") as consumer:
            found = [message.body for _, message in zip(range(2), consumer, strict=False)]
        assert found == [b"one", b"two"]
        if kill:
            broker.kill_all()
    for _ in range(2):  # a start that knows the queues of the last run
        with RunningBroker(store, SETTINGS) as broker:
            broker.assert_stored(sent)
        assert theirs(store) == before
    assert {offsets(store)[f"{name}@g"] for name in (*BATCH, COMPACT)} == {5}
    size = SIZES["mappedFileSizeCommitLog"]
    assert find_end(store, size, clean=True).physical_offset > end.physical_offset
    assert not verify_store(store).findings


def test_folders_say_it_where_topics_json_does_not(tmp_path: Path) -> None:
    store = prepared(tmp_path, topics=False)
    shutil.rmtree(store / "consumequeue" / COMPACT)
    before = theirs(store)
    (store / "abort").touch()
    with RunningBroker(store, SETTINGS) as broker:
        for name in BATCH:
            assert f"topic {name} has messages" in broker.log
            assert "batchconsumequeue" in broker.log
    assert theirs(store) == before


def test_repair_leaves_them_as_they_are(tmp_path: Path) -> None:
    store = prepared(tmp_path)
    before = theirs(store)
    (store / "abort").touch()
    size, queue_size = SIZES["mappedFileSizeCommitLog"], SIZES["mappedFileSizeConsumeQueue"]
    assert not repair_store(store, size, queue_size).offsets_put_back
    assert theirs(store) == before
    assert set(offsets(store).values()) == {5}


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({}, ""),
        ({"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}, ""),
        ({"message.type": "FIFO"}, ""),
        ({"+queue.type": "BatchCQ"}, "queue.type=BatchCQ"),
        ({"queue.type": "RocksDBCQ"}, "queue.type=RocksDBCQ"),
        ({"cleanup.policy": "COMPACTION"}, "cleanup.policy=COMPACTION"),
    ],
)
def test_which_topics_are_not_served(attributes: dict[str, str], why: str) -> None:
    assert why_not_served(TopicConfig(topic_name="t", attributes=attributes)) == why


@pytest.fixture
def rocket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealRocketMQ]:
    peers.require("rocketmq")
    failed = request.session.testsfailed
    with RealRocketMQ(tmp_path_factory.mktemp("jvm")) as running:
        yield running
        if request.session.testsfailed > failed:
            sys.stderr.write(running.said)


@pytest.mark.slow
@pytest.mark.jvm
@pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 300)
def test_a_rocketmq_starts_on_the_store_again(rocket: RealRocketMQ, tmp_path: Path) -> None:
    """Our broker was killed; test_they_are_named_and_not_served compares the files of both ends."""
    store = prepared(tmp_path)
    shutil.rmtree(store / "consumequeue" / COMPACT)  # its entry points at no record of it
    (store / "abort").touch()  # then all of the log is dispatched
    with RunningBroker(store, SETTINGS) as broker:
        broker.create_topic("plain", 1)
        broker.send("plain", 0, [b"one", b"two"])
        topics = store / "config" / "topics.json"
        until(lambda: b"plain" in topics.read_bytes(), says="RocketMQ knows the topic")
        broker.kill_all()
    batch = {"mapperFileSizeBatchConsumeQueue": SIZES["mapperFileSizeBatchConsumeQueue"]}
    index = {key: SIZES[key] for key in ("maxHashSlotNum", "maxIndexNum")}
    rocket.start(store, {**THEIRS, **SETTINGS, **batch, **index}, "plain")
    rocket.consume("theirs", {"plain": ""})
    rocket.wait(lambda events: len(events) == 2)
    rocket.stop()
