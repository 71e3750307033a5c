"""Traffic statistics by topic and hour, from headers alone: no body is read into Spark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.spark.jobs import plots
from cometmq.spark.jobs.running import Progress, Watch
from cometmq.spark.sessions import messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS: Final = ("topic", "queue_id", "queue_offset", "store_ts", "store_size")
HOUR_S: Final = 3600
BARS_MAX: Final = 2000  # hours that a plot shows of a topic, the latest


class HourStats(msgspec.Struct, frozen=True):
    """One topic's messages that were stored within one hour. Sizes are those of whole records."""

    topic: str
    hour: str  # ISO 8601, UTC
    messages: int
    size_bytes: int
    size_mean: float
    size_p50: int
    size_p95: int
    size_p99: int
    size_max: int
    queues: int
    missing: int  # queue offsets between the first and the last that no message has


class Stats(msgspec.Struct, frozen=True):
    rows: list[HourStats]
    messages: int
    size_bytes: int
    topics: int
    seconds: float


def stats(spark: SparkSession, progress: Progress | None = None, **options: str) -> Stats:
    """Count what a source has.

    Args:
        progress: told of Spark's tasks, stage by stage.
        options: the source's, such as store="./store", subscribe="orders".
    """
    from pyspark.sql import functions as f

    began = time.monotonic()
    frame = messages(spark, columns=COLUMNS, **options)
    hour = f.floor(f.unix_micros("store_ts") / (HOUR_S * 1_000_000)).alias("hour")
    frame = frame.select("topic", "queue_id", "queue_offset", "store_size", hour)
    sets = [["topic", "hour"], ["topic", "hour", "queue_id"]]
    grouped = frame.groupingSets(
        [[frame[name] for name in names] for names in sets],
        frame.topic, frame.hour, frame.queue_id,
    ).agg(
        f.grouping(frame.queue_id).alias("whole"),
        f.count("*").alias("messages"),
        f.sum("store_size").alias("size_bytes"),
        f.percentile_approx("store_size", [0.5, 0.95, 0.99], 1000).alias("sizes"),
        f.max("store_size").alias("size_max"),
        (f.max("queue_offset") - f.min("queue_offset") + 1 - f.count("*")).alias("missing"),
    )  # fmt: skip
    by_queue: dict[tuple[str, int], list[int]] = {}
    whole = []
    with Watch(spark, progress):
        found = grouped.collect()
    for row in found:
        if row.whole:
            whole.append(row)
        else:
            by_queue.setdefault((row.topic, row.hour), []).append(row.missing)
    rows = [
        HourStats(
            topic=row.topic,
            hour=_iso(row.hour),
            messages=row.messages,
            size_bytes=row.size_bytes,
            size_mean=round(row.size_bytes / row.messages, 1),
            size_p50=row.sizes[0],
            size_p95=row.sizes[1],
            size_p99=row.sizes[2],
            size_max=row.size_max,
            queues=len(by_queue[row.topic, row.hour]),
            missing=sum(by_queue[row.topic, row.hour]),
        )
        for row in sorted(whole, key=lambda row: (row.topic, row.hour))
    ]
    return Stats(
        rows, sum(row.messages for row in rows), sum(row.size_bytes for row in rows),
        len({row.topic for row in rows}), time.monotonic() - began,
    )  # fmt: skip


def _iso(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H:%MZ")


# --- a plot ---


def write_plot(found: Stats, path: Path) -> None:
    """A page of its own with a bar an hour, one plot a topic; it loads nothing from anywhere."""
    by_topic: dict[str, list[HourStats]] = {}
    for row in found.rows:
        by_topic.setdefault(row.topic, []).append(row)
    summary = f"{found.messages:,} messages, {found.size_bytes:,} bytes, {found.topics} topics"
    drawn = [_plot(topic, rows) for topic, rows in by_topic.items()]
    plots.write_page(path, "Messages by hour", summary, drawn)


def _plot(topic: str, rows: Sequence[HourStats]) -> str:
    hours = [int(datetime.fromisoformat(row.hour).timestamp()) // HOUR_S for row in rows]
    first = max(hours[0], hours[-1] - BARS_MAX + 1)
    step = plots.WIDTH / (hours[-1] - first + 1)
    most = max(row.messages for row in rows)
    bars = [
        plots.bar(
            (hour - first) * step, step * 0.9, row.messages / most,
            f"{row.hour}: {row.messages:,} messages, {row.size_bytes:,} bytes",
        )
        for hour, row in zip(hours, rows, strict=True)
        if hour >= first
    ]  # fmt: skip
    total = sum(row.messages for row in rows)
    missing = sum(row.missing for row in rows)
    note = f"{total:,} messages, at most {most:,} an hour; {missing:,} queue offsets are missing"
    return plots.drawing(topic, note, bars, _iso(first), rows[-1].hour)
