"""Reading into Spark, against Spark's own Parquet reader on the same rows and a source of tuples.

Canonical load: 2 M messages of 200 B in 16 queues, all default columns, sink `noop`, hot page
cache. All rivals take turns in one run and one JVM; the ratio of their medians counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tuple_source
from benchmarks import Report
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from spark_rounds import QUEUES, TOPIC, Turns, drain, fill, same_rows
from tuple_source import TupleSource

from cometmq import Broker
from cometmq.shm.reading.column_reader import Served

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)  # --full on a busy machine
def test_read(spark: SparkSession, full: bool, tmp_path: Path, report: Report) -> None:
    count = 2_000_000 if full else 16_000
    store = tmp_path / "store"
    cloudpickle.register_pickle_by_value(tuple_source)  # no worker could import it
    spark.dataSource.register(TupleSource)
    with Broker(store) as broker:
        fill(broker, count)

        def comet(**options: str) -> DataFrame:
            reader = spark.read.format("cometmq").option("subscribe", TOPIC)
            return reader.options(isolation="dispatched", **options).load()

        parquet = str(tmp_path / "parquet")
        comet(store=str(store)).write.parquet(parquet)
        tuples = spark.read.format("tuples").options(
            store=str(store), topic=TOPIC, queues=str(QUEUES), count=str(count)
        )
        frames = {
            "file": comet(store=str(store)),
            "rpc": comet(namesrv=broker.name_server),
            "parquet": spark.read.parquet(parquet),
            "tuples": tuples.option("log_max", str(Served(store).positions.log_range()[1])).load(),
        }
        seen = {name: same_rows(frame) for name, frame in frames.items()}
        assert set(seen.values()) == {(count, seen["file"][1])}, seen
        rivals = {name: lambda frame=frame: drain(frame) for name, frame in frames.items()}
        turns = Turns(rivals, 7 if full else 1, {"tuples": 3})
    turns.rates(report, count)
    turns.ratio(report, "file", "parquet")
    turns.ratio(report, "file", "tuples")
    turns.ratio(report, "rpc", "file")
