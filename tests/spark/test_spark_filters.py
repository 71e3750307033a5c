"""Filters limit the rows of their own query only (Fault 12)."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import golden
import pytest
from patience import patient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, In, LessThan
from pyspark.sql.types import StructType

from cometmq import Admin, Broker
from cometmq.spark import messages
from cometmq.spark.options import parse
from cometmq.spark.pushdown import PER_SCAN
from cometmq.spark.schema import default_schema
from cometmq.spark.source import BatchReader, CometDataSource, PushdownBatchReader

pytestmark = pytest.mark.slow

SWITCH = "spark.sql.python.filterPushdown.enabled"
SMALL = {"mappedFileSizeCommitLog": 8 << 20, "mlockEnable": False}
QUEUES = 3
EACH = 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three queues of ten messages each; every second message has the tag `even`."""
    folder = tmp_path_factory.mktemp("filters") / "store"
    with Broker(folder, settings=SMALL) as broker:
        fill(broker)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with the same messages."""
    folder = tmp_path_factory.mktemp("filters") / "served"
    with Broker(folder, settings=SMALL) as broker:
        fill(broker)
        yield broker


def fill(broker: Broker) -> None:
    with Admin(broker.name_server) as admin, broker.producer() as producer:
        admin.create_topic("t", QUEUES)
        for number in range(QUEUES * EACH):
            offset, queue_id = divmod(number, QUEUES)
            producer.send(
                "t", b"%d" % number, queue_id=queue_id, keys=[f"k{offset}"],
                tags="odd" if offset % 2 else "even",
            )  # fmt: skip
    with broker.consumer("filled", "t") as consumer:  # until all is in the queues
        deadline = time.monotonic() + patient(60)
        left = QUEUES * EACH
        while left:
            assert time.monotonic() < deadline, f"{left} messages are not there"
            left -= len(consumer.poll(left, timeout_s=1))


@pytest.fixture
def switched_on(spark: SparkSession) -> Any:
    """Turn on Spark's own switch, as a user's session may do."""
    before = spark.conf.get(SWITCH, "false") or "false"
    spark.conf.set(SWITCH, "true")
    yield
    spark.conf.set(SWITCH, before)


@pytest.fixture(params=["load", "columns"])
def frame(
    spark: SparkSession, store: Path, switched_on: None, request: pytest.FixtureRequest
) -> DataFrame:
    if request.param == "columns":
        names = ["queue_id", "queue_offset", "tags", "keys", "topic"]
        return messages(spark, store=str(store), subscribe="t", columns=names, pushdown="true")
    reader = spark.read.format("cometmq").option("store", str(store)).option("subscribe", "t")
    return reader.option("pushdown", "true").load()


def test_query_without_filter_reads_all(frame: DataFrame) -> None:
    counts = [frame.count(), frame.where("queue_offset >= 8").count(), frame.count()]
    assert counts == [30, 6, 30]
    assert frame.where("queue_id = 1 and tags = 'even'").count() == 5
    assert frame.groupBy("queue_id").count().count() == QUEUES
    assert frame.where("length(keys) = 2").count() == 30  # not a filter that is pushed
    assert frame.where("keys = 'k3'").count() == 3
    assert len(frame.collect()) == 30


def test_narrowest_first(frame: DataFrame) -> None:
    assert frame.where("topic = 'other'").count() == 0
    assert frame.where("queue_id = 2").count() == EACH
    assert frame.count() == 30


def test_joins_of_different_filters(frame: DataFrame) -> None:
    """Each side of a join has its own filter, whichever was planned last."""
    low, high = frame.where("queue_offset < 4"), frame.where("queue_offset >= 2 and queue_id = 0")
    on = (f.col("a.queue_offset") == f.col("b.queue_offset"))  # fmt: skip
    both = low.alias("a").join(high.alias("b"), on)
    assert both.count() == 2 * QUEUES  # offsets 2 and 3 of each queue on the left
    assert low.alias("a").join(frame.alias("b"), on).count() == 4 * QUEUES * QUEUES
    assert frame.alias("a").join(low.alias("b"), on, "left_anti").count() == 6 * QUEUES
    nested = frame.where(f.col("queue_offset") == f.lit(1)).select("keys")
    assert frame.join(nested, "keys", "left_semi").count() == QUEUES


def test_unions_and_subqueries(spark: SparkSession, frame: DataFrame) -> None:
    parts = [frame.where(f"queue_id = {queue_id}") for queue_id in range(QUEUES)]
    union = parts[0].unionAll(parts[1]).unionAll(parts[2])
    assert union.dropDuplicates(["queue_id", "queue_offset"]).count() == 30
    assert frame.unionAll(frame.where("queue_offset = 5")).count() == 33
    frame.createOrReplaceTempView("messages_of_t")
    row = spark.sql(
        "select (select count(*) from messages_of_t where queue_offset >= 9) few,"
        " (select count(*) from messages_of_t) every, count(*) even"
        " from messages_of_t where tags = 'even'"
    ).first()
    assert row is not None
    assert tuple(row) == (3, 30, 15)


def test_cached_frames(frame: DataFrame) -> None:
    kept = frame.where("queue_offset >= 5").cache()
    try:
        assert kept.count() == 15
        assert frame.where("queue_id = 1").count() == EACH
        assert frame.count() == 30
        assert kept.where("queue_id = 1").count() == 5
    finally:
        kept.unpersist()
    whole = frame.cache()
    try:
        assert [whole.where("queue_offset = 3").count(), whole.count()] == [3, 30]
    finally:
        whole.unpersist()


def test_queries_at_the_same_time(frame: DataFrame) -> None:
    wanted = {"queue_offset >= 0": 30, "queue_offset >= 8": 6, "queue_id = 1": 10, "tags='odd'": 15}

    def asked(where: str) -> tuple[str, int]:
        return where, frame.where(where).count()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(asked, 3 * list(wanted)))
    assert all(wanted[where] == count for where, count in found), found


def test_stream_joined_with_a_filtered_batch(
    spark: SparkSession, frame: DataFrame, store: Path, tmp_path: Path
) -> None:
    """Each batch of a stream plans the static table again, without filters of other queries."""
    stream = spark.readStream.format("cometmq").options(
        store=str(store), subscribe="t", startingOffsets="earliest", pushdown="true"
    )
    table = frame.where("queue_id = 0").select("queue_offset", f.col("keys").alias("its_keys"))
    seen: list[int] = []
    query = (
        stream.load()
        .where("queue_id = 1")
        .join(table, "queue_offset")
        .writeStream.foreachBatch(lambda rows, _: seen.append(rows.count()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(patient(120))
    assert sum(seen) == EACH
    assert frame.count() == 30


# --- pushed filters: the calls of Spark's planner, without its JVM ---


def planned(reader: BatchReader, filters: list[Filter] | None) -> list[dict[str, Any]]:
    """Return the rows of a read, planned like pyspark's data_source_pushdown_filters does: the
    reader is copied before `partitions`."""
    if filters is not None:
        assert isinstance(reader, PushdownBatchReader)
        reader.pushFilters(filters)
    copied = pickle.dumps(reader)
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    worker: BatchReader = pickle.loads(copied)
    return [
        row
        for each in partitions
        for batch in worker.read(each)
        for row in batch.to_pylist()
    ]  # fmt: skip


def reader_of(kind: type[BatchReader], **options: str) -> BatchReader:
    schema = StructType.fromDDL(default_schema(metadata=False))
    return kind(parse({"subscribe": "t", **options}), schema)


def places(rows: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    return Counter((row["queue_id"], row["queue_offset"]) for row in rows)


@pytest.mark.parametrize("layout", ["queue", "log", "rpc"])
@pytest.mark.parametrize(
    ("filters", "takes"),
    [
        ([EqualTo(("tags",), "even")], lambda queue_id, offset: offset % 2 == 0),
        ([In(("keys",), ("k1", "k7"))], lambda queue_id, offset: offset in (1, 7)),
        (
            [EqualTo(("queue_id",), 1), GreaterThanOrEqual(("queue_offset",), 3)],
            lambda queue_id, offset: queue_id == 1 and offset >= 3,
        ),
        (
            [LessThan(("queue_offset",), 6), EqualTo(("tags",), "odd"), In(("queue_id",), (0, 2))],
            lambda queue_id, offset: offset < 6 and offset % 2 and queue_id != 1,
        ),
        ([In(("tags",), ("*", "odd"))], lambda queue_id, offset: offset % 2),
        ([In(("tags",), ("even || odd", ""))], lambda queue_id, offset: False),
        ([In(("tags",), ())], lambda queue_id, offset: False),
    ],
)
def test_pushed_filters_reach_the_tasks(
    store: Path, served: Broker, layout: str, filters: list[Filter], takes: Any
) -> None:
    """Only rows that match the filters are read, with either layout of tasks."""
    files = {"store": str(store), "layout": layout}
    place = {"namesrv": served.name_server, "isolation": "dispatched"}
    reader = reader_of(PushdownBatchReader, **(place if layout == "rpc" else files))
    found = planned(reader, filters)
    every = [(queue_id, offset) for queue_id in range(QUEUES) for offset in range(EACH)]
    assert places(found) == Counter(each for each in every if takes(*each))


def test_reader_that_is_asked_again_has_no_filters_left(store: Path) -> None:
    reader = reader_of(PushdownBatchReader, store=str(store))
    narrow: list[Filter] = [EqualTo(("tags",), "even"), EqualTo(("keys",), "k2")]
    assert len(planned(reader, narrow)) == QUEUES
    assert len(planned(reader, [])) == QUEUES * EACH


def test_filters_by_time_reach_the_tasks(store: Path) -> None:
    rows = planned(reader_of(BatchReader, store=str(store)), None)
    moments = sorted(row["store_ts"] for row in rows)
    middle = moments[len(moments) // 2].replace(tzinfo=None)
    for layout in ("queue", "log"):
        reader = reader_of(PushdownBatchReader, store=str(store), layout=layout)
        found = planned(reader, [GreaterThanOrEqual(("store_ts",), middle.replace(tzinfo=UTC))])
        expected = [row for row in rows if row["store_ts"].replace(tzinfo=None) >= middle]
        assert places(found) == places(expected)


def test_reader_takes_no_filters_where_spark_would_keep_them(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = CometDataSource({"store": str(store), "subscribe": "t", "pushdown": "true"})
    reader = source.reader(StructType.fromDDL(default_schema(metadata=False)))
    assert isinstance(reader, PushdownBatchReader) == PER_SCAN
    assert ("pushdown = true has no effect" in caplog.text) != PER_SCAN


# --- times, where the log is read as it is ---


@pytest.mark.parametrize("layout", ["queue", "log"])
def test_timestamps_of_options_hold_in_each_layout(
    spark: SparkSession, tmp_path: Path, layout: str
) -> None:
    options: dict[str, Any] = {
        "store": str(golden.unpack("loghub-clean", tmp_path)),
        "subscribePattern": "loghub.*",
        "columns": ["store_ts"],
    }
    times = sorted(_ms(row.store_ts) for row in messages(spark, **options).collect())
    middle = times[len(times) // 2]
    for name, expected in (
        ("startingTimestamp", sum(each >= middle for each in times)),
        ("endingTimestamp", sum(each < middle for each in times)),
    ):
        given = {**options, "layout": layout, name: str(middle)}
        assert messages(spark, **given).count() == expected, name


def _ms(moment: datetime) -> int:
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)
