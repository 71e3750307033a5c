"""Reading from a broker that runs: both transports, streams, groups."""

from __future__ import annotations

import re
import shutil
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from family import RunningBroker
from patience import patient
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from still import stopped

import cometmq.spark.catalog
from cometmq.client import Admin
from cometmq.shm.live.control import Counter as Counters
from cometmq.shm.live.queue_table import QueueRange
from cometmq.shm.reading.column_reader import Served
from cometmq.spark import LagListener
from cometmq.spark.catalog import LocalStore
from cometmq.spark.listener import LagRow
from cometmq.spark.offsets import Queue
from cometmq.spark.options import parse
from cometmq.spark.streams import finished

pytestmark = pytest.mark.slow

README = Path(__file__).resolve().parents[2] / "README.md"
WAIT_S = patient(240)  # of a stream, on a machine that has other work to do
TRANSPORTS = ("file", "rpc")
COLUMNS = "topic string, queue_id int, queue_offset bigint, body binary, tags string, keys string"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("spark")
    settings = {"brokerName": "broker-a", "flushDiskType": "SYNC_FLUSH"}
    with RunningBroker(folder / "store", settings) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def topic(broker: RunningBroker) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    broker.create_topic(name, 2)
    return name


def where(broker: RunningBroker, transport: str) -> dict[str, str]:
    if transport == "file":
        return {"store": str(broker.store)}
    return {"namesrv": broker.ready.name_server}


def send(broker: RunningBroker, topic: str, count: int, *, first: int = 0, **kinds: Any) -> None:
    """Messages numbered over both queues; they are on the disk, and in their queues."""
    for queue_id in (0, 1):
        for at in range(first, first + count, 1000):
            numbers = range(at, min(at + 1000, first + count))
            bodies = [b"%d %d " % (queue_id, number) + b"x" * 200 for number in numbers]
            broker.send(topic, queue_id, bodies, **kinds)
        broker.read_queue(topic, queue_id, first + count)


def batch(spark: SparkSession, schema: str = COLUMNS, **options: Any) -> DataFrame:
    return spark.read.format("cometmq").schema(schema).options(**options).load()


def places(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [(row.queue_id, row.queue_offset) for row in rows]


def both(begin: int, end: int) -> list[tuple[int, int]]:
    return [(queue_id, offset) for queue_id in (0, 1) for offset in range(begin, end)]


def test_the_readmes_program(spark: SparkSession, broker: RunningBroker) -> None:
    *_, program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    broker.create_topic("orders", 1)
    names: dict[str, Any] = {}
    exec(program.replace("127.0.0.1:9876", broker.ready.name_server), names)
    broker.send("orders", 0, [b"paid"])
    orders = names["orders"].writeStream.format("memory").queryName("orders")
    finished(orders.trigger(availableNow=True).start, WAIT_S)
    assert names["spark"] is spark or names["spark"]._jvm is spark._jvm
    assert spark.table("orders").count() == 0  # a stream begins at the latest message


# --- batches ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_message(
    spark: SparkSession, broker: RunningBroker, topic: str, transport: str
) -> None:
    send(broker, topic, 3000, tags="paid", keys="k1 k2")  # more than one segment of each
    rows = batch(spark, subscribe=topic, **where(broker, transport)).collect()
    assert places(rows) == both(0, 3000)
    for row in rows:
        assert row.body.startswith(b"%d %d " % (row.queue_id, row.queue_offset))
        assert (row.topic, row.tags, row.keys) == (topic, "paid", "k1 k2")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parts_keep_the_order(
    spark: SparkSession, broker: RunningBroker, topic: str, transport: str
) -> None:
    send(broker, topic, 500)
    read = batch(
        spark, subscribe=topic, maxBytesPerPartition=20_000, batchRows=7, **where(broker, transport)
    )
    parts = read.rdd.glom().collect()
    assert len(parts) > 10
    assert all(sum(len(row.body) for row in part) <= 20_000 for part in parts)
    assert sorted(places([row for part in parts for row in part])) == both(0, 500)
    for part in parts:
        assert places(part) == sorted(places(part))
    few = batch(spark, subscribe=topic, maxMessagesPerPartition=600, **where(broker, transport))
    assert [len(part) for part in few.rdd.glom().collect()] == [500, 500]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tags(spark: SparkSession, broker: RunningBroker, topic: str, transport: str) -> None:
    """Aa and BB have the same hash."""
    for number, tags in enumerate(["Aa", "BB", "other"] * 20):
        broker.send(topic, 0, [b"%d" % number], tags=tags)
    broker.read_queue(topic, 0, 60)
    rows = batch(spark, subscribe=topic, tags="Aa || other", **where(broker, transport)).collect()
    assert Counter(row.tags for row in rows) == {"Aa": 20, "other": 20}
    wanted = [number for number in range(60) if number % 3 != 1]
    assert [int(row.body) for row in rows] == wanted


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_where(spark: SparkSession, broker: RunningBroker, topic: str, transport: str) -> None:
    for number in range(60):
        tags, properties = "ab"[number % 2], {"n": str(number % 10)}
        broker.send(topic, 0, [b"%d" % number], tags=tags, properties=properties)
    broker.read_queue(topic, 0, 60)
    options = {"tags": "a", "where": "n > 5", **where(broker, transport)}
    rows = batch(spark, subscribe=topic, **options).collect()
    assert [int(row.body) for row in rows] == [n for n in range(0, 60, 2) if n % 10 > 5]
    with pytest.raises(Exception, match="where: SQL92, line 1, column 3"):
        batch(spark, subscribe=topic, **{**options, "where": "n ! 5"}).collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_assign_and_offsets(
    spark: SparkSession, broker: RunningBroker, topic: str, transport: str
) -> None:
    send(broker, topic, 10)
    one = batch(
        spark,
        assign=f'{{"{topic}": {{"broker-a": [1]}}}}',
        startingOffsets=f'{{"{topic}": {{"broker-a": {{"1": 3}}}}}}',
        endingOffsets=f'{{"{topic}": {{"broker-a": {{"1": 7}}}}}}',
        **where(broker, transport),
    )
    assert places(one.collect()) == [(1, offset) for offset in range(3, 7)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_timestamps(spark: SparkSession, broker: RunningBroker, topic: str, transport: str) -> None:
    send(broker, topic, 5)
    broker.send(topic, 0, [b"later"])
    later = broker.read_queue(topic, 0, 6)[5].store_timestamp_ms
    stored = {at.store_timestamp_ms for q in (0, 1) for at in broker.read_queue(topic, q, 5)}
    expected = [
        (queue_id, message.queue_offset)
        for queue_id in (0, 1)
        for message in broker.read_queue(topic, queue_id, 5)
        if message.store_timestamp_ms >= later
    ]
    place = where(broker, transport)
    after = batch(spark, subscribe=topic, startingTimestamp=later, **place).collect()
    assert places(after) == expected
    before = batch(spark, subscribe=topic, endingTimestamp=min(stored), **place).collect()
    assert before == []
    with pytest.raises(PySparkException, match="no message was stored at"):
        batch(
            spark, subscribe=topic, startingTimestamp="2100-01-01", onNoTimestamp="error", **place
        ).collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_as_the_beginning(
    spark: SparkSession, broker: RunningBroker, topic: str, transport: str
) -> None:
    send(broker, topic, 10)
    group = f"g-{topic}"
    with Admin(broker.ready.name_server) as admin:
        admin.reset_offsets(group, topic, 8, queue_id=0)
    read = batch(
        spark,
        subscribe=topic,
        startingOffsets="group",
        consumerGroup=group,
        groupFallback="latest",
        **where(broker, transport) | {"namesrv": broker.ready.name_server},
    )
    assert places(read.collect()) == [(0, 8), (0, 9)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_damage_is_named(
    spark: SparkSession, broker: RunningBroker, topic: str, transport: str
) -> None:
    """A body that changed under a running broker: both transports say the same of it."""
    send(broker, topic, 10)
    victim = broker.read_queue(topic, 1, 10)[4]
    size = int(broker.settings["mappedFileSizeCommitLog"])
    start = victim.physical_offset // size * size
    with (broker.store / "commitlog" / f"{start:020d}").open("r+b") as segment:
        segment.seek(victim.physical_offset - start + victim.record.index(b"xxx"))
        segment.write(b"y")
    broken = victim.stored_body.replace(b"x", b"y", 1)
    text = (
        f"{topic}/1 offset 4: .*{start:020d}, physical offset {victim.physical_offset}: "
        f"wrong body CRC: expected {victim.body_crc:#010x}, "
        f"it has {zlib.crc32(broken) & 0x7FFFFFFF:#010x}"
    )
    place = where(broker, transport)
    with pytest.raises(PySparkException, match=text):
        batch(spark, subscribe=topic, **place).collect()
    rest = [each for each in both(0, 10) if each != (1, 4)]
    assert places(batch(spark, subscribe=topic, onCorrupt="skip", **place).collect()) == rest
    nulled = batch(spark, subscribe=topic, onCorrupt="null-body", **place).collect()
    assert places(nulled) == both(0, 10)
    assert [(row.queue_id, row.queue_offset) for row in nulled if row.body is None] == [(1, 4)]


def test_a_broker_that_has_gone(spark: SparkSession, tmp_path: Path) -> None:
    """Asked again, then an error with its address; never an empty answer."""
    with RunningBroker(tmp_path / "store") as broker:
        address = broker.ready.name_server
    with pytest.raises(PySparkException, match="no name server answers at"):
        batch(spark, subscribe="t", namesrv=address, timeoutMs=300, retries=1).collect()


def test_only_what_is_durable(spark: SparkSession, tmp_path: Path) -> None:
    """Under ASYNC_FLUSH, with a flush that does not come."""
    settings = {"flushIntervalCommitLog": 600_000, "flushCommitLogThoroughInterval": 600_000}
    with RunningBroker(tmp_path / "store", settings) as broker:
        broker.create_topic("t", 2)
        send(broker, "t", 10)
        flushed = broker.counter(Counters.FLUSHED)
        durable = [
            (queue_id, message.queue_offset)
            for queue_id in (0, 1)
            for message in broker.read_queue("t", queue_id, 10)
            if message.physical_offset + message.size <= flushed
        ]
        assert len(durable) < 20
        for transport in TRANSPORTS:
            place = where(broker, transport)
            assert places(batch(spark, subscribe="t", **place).collect()) == durable
            rows = batch(spark, subscribe="t", isolation="dispatched", **place).collect()
            assert places(rows) == both(0, 10)


def test_who_reads_the_files_waits_for_the_dispatcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is acknowledged is in no queue yet: it is waited for, and read; not for ever."""
    looks = Event()

    def look(served: Served) -> int:
        looks.set()
        return served._dispatched.value

    monkeypatch.setattr(Served, "dispatched", property(look))
    with RunningBroker(tmp_path / "store") as broker, ThreadPoolExecutor(1) as pool:
        broker.create_topic("t", 1)
        told = parse({"store": str(broker.store), "subscribe": "t", "isolation": "dispatched"})
        catalog = LocalStore(told)
        queue = Queue(catalog.broker, "t", 0)
        with stopped(broker.pids()["dispatcher"]):
            broker.send("t", 0, [b"x"] * 10)
            monkeypatch.setattr(cometmq.spark.catalog, "DISPATCH_S", 0.1)
            assert "t" not in catalog.topics()
            monkeypatch.setattr(cometmq.spark.catalog, "DISPATCH_S", WAIT_S)
            looks.clear()
            found = pool.submit(catalog.ranges, [queue])
            assert looks.wait(WAIT_S)
        assert found.result(WAIT_S) == {queue: QueueRange(0, 10)}
        assert catalog.topics()["t"] == [queue]
        catalog.close()


# --- streams ---


class Stream:
    """A query with a checkpoint, and what it put out."""

    def __init__(self, spark: SparkSession, folder: Path, **options: Any) -> None:
        self.spark = spark
        self.options = options
        self.checkpoint = str(folder / "checkpoint")
        self.out = str(folder / "out")
        self.name = f"q{uuid.uuid4().hex[:8]}"

    def start(self, **more: Any) -> StreamingQuery:
        source = self.spark.readStream.format("cometmq").schema(COLUMNS)
        frame = source.options(**self.options | more).load()
        writer = frame.writeStream.format("parquet").queryName(self.name)
        writer = writer.option("checkpointLocation", self.checkpoint).option("path", self.out)
        return writer.trigger(availableNow=True).start()

    def run(self, **more: Any) -> list[dict[str, Any]]:
        """To what is there now; the progress of every batch that had something."""
        query = finished(partial(self.start, **more), WAIT_S)
        return [progress for progress in query.recentProgress if progress["numInputRows"]]

    def rows(self) -> list[Row]:
        return sorted(self.spark.read.parquet(self.out).collect())

    def places(self) -> list[tuple[int, int]]:
        return sorted(places(self.rows()))


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Callable[..., Stream]:
    return lambda **options: Stream(spark, tmp_path, **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stream_goes_on_where_it_was(
    broker: RunningBroker, topic: str, transport: str, stream: Callable[..., Stream]
) -> None:
    send(broker, topic, 100)
    query = stream(
        subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger=20_000,
        **where(broker, transport),
    )  # fmt: skip
    batches = query.run()
    assert len(batches) > 2  # 2 * 100 messages of some 300 bytes
    assert all(each["numInputRows"] * 300 < 25_000 for each in batches)
    assert query.places() == both(0, 100)
    send(broker, topic, 50, first=100)
    assert sum(each["numInputRows"] for each in query.run(maxMessagesPerTrigger=30)) == 100
    assert query.places() == both(0, 150)
    assert query.run() == []


def test_limits_by_messages(
    broker: RunningBroker, topic: str, stream: Callable[..., Stream]
) -> None:
    send(broker, topic, 50)
    query = stream(
        subscribe=topic, startingOffsets="earliest", maxMessagesPerTrigger=20,
        **where(broker, "rpc"),
    )  # fmt: skip
    assert [each["numInputRows"] for each in query.run()] == [20] * 5


def test_the_beginning_is_pinned(
    broker: RunningBroker, topic: str, stream: Callable[..., Stream]
) -> None:
    """From latest: what comes after the first start is read by the next, whatever came between."""
    send(broker, topic, 5)
    query = stream(subscribe=topic, **where(broker, "file"))
    assert query.run() == []
    send(broker, topic, 5, first=5)
    query.run()
    assert query.places() == both(5, 10)


def test_a_topic_that_comes_later(
    broker: RunningBroker, topic: str, stream: Callable[..., Stream]
) -> None:
    send(broker, topic, 5)
    query = stream(subscribePattern=f"{topic}.*", startingOffsets="latest", **where(broker, "rpc"))
    assert query.run() == []
    broker.create_topic(f"{topic}-more", 2)
    send(broker, f"{topic}-more", 3)
    query.run()
    assert query.places() == both(0, 3)
    assert {row.topic for row in query.rows()} == {f"{topic}-more"}


def test_group_commits_and_lag(
    spark: SparkSession, broker: RunningBroker, topic: str, stream: Callable[..., Stream]
) -> None:
    """The last batch of an AvailableNow run is committed too."""
    send(broker, topic, 60)
    group = f"g-{topic}"
    query = stream(
        subscribe=topic, startingOffsets="earliest", maxMessagesPerTrigger=50,
        consumerGroup=group, commitOffsets="afterBatch", **where(broker, "rpc"),
    )  # fmt: skip
    seen: list[LagRow] = []
    listener = LagListener(broker.ready.name_server, group, query=query.name, on_rows=seen.extend)
    spark.streams.addListener(listener)
    try:
        query.run()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(20_000)
    finally:
        spark.streams.removeListener(listener)
        listener.close()
    with Admin(broker.ready.name_server) as admin:
        assert admin.committed(group, topic) == {("broker-a", 0): 60, ("broker-a", 1): 60}
    by_batch = {}
    for row in seen:
        assert row.latest == 60
        assert row.lag_messages == 60 - row.end
        assert (row.lag_bytes == 0) == (row.lag_messages == 0)
        by_batch[row.batch] = by_batch.get(row.batch, 0) + row.lag_messages
    assert list(by_batch.values()) == [120, 70, 20, 0]


def test_another_store_is_an_error(
    broker: RunningBroker, topic: str, stream: Callable[..., Stream], tmp_path: Path
) -> None:
    """Of the same names, at the same place: only its identity differs."""
    copy = tmp_path / "copy"
    names: list[str] = []
    for number in range(2):
        with RunningBroker(copy, {"brokerName": "broker-a"}) as other:
            other.create_topic("t", 2)
            send(other, "t", 10 + number)
        names.append((copy / "cometmq.store").read_text())
        if not number:
            query = stream(subscribe="t", startingOffsets="earliest", store=str(copy))
            query.run()
            assert query.places() == both(0, 10)
            shutil.rmtree(copy)
    with pytest.raises(StreamingQueryException) as raised:
        query.run()
    for name in names:
        assert name.split('"')[3] in str(raised.value)


def test_a_store_that_was_cut_is_an_error(stream: Callable[..., Stream], tmp_path: Path) -> None:
    """Without an identity, as RocketMQ's stores are, it shows in where queues end."""
    copy = tmp_path / "copy"
    for count in (10, 4):
        shutil.rmtree(copy, ignore_errors=True)
        with RunningBroker(copy, {"brokerName": "broker-a"}) as other:
            other.create_topic("t", 2)
            send(other, "t", count)
        (copy / "cometmq.store").unlink()
        if count == 10:
            query = stream(
                subscribe="t", startingOffsets="earliest", store=str(copy), brokerName="b"
            )
            query.run()
    with pytest.raises(StreamingQueryException, match=r"read up to 10 of .* ends at 4"):
        query.run()


def test_expired_ranges(spark: SparkSession, stream: Callable[..., Stream], tmp_path: Path) -> None:
    """The log's first segment goes while a stream stands in it."""
    store = tmp_path / "store"
    with RunningBroker(store, {"brokerName": "broker-a"}) as broker:
        broker.create_topic("t", 2)
        send(broker, "t", 10)
    query = stream(subscribe="t", startingOffsets="earliest", store=str(store))
    query.run()
    with RunningBroker(store, {"brokerName": "broker-a"}) as broker:
        for first in range(10, 4010, 1000):  # 1 MiB segments
            send(broker, "t", 1000, first=first)
    min((store / "commitlog").iterdir()).unlink()
    with pytest.raises(StreamingQueryException, match="have expired"):
        query.run()
    query.run(onMissing="skip")
    found = query.places()
    assert found[:10] == [(0, offset) for offset in range(10)]
    begin = batch(spark, subscribe="t", store=str(store)).groupBy("queue_id").min("queue_offset")
    lows = dict(begin.collect())
    assert min(lows.values()) > 10
    kept = {(queue_id, offset) for queue_id, low in lows.items() for offset in range(low, 4010)}
    assert set(found) == kept | set(both(0, 10))
    wanted = '{"t": {"broker-a": {"0": 5}}}'
    with pytest.raises(PySparkException, match="have expired"):
        batch(spark, subscribe="t", store=str(store), startingOffsets=wanted).collect()
