"""Options, schemas, filters, offsets and plans: what is refused, and what is chosen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from cometmq.protocol.errors import StoreLocked, StoreNotOurs, TopicNotExist
from cometmq.shm.kernel.columns import COLUMN_NAMES
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.os.locks import StoreLock
from cometmq.spark import messages
from cometmq.spark.arrow import arrow_schema
from cometmq.spark.catalog import LocalStore
from cometmq.spark.offsets import Offsets, Queue, StoreChanged, check_stores
from cometmq.spark.options import OptionError, as_table, milliseconds, parse
from cometmq.spark.planning import Span, coalesce, part_bytes, shares, split
from cometmq.spark.pushdown import push
from cometmq.spark.schema import COLUMNS, SchemaError, columns_of, default_schema
from cometmq.spark.schema import as_table as schema_table
from cometmq.spark.selecting import choose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.unpack("loghub-clean", tmp_path_factory.mktemp("input"))


# --- options ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "store .* or namesrv"),
        ({"store": "s"}, "none is given"),
        ({"store": "s", "subscribe": "a", "assign": "{}"}, "subscribe and assign are"),
        ({"store": "s", "subscribe": "a", "subscrib": "b"}, "did you mean subscribe?"),
        ({"store": "s", "startingoffset": "b"}, "did you mean startingOffsets?"),
        ({"store": "s", "secretKey": "hunter2"}, "there is no option 'secretKey'"),
        ({"store": "s", "subscribe": "a", "onMissing": "ignore"}, "must be fail or skip"),
        ({"store": "s", "subscribe": "a", "maxBytesPerTrigger": "12 parsecs"}, "whole number"),
        ({"store": "s", "subscribe": "a", "batchRows": "0"}, "at least 1"),
        ({"store": "s", "path": "t", "subscribe": "a"}, "same option"),
        ({"store": "s", "subscribe": "a", "tags": "price > 10"}, "tags: .* SQL92"),
        ({"store": "s", "subscribe": "a", "tags": "a || *"}, "tags: .* stands alone"),
        ({"store": "s", "subscribe": "a", "transport": "rpc"}, "needs namesrv"),
        ({"namesrv": "s", "subscribe": "a", "transport": "file"}, "needs store"),
        ({"store": "s", "subscribe": "a", "startingOffsets": "group"}, "need consumerGroup"),
        (
            {"store": "s", "subscribe": "a", "consumerGroup": "g", "commitOffsets": "afterBatch"},
            "needs namesrv",
        ),
    ],
)
def test_options_that_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text) as raised:
        parse(given)
    assert "hunter2" not in str(raised.value)


def test_options_as_spark_hands_them_over() -> None:
    found = parse({"store": "s", "SUBSCRIBE": "a", "maxbytespertrigger": "64MiB"})
    assert (found.subscribe, found.max_bytes_per_trigger) == ("a", 64 << 20)
    assert parse({"path": "s", "subscribe": "a"}).store == "s"


def test_times() -> None:
    assert milliseconds("1700000000000", "x") == 1_700_000_000_000
    assert milliseconds("2023-11-14T22:13:20", "x") == 1_700_000_000_000
    assert milliseconds("2023-11-14T23:13:20+01:00", "x") == 1_700_000_000_000
    assert milliseconds("2023-11-14T22:13:20.000001", "x") == 1_700_000_000_001
    with pytest.raises(OptionError, match="startingTimestamp = 'soon'"):
        milliseconds("soon", "startingTimestamp")


def test_the_documentation_has_these_options_and_columns() -> None:
    text = (ROOT / "docs/spark.md").read_text()
    assert as_table() in text, "print it again: cometmq.spark.options.as_table"
    assert schema_table() in text, "print it again: cometmq.spark.schema.as_table"


# --- schemas ---


def test_columns_are_the_kernels() -> None:
    assert tuple(COLUMNS) == COLUMN_NAMES


def test_schemas_that_are_refused(spark: SparkSession) -> None:
    good = StructType([StructField("topic", StringType()), StructField("queue_id", IntegerType())])
    assert columns_of(good) == ("topic", "queue_id")
    for fields, text in (
        ([StructField("topics", StringType())], "did you mean topic"),
        ([StructField("queue_id", StringType())], "queue_id is int, not string"),
        ([StructField("topic", StringType(), nullable=False)], "nullable"),
        ([StructField("topic", StringType())] * 2, "twice"),
    ):
        with pytest.raises(SchemaError, match=text):
            columns_of(StructType(fields))


def test_arrow_types_are_what_spark_expects(spark: SparkSession, store: Path) -> None:
    """All columns, in another order; what Spark checks of a batch it checks here."""
    names = list(COLUMNS)[::-1]
    frame = messages(spark, columns=names, store=str(store), subscribe="loghub_Spark")
    assert frame.count() == frame.select("properties").count()
    assert [field.name for field in arrow_schema(frame.schema)] == names
    assert default_schema(metadata=True).count(",") == default_schema().count(",") - 3


def test_wrong_columns_in_spark(spark: SparkSession, store: Path) -> None:
    reader = spark.read.format("cometmq").options(store=str(store), subscribe="loghub_Spark")
    with pytest.raises(PySparkException, match="did you mean body"):
        reader.schema("bodies binary").load().collect()
    with pytest.raises(SchemaError, match="no column 'x'"):
        messages(spark, columns=["x"])


def test_no_columns_but_rows(spark: SparkSession, store: Path) -> None:
    assert messages(spark, store=str(store), subscribe="loghub_Spark").count() == 2000


# --- what there is ---


def test_topics_that_are_not_there(
    spark: SparkSession, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = parse({"store": str(store), "subscribe": "loghub_Sparc"})
    catalog = LocalStore(options)
    try:
        with pytest.raises(TopicNotExist, match=r"loghub_Sparc .* did you mean loghub_Spark"):
            choose(catalog, options)
        skipping = parse(
            {"store": str(store), "subscribe": "loghub_Sparc,loghub_HDFS", "onMissing": "skip"}
        )
        assert {queue.topic for queue in choose(catalog, skipping)} == {"loghub_HDFS"}
        assert "loghub_Sparc does not exist; it is left out" in caplog.text
        with pytest.raises(OptionError, match="has no queue 9"):
            choose(catalog, parse({"store": str(store), "assign": '{"loghub_HDFS": [9]}'}))
        with pytest.raises(OptionError, match="subscribePattern"):
            choose(catalog, parse({"store": str(store), "subscribePattern": "("}))
    finally:
        catalog.close()


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotOurs, match="is no store"):
        LocalStore(parse({"store": str(tmp_path), "subscribe": "a"}))


def test_a_store_that_somebody_else_has_open(tmp_path: Path) -> None:
    """A RocketMQ broker, say: there is nothing that says how far it has written."""
    copy = golden.unpack("special", tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom pathlib import Path\n"
         "from cometmq.shm.os.locks import StoreLock\n"
         "lock = StoreLock(Path(sys.argv[1]), 0)\nprint('held', flush=True)\nsys.stdin.read()",
         str(copy)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StoreLocked, match=f"is held by process {child.pid}"):
            LocalStore(parse({"store": str(copy), "subscribe": "a"}))
    finally:
        child.communicate()
    StoreLock(copy, 0).release()
    LocalStore(parse({"store": str(copy), "subscribe": "a"})).close()


def test_queues_that_cannot_be_trusted(tmp_path: Path) -> None:
    from cometmq.spark.source import CometDataSource

    copy = golden.unpack("damaged-base", tmp_path)
    schema = StructType([StructField("topic", StringType())])
    options = {"store": str(copy), "subscribePattern": ".*"}
    source = CometDataSource({**options, "layout": "queue"})
    with pytest.raises(OptionError, match="was not closed"):
        source.reader(schema).partitions()
    with pytest.raises(OptionError, match=r"was not closed.*a stream needs them"):
        CometDataSource(options).streamReader(schema).initialOffset()


@pytest.mark.parametrize("damage", ["a gap", "no queues"])
def test_queues_that_have_lost_something(spark: SparkSession, damage: str, tmp_path: Path) -> None:
    """Of a store that was closed: no message is left out because its entry is."""
    copy = golden.unpack("loghub-clean", tmp_path)
    if damage == "a gap":
        last = sorted((copy / "consumequeue" / "loghub_HDFS" / "0").iterdir())[-1]
        with last.open("r+b") as file:
            file.seek(3 * CONSUME_QUEUE_UNIT.size)
            file.write(bytes(CONSUME_QUEUE_UNIT.size))
    else:
        shutil.rmtree(copy / "consumequeue")
    options: dict[str, Any] = {"store": str(copy), "subscribePattern": ".*"}
    found = spark.read.format("cometmq").options(**options).load().count()
    assert found == len(golden.listing("loghub-clean"))
    with pytest.raises(PySparkException, match="is damaged"):
        spark.read.format("cometmq").options(**options, layout="queue").load().count()


def test_a_segment_that_is_missing(spark: SparkSession, tmp_path: Path) -> None:
    copy = golden.unpack("loghub-clean", tmp_path)
    sorted((copy / "commitlog").iterdir())[2].unlink()
    options: dict[str, Any] = {"store": str(copy), "subscribePattern": ".*"}
    with pytest.raises(PySparkException, match="have expired"):
        messages(spark, **options).collect()


def test_nothing_of_the_options_is_in_a_plan(spark: SparkSession, store: Path) -> None:
    """Whatever somebody puts into an address or a path, a plan's text does not repeat it."""
    frame = spark.read.format("cometmq").options(
        store=str(store), namesrv="tcp://user:hunter2@127.0.0.1:1", subscribe="loghub_Spark"
    )
    plan = frame.load()._jdf.queryExecution().toString()
    assert "cometmq" in plan
    assert "hunter2" not in plan


# --- filters ---


def push_all(*filters: Filter) -> Any:
    return push(filters)


def test_filters_that_are_served() -> None:
    topic, queue = EqualTo(("topic",), "t"), In(("queue_id",), (1, 2))
    low, high = GreaterThan(("queue_offset",), 5), LessThanOrEqual(("queue_offset",), 9)
    pushed, left = push_all(IsNotNull(("topic",)), topic, queue, low, high)
    assert left == []
    assert (pushed.topics, pushed.queue_ids) == ({"t"}, {1, 2})
    assert (pushed.offset_begin, pushed.offset_end) == (6, 10)


def test_filters_that_are_looked_at_again() -> None:
    moment = datetime(2025, 1, 1, 0, 0, 0, 500, UTC)
    filters = [
        GreaterThanOrEqual(("store_ts",), moment),
        LessThan(("store_ts",), moment),
        EqualTo(("tags",), "a"),
        In(("keys",), ("k",)),
        Not(EqualTo(("queue_id",), 1)),
        EqualTo(("properties", "a"), "b"),
        IsNotNull(("body",)),
        StringStartsWith(("tags",), "a"),
        EqualTo(("body",), b"x"),
        EqualNullSafe(("tags",), None),
    ]
    pushed, left = push(filters)
    assert left == filters
    assert (pushed.tags, pushed.keys, pushed.queue_ids) == ({"a"}, {"k"}, None)
    base = 1_735_689_600_000
    assert (pushed.begin_ms, pushed.end_ms) == (base + 1, base + 1)
    exact, _ = push([LessThanOrEqual(("store_ts",), datetime(2025, 1, 1, tzinfo=UTC))])
    assert exact.end_ms == base + 1


@pytest.mark.parametrize(
    "where",
    [
        "topic = 'loghub_Spark'",
        "topic in ('loghub_Spark', 'loghub_HDFS') and queue_id = 2",
        "topic like 'loghub_H%'",
        "topic = 'loghub_Spark' and topic = 'loghub_HDFS'",
        "queue_offset between 17 and 30 and queue_id in (0, 3)",
        "queue_offset = 5",
        "queue_offset in (5, 9)",
        "tags in ('INFO', 'WARN') and queue_id = 1",
        "keys = 'nothing'",
        "store_ts >= '{third}' and store_ts < '{last}'",
        "not queue_id = 1 and store_ts <= '{third}'",
        "broker = 'broker' and reconsume_times = 0",
        "broker = 'other'",
        "tags is null",
    ],
)
def test_filters_change_no_result(spark: SparkSession, store: Path, where: str) -> None:
    """The same rows with and without; and with them no more than needed is read."""
    columns = ["topic", "broker", "queue_id", "queue_offset", "store_ts", "tags", "keys",
               "reconsume_times"]  # fmt: skip
    options: dict[str, Any] = {"store": str(store), "subscribePattern": "loghub.*"}
    everything = messages(spark, columns=columns, pushdown="false", **options)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        if not everything.isEmpty() and "{" in where:
            times = sorted(row[0] for row in everything.select("store_ts").distinct().collect())
            where = where.format(third=times[len(times) // 3], last=times[-1])
        wanted = sorted(everything.where(where).collect())
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    found = messages(spark, columns=columns, pushdown="true", **options).where(where)
    assert sorted(found.collect()) == wanted
    if "other" in where or "and topic" in where:
        assert wanted == []


# --- offsets and plans ---


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
QUEUES = st.builds(Queue, NAMES, NAMES, st.integers(0, 99))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(QUEUES, st.integers(0, 1 << 62)), st.dictionaries(NAMES, NAMES))
def test_offsets_there_and_back(queues: dict[Queue, int], stores: dict[str, str]) -> None:
    offsets = Offsets(queues, stores)
    text = json.dumps(offsets.to_json())
    assert Offsets.from_json(json.loads(text)) == offsets
    turned = Offsets(dict(reversed(queues.items())), dict(reversed(stores.items())))
    assert json.dumps(turned.to_json()) == text  # Spark compares the text


@pytest.mark.parametrize(
    "given",
    [None, {}, {"v": 2}, {"v": 1, "q": [], "s": {}}, {"v": 1, "q": {"b": {"t": {"x": 1}}}, "s": {}},
     {"v": 1, "q": {"b": {"t": {"0": 1.5}}}, "s": {}}, {"v": 1, "q": {"b": 7}, "s": {}}],
)  # fmt: skip
def test_offsets_of_somebody_else(given: Any) -> None:
    with pytest.raises(OptionError):
        Offsets.from_json(given)


def test_another_store_is_named() -> None:
    check_stores({"b": "one"}, {"b": "one", "c": "two"})
    check_stores({"b": "-"}, {"b": "one"})  # it had no identity then
    with pytest.raises(StoreChanged, match="store one, it has store two"):
        check_stores({"b": "one"}, {"b": "two"})
    with pytest.raises(StoreChanged, match="store one of broker b"):
        check_stores({"b": "one"}, {"c": "two"})


SPANS = st.lists(
    st.builds(
        lambda broker, queue_id, begin, count, size: Span(
            Queue(broker, "t", queue_id), begin, begin + count, size
        ),
        st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 50), st.integers(1, 9),
        st.integers(0, 100),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(SPANS, st.integers(1, 300), st.integers(1, 30))
def test_coalesced_tasks(spans: list[Span], bytes_max: int, count_max: int) -> None:
    tasks = coalesce(spans, bytes_max, count_max)
    assert sorted(span for task in tasks for span in map(str, task)) == sorted(map(str, spans))
    for task in tasks:
        assert len({span.queue.broker for span in task}) == 1
        assert list(task) == sorted(task, key=lambda span: (span.queue, span.begin))
        if len(task) > 1:
            assert sum(span.size_bytes for span in task) <= bytes_max
            assert sum(span.end - span.begin for span in task) <= count_max


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(1, 100), st.sets(st.integers(1, 99)))
def test_split_ranges(begin: int, count: int, marks: set[int]) -> None:
    inside = sorted(begin + mark for mark in marks if mark < count)
    parts = split(Queue("b", "t", 0), begin, begin + count, inside, 1000)
    assert [offset for part in parts for offset in range(part.begin, part.end)] == list(
        range(begin, begin + count)
    )
    assert len(parts) == len(inside) + 1


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(QUEUES, st.integers(1, 10_000), min_size=1), st.integers(1, 20_000))
def test_shares(backlog: dict[Queue, int], limit: int) -> None:
    found = shares(backlog, limit)
    assert found.keys() == backlog.keys()
    assert all(1 <= found[queue] <= backlog[queue] for queue in backlog)
    assert sum(found.values()) <= max(limit, 0) + len(backlog)


def test_part_bytes() -> None:
    assert part_bytes(1000, 64, 0) == 64
    assert part_bytes(1000, 640, 4) == 250
    assert part_bytes(0, 64, 4) == 1


def test_nothing_here_needs_spark_to_be_imported() -> None:
    """`import cometmq.spark` is cheap; what is missing is said when it is used."""
    code = "import sys, cometmq.spark\nassert 'pyspark' not in sys.modules\nprint('good')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.sep
    )
    assert done.stdout == "good\n"
