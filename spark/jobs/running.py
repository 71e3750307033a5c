"""What the jobs share: which part of a log they look at, and how tasks run in Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cometmq.protocol.errors import CometError, StoreNotOurs
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os.files import ABORT_FILE, COMMITLOG_DIR, list_segments
from cometmq.shm.reading.column_reader import Served, is_served
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.state.identity import read_identity
from cometmq.spark.catalog import DEFAULT_BROKER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[int, int], None]  # tasks done, tasks in all
Task = TypeVar("Task")

LOOK_S: Final = 0.5  # between two looks at how many tasks are done


class JobFailed(CometError):
    """A job that could not do what it was asked to; its text says why."""

    code = 9040


@dataclass(frozen=True)
class LogBounds:
    """A store, and how far its log could be read when somebody looked."""

    store: str
    broker: str
    store_id: str
    segment_bytes: int
    queue_segment_bytes: int
    begin: int  # physical offsets
    end: int  # behind the last whole record
    dispatched: int  # everything below has its ConsumeQueue entry
    durable: int  # everything below survives a loss of power
    served: bool
    waits_for_archive: bool  # the broker's cleaner: archiveHold
    starts: tuple[int, ...]  # of the segments that have something

    def stop_of(self, start: int) -> int:
        return min(self.end, start + self.segment_bytes)


def log_bounds(store: Path, broker: str = "") -> LogBounds:
    """Of a store that a broker serves, or that nobody has open. Raises StoreError.

    A closed store's log is walked from where recovery would begin; nothing is written.
    """
    store = store.absolute()
    if not (store / COMMITLOG_DIR).is_dir():
        raise StoreNotOurs(f"{store} is no store: there is no {COMMITLOG_DIR}/ in it")
    identity = read_identity(store)
    segment_bytes, queue_bytes = file_sizes(store)
    if is_served(store):
        served = Served(store)
        end = dispatched = served.dispatched
        durable = min(served.flushed, end)
        begin = served.positions.log_range()[0]
    else:
        clean = not (store / ABORT_FILE).exists()
        begin = 0
        end = dispatched = durable = find_end(store, segment_bytes, clean=clean).physical_offset
        served = None
    starts = list_segments(store / COMMITLOG_DIR, segment_bytes)
    kept = tuple(start for start in starts if start + segment_bytes > begin and start < end)
    return LogBounds(
        str(store), broker or identity.broker or DEFAULT_BROKER, identity.store_id,
        segment_bytes, queue_bytes, kept[0] if kept else end, end, dispatched, durable,
        served is not None, served is not None and served.waits_for_archive, kept,
    )  # fmt: skip


def run_tasks(
    spark: SparkSession,
    tasks: Sequence[Task],
    work: Callable[[Task], bytes],
    progress: Progress | None = None,
    *,
    parts: int | None = None,
) -> list[bytes]:
    """Each task's result, in their order; each runs in a Python worker.

    `work` has to stand in a module that the workers can import. What it returns goes through the
    JVM, so it should be small.

    Args:
        parts: Spark's tasks, which share these out; by default it has one for each.
    """
    if not tasks:
        return []
    parts = min(parts or len(tasks), len(tasks))
    frame = spark.range(0, len(tasks), 1, parts).mapInArrow(
        _Runner(tuple(tasks), work), "id bigint, result binary"
    )
    with Watch(spark, progress, len(tasks), parts):
        rows = frame.collect()
    return [bytes(row.result) for row in sorted(rows, key=lambda row: row.id)]


def parts_of(spark: SparkSession, size_bytes: int, part_bytes: int) -> int:
    """How many tasks Spark should make of a scan, so that no core is idle while others end."""
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    cores = context.defaultParallelism if context is not None else 1
    rounds = -(-size_bytes // (part_bytes * cores))
    return max(1, rounds) * int(cores)


@dataclass(frozen=True)
class _Runner:
    """What is sent to the workers."""

    tasks: tuple[Any, ...]
    work: Callable[[Any], bytes]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa  # type: ignore[import-untyped]

        schema = pa.schema([("id", pa.int64()), ("result", pa.binary())])
        for batch in batches:
            for number in batch.column(0).to_pylist():
                result = self.work(self.tasks[number])
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int64()), pa.array([result], pa.binary())],
                    schema=schema,
                )


class Watch:
    """Tells how many tasks are done, from a thread beside the one that waits for them.

    Args:
        total: what is told as all of it, where `parts` of Spark's tasks share that out. 0: Spark's
            tasks are told, stage by stage.
    """

    def __init__(
        self, spark: SparkSession, progress: Progress | None, total: int = 0, parts: int = 0
    ) -> None:
        self._spark, self._total, self._parts, self._progress = spark, total, parts, progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="progress", daemon=True)

    def __enter__(self) -> None:
        if self._progress is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._progress is not None:
            self._thread.join()
            if self._total:
                self._progress(self._total, self._total)

    def _look(self) -> None:
        assert self._progress is not None
        tracker = self._spark.sparkContext.statusTracker()
        while not self._ended.wait(LOOK_S):
            for stage in tracker.getActiveStageIds():
                info = tracker.getStageInfo(stage)
                if info is None or self._parts not in (0, info.numTasks):
                    continue
                total = self._total or info.numTasks
                self._progress(info.numCompletedTasks * total // info.numTasks, total)
