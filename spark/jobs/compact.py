"""Compaction: the latest message of each key, as a table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.protocol.errors import StoreError
from cometmq.spark.jobs.running import Progress, Watch
from cometmq.spark.sessions import messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS: Final = (
    "topic", "keys", "broker", "queue_id", "queue_offset", "store_ts", "body", "properties",
)  # fmt: skip


class Compacted(msgspec.Struct, frozen=True):
    target: str
    keys: int
    seconds: float


def compact(
    spark: SparkSession,
    target: Path,
    *,
    keep_tombstones: bool = False,
    progress: Progress | None = None,
    **options: str,
) -> Compacted:
    """Write the newest message of each (topic, keys) as Parquet into a new directory.

    Newest is the highest store time; of one queue, which the order of its messages decides, the
    highest queue offset. Messages without keys are left out, and so are keys whose newest message
    has an empty body, unless `keep_tombstones`. The same input gives the same rows.

    Args:
        progress: told of Spark's tasks, stage by stage.
        options: the source's, such as store="./store", subscribe="customers".
    """
    from pyspark.sql import functions as f

    began = time.monotonic()
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"{target} is not empty: name a new directory")
    frame = messages(spark, columns=COLUMNS, **options).where("keys is not null")
    place = f.struct("store_ts", "queue_offset", "broker", "queue_id")
    newest = frame.groupBy("topic", "keys").agg(
        f.max_by(f.struct(*COLUMNS[2:]), place).alias("newest")
    )
    found = newest.select("topic", "keys", "newest.*")
    if not keep_tombstones:
        found = found.where("length(body) > 0")
    with Watch(spark, progress):
        found.sort("topic", "keys").write.mode("overwrite").parquet(str(target))
        count = spark.read.parquet(str(target)).count()
    return Compacted(str(target), count, time.monotonic() - began)
