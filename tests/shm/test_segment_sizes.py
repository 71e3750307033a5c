"""Segments of any size, as RocketMQ takes them: 100000000 as well as 1073741824.

A mapping begins with its file. So pages are counted from a segment's own beginning, which is not
the beginning of a page of the log where segments are no whole number of pages.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from family import SMALL, RunningBroker, Sent
from log_scan import scan_log
from patience import patient
from waiting import until

from cometmq import Broker, Consumer, Message, Producer, errors
from cometmq.protocol.commands import DeletedSegments, DeleteSegments
from cometmq.shm.kernel.columns import COLUMNS_DONE, Columns
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import list_segments, segment_name
from cometmq.shm.reading.column_reader import ColumnReader, log_end
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.tools.verify import verify_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WAIT_S = patient(60)
OLD_S = 73 * 3600
FLUSHES = ("ASYNC_FLUSH", "SYNC_FLUSH")
BODY = 8_000
BASE: dict[str, Any] = {
    "mappedFileSizeConsumeQueue": 2_020,
    "maxMessageSize": 65_536,
    "mlockEnable": True,
    "flushIntervalCommitLog": 20,
    "flushCommitLogLeastPages": 0,
    "cleanResourceInterval": 600_000,
    "deleteCommitLogFilesInterval": 5,
}


def take(name_server: str, transport: str, group: str, count: int) -> list[Message]:
    """So many messages of the topic, by a consumer of that kind."""
    found: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    with Consumer(name_server, group, "orders", transport=transport, start="earliest") as consumer:
        while len(found) < count:
            messages = consumer.poll(1024, 1)
            consumer.ack(messages)
            found += messages
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
    return found


def fill(broker: RunningBroker, sent: list[Sent], segments: int, body: int = BODY) -> None:
    """Messages of several sizes in that many segments more."""
    size = int(broker.settings["mappedFileSizeCommitLog"])
    end = broker.counter(Counter.WROTE) + segments * size
    number = len(sent)
    while broker.counter(Counter.WROTE) < end:
        bodies = [b"%d " % (number + i) + bytes(body - 37 * (i % 7)) for i in range(4)]
        sent += broker.send("orders", number % 4, bodies)
        number += 4


def check_consumers(broker: RunningBroker, sent: list[Sent], group: str) -> None:
    wanted = sorted((one.queue_id, one.queue_offset, one.body) for one in sent)
    for transport in ("mapped", "zmq"):
        found = take(broker.ready.name_server, transport, f"{group}-{transport}", len(sent))
        got = sorted((one.queue_id, one.queue_offset, bytes(one.body)) for one in found)
        assert got == wanted, transport


@pytest.mark.parametrize(
    ("size", "flush"),
    [
        (160_000, "ASYNC_FLUSH"),
        (1_000_000, "SYNC_FLUSH"),
        (1 << 20, "ASYNC_FLUSH"),
        (65_537, "SYNC_FLUSH"),
        (65_537, "ASYNC_FLUSH"),
    ],
)
def test_everything_works_with_segments_of_any_size(size: int, flush: str, tmp_path: Path) -> None:
    """Rolled over, read in every way, killed, recovered, cleaned, used again."""
    store = tmp_path / "store"
    settings = {**BASE, "mappedFileSizeCommitLog": size, "flushDiskType": flush}
    sent: list[Sent] = []
    broker = RunningBroker(store, settings)
    try:
        broker.create_topic("orders")
        fill(broker, sent, 4)
        check_consumers(broker, sent, "first")
        limits = broker.statistics("allocator")["limits"]
        assert "populated" not in limits, limits
        assert "got ready" not in limits, limits
        broker.kill("commitlog")
        broker.kill("allocator")
        fill(broker, sent, 2)
        broker.kill("dispatcher")
        broker.kill("flush")
        fill(broker, sent, 2)
        broker.assert_stored(sent)
        assert "Traceback" not in broker.log, broker.log
        assert broker.statistics()["restarts"] == 4
    finally:
        broker.kill_all()
    with RunningBroker(store, settings) as broker:
        check_consumers(broker, sent, "second")
        fill(broker, sent, 2)
        broker.assert_stored(sent)
        assert broker.close() == 0
    assert not verify_store(store).findings
    check_tools(store, sent)
    clean_and_use_again(store, settings, size)


def check_tools(store: Path, sent: list[Sent]) -> None:
    """Who opens the files of a closed store, and Spark's columns: by the log, and by queues."""
    wanted = sorted((one.queue_id, one.queue_offset) for one in sent)
    reader = StoreReader.open_closed(store)
    records = list(scan_log(reader))
    ours = [one for one in records if one.topic == "orders"]
    assert sorted((one.queue_id, one.queue_offset) for one in ours) == wanted
    reader.close()
    columns = Columns(("queue_id", "queue_offset"), "b", rows_max=1 << 16, bytes_max=1 << 28)
    by_log = ColumnReader.up_to(store, log_end(store))
    reason, _ = by_log.scan_columns(columns, *by_log.positions.log_range())
    assert reason == COLUMNS_DONE
    assert columns.take()[0] == len(records)
    for queue_id in range(4):
        count = sum(one.queue_id == queue_id for one in sent)
        assert by_log.gather_columns(columns, "orders", queue_id, 0, count) == (COLUMNS_DONE, count)
        assert columns.take()[0] == count
    by_log.close()


def clean_and_use_again(store: Path, settings: dict[str, Any], size: int) -> None:
    """The oldest segments go, and become the next ones."""
    with RunningBroker(store, settings) as broker:
        starts = list_segments(store / "commitlog", size)
        old = time.time() - OLD_S
        for start in starts[:4]:
            os.utime(store / "commitlog" / segment_name(start), times=(old, old))
        answer = broker.ask("coordinator", DeleteSegments())
        assert isinstance(answer, DeletedSegments)
        assert answer.segments == starts[:4]

        def is_used_again() -> Any:
            fill(broker, [], 1)
            return broker.statistics("allocator")["recycled_segments"]

        until(is_used_again, says=lambda: broker.log)
        assert "Traceback" not in broker.log, broker.log
        broker.create_topic("fresh", 1)
        after = [one for _ in range(25) for one in broker.send("fresh", 0, [bytes(BODY)] * 2)]
        broker.assert_stored(after)
    assert not [each for each in verify_store(store).findings if each.kind != "extra"]


def test_rocketmqs_own_small_size(tmp_path: Path) -> None:
    """100 MB, with what everything else is by default: written faster than it can be followed."""
    store = tmp_path / "store"
    settings = {"mappedFileSizeCommitLog": 100_000_000, "maxMessageSize": 4_194_304}
    bodies = [b"%d " % number + bytes(1 << 20) for number in range(4)]
    with RunningBroker(store, settings) as broker:
        broker.create_topic("orders", 1)
        sent: list[Sent] = []
        with Consumer(
            broker.ready.name_server, "g", "orders", transport="mapped", start="earliest"
        ) as consumer:
            while len(sent) < 232:
                sent += broker.send("orders", 0, bodies, timeout_s=patient(30))
                found = 0
                while found < len(bodies):
                    messages = consumer.poll(8, WAIT_S)
                    assert messages, broker.log
                    assert [one.body[:4] for one in messages] == [
                        body[:4] for body in bodies[found : found + len(messages)]
                    ]
                    found += len(messages)
        assert broker.counter(Counter.WROTE) > 2 * 100_000_000
        assert broker.statistics()["restarts"] == 0
        assert "Traceback" not in broker.log, broker.log
    with RunningBroker(store, settings) as broker:
        assert len(broker.read_queue("orders", 0, len(sent))) == len(sent)


def test_a_segment_as_large_as_the_largest_message(tmp_path: Path) -> None:
    """What fits is stored, what does not is refused, and neither stops the other."""
    size = 256 << 10
    settings = {"mappedFileSizeCommitLog": size, "maxMessageSize": size}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.until_logged(f"mappedFileSizeCommitLog = {size}: a message lies in one segment")
        broker.create_topic("orders", 1)
        sent = []
        for _ in range(5):
            with pytest.raises(errors.MessageTooLarge, match=f"at most {size - 8}"):
                broker.send("orders", 0, [bytes(size)])
            sent += broker.send("orders", 0, [b"large" + bytes(size - 1_000)])
            sent += broker.send("orders", 0, [b"small"])
        broker.assert_stored(sent)
        check_consumers(broker, sent, "g")


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_services_own_writer(flush: str, tmp_path: Path) -> None:
    size = 160_000
    settings = {"mappedFileSizeCommitLog": size, "flushDiskType": flush, "maxMessageSize": 16_384}
    bodies = [b"%d " % number + bytes(3_000) for number in range(300)]
    with Broker(tmp_path / "store", settings={**SMALL, **settings}, writer="here") as broker:
        appender = broker.appender("orders", 0)
        for body in bodies[:150]:
            appender.append(body)
        for start in range(150, 300, 10):
            appender.append_many(bodies[start : start + 10])
        for transport in ("mapped", "zmq"):
            found = take(broker.name_server, transport, transport, len(bodies))
            assert [one.body for one in found] == bodies


def test_a_producers_batches_in_small_segments(tmp_path: Path) -> None:
    """A producer fills batches of 256 KiB, whatever the segments are."""
    settings = {"mappedFileSizeCommitLog": 160_000, "maxMessageSize": 16_384}
    bodies = [b"%d " % number + bytes(1_000) for number in range(2_000)]
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("orders", 1)
        with Producer(broker.ready.name_server) as producer:
            producer.send_many("orders", bodies)
        found = broker.read_queue("orders", 0, len(bodies))
        assert [one.body for one in found] == bodies
