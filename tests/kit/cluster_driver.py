"""The driver of test_spark_cluster, run by the interpreter that has the wheel: no tests here.

Its tasks are lines `[name, options]` of JSON on standard input, until that ends; what happens is a
line `[event, value]` on standard output. Nothing is registered: Spark finds the source and the sink
by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from patience import patient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from cometmq.spark.streams import finished

END_S = patient(600)  # longer than the wait for a step


def say(event: str, value: Any) -> None:
    print(json.dumps([event, value]), flush=True)


def start(told: dict[str, Any]) -> SparkSession:
    builder = SparkSession.builder.master(told["master"]).appName("cometmq cluster tests")
    for key, value in told["conf"].items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def executor_pid() -> int:
    """Of the JVM that this worker works for: a daemon is between them."""
    daemon = psutil.Process(os.getppid())
    return daemon.ppid()


# --- batches ---


def summed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Who read how much, and the sum of all CRCs."""
    for batch in batches:
        crcs = [zlib.crc32(body) for body in batch.column("body").to_pylist()]
        yield pa.RecordBatch.from_pydict(
            {"executor": [executor_pid()], "count": [len(crcs)], "crc": [sum(crcs)]},
            schema=SUMS,
        )


SUMS = pa.schema([("executor", pa.int64()), ("count", pa.int64()), ("crc", pa.int64())])


def read(spark: SparkSession, told: dict[str, Any]) -> None:
    """Each of `sources`, as a batch."""
    for options in told["sources"]:
        frame = spark.read.format("cometmq").options(**options).load()
        rows = frame.select("body").mapInArrow(summed, "executor long, count long, crc long")
        parts = [row.asDict() for row in rows.collect()]
        say("read", parts)


# --- a stream ---


def holding(place: Path, after: int) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    """A step that stops for good when some rows are through: once, in the first task to get there.

    That one takes the named pipe at `place` away and writes its executor's pid to it.
    """

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in batches:
            for at in range(0, batch.num_rows, 100):
                yield batch.slice(at, 100)
                rows += 100
                if rows >= after and place.exists():
                    mine = place.with_suffix(f".{os.getpid()}")
                    with contextlib.suppress(FileNotFoundError):
                        place.rename(mine)
                        mine.write_text(str(executor_pid()))
                        signal.pause()

    return step


class Told(StreamingQueryListener):
    """Each batch with rows is an event."""

    def onQueryStarted(self, event: Any) -> None:
        say("started", str(event.id))

    def onQueryProgress(self, event: Any) -> None:
        if event.progress.numInputRows:
            say("batch", event.progress.batchId)

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass


def copy(spark: SparkSession, told: dict[str, Any]) -> None:
    """One topic to another, up to what is there."""
    spark.streams.addListener(Told())
    frame: DataFrame = spark.readStream.format("cometmq").options(**told["source"]).load()
    rows = frame.select("body", "queue_id", "keys", "tags")
    rows = rows.mapInArrow(holding(Path(told["hold"]), told["hold_after"]), rows.schema)
    writer = rows.writeStream.format("cometmq").options(**told["sink"])
    writer = writer.option("checkpointLocation", told["checkpoint"])
    query = finished(writer.trigger(availableNow=True).start, END_S)
    say("done", [row["batchId"] for row in query.recentProgress])


def main() -> None:
    spark = start(json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, told = json.loads(line)
        {"read": read, "copy": copy}[name](spark, told)
    spark.stop()


if __name__ == "__main__":
    main()
