"""What a running family writes, judged by the second reading of the formats and by RocketMQ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reference
from family import RunningBroker, Sent
from interop import rocketmq
from interop.rocketmq import append_messages, assert_rocketmq_reads
from shared_data import data_path

LINES_A_LOG = 600
BATCH_COUNT = 16
QUEUES = 3
LOGS = ("Apache", "HDFS", "Linux", "OpenSSH", "Zookeeper")
SETTINGS = {
    "mappedFileSizeCommitLog": 256 << 10,
    "mappedFileSizeConsumeQueue": 2_000,
    "maxMessageSize": 64 << 10,
}
jvm = pytest.mark.jvm
PATIENT = pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 120)


@dataclass(frozen=True)
class Told:
    """A message as it was sent, and where it was said to be."""

    sent: Sent
    tags: str | None
    keys: str | None
    properties: dict[str, str]


def lines_of(log: str) -> Iterator[bytes]:
    """Real log lines, the awkward ones too."""
    content = data_path("loghub", f"{log}.log").read_bytes()
    yield from itertools.islice(content.split(b"\n"), LINES_A_LOG)


def write_logs(broker: RunningBroker) -> list[Told]:
    """One topic a log, several queues; what a batch has in common stands in its properties."""
    told = []
    for log in LOGS:
        topic = f"loghub_{log}"
        broker.create_topic(topic, QUEUES)
        lines = list(lines_of(log))
        for number, at in enumerate(range(0, len(lines), BATCH_COUNT)):
            batch = lines[at : at + BATCH_COUNT]
            tags = (None, "info", "警告", "Aa", "BB")[number % 5]
            keys = (None, f"batch{number}", f"batch{number} {log}")[number % 3]
            properties = {"source": log, "naïve": "ü" * (number % 4)} if number % 2 else {}
            sent = broker.send(
                topic, number % QUEUES, batch, tags=tags, keys=keys, properties=properties
            )
            kept = {name: value for name, value in properties.items() if value}
            told += [Told(one, tags, keys, kept) for one in sent]
    return told


def assert_messages_are(store: Path, told: list[Told]) -> list[reference.Record]:
    """The log holds exactly what was sent, each in its place; all of its records."""
    stored = {
        (record.topic, record.queue_id, record.queue_offset): record
        for record in reference.messages(store)
    }
    assert len(stored) == len(told)
    for one in told:
        record = stored[one.sent.topic, one.sent.queue_id, one.sent.queue_offset]
        assert record.body == one.sent.body
        expected = {"TAGS": one.tags, "KEYS": one.keys, **one.properties}
        unique = record.properties.get("UNIQ_KEY", "")
        assert len(unique) == 32
        assert record.properties == {
            "UNIQ_KEY": unique, **{name: value for name, value in expected.items() if value},
        }  # fmt: skip
    return reference.records(store)


def as_rocketmq_lists(records: list[reference.Record]) -> list[dict[str, Any]]:
    return [
        {
            "topic": record.topic,
            "queueId": record.queue_id,
            "queueOffset": record.queue_offset,
            "physicalOffset": record.physical_offset,
            "storeSize": record.total_size,
            "sysFlag": record.sys_flag,
            "bornTimestamp": record.born_timestamp,
            "storeTimestamp": record.store_timestamp,
            "bodyCRC": record.body_crc,
            "body": record.body,
            "properties": record.properties,
            "msgId": record.msg_id,
        }
        for record in records
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize(
    "extra",
    [{}, {"enabledAppendPropCRC": True}, {"flushDiskType": "SYNC_FLUSH"}],
    ids=["plain", "crc", "sync"],
)
@pytest.mark.slow
def test_a_store_of_real_logs(extra: dict[str, object], store: Path) -> None:
    with RunningBroker(store, SETTINGS | extra) as broker:
        told = write_logs(broker)
        broker.assert_stored([one.sent for one in told])
    assert reference.check_store(store, SETTINGS["mappedFileSizeCommitLog"]) == []
    if not extra.get("enabledAppendPropCRC"):
        assert_messages_are(store, told)
    else:
        assert all(record.property_crc_ok for record in reference.records(store))
    assert len(list((store / "commitlog").iterdir())) > 1
    assert any(len(list(queue.iterdir())) > 1 for queue in (store / "consumequeue").glob("*/*"))


@pytest.mark.slow
def test_a_store_that_was_killed(store: Path) -> None:
    """What lies there before anybody recovers it: whole records up to the last acknowledged one."""
    with RunningBroker(store, SETTINGS) as broker:
        told = write_logs(broker)
        broker.kill_all()
    assert_messages_are(store, told)
    with RunningBroker(store, SETTINGS) as broker:
        broker.assert_stored([one.sent for one in told])
    assert reference.check_store(store) == []
    assert_messages_are(store, told)


def test_lost_queues_are_built_again(store: Path) -> None:
    with RunningBroker(store, SETTINGS) as broker:
        told = write_logs(broker)
    for path in (store / "consumequeue").glob("loghub_HDFS/*/*"):
        path.unlink()
    for path in (store / "consumequeue").glob("loghub_Linux/0/*"):
        path.write_bytes(bytes(path.stat().st_size))
    (store / "abort").write_text("1")  # an orderly end would not have lost them
    with RunningBroker(store, SETTINGS) as broker:
        broker.assert_stored([one.sent for one in told])
    assert reference.check_store(store) == []


@jvm
@pytest.mark.slow
@PATIENT
def test_rocketmq_reads_what_we_wrote(store: Path) -> None:
    with RunningBroker(store, SETTINGS) as broker:
        told = write_logs(broker)
    records = assert_messages_are(store, told)
    listing = assert_rocketmq_reads(store, SETTINGS, as_rocketmq_lists(records))
    assert listing["lastExitOk"]


@jvm
@pytest.mark.slow
@PATIENT
def test_rocketmq_recovers_what_we_left(store: Path) -> None:
    """kill -9 of everything: `abort` is there, and segments ahead, and files of ours."""
    with RunningBroker(store, SETTINGS) as broker:
        told = write_logs(broker)
        broker.kill_all()
    records = assert_messages_are(store, told)
    listing = assert_rocketmq_reads(store, SETTINGS, as_rocketmq_lists(records))
    assert not listing["lastExitOk"]
    with RunningBroker(store, SETTINGS) as broker:
        broker.until_logged("after an orderly end")
        broker.assert_stored([one.sent for one in told])


@jvm
@pytest.mark.slow
@PATIENT
@pytest.mark.parametrize("leave_open", [False, True], ids=["closed", "halted"])
def test_rocketmq_goes_on_and_so_do_we(leave_open: bool, store: Path) -> None:
    with RunningBroker(store, SETTINGS) as broker:
        told = write_logs(broker)
    bodies = [b"theirs %d" % number * 20 for number in range(2_000)]
    theirs = append_messages(
        store, SETTINGS, "loghub_Apache", bodies, queues=QUEUES, leave_open=leave_open
    )
    sent = [one.sent for one in told]
    sent += [
        Sent(line["topic"], line["queueId"], line["queueOffset"], body)
        for line, body in zip(theirs, bodies, strict=True)
    ]
    with RunningBroker(store, SETTINGS) as broker:
        assert ("after a bad end" in broker.log) == leave_open
        broker.assert_stored(sent)
        ours = broker.send("loghub_Apache", 0, [b"ours again"] * 50)
        sent += ours
        last = max(one.queue_offset for one in sent[: -len(ours)]
                   if (one.topic, one.queue_id) == ("loghub_Apache", 0))  # fmt: skip
        assert ours[0].queue_offset == last + 1
        broker.assert_stored(sent)
    assert reference.check_store(store) == []
    assert len(reference.messages(store)) == len(sent)
    assert_rocketmq_reads(store, SETTINGS, as_rocketmq_lists(reference.records(store)))
