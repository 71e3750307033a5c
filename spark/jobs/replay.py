"""From an archive back to a store, byte by byte, or to a topic."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cometmq.client import Admin, Producer
from cometmq.protocol.errors import StoreError
from cometmq.shm import _kernel
from cometmq.shm.files import COMMITLOG_DIR, segment_name, sync_folder
from cometmq.shm.repair import recover_store
from cometmq.spark.jobs import manifest
from cometmq.spark.jobs.archived import contiguous, fill_segment
from cometmq.spark.jobs.manifest import ArchiveError, Entry
from cometmq.spark.jobs.running import Progress, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEND_ROWS: Final = 1000
# Made anew by whoever sends, or spelled out beside the properties.
_OWN: Final = frozenset({"TAGS", "KEYS", "UNIQ_KEY", "WAIT", "__CRC32#"})


class Replayed(msgspec.Struct, frozen=True):
    """What was brought back."""

    archive: str
    target: str
    segments: int
    messages: int
    seconds: float


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
    try:
        with made.open("w+b") as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as memory:
                fill_segment(Path(task.root), entry, memory)
                memory.flush()
            os.fsync(file.fileno())
        made.replace(folder / segment_name(entry.begin))
    finally:
        made.unlink(missing_ok=True)
    return b""


# --- to a topic ---


@dataclass(frozen=True)
class Choice:
    """Which archived messages are meant."""

    topic: str
    broker: str = ""
    begin_ms: int = 0  # store time
    end_ms: int = (1 << 63) - 1

    def files(self, root: Path) -> Iterator[Path]:
        """In the order of the log; of one broker the messages of a queue ascend."""
        folders = {manifest.escaped(self.topic), manifest.SMALL}
        for entry in manifest.entries(root, self.broker):
            for file in entry.files:
                folder = file.path.split("/")[1].removeprefix("topic=")
                in_time = file.min_store_ms < self.end_ms and file.max_store_ms >= self.begin_ms
                if folder in folders and in_time:
                    yield manifest.inside(root, file.path)

    def rows(self, root: Path) -> Iterator[list[dict[str, Any]]]:
        """Batches of rows; internal bookkeeping (transactions that were not committed) is not."""
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.compute as compute  # type: ignore[import-untyped]
        from pyarrow import parquet

        names = ["topic", "queue_id", "sys_flag", "flag", "store_ts", "body", "properties_raw"]
        for path in self.files(root):
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(SEND_ROWS, columns=names):
                    table = pa.Table.from_batches([batch])
                    ms = compute.divide(table["store_ts"].cast(pa.int64()), 1000)
                    keep = compute.and_(
                        compute.equal(table["topic"], self.topic),
                        compute.and_(
                            compute.greater_equal(ms, self.begin_ms),
                            compute.less(ms, self.end_ms),
                        ),
                    )
                    rows = table.filter(keep).to_pylist()
                    yield [row for row in rows if row["sys_flag"] & 0xC not in (0x4, 0xC)]


def replay_to_topic(
    archive: str | Path,
    choice: Choice,
    name_server: str,
    to_topic: str,
    *,
    rate: int = 0,
    progress: Progress | None = None,
) -> Replayed:
    """Send archived messages again: bodies, tags, keys and properties, queue by queue in order.

    At least once: a run that ends early and is begun again sends what it had sent once more. Ids,
    times and hosts are new ones. Runs in this process, not in Spark.

    Args:
        rate: messages a second, 0 = as fast as it goes.
    """
    began = time.monotonic()
    root = manifest.local_root(archive)
    files = list(choice.files(root))
    if not files:
        raise ArchiveError(f"{root}: no message of topic {choice.topic} of that time is in it")
    with Admin(name_server) as admin:
        queues = admin.describe_topic(to_topic)
    count = len({queue.queue_id for queue in queues.queues})
    pace = _Pace(rate)
    sent = 0
    with Producer(name_server) as producer:
        for rows in choice.rows(root):
            for _, alike in groupby(rows, key=_kind):
                run = list(alike)
                sent += _send(producer, to_topic, run, count)
                pace.after(sent)
                if progress is not None:
                    progress(sent, sent)
    return Replayed(str(root), to_topic, 0, sent, time.monotonic() - began)


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be the same of messages that are sent together."""
    return row["queue_id"], row["flag"], tuple(sorted(_properties(row).items()))


def _properties(row: dict[str, Any]) -> dict[str, str]:
    found = {}
    for pair in row["properties_raw"].split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if name and value:
            found[name.decode(errors="replace")] = value.decode(errors="replace")
    found.pop("UNIQ_KEY", None)
    return found


def _send(producer: Producer, topic: str, rows: list[dict[str, Any]], queues: int) -> int:
    first = _properties(rows[0])
    own = {name: value for name, value in first.items() if name not in _OWN}
    bodies = [
        _kernel.decompress(row["body"], row["sys_flag"]) if row["sys_flag"] & 1 else row["body"]
        for row in rows
    ]
    producer.send_many(
        topic,
        bodies,
        tags=first.get("TAGS"),
        keys=first.get("KEYS"),
        properties=own or None,
        queue_id=rows[0]["queue_id"] % queues,
        flag=rows[0]["flag"],
    )
    return len(rows)


class _Pace:
    """Waits so that no more than so many messages a second go out."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._began = time.monotonic()
        self._pause = threading.Event()

    def after(self, sent: int) -> None:
        if self._rate:
            self._pause.wait(max(0.0, self._began + sent / self._rate - time.monotonic()))
