"""Writing to a broker that runs: rows of batches and streams as messages."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from family import RunningBroker
from patience import patient
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from cometmq.client.routes import Routes
from cometmq.client.sending.staging import SinkLine
from cometmq.protocol.commands import BrokerEndpoints, BrokerRoute, TopicInfo, TopicRoute
from cometmq.protocol.errors import TopicNotExist
from cometmq.shm.kernel.codec import Message, java_hash
from cometmq.spark import register
from cometmq.spark.encoding import as_table as column_table
from cometmq.spark.options import OptionError, as_table
from cometmq.spark.sink import BatchWriter, Written
from cometmq.spark.sink_options import WriteOptions, parse_write
from cometmq.spark.streams import finished

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = patient(240)  # of a stream, on a machine that has other work to do


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("sink")
    with RunningBroker(folder / "store", {"brokerName": "broker-a"}) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def topic(broker: RunningBroker) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    broker.create_topic(name, 4)
    return name


def write(frame: DataFrame, broker: RunningBroker, **options: Any) -> None:
    options = {"namesrv": broker.ready.name_server, **options}
    frame.write.format("cometmq").mode("append").options(**options).save()


def stored(broker: RunningBroker, topic: str, queues: int = 4) -> list[list[Message]]:
    """What each queue has, when everything that is in the log is in its queue."""
    return [broker.read_queue(topic, queue_id) for queue_id in range(queues)]


def bodies(
    broker: RunningBroker, topic: str, at_least: int = 0, *, queues: int = 4
) -> Counter[bytes]:
    """All of a topic; waits for the dispatcher until there are so many."""
    for _ in range(200):
        found = Counter(each.body for queue in stored(broker, topic, queues) for each in queue)
        if found.total() >= at_least:
            return found
    raise AssertionError(f"{found.total()} messages, {at_least} wanted")


def numbers(spark: SparkSession, count: int, tasks: int = 3) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) body", "id")


def expected(begin: int, end: int) -> Counter[bytes]:
    return Counter(b"%d" % number for number in range(begin, end))


# --- batches ---


def test_every_row_once(spark: SparkSession, broker: RunningBroker, topic: str) -> None:
    write(numbers(spark, 5000).select("body"), broker, topic=topic, batchBytes=10_000)
    assert bodies(broker, topic, 5000) == expected(0, 5000)
    assert all(len(queue) > 100 for queue in stored(broker, topic))  # in turn


@pytest.mark.parametrize("key", ["ordering_key", "sharding_key"])
def test_all_columns(spark: SparkSession, broker: RunningBroker, topic: str, key: str) -> None:
    other = f"{topic}-other"
    broker.create_topic(other, 4)
    frame = numbers(spark, 400, 1).selectExpr(
        f"if(id % 2 = 0, '{topic}', '{other}') topic",
        "encode(concat('körper ', body), 'utf-8') body",
        "if(id % 3 = 0, null, concat('k', id, ' all')) keys",
        "if(id % 5 = 0, null, concat('tag', id % 7)) tags",
        "if(id % 4 = 3, null, cast(id / 100 as int)) queue_id",
        f"if(id % 8 = 3, null, concat('schlüssel', id % 11)) {key}",
        "if(id % 6 = 0, null, map('a', body, 'größe', if(id % 9 = 0, '', 'ü'))) properties",
    )
    write(frame, broker)
    for each in (topic, other):
        bodies(broker, each, 200)
        found = {
            int(message.body.split()[1]): (queue_id, message)
            for queue_id, queue in enumerate(stored(broker, each))
            for message in queue
        }
        assert sorted(found) == list(range(0 if each == topic else 1, 400, 2))
        for number, (queue_id, message) in found.items():
            check_message(number, queue_id, message)
        for queue in stored(broker, each):
            ids = [int(m.body.split()[1]) for m in queue]
            keyed = [n for n in ids if n % 8 != 3]
            by_queue = [n for n in keyed if n % 4 != 3]
            assert by_queue == sorted(by_queue)  # a task keeps the order of each queue
        assert len({m.msg_id for _, m in found.values()}) == 200


def check_message(number: int, queue_id: int, message: Message) -> None:
    assert message.body == f"körper {number}".encode()
    assert message.keys == (None if number % 3 == 0 else f"k{number} all")
    assert message.tags == (None if number % 5 == 0 else f"tag{number % 7}")
    wanted = {"a": str(number), "größe": "ü"} if number % 6 else {}
    if number % 9 == 0:
        wanted.pop("größe", None)
    have = {k: v for k, v in message.properties.items() if k not in ("KEYS", "TAGS", "UNIQ_KEY")}
    assert have == wanted
    if number % 4 != 3:
        assert queue_id == number // 100
    elif number % 8 != 3:
        assert queue_id == abs(java_hash(f"schlüssel{number % 11}")) % 4


def test_no_rows(spark: SparkSession, broker: RunningBroker, topic: str) -> None:
    write(numbers(spark, 0).select("body"), broker, topic=topic)
    assert bodies(broker, topic) == Counter()


def test_from_a_thread_of_ones_own(spark: SparkSession, broker: RunningBroker, topic: str) -> None:
    """Writers look for the format in the thread's active session; `register` gives it one."""

    def batch() -> str:
        try:
            write(numbers(spark, 10).select("body"), broker, topic=topic)
        except Py4JJavaError as error:
            return str(error)
        return "written"

    def registered() -> str:
        register(spark)
        return batch()

    with ThreadPoolExecutor(1) as thread:
        assert "DATA_SOURCE_NOT_FOUND" in thread.submit(batch).result()
        assert thread.submit(registered).result() == "written"
    assert bodies(broker, topic, 10) == expected(0, 10)


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_killed_commitlog_loses_nothing(
    spark: SparkSession, broker: RunningBroker, topic: str, delivery: str
) -> None:
    """Killed while tasks send: what was not answered is sent again, perhaps stored twice."""
    frame = numbers(spark, 20_000, 2).selectExpr("concat(body, repeat(' ', 500)) body")
    over = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while not over.is_set():
            if any(stored(broker, topic)) or broker.statistics("commitlog")["staged_bytes"]:
                killed.append(broker.kill("commitlog"))
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        write(
            frame,
            broker,
            topic=topic,
            batchBytes=20_000,
            maxInFlightBytes=40_000,
            delivery=delivery,
        )
    finally:
        over.set()
        killer.join()
    assert killed
    found = bodies(broker, topic, 20_000)
    assert {int(each) for each in found} == set(range(20_000))
    if delivery == "exactly_once":
        assert set(found.values()) == {1}


# --- streams ---


def killing(mark: Path) -> Any:
    """A step that, once, kills all Python workers: the writer's among them."""

    def step(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import signal
        import time

        import psutil

        for batch in batches:
            for at in range(0, batch.num_rows, 100):
                yield batch.slice(at, 100)
            if not mark.exists():
                time.sleep(0.5)  # the writer gets what was yielded
                mark.touch()
                for worker in psutil.Process(os.getppid()).children():
                    worker.send_signal(signal.SIGKILL)

    return step


class Stream:
    """Files of numbers in, messages out."""

    def __init__(
        self, spark: SparkSession, folder: Path, broker: RunningBroker, **options: Any
    ) -> None:
        self.spark = spark
        self.options = {"namesrv": broker.ready.name_server, **options}
        self.source = folder / "in"
        self.source.mkdir(exist_ok=True)
        self.checkpoint = str(folder / "checkpoint")
        self.deadly: Path | None = None  # not there yet: the next batch kills its workers

    def put(self, begin: int, end: int) -> None:
        made = self.source / f".{begin}.tmp"
        made.write_text("".join(f"{number}\n" for number in range(begin, end)))
        made.rename(self.source / f"{begin}.txt")

    def start(self, **more: Any) -> StreamingQuery:
        frame = self.spark.readStream.option("maxFilesPerTrigger", 1).text(str(self.source))
        rows = frame.selectExpr("value as body", "cast(cast(value as int) % 4 as int) queue_id")
        rows = rows.repartition(2)
        if self.deadly is not None:
            rows = rows.mapInArrow(killing(self.deadly), rows.schema)
        writer = rows.writeStream.format("cometmq").options(**self.options | more)
        writer = writer.option("checkpointLocation", self.checkpoint).outputMode("append")
        return writer.trigger(availableNow=True).start()

    def run(self, **more: Any) -> None:
        finished(partial(self.start, **more), WAIT_S)


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_stream(
    spark: SparkSession, broker: RunningBroker, topic: str, tmp_path: Path, delivery: str
) -> None:
    stream = Stream(spark, tmp_path, broker, topic=topic, delivery=delivery)
    stream.put(0, 500)
    stream.put(500, 900)
    stream.run()
    assert bodies(broker, topic, 900) == expected(0, 900)
    stream.put(900, 1000)
    stream.run()
    assert bodies(broker, topic, 1000) == expected(0, 1000)


# --- exactly once ---


def forget_commit(stream: Stream, number: int) -> None:
    """As if Spark had died after the broker's answer and before its own note of it."""
    commits = Path(stream.checkpoint) / "commits"
    (commits / str(number)).unlink()
    for leftover in commits.glob(f".{number}.*"):
        leftover.unlink()


def test_a_commit_whose_answer_was_lost(
    spark: SparkSession, broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    """The batch is run again, staged again, and told that it is there already."""
    stream = Stream(spark, tmp_path, broker, topic=topic)
    stream.put(0, 300)
    stream.put(300, 500)
    stream.run()
    forget_commit(stream, 1)
    stream.run()
    stream.put(500, 600)
    stream.run()
    assert bodies(broker, topic, 600) == expected(0, 600)
    assert broker.statistics("commitlog")["staged_bytes"] == 0


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_workers_killed_in_mid_write(
    spark: SparkSession, broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    """All Python workers die while the batch is staged; the query fails, and starts again."""
    stream = Stream(spark, tmp_path, broker, topic=topic, batchBytes=500)
    stream.put(0, 400)
    stream.run()
    stream.put(400, 5000)
    stream.deadly = tmp_path / "killed"
    with pytest.raises(StreamingQueryException):
        stream.run()
    assert stream.deadly.exists()
    assert bodies(broker, topic, 400) == expected(0, 400)  # nothing of it is to be seen
    stream.run()
    assert bodies(broker, topic, 5000) == expected(0, 5000)


def test_the_whole_broker_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    """After the commit, before Spark noted it: the next broker knows."""
    with RunningBroker(tmp_path / "store") as broker:
        broker.create_topic("t", 4)
        stream = Stream(spark, tmp_path, broker, topic="t")
        stream.put(0, 500)
        stream.run()
        assert bodies(broker, "t", 500) == expected(0, 500)
        broker.kill_all()
    with RunningBroker(tmp_path / "store") as broker:
        stream.options["namesrv"] = broker.ready.name_server
        forget_commit(stream, 0)
        stream.put(500, 700)
        stream.run()
        assert bodies(broker, "t", 700) == expected(0, 700)


def test_a_batch_with_a_name(spark: SparkSession, broker: RunningBroker, topic: str) -> None:
    frame = numbers(spark, 100).select("body")
    for _ in range(2):
        write(frame, broker, topic=topic, sinkId=f"job-{topic}")
    assert bodies(broker, topic, 100) == expected(0, 100)
    write(frame, broker, topic=topic)
    write(frame, broker, topic=topic)
    assert bodies(broker, topic, 300).total() == 300


def test_nothing_of_a_batch_that_fails(
    spark: SparkSession, broker: RunningBroker, topic: str
) -> None:
    """One row of the last task is wrong: no row of the others is to be seen."""
    frame = numbers(spark, 3000, 3).selectExpr("if(id = 2999, null, body) body")
    with pytest.raises(PySparkException, match="partition 2: row 999, column body: it is null"):
        write(frame, broker, topic=topic)
    assert bodies(broker, topic) == Counter()


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_new_topic_is_made(spark: SparkSession, broker: RunningBroker, delivery: str) -> None:
    """As by a producer: with the broker's defaults."""
    topic = f"new-{delivery}"
    write(numbers(spark, 100).select("body"), broker, topic=topic, delivery=delivery)
    assert bodies(broker, topic, 100, queues=8) == expected(0, 100)


def test_several_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exact goes to one of them, and somebody has to say which."""
    routes = [
        BrokerRoute(BrokerEndpoints("c", name, 0, f"tcp://{name}:1", [], ""), TopicInfo("t", 2, 2))
        for name in ("east", "west")
    ]
    monkeypatch.setattr(Routes, "topic", lambda *_: TopicRoute("t", routes))
    with (
        SinkLine("h", "s") as line,
        pytest.raises(TopicNotExist, match=r"east, west; .*brokerName"),
    ):
        line.queues("t")
    with SinkLine("h", "s", broker="west") as line:
        assert line.queues("t") == [0, 1]
    with SinkLine("h", "s", broker="north") as line, pytest.raises(TopicNotExist, match="north"):
        line.queues("t")
    writer = BatchWriter(
        parse_write({"namesrv": "h", "topic": "t"}), StructType.fromDDL("body string")
    )
    staged = [Written(1, "s", 0, name, name) for name in ("east", "west")]
    with pytest.raises(OptionError, match="rows went to east and west"):
        writer.commit(staged)


# --- what is refused ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"namesrc": "x"}, "there is no option 'namesrc'; did you mean namesrv"),
        ({}, "say where to write: namesrv"),
        ({"namesrv": "h", "topic": "a b"}, "topic: topic name 'a b'"),
        ({"namesrv": "h", "topic": "SCHEDULE_TOPIC_XXXX"}, "is the broker's own"),
        ({"namesrv": "h", "delivery": "once"}, "delivery = once: must be exactly_once"),
        ({"namesrv": "h", "batchBytes": "0"}, "batchBytes = 0: must be at least 1"),
        ({"namesrv": "h", "sinkId": "a/b"}, "sinkId: sink name 'a/b'"),
        ({"namesrv": "h", "sinkId": "a", "delivery": "at_least_once"}, "sinkId is for delivery"),
        ({"namesrv": "h", "subscribe": "t"}, "there is no option 'subscribe'"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parse_write(given)


def test_sparks_own_option_is_left_to_spark() -> None:
    assert parse_write({"namesrv": "h", "checkpointlocation": "/x"}).namesrv == "h"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("bodies binary", "no column 'bodies' to write; did you mean body"),
        ("body int", "column body is binary or string, not int: cast it"),
        ("body string, queue_id bigint", "column queue_id is int, not bigint: cast it"),
        ("body string, properties map<string,int>", "column properties is map<string,string>"),
        ("topic string", "there is no column body"),
        ("body string", "Neither an option nor a column says the topic"),
        ("body string, body string", "a column is named twice"),
        ("body string, ordering_key string, sharding_key string", "two names of one thing"),
    ],
)
def test_schemas_that_are_refused(spark: SparkSession, schema: str, text: str) -> None:
    from cometmq.spark.source import CometDataSource

    source = CometDataSource({"namesrv": "h"})
    with pytest.raises(ValueError, match=text):
        source.writer(StructType.fromDDL(schema), overwrite=False)
    with pytest.raises(ValueError, match=text):
        source.streamWriter(StructType.fromDDL(schema), overwrite=False)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["if(id = 7, null, body) body"], "row 7, column body: it is null"),
        (["if(id = 7, '', body) body"], "row 7, column body: a message needs a body of at least"),
        (["if(id = 7, repeat('x', 2000), body) body"], "row 7, column body: 2000 bytes, at most"),
        (["body", "if(id = 7, 4, 0) queue_id"], "row 7, column queue_id: there is no queue 4"),
        (["body", "if(id = 7, -1, 0) queue_id"], "row 7, column queue_id: there is no queue -1"),
        (["body", "if(id = 7, 'a\\u0001b', 'a') keys"], "row 7, column keys: KEYS = .* holds 0x01"),
        (["body", "if(id = 7, 'a\\u0002b', 'a') tags"], "row 7, column tags: TAGS = .* holds 0x01"),
        (["body", "if(id = 7, map('WAIT', 'false'), map('a', 'b')) properties"],
         "row 7, column properties: WAIT = 'false': that name is reserved"),
        (["body", "if(id = 7, map('DELAY', '3'), map('a', 'b')) properties"],
         "row 7, column properties: DELAY: rows are sent for now.* at once"),
        (["body", "if(id = 7, 'a || b', 'a') tags"],
         "row 7, column tags: 'a .. b': a message has one tag"),
        (["body", "if(id = 7, map('', 'x'), map('a', 'b')) properties"],
         "row 7, column properties: a property without a name"),
        (["body", "if(id = 7, map('a', repeat('x', 33000)), map('a', 'b')) properties"],
         "row 7, column properties: 33045 bytes with keys, tags and id, at most 32767"),
        (["body", "if(id = 7, 'a b', '{topic}') topic"], "topic name 'a b'.*row 7, column topic"),
        (["body", "if(id = 7, null, '{topic}') topic"], "row 7, column topic: it is null"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(
    spark: SparkSession, broker: RunningBroker, topic: str, columns: Sequence[str], text: str
) -> None:
    """The error names partition, row and column."""
    frame = numbers(spark, 20, 1).selectExpr(*[each.format(topic=topic) for each in columns])
    given = {} if "topic" in frame.columns else {"topic": topic}
    with pytest.raises(PySparkException, match=f"partition 0: .*{text}"):
        write(frame, broker, maxMessageSize=1000, **given)


def test_modes_that_are_refused(
    spark: SparkSession, broker: RunningBroker, topic: str, tmp_path: Path
) -> None:
    frame = numbers(spark, 1).select("body")
    writer = frame.write.format("cometmq").option("namesrv", "h").option("topic", topic)
    with pytest.raises(PySparkException, match="a topic cannot be overwritten"):
        writer.mode("overwrite").save()
    rates = spark.readStream.format("rate").load().selectExpr("cast(value as string) body")
    counted = rates.groupBy("body").count().select("body")
    stream = counted.writeStream.format("cometmq").outputMode("complete")
    stream = stream.options(namesrv="h", topic=topic, checkpointLocation=str(tmp_path / "c"))
    with pytest.raises(PySparkException, match="outputMode complete"):
        assert stream.start().awaitTermination(WAIT_S)


def test_a_broker_that_has_gone(spark: SparkSession, tmp_path: Path) -> None:
    with RunningBroker(tmp_path / "store") as broker:
        address = broker.ready.name_server
    frame = numbers(spark, 1).select("body")
    writer = frame.write.format("cometmq").mode("append").option("timeoutMs", 300)
    with pytest.raises(PySparkException, match="no name server answers at"):
        writer.options(namesrv=address, topic="t").save()


def test_the_documentation_has_these_options_and_columns() -> None:
    text = (ROOT / "docs/spark.md").read_text()
    assert as_table(WriteOptions) in text, "print it again: cometmq.spark.options.as_table"
    assert column_table() in text, "print it again: cometmq.spark.encoding.as_table"
