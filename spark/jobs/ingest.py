"""A topic into a Parquet table, each message once; what cannot be read goes aside.

Each micro-batch is one directory `batch=<number>` of the table, and one of `<table>__dlq` for rows
that did not parse. Spark gives a batch that is begun again the same number and the same messages,
and the directory is written anew, so a crash at any line neither loses nor doubles a message.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cometmq.shm.os.durable import replace_file
from cometmq.spark.jobs.running import JobFailed, Progress
from cometmq.spark.schema import COLUMNS as SOURCE_COLUMNS
from cometmq.spark.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARK: Final = "_cometmq_ingest.json"
RAW: Final = ("topic", "broker", "queue_id", "queue_offset", "store_ts", "keys", "tags", "body")
PLACE: Final = ("topic", "queue_id", "queue_offset", "store_ts", "keys")
# Of both; a table that was begun without them goes on without them.
MORE: Final = ("unique_key", "properties")
ON_BAD: Final = ("dlq", "suspend", "skip")
_CORRUPT: Final = "__corrupt"


class Ingested(msgspec.Struct, frozen=True):
    table: str
    batches: int
    rows: int
    bad: int
    seconds: float


@dataclass
class _Batches:
    """Writes one micro-batch after the other."""

    table: Path
    schema: str
    on_bad: str
    more: tuple[str, ...]
    progress: Progress | None
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self._bring(frame, batch)
        if self.progress is not None:
            self.progress(sum(map(sum, self.counts.values())), 0)

    def _bring(self, frame: DataFrame, batch: int) -> None:
        if not self.schema:
            self.counts[batch] = self._write(frame.select(*RAW, *self.more), self.table, batch), 0
            return
        parsed = self._parsed(frame).persist()
        try:
            is_bad = f"row is null or row.{_CORRUPT} is not null"
            bad = self._bad(parsed.where(is_bad), batch)
            place = [f"_{name}" for name in (*PLACE, *self.more)]
            good = parsed.where(f"not ({is_bad})").select("row.*", *place)
            self.counts[batch] = self._write(good.drop(_CORRUPT), self.table, batch), bad
        finally:
            parsed.unpersist()

    def _parsed(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        schema = f"{self.schema}, {_CORRUPT} string"
        options = {"columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}
        row = f.from_json(f.col("body").cast("string"), schema, options).alias("row")
        place = [f.col(name).alias(f"_{name}") for name in (*PLACE, *self.more)]
        return frame.select(row, *place, f.col("body").alias("_body"))

    def _bad(self, frame: DataFrame, batch: int) -> int:
        if self.on_bad == "suspend":
            first = frame.sort("_topic", "_queue_id", "_queue_offset").first()
            if first is not None:
                raise JobFailed(
                    f"{first._topic}/{first._queue_id} offset {first._queue_offset} is no row of "
                    f"the schema: {bytes(first._body)[:200]!r} (--on-bad dlq puts it aside)"
                )
        if self.on_bad != "dlq":
            return int(frame.count())
        aside = self.table.with_name(f"{self.table.name}__dlq")
        return self._write(frame.drop("row"), aside, batch)

    def _write(self, frame: DataFrame, table: Path, batch: int) -> int:
        path = str(table / f"batch={batch:020d}")
        frame.write.mode("overwrite").parquet(path)
        return int(frame.sparkSession.read.parquet(path).count())


def ingest(
    spark: SparkSession,
    table: Path,
    *,
    schema: str = "",
    on_bad: str = "dlq",
    checkpoint: Path | None = None,
    trigger: str = "",
    progress: Progress | None = None,
    **options: str,
) -> Ingested:
    """Bring a stream into a table, from the beginning of the topics or where the last run ended.

    Args:
        schema: as DDL: bodies are JSON objects of it, and their fields become columns. Empty: rows
            as the source gives them.
        on_bad: dlq puts bodies that are no such objects aside, suspend ends with the first one's
            place, skip counts them.
        checkpoint: where the run remembers how far it came; <table>__checkpoint.
        trigger: such as "60 seconds", runs until it is interrupted. Empty: what there is now.
        progress: told after each batch how many rows there are; of how many in all is not known, 0.
        options: the source's, such as store="./store", subscribe="orders".

    Raises JobFailed where the table belongs to another checkpoint, or with `suspend`.
    """
    began = time.monotonic()
    if on_bad not in ON_BAD:
        raise JobFailed(f"on_bad = {on_bad!r}: {', '.join(ON_BAD)}")
    table = table.absolute()
    checkpoint = (checkpoint or table.with_name(f"{table.name}__checkpoint")).absolute()
    more = _claim(table, checkpoint)
    names = dict.fromkeys((*RAW, *PLACE, *more))
    reader = spark.readStream.format("cometmq").options(startingOffsets="earliest")
    reader = reader.options(**options)
    frame = reader.schema(", ".join(f"{name} {SOURCE_COLUMNS[name][0]}" for name in names)).load()
    batches = _Batches(table, schema, on_bad, more, progress)
    writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint))
    how: dict[str, Any] = {"processingTime": trigger} if trigger else {"availableNow": True}
    finished(writer.trigger(**how).start)
    counts = batches.counts.values()
    return Ingested(
        str(table), len(counts), sum(good for good, _ in counts), sum(bad for _, bad in counts),
        time.monotonic() - began,
    )  # fmt: skip


def _claim(table: Path, checkpoint: Path) -> tuple[str, ...]:
    """A table has one checkpoint: another one's batches would be written over this one's.

    Which of MORE its rows have: those that it was begun with.
    """
    mark = table / MARK
    if mark.exists():
        known = json.loads(mark.read_text())
        owner = known.get("checkpoint")
        if owner != str(checkpoint):
            raise JobFailed(f"{table} belongs to the checkpoint {owner}, not to {checkpoint}")
        if not checkpoint.exists() and any(table.glob("batch=*")):
            raise JobFailed(f"{table} has rows, and its checkpoint {checkpoint} is gone")
        return tuple(name for name in MORE if name in known.get("more", ()))
    if table.exists() and any(table.iterdir()):
        raise JobFailed(f"{table} is not empty, and no table of this command")
    table.mkdir(parents=True, exist_ok=True)
    known = {"checkpoint": str(checkpoint), "more": MORE}
    replace_file(mark, json.dumps(known).encode(), mode=0o666)
    return MORE
