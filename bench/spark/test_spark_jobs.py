"""Audit and archive of a store: messages a second, and against Spark's own Parquet writer.

Canonical load: 2 M messages of 200 B in 16 queues, segments of 128 MiB, hot page cache. Contenders
take turns in one run and one JVM; the ratio of their medians counts. Spark's writer gets the same
segments' messages from the source `cometmq`, with the columns that an archive has, CRCs checked,
zstd, partitioned by topic and date.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import Report
from pyspark.sql import SparkSession

from cometmq import Broker
from cometmq.client import Admin
from cometmq.spark import session
from cometmq.spark.jobs.archive import archive
from cometmq.spark.jobs.audit import audit
from cometmq.spark.schema import COLUMNS

TOPIC = "bench"
QUEUES = 16
# What an archive holds of a record; its raw columns stand for themselves here.
NAMES = (
    "broker", "topic", "queue_id", "queue_offset", "physical_offset", "flag", "sys_flag",
    "born_ts", "store_ts", "born_host", "store_host", "reconsume_times", "prepared_txn_offset",
    "body_crc", "body_raw", "properties_raw", "keys", "tags", "unique_key",
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


def fill(store: Path, count: int, segment: str) -> None:
    settings = {"mappedFileSizeCommitLog": segment}
    with Broker(store, settings=settings) as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic(TOPIC, QUEUES)
        with broker.producer() as producer:
            for at in range(0, count, 1000):
                bodies = [os.urandom(100) + b"x" * 100 for _ in range(1000)]
                producer.send_many(
                    TOPIC, bodies, tags="paid", keys=f"k{at}", queue_id=at // 1000 % QUEUES
                )


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@pytest.mark.timeout(1200)  # --full on a busy machine
def test_jobs(spark: SparkSession, full: bool, tmp_path: Path, report: Report) -> None:
    count = 2_000_000 if full else 16_000
    store = tmp_path / "store"
    fill(store, count, "128MiB" if full else "1MiB")
    found = audit(spark, store)
    assert (found.records, found.findings) == (count, [])
    done = archive(spark, store, tmp_path / "warm")
    assert done.segments > 1

    def by_us() -> None:
        shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        archive(spark, store, tmp_path / "ours")

    schema = ", ".join(f"{name} {COLUMNS[name][0]}" for name in NAMES)
    source = spark.read.format("cometmq").schema(schema)
    source = source.options(store=str(store), subscribe=TOPIC, layout="log")

    def by_spark() -> None:
        frame = source.load().where(f"physical_offset < {done.log_bytes}")
        writer = frame.selectExpr("*", "to_date(store_ts) as dt").write.mode("overwrite")
        writer = writer.option("compression", "zstd").partitionBy("topic", "dt")
        writer.parquet(str(tmp_path / "theirs"))

    contenders = {"audit": lambda: audit(spark, store), "archive": by_us, "spark": by_spark}
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(5 if full else 1):
        for name, run in contenders.items():
            took[name].append(seconds(run))
    assert spark.read.parquet(str(tmp_path / "theirs")).count() == done.records
    median = {name: statistics.median(each) for name, each in took.items()}
    report("audit", count / median["audit"] / 1e6, "M messages/s")
    report("archive", done.records / median["archive"] / 1e6, "M messages/s")
    report("Spark's Parquet writer", done.records / median["spark"] / 1e6, "M messages/s")
    report("archive to Spark's writer", median["spark"] / median["archive"], "times its speed")
    report("archive, size to log", done.file_bytes / done.log_bytes, "")
