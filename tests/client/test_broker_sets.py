"""Groups and orderly groups of a RocketMQ 5.3.3 broker go on here where they were, message for
message as its own consumers did when that broker was started again."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import golden
import pytest
from patience import patient

from cometmq import Admin, Broker, Message
from cometmq.client.administration.descriptions import GroupReport
from cometmq.protocol.errors import GroupNotExist, NoPermission
from cometmq.shm.state.fastjson import loads

WAIT_S = patient(90)
KEYS = (
    "mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxMessageSize", "maxHashSlotNum",
    "maxIndexNum", "fileReservedTime", "messageDelayLevel",
)  # fmt: skip
PROBE = "probe-"  # messages that were sent to the broker when it was started again
BATCH_CQ = "AttrBatch"  # a topic whose queues have another format (docs/formats.md)

Place = tuple[str, int]
Seen = dict[Place, list[tuple[int, str, int]]]  # queue -> queue offset, gid, reconsume times


def opened(name: str, tmp_path: Path) -> tuple[Broker, dict[str, Any], dict[str, Any]]:
    """The broker on a copy, what it knows of it, and what RocketMQ did a day later."""
    store = golden.unpack(name, tmp_path, golden.BROKERS)
    meta = golden.meta(name, golden.BROKERS)
    settings = {key: meta["settings"][key] for key in KEYS if key in meta["settings"]}
    late = golden.expected(name)["restarts"]["late"]
    return Broker(store, profile="test", settings=settings), meta, late


def consume(broker: Broker, observer: dict[str, Any]) -> Seen:
    """What a group gets until it lags behind in nothing."""
    seen: Seen = defaultdict(list)
    lock = threading.Lock()
    group = observer["group"]

    def handle(message: Message) -> None:
        place = message.stored_topic, message.queue_id
        with lock:
            gid = message.properties.get("gid", "")
            seen[place].append((message.queue_offset, gid, message.reconsume_times))

    with broker.consumer(group) as consumer:
        for topic, expression in observer["topics"].items():
            kind, _, sql = expression.partition("SQL:")
            consumer.subscribe(topic, kind or "*", sql=sql)
        orderly = observer["mode"] == "orderly"
        runner = threading.Thread(target=consumer.run, args=(handle,), kwargs={"orderly": orderly})
        runner.start()
        try:
            wait_until_read(broker, group, observer["topics"])
        finally:
            consumer.close()
            runner.join(WAIT_S)
    return seen


def wait_until_read(broker: Broker, group: str, topics: Iterable[str]) -> None:
    """A consumer joins with what it subscribes to first, which may have been read before."""
    wanted = {*topics, f"%RETRY%{group}"}
    deadline = time.monotonic() + WAIT_S
    with Admin(broker.name_server) as admin:
        while True:
            report: GroupReport | None = None
            with suppress(GroupNotExist):  # until its first consumer has joined
                report = admin.describe_group(group)
            if report is not None and wanted <= report.subscriptions.keys():
                owned = [each for each in report.queues if each.member]  # else nobody may read it
                if not any(each.lag for each in owned if each.topic in wanted):
                    return
            assert time.monotonic() < deadline, report
            time.sleep(0.05)


def told(rows: list[dict[str, Any]]) -> Seen:
    seen: Seen = defaultdict(list)
    for row in rows:
        if not row["gid"].startswith(PROBE) and row["queueTopic"] != BATCH_CQ:
            entry = row["queueOffset"], row["gid"], row["reconsumeTimes"]
            seen[row["queueTopic"], row["queueId"]].append(entry)
    return {place: sorted(entries) for place, entries in seen.items()}


def test_orderly_groups(tmp_path: Path) -> None:
    broker, meta, late = opened("orderly", tmp_path)
    with broker:
        for observer in meta["observers"]["groups"]:
            found = consume(broker, observer)
            rows = late["deliveries"].get(observer["group"], {"messages": []})["messages"]
            assert found == told(rows), observer  # in the order of each queue, without sorting
    offsets = golden_offsets(tmp_path, "orderly")
    assert offsets == late["configAtEnd"]["consumerOffsets"]


def golden_offsets(tmp_path: Path, name: str) -> dict[str, dict[str, int]]:
    file = tmp_path / name / "store" / "config" / "consumerOffset.json"
    table: Any = loads(file.read_bytes())
    return {
        key: {str(queue): offset for queue, offset in queues.items()}
        for key, queues in table["offsetTable"].items()
        if not key.startswith("%RETRY%")
    }


@pytest.mark.slow
def test_groups_of_all_kinds(tmp_path: Path) -> None:
    broker, meta, late = opened("groups", tmp_path)
    with broker:
        for observer in meta["observers"]["groups"]:
            group = observer["group"]
            observer["topics"].pop(BATCH_CQ, None)
            if group == "GDisabled":
                with (
                    broker.consumer(group, "OrderTopic") as consumer,
                    pytest.raises(NoPermission, match="consumeEnable"),
                ):
                    consumer.run(print)
                continue
            found = {place: sorted(entries) for place, entries in consume(broker, observer).items()}
            rows = late["deliveries"].get(group, {"messages": []})["messages"]
            assert found == told(rows), group
