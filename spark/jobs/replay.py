"""From an archive back to a store, byte by byte, or to a topic."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cometmq.client import Admin
from cometmq.protocol.errors import StoreError
from cometmq.protocol.names import RESERVED_PROPERTIES, UNKEPT_PROPERTIES
from cometmq.shm.kernel import codec
from cometmq.shm.os.durable import sync_folder, whole_file
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name
from cometmq.shm.tools.repair import recover_store
from cometmq.spark.jobs import manifest
from cometmq.spark.jobs.archived import contiguous, fill_segment
from cometmq.spark.jobs.manifest import ArchiveError, Entry
from cometmq.spark.jobs.running import Progress, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REPLAY_FROM: Final = "REPLAY_FROM"  # a property: broker/topic/queue/queue offset
DEDUPLICATION: Final = "spark.sql.mapKeyDedupPolicy"
# Made anew by whoever sends, or a column of its own.
_OWN: Final = (*sorted(RESERVED_PROPERTIES | UNKEPT_PROPERTIES.keys()), "__CRC32#")


class Replayed(msgspec.Struct, frozen=True):
    """What was brought back."""

    archive: str
    target: str
    segments: int
    messages: int
    seconds: float
    left_out: int = 0  # without a body: no client may send such a message


@dataclass(frozen=True)
class SegmentTask:
    root: str
    target: str
    entry: bytes  # JSON


def replay_to_store(
    spark: SparkSession,
    archive: str | Path,
    target: Path,
    *,
    broker: str = "",
    progress: Progress | None = None,
) -> Replayed:
    """Make a store of what was archived: the log byte by byte, the queues built from it.

    Raises ArchiveError where the archive has a hole or does not hold, StoreError where the target
    is not empty. A broker can be started on the store; it gives it a name of its own.
    """
    began = time.monotonic()
    root = manifest.local_root(archive)
    found = list(contiguous(manifest.entries(root, broker), str(root)))
    if not found:
        raise ArchiveError(f"{root}: there is nothing in the archive")
    target = target.absolute()
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"{target} is not empty: name a new directory")
    (target / COMMITLOG_DIR).mkdir(parents=True, exist_ok=True)
    tasks = [SegmentTask(str(root), str(target), msgspec.json.encode(entry)) for entry in found]
    run_tasks(spark, tasks, _write_segment, progress)
    sync_folder(target / COMMITLOG_DIR)
    size = found[0].end - found[0].begin
    recover_store(target, size, found[0].queue_segment_bytes, rebuild=True)
    records = sum(entry.records for entry in found)
    return Replayed(str(root), str(target), len(found), records, time.monotonic() - began)


def _write_segment(task: SegmentTask) -> bytes:
    entry = msgspec.json.decode(task.entry, type=Entry)
    folder = Path(task.target) / COMMITLOG_DIR
    made = folder.parent / f"{segment_name(entry.begin)}.{os.getpid()}{manifest.TMP}"
    size = entry.end - entry.begin
    with whole_file(folder / segment_name(entry.begin), made), made.open("w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            fill_segment(Path(task.root), entry, memory)
            memory.flush()
    return b""


# --- to a topic ---


@dataclass(frozen=True)
class Choice:
    """Which archived messages are meant."""

    topic: str
    broker: str = ""
    begin_ms: int = 0  # store time
    end_ms: int = (1 << 63) - 1

    def segments(self, root: Path) -> list[tuple[Entry, list[str]]]:
        """Archived segments that may have some, with those files, in the order of each log."""
        folders = {manifest.escaped(self.topic), manifest.SMALL}
        found = []
        for entry in manifest.entries(root, self.broker):
            paths = [
                str(manifest.inside(root, file.path))
                for file in entry.files
                if file.path.split("/")[1].removeprefix("topic=") in folders
                and file.min_store_ms < self.end_ms
                and file.max_store_ms >= self.begin_ms
            ]
            if paths:
                found.append((entry, paths))
        return found

    def sink_id(self, entry: Entry, to_topic: str, run: str) -> str:
        """The same for the same request, so that a run that is begun again goes on."""
        asked = [entry.broker, entry.store_id, *astuple(self), to_topic, run]
        digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:24]
        return f"replay-{digest}-{entry.begin}"


def replay_to_topic(
    spark: SparkSession,
    archive: str | Path,
    choice: Choice,
    name_server: str,
    to_topic: str,
    *,
    run: str = "",
    rate: int = 0,
    at_least_once: bool = False,
    to_broker: str = "",
    progress: Progress | None = None,
) -> Replayed:
    """Send archived messages again, queue by queue in order, to queues of the same numbers (modulo
    their count); ids, times and hosts are new, the property REPLAY_FROM says where one was.

    Exactly once, archived segment by archived segment: a run that ends early and is begun again
    goes on where it was, for as long as brokers remember a sink (30 days).

    Args:
        run: with another name the same is replayed once more.
        rate: at most so many messages a second are sent; 0 = as fast as it goes. Exactly once,
            they are seen when their segment is committed.
        at_least_once: they are seen as they are sent, and a run that is begun again begins again.
        to_broker: needed where several have the topic, unless `at_least_once`.

    Raises ArchiveError, TopicNotExist, NotReachable.
    """
    began = time.monotonic()
    root = manifest.local_root(archive)
    segments = choice.segments(root)
    if not segments:
        raise ArchiveError(f"{root}: no message of topic {choice.topic} of that time is in it")
    with Admin(name_server) as admin:
        described = admin.describe_topic(to_topic)
    queues = len({queue.queue_id for queue in described.queues if not queue.hidden})
    options = {"namesrv": name_server, "topic": to_topic, "delivery": "at_least_once"}
    options["multiTags"] = "true"  # they stay what they were
    messages = left_out = 0
    for done, (entry, paths) in enumerate(segments, 1):
        if not at_least_once:
            options["delivery"] = "exactly_once"
            options["sinkId"] = choice.sink_id(entry, to_topic, run)
            options["brokerName"] = to_broker
        rows = _rows(spark.read.parquet(*paths), choice, queues, rate)
        with _last_wins(spark):
            sent, empty = _write(rows, options)
        messages, left_out = messages + sent, left_out + empty
        if progress is not None:
            progress(done, len(segments))
    seconds = time.monotonic() - began
    return Replayed(str(root), to_topic, len(segments), messages, seconds, left_out)


@contextmanager
def _last_wins(spark: SparkSession) -> Iterator[None]:
    """Of a property that is there twice the last counts, as RocketMQ reads it."""
    before = spark.conf.get(DEDUPLICATION)
    spark.conf.set(DEDUPLICATION, "LAST_WIN")
    try:
        yield
    finally:
        spark.conf.set(DEDUPLICATION, before or "EXCEPTION")


def _write(rows: DataFrame, options: Mapping[str, str]) -> tuple[int, int]:
    """(messages sent, messages without a body)."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen = Observation()
    empty = f.length("body") == 0
    rows = rows.observe(seen, f.count_if(~empty).alias("sent"), f.count_if(empty).alias("empty"))
    rows = rows.where(~empty)
    rows.write.format("cometmq").mode("append").options(**options).save()
    return int(seen.get["sent"]), int(seen.get["empty"])


def _rows(table: DataFrame, choice: Choice, queues: int, rate: int) -> DataFrame:
    """What the sink takes, each source queue in one task and in order."""
    from pyspark.sql import functions as f

    ms = f.unix_millis("store_ts")
    prepared, rolled_back = 0x4, 0xC  # bookkeeping of transactions
    table = table.where(
        (f.col("topic") == choice.topic) & (ms >= choice.begin_ms) & (ms < choice.end_ms)
        & ~f.col("sys_flag").bitwiseAND(0xC).isin(prepared, rolled_back)
    )  # fmt: skip
    folded = not table.where(f.col("sys_flag").bitwiseAND(1) == 1).isEmpty()
    tasks = max(1, min(queues, table.sparkSession.sparkContext.defaultParallelism))
    pairs = f.str_to_map(f.col("properties_raw").cast("string"), f.lit("\x02"), f.lit("\x01"))
    kept = f.map_filter(pairs, lambda key, value: value.isNotNull() & ~key.isin("", *_OWN))
    place = f.concat_ws("/", "broker", "topic", "queue_id", "queue_offset")
    rows = table.repartition(tasks, "queue_id").sortWithinPartitions("queue_id", "queue_offset")
    rows = rows.select(
        (f.col("queue_id") % queues).cast("int").alias("queue_id"), "body", "keys", "tags",
        f.map_concat(kept, f.create_map(f.lit(REPLAY_FROM), place)).alias("properties"),
        "flag", "sys_flag",
    )  # fmt: skip
    if folded or rate:
        rows = rows.mapInArrow(_Sent(rate / tasks), rows.schema)
    return rows.drop("sys_flag")


@dataclass(frozen=True)
class _Sent:
    """In a worker: bodies are unfolded, and no more than so many messages a second pass."""

    rate: float

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        pause, began, passed = threading.Event(), time.monotonic(), 0
        for batch in batches:
            step = max(1, int(self.rate / 10)) if self.rate else max(1, batch.num_rows)
            for at in range(0, batch.num_rows, step):
                part = batch.slice(at, step)
                yield _unfolded(part)
                passed += part.num_rows
                if self.rate:
                    pause.wait(max(0.0, began + passed / self.rate - time.monotonic()))


def _unfolded(batch: Any) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]

    flags = batch.column("sys_flag").to_pylist()
    if not any(flag & 1 for flag in flags):
        return batch
    bodies = batch.column("body").to_pylist()
    for row, flag in enumerate(flags):
        if flag & 1:
            try:
                bodies[row] = codec.decompress(bodies[row], flag)
            except ValueError as error:
                place = dict(batch.column("properties")[row].as_py())[REPLAY_FROM]
                raise ArchiveError(f"{place}: {error}") from None
    place = batch.schema.get_field_index("body")
    return batch.set_column(place, batch.schema.field(place), pa.array(bodies, pa.binary()))
