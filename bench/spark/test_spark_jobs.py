"""Audit and archive of a store: messages a second, and against Spark's own Parquet writer.

Canonical load: 2 M messages of 200 B in 16 queues, segments of 128 MiB, hot page cache; and bodies
of 1 KiB for the audit alone. What is timed is the job as a function on a session that runs, which
is what the command does after Java has started. Rivals take turns in one run and one JVM; the ratio
of their medians counts. Spark's writer gets the same segments' messages from the source `cometmq`,
with the columns that an archive has, CRCs checked, zstd, partitioned by topic and date.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks import Report
from pyspark.sql import SparkSession
from spark_rounds import TOPIC, Turns, fill

from cometmq import Broker
from cometmq.spark.jobs.archive import archive
from cometmq.spark.jobs.audit import audit
from cometmq.spark.schema import COLUMNS

OWN_RECORDS = 100  # the broker has fewer of its own in such a store

pytestmark = pytest.mark.slow

# What an archive holds of a record; its raw columns stand for themselves here.
NAMES = (
    "broker", "topic", "queue_id", "queue_offset", "physical_offset", "flag", "sys_flag",
    "born_ts", "store_ts", "born_host", "store_host", "reconsume_times", "prepared_txn_offset",
    "body_crc", "body_raw", "properties_raw", "keys", "tags", "unique_key",
)  # fmt: skip


def filled(store: Path, full: bool, body_bytes: int) -> int:
    """The number of messages in a store that is closed."""
    count = 2_000_000 if full else 32_000
    with Broker(
        store, settings={"mappedFileSizeCommitLog": "128MiB" if full else "5MiB"}
    ) as broker:
        fill(broker, count, body_bytes)
    return count


@pytest.mark.timeout(1200)  # --full on a busy machine
@pytest.mark.parametrize("body_bytes", [200, 1024])
def test_audit(
    spark: SparkSession, full: bool, tmp_path: Path, report: Report, body_bytes: int
) -> None:
    store = tmp_path / "store"
    count = filled(store, full, body_bytes)

    def run() -> None:
        found = audit(spark, store)
        assert found.findings == []
        assert 0 <= found.records - count < OWN_RECORDS

    if full:
        run()  # the first one starts the workers
    Turns({"audit": run}, 9 if full else 1).rates(report, count)


@pytest.mark.timeout(1200)
def test_archive(spark: SparkSession, full: bool, tmp_path: Path, report: Report) -> None:
    store, theirs = tmp_path / "store", str(tmp_path / "theirs")
    filled(store, full, 200)
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
        writer.option("compression", "zstd").partitionBy("topic", "dt").parquet(theirs)

    turns = Turns({"archive": by_us, "Spark's writer": by_spark}, 5 if full else 1)
    assert 0 <= done.records - spark.read.parquet(theirs).count() < OWN_RECORDS
    turns.rates(report, done.records)
    turns.ratio(report, "archive", "Spark's writer")
    report("archive, size to log", done.file_bytes / done.log_bytes, "")
