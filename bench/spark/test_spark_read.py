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
import tuple_source
from benchmarks import Report
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from tuple_source import QUEUES, TOPIC, TupleSource

from cometmq import Broker
from cometmq.client import Admin
from cometmq.shm.column_reader import Served
from cometmq.spark import session


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

        cloudpickle.register_pickle_by_value(tuple_source)  # no worker could import it
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
        log_max = str(Served(store).positions.log_range()[1])
    tuples = spark.read.format("tuples").options(store=str(store), count=str(count))
    tuples = tuples.option("log_max", log_max).load()
    took["tuples"] = [seconds(lambda: drain(tuples))]
    median = {name: statistics.median(each) for name, each in took.items()}
    for name, each in median.items():
        report(f"{name}, 12 columns", count / each / 1e6, "M messages/s")
    report("file to parquet", median["parquet"] / median["file"], "times its speed")
    report("file to tuples", median["tuples"] / median["file"], "times its speed")
    report("rpc to file", median["file"] / median["rpc"], "times its speed")
