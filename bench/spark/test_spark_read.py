"""Reading into Spark, against Spark's own Parquet reader on the same rows and a source of tuples.

Canonical load: 2 M messages of 200 B in 16 queues, all default columns, sink `noop`, hot page
cache. All contenders take turns in one run and one JVM; the ratio of their medians counts.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import Report
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from cometmq import Broker
from cometmq.client import Admin
from cometmq.shm._kernel import decode
from cometmq.shm.column_reader import ColumnReader
from cometmq.spark import session
from cometmq.spark.schema import default_schema

QUEUES = 16
TOPIC = "bench"


class TupleSource(DataSource):
    """The same columns out of the same store, as tuples: what a source in plain Python does."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return default_schema()

    def reader(self, schema: Any) -> DataSourceReader:
        return TupleReader(str(self.options["store"]), int(self.options["count"]))


class TupleReader(DataSourceReader):
    def __init__(self, store: str, count: int) -> None:
        self.store, self.count = store, count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(queue_id) for queue_id in range(QUEUES)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        from datetime import UTC, datetime

        reader = ColumnReader.open_closed(Path(self.store))
        at = 0
        while at < self.count // QUEUES:
            found = reader.get_message(TOPIC, partition.value, at, 1024)
            at = found.next_queue_offset
            for one in decode(found.payload, None, False):
                yield (
                    one.topic, "broker", one.queue_id, one.queue_offset,
                    datetime.fromtimestamp(one.store_timestamp_ms / 1000, UTC),
                    datetime.fromtimestamp(one.born_timestamp_ms / 1000, UTC),
                    one.keys, one.tags, one.msg_id, one.body, one.properties, one.reconsume_times,
                )  # fmt: skip


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    made = session(
        "local[2]",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": "3g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


def fill(broker: Broker, count: int) -> None:
    body = random.Random(7)
    with Admin(broker.name_server) as admin:
        admin.create_topic(TOPIC, QUEUES)
    with broker.producer() as producer:
        for at in range(0, count, 1000):
            bodies = [body.randbytes(200) for _ in range(1000)]
            producer.send_many(
                TOPIC, bodies, tags="paid", keys=f"k{at}", queue_id=at // 1000 % QUEUES
            )


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def test_read(spark: SparkSession, full: bool, tmp_path: Path, report: Report) -> None:
    count = 2_000_000 if full else 16_000
    store = tmp_path / "store"
    with Broker(store) as broker:
        fill(broker, count)

        def comet(**options: str) -> DataFrame:
            reader = spark.read.format("cometmq").option("subscribe", TOPIC)
            return reader.options(isolation="dispatched", **options).load()

        spark.dataSource.register(TupleSource)
        parquet = str(tmp_path / "parquet")
        comet(store=str(store)).write.parquet(parquet)
        contenders = {
            "file": comet(store=str(store)),
            "rpc": comet(namesrv=broker.name_server),
            "parquet": spark.read.parquet(parquet),
        }
        for frame in contenders.values():
            assert frame.count() == count
        took: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(7 if full else 1):
            for name, frame in contenders.items():
                took[name].append(seconds(lambda frame=frame: drain(frame)))
    tuples = spark.read.format("tuples").options(store=str(store), count=str(count)).load()
    assert tuples.count() == count
    took["tuples"] = [seconds(lambda: drain(tuples))]
    took["file"].append(seconds(lambda: drain(comet(store=str(store)))))
    median = {name: statistics.median(each) for name, each in took.items()}
    for name, each in median.items():
        report(f"{name}, 12 columns", count / each / 1e6, "M messages/s")
    report("file to parquet", median["parquet"] / median["file"], "times its speed")
    report("file to tuples", median["tuples"] / median["file"], "times its speed")
    report("rpc to file", median["file"] / median["rpc"], "times its speed")
