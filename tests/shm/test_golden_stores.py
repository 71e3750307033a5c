"""The stores that a real RocketMQ wrote, read by ours and written again by ours."""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
import reference
from log_scan import scan_log

from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.reading.store_reader import GetStatus, StoreReader

BOUNDARY_UPPER = "upper"


@pytest.fixture(params=golden.CLEAN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reader(name: str, tmp_path: Path) -> Iterator[StoreReader]:
    store = StoreReader.open_closed(golden.unpack(name, tmp_path))
    yield store
    store.close()


def host(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    return golden.host(text)


def as_listed(message: Message) -> dict[str, Any]:
    """A message of ours in the fields of a golden listing."""
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "storeSize": message.size,
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "bornTimestamp": message.born_timestamp_ms,
        "bornHost": host(message.born_host),
        "storeTimestamp": message.store_timestamp_ms,
        "storeHost": host(message.store_host),
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "bodyCRC": message.body_crc,
        "body": base64.b64encode(message.stored_body).decode(),
        "properties": message.properties,
        "msgId": message.offset_msg_id,
        "magic": f"{message.magic:08x}",
    }


def listed(row: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in row.items()
        if key not in ("cq", "recordCrc32", "bodyDecompressed", "bodyCrcOk", "foundAt")
    }
    return kept | {"bornHost": host(row["bornHost"]), "storeHost": host(row["storeHost"])}


@pytest.mark.slow
def test_every_message_by_a_plain_scan(name: str, reader: StoreReader) -> None:
    found = [as_listed(message) for message in scan_log(reader)]
    assert found == [listed(row) for row in golden.listing(name)]


def test_every_message_through_its_queue(name: str, reader: StoreReader) -> None:
    rows = [row for row in golden.listing(name) if row["cq"]]
    for row in rows:
        answer = reader.get_message(row["topic"], row["queueId"], row["cq"]["index"], 1)
        assert answer.status is GetStatus.FOUND
        assert answer.payload is not None
        (message,) = decode(answer.payload)
        assert as_listed(message) == listed(row)
        if row.get("bodyDecompressed"):
            assert base64.b64encode(message.body).decode() == row["bodyDecompressed"]


def test_a_body_only_said_to_be_compressed(tmp_path: Path) -> None:
    """RocketMQ's decoder gives no body for it; ours says why, and hands out the stored bytes."""
    row = next(r for r in golden.listing("special") if r.get("bodyDecompressed", 0) is None)
    reader = StoreReader.open_closed(golden.unpack("special", tmp_path))
    message = reader.record_at(row["physicalOffset"])
    with pytest.raises(ValueError, match="ZLIB"):
        _ = message.body
    assert base64.b64encode(message.stored_body).decode() == row["body"]
    reader.close()


def test_queue_ranges(name: str, reader: StoreReader) -> None:
    for queue in golden.meta(name)["opened"]["afterLoad"]["queues"]:
        found = reader.positions.queue_range(queue["topic"], queue["queueId"])
        assert found == (queue["minOffset"], queue["maxOffset"]), queue


def test_get_message_answers_as_listed(name: str, reader: StoreReader) -> None:
    for query in golden.meta(name)["queries"]["getMessage"]:
        tags = None
        if query["tags"] and query["tags"] != "*":
            tags = [tag.strip() for tag in re.split(r"\|\|", query["tags"]) if tag.strip()]
        answer = reader.get_message(
            query["topic"], query["queueId"], query["offset"], query["maxMsgNums"], tags=tags
        )
        messages = decode(answer.payload) if answer.payload else []
        assert {
            "status": answer.status.name,
            "nextBeginOffset": answer.next_queue_offset,
            "minOffset": answer.min_queue_offset,
            "maxOffset": answer.max_queue_offset,
            "messageCount": answer.count,
            "bufferTotalSize": len(answer.payload or b""),
            "queueOffsets": [message.queue_offset for message in messages],
        } == {key: query[key] for key in (
            "status", "nextBeginOffset", "minOffset", "maxOffset", "messageCount",
            "bufferTotalSize", "queueOffsets",
        )}, query  # fmt: skip


def test_offset_by_time_answers_as_listed(name: str, reader: StoreReader) -> None:
    for query in golden.meta(name)["queries"]["getOffsetInQueueByTime"]:
        found = reader.offset_by_time(
            query["topic"],
            query["queueId"],
            query["timestamp"],
            upper=query["boundary"] == BOUNDARY_UPPER,
        )
        assert found == query["offset"], query


@pytest.mark.slow
def test_the_same_messages_appended_by_us_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Same clock, same hosts, same property text: every segment comes out byte for byte."""
    theirs = golden.unpack(name, tmp_path)
    ours = tmp_path / "ours"
    (ours / "commitlog").mkdir(parents=True)
    append_again(theirs, ours, name)
    for path in sorted((theirs / "commitlog").iterdir()):
        assert (ours / "commitlog" / path.name).read_bytes() == path.read_bytes(), path.name


def append_again(theirs: Path, ours: Path, name: str) -> None:
    """Put for put: what was one call then (`recordNames`, else one record) is one call now."""
    meta = golden.meta(name)
    settings = meta["settings"]
    batches = {
        put["physicalOffset"]: put["messages"]
        for put in meta.get("recordNames", [])
        if put["messages"] > 1
    }
    queues: dict[tuple[str, int], QueueCursor] = {}
    records = reference.records(theirs)
    at, index = 0, 0
    while index < len(records):
        count = batches.get(records[index].physical_offset, 1)
        group = records[index : index + count]
        log = CommitLog(
            ours,
            segment_bytes=settings["mappedFileSizeCommitLog"],
            physical_offset=at,
            store_host=reference.encode_host(group[0].store_host),
            max_message_bytes=settings["maxMessageSize"],
            crc_property=bool(settings.get("enabledAppendPropCRC")),
        )
        key = (group[0].topic, group[0].queue_id)
        queue = queues.setdefault(key, QueueCursor(*key))
        if group[0].queued:
            queue.next_offset = group[0].queue_offset
        put = append_one if count == 1 else append_batch
        assert put(log, queue, group) == group[0].physical_offset
        at = log.physical_offset
        log.close()
        index += count


def given_properties(record: reference.Record) -> bytes:
    """The property text as it was handed in: without the appended CRC."""
    raw = record.properties_raw
    return raw[:-20] if record.property_crc_ok is not None else raw


def append_one(log: CommitLog, queue: QueueCursor, group: list[reference.Record]) -> int:
    (record,) = group
    return log.append(
        queue,
        record.body,
        given_properties(record),
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp_ms=record.born_timestamp,
        born_host=reference.encode_host(record.born_host),
        store_timestamp_ms=record.store_timestamp,
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
    )


def append_batch(log: CommitLog, queue: QueueCursor, group: list[reference.Record]) -> int:
    elements = []
    for record in group:
        properties = given_properties(record)
        size = 22 + len(record.body) + len(properties)
        head = struct.pack(">iiiii", size, 0, 0, record.flag, len(record.body))
        elements.append(head + record.body + struct.pack(">h", len(properties)) + properties)
    first = group[0]
    return log.append_batch(
        queue,
        b"".join(elements),
        len(group),
        sys_flag=first.sys_flag,
        born_timestamp_ms=first.born_timestamp,
        born_host=reference.encode_host(first.born_host),
        store_timestamp_ms=first.store_timestamp,
        reconsume_times=first.reconsume_times,
    )
