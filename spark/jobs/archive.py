"""Sealed segments of a log to Parquet, by topic and date; each segment once.

One task a segment: it walks the records natively, CRC included, and lays them out by queue, so that
a file holds one topic's messages queue by queue, oldest first. The files are there and durable
before the manifest's entry is, and that is made with a link that fails where there is one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cometmq.client import Admin
from cometmq.shm.kernel.codec import REASONS, FileMap, crc32, find_record
from cometmq.shm.kernel.columns import COLUMNS_DONE, COLUMNS_FULL, Columns, LogWalk
from cometmq.shm.os.durable import beside, sync_folder, whole_file
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name
from cometmq.shm.state.holds import ARCHIVE_HOLD
from cometmq.shm.state.identity import read_identity
from cometmq.spark.arrow import take_batch
from cometmq.spark.jobs import manifest
from cometmq.spark.jobs.archived import verify_entry
from cometmq.spark.jobs.manifest import (
    ArchivedFile,
    ArchivedQueue,
    ArchiveError,
    Entry,
    RawStretch,
)
from cometmq.spark.jobs.running import LogBounds, Progress, log_bounds, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW_GROUP_ROWS: Final = 131_072
ROW_GROUP_BYTES: Final = 64 << 20
SMALL_SHARE: Final = 100  # a topic below one such part of its segment shares a file
CHUNK: Final = 1 << 20
END_OF_SEGMENT: Final = REASONS[1]
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# What repeats is worth a dictionary; what ascends, the differences.
DICTIONARY: Final = ("broker", "topic", "born_host", "store_host", "tags", "record_version")
DELTAS: Final = ("queue_offset", "physical_offset", "born_ts", "store_ts")


class Archived(msgspec.Struct, frozen=True):
    """What one run did."""

    store: str
    archive: str
    broker: str
    sealed: int  # segments that could be archived
    skipped: int  # that were in the archive already
    segments: int  # archived now
    records: int
    log_bytes: int
    file_bytes: int
    files: int
    damaged: int  # stretches without a whole record, kept as they are
    swept: int  # files of killed jobs that were removed
    lost_bytes: int  # of the log, deleted since the last run without having been archived
    told: int  # the broker may delete below this physical offset; -1: it did not ask (archiveHold)
    seconds: float


@dataclass(frozen=True)
class ArchiveTask:
    bounds: LogBounds
    root: str
    start: int
    keep_going: bool
    verify: bool
    codec: str


@dataclass(frozen=True)
class ArchivePlan:
    bounds: LogBounds
    sealed: tuple[int, ...]
    waiting: tuple[int, ...]  # not in the archive yet
    lost_bytes: int


def plan_archive(store: Path, archive: str | Path, broker: str = "") -> ArchivePlan:
    """Which segments would be archived. Raises StoreError, ArchiveError."""
    root = manifest.local_root(archive)
    bounds = log_bounds(store, broker)
    there = {}
    for entry in manifest.entries(root, bounds.broker):
        there[entry.begin] = entry
        if entry.store_id != bounds.store_id:
            raise ArchiveError(
                f"{root} has segments of broker {bounds.broker} from store {entry.store_id}, and "
                f"{bounds.store} is {bounds.store_id}: name another archive or another --broker"
            )
    sealed = tuple(
        start for start in bounds.starts if start + bounds.segment_bytes <= bounds.durable
    )
    if sealed and not bounds.served and sealed[-1] + bounds.segment_bytes >= bounds.end:
        sealed = sealed[:-1]  # the last one: a broker may still write to it
    waiting = tuple(start for start in sealed if start not in there)
    known = [entry.end for begin, entry in there.items() if begin < bounds.begin]
    return ArchivePlan(bounds, sealed, waiting, bounds.begin - max(known, default=bounds.begin))


def archive(
    spark: SparkSession,
    store: Path,
    archive: str | Path,
    *,
    broker: str = "",
    keep_going: bool = False,
    verify: bool = False,
    codec: str = "zstd",
    name_server: str = "",
    progress: Progress | None = None,
) -> Archived:
    """Bring all sealed segments of a store, served or not, into an archive.

    Args:
        keep_going: a segment with damage is archived as it is; else it is an error.
        verify: each segment is put together again from its files, and compared with the log, before
            it counts as archived.
        name_server: where a broker is found that waits for its archive (archiveHold). It is told,
            at the end, what it may delete; it has to be running then.

    Raises ArchiveError, StoreError, NotReachable. Killed at any line, the next run does what is
    missing.
    """
    began = time.monotonic()
    root = manifest.local_root(archive)
    with manifest.locked(root):
        swept = manifest.sweep(root)
        plan = plan_archive(store, root, broker)
        tasks = [
            ArchiveTask(plan.bounds, str(root), start, keep_going, verify, codec)
            for start in plan.waiting
        ]
        answers = run_tasks(spark, tasks, archive_segment, progress)
        made = [msgspec.json.decode(answer, type=Entry) for answer in answers]
        told = _tell_broker(plan.bounds, root, name_server)
    return Archived(
        plan.bounds.store, str(root), plan.bounds.broker, len(plan.sealed),
        len(plan.sealed) - len(plan.waiting), len(made), sum(entry.records for entry in made),
        sum(entry.end - entry.begin for entry in made), sum(entry.size_bytes for entry in made),
        sum(len(entry.files) for entry in made), sum(entry.damaged for entry in made), swept,
        plan.lost_bytes, told, time.monotonic() - began,
    )  # fmt: skip


def _tell_broker(bounds: LogBounds, root: Path, name_server: str) -> int:
    """What is archived from the log's beginning on, without a hole, need not be kept any more."""
    if not bounds.waits_for_archive:
        return -1
    if not name_server:
        raise ArchiveError(
            f"{bounds.store}: the broker waits for its archive (archiveHold), and nobody said at "
            "which name server it can be told"
        )
    below = bounds.begin
    there = {entry.begin for entry in manifest.entries(root, bounds.broker)}
    while below in there:
        below += bounds.segment_bytes
    broker = read_identity(Path(bounds.store)).broker
    with Admin(name_server) as admin:
        admin.place_hold(ARCHIVE_HOLD, below, broker=broker, store_id=bounds.store_id)
    return below


def archive_segment(task: ArchiveTask) -> bytes:
    """In a worker: write the segment's files, and then its entry."""
    return msgspec.json.encode(_Archiving(task).run())


@dataclass
class _Archiving:
    task: ArchiveTask
    raw: list[tuple[int, int, str]] = field(default_factory=list)  # [begin, end), reason

    def run(self) -> Entry:
        bounds, start = self.task.bounds, self.task.start
        self.root = Path(self.task.root)
        self.name = f"{manifest.escaped(bounds.broker)}-{segment_name(start)}"
        path = Path(bounds.store) / COMMITLOG_DIR / segment_name(start)
        memory = map_segment(path, bounds.segment_bytes, writable=False)
        try:
            return self._run(memory)
        finally:
            memory.close()

    def _run(self, memory: FileMap) -> Entry:
        bounds, start = self.task.bounds, self.task.start
        end = start + bounds.segment_bytes
        walk = LogWalk()
        self._walk(walk, memory, end)
        damaged = sum(reason != END_OF_SEGMENT for _, _, reason in self.raw)
        if damaged and not self.task.keep_going:
            begin, stop, reason = next(each for each in self.raw if each[2] != END_OF_SEGMENT)
            raise ArchiveError(
                f"{bounds.store}: the segment at {start} has no whole record in [{begin}, {stop}): "
                f"{reason} (--keep-going archives it as it is)"
            )
        raw_path, raw = self._write_raw(memory)
        lanes = walk.lanes()
        files = list(self._write_files(walk, lanes, memory))
        if sum(file.rows for file in files) != walk.records:
            raise ArchiveError(f"the segment at {start} has records with times that cannot be")
        entry = Entry(
            manifest.VERSION, bounds.broker, bounds.store_id, start, end,
            bounds.queue_segment_bytes, walk.records, crc32(memory), files,
            _queues(lanes), raw_path, raw, damaged,
        )  # fmt: skip
        if self.task.verify:
            verify_entry(self.root, entry)
        manifest.commit(self.root, entry)
        return entry

    def _walk(self, walk: LogWalk, memory: FileMap, end: int) -> None:
        start = at = self.task.start
        while at < end:
            at, reason = walk.group(memory, start, at, end)
            if at >= end:
                return
            found = -1
            if REASONS[reason] != END_OF_SEGMENT:
                found = find_record(memory, start, min(at + 1, end), end)
            stop = found if found >= 0 else end
            self.raw.append((at, stop, REASONS[reason]))
            at = stop

    # --- files ---

    def _write_raw(self, memory: FileMap) -> tuple[str, list[RawStretch]]:
        path = f"{manifest.FOLDER}/{manifest.RAW}/{self.name}.bin"
        stretches: list[RawStretch] = []
        at = 0
        with _made(self.root / path) as made, made.open("wb") as file:
            for begin, end, reason in self.raw:
                low, high = begin - self.task.start, end - self.task.start
                kept = _data_end(memory, low, high)
                for place in range(low, kept, CHUNK):
                    file.write(memory[place : min(kept, place + CHUNK)])
                stretches.append(RawStretch(begin, end - begin, kept - low, at, reason))
                at += kept - low
        return path, stretches

    def _write_files(
        self, walk: LogWalk, lanes: list[dict[str, Any]], memory: FileMap
    ) -> Iterator[ArchivedFile]:
        """One file a topic and day; the small ones together."""
        least = sum(lane["size_bytes"] for lane in lanes) // SMALL_SHARE
        by_topic: dict[tuple[str, int], int] = {}
        for lane in lanes:
            key = lane["topic"], lane["day"]
            by_topic[key] = by_topic.get(key, 0) + lane["size_bytes"]
        by_file: dict[str, list[int]] = {}
        order = sorted(
            range(len(lanes)),
            key=lambda i: (lanes[i]["topic"], lanes[i]["day"], lanes[i]["queue_id"]),
        )
        first_day = min((lane["day"] for lane in lanes), default=0)
        for number in order:
            topic, day = lanes[number]["topic"], lanes[number]["day"]
            small = by_topic[topic, day] < least
            folder = manifest.SMALL if small else manifest.escaped(topic)
            date = _date(first_day if small else day)
            path = f"{manifest.FOLDER}/topic={folder}/dt={date}/{self.name}.parquet"
            by_file.setdefault(path, []).append(number)
        for path, numbers in sorted(by_file.items()):
            yield self._write_file(path, walk, numbers, memory, lanes)

    def _write_file(
        self, path: str, walk: LogWalk, numbers: list[int], memory: FileMap,
        lanes: list[dict[str, Any]],
    ) -> ArchivedFile:  # fmt: skip
        rows = 0
        with _made(self.root / path) as made:
            with _writer(made, self.task.codec, self.task.bounds, self.task.start) as writer:
                for batch in self._batches(walk, numbers, memory):
                    rows += batch.num_rows
                    writer.write_batch(batch)
            with made.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
        mine = [lanes[number] for number in numbers]
        return ArchivedFile(
            path, rows, size, digest, min(lane["first_ms"] for lane in mine),
            max(lane["last_ms"] for lane in mine),
        )  # fmt: skip

    def _batches(self, walk: LogWalk, numbers: list[int], memory: FileMap) -> Iterator[Any]:
        schema = manifest.arrow_schema()
        columns = Columns(
            [column for _, column, _ in manifest.COLUMNS],
            self.task.bounds.broker,
            rows_max=ROW_GROUP_ROWS,
            bytes_max=ROW_GROUP_BYTES,
            check_crc=False,  # the walk has
            decompress=False,
            begin_ms=-(1 << 63),
        )
        for number in numbers:
            at, reason = 0, COLUMNS_FULL
            while reason != COLUMNS_DONE:
                reason, at = walk.fill(columns, number, at, memory)
                if reason == COLUMNS_FULL:
                    yield take_batch(columns, schema)
                elif reason != COLUMNS_DONE:
                    raise ArchiveError(f"the segment at {self.task.start} changed meanwhile")
        if columns.rows:
            yield take_batch(columns, schema)


@contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A file that appears under its name, and its folder under its own, when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, beside(path, several=True)) as made:
        yield made
    sync_folder(path.parent.parent)


def _writer(path: Path, codec: str, bounds: LogBounds, start: int) -> Any:
    from pyarrow import parquet  # type: ignore[import-untyped]

    notes = {
        "cometmq.archive": str(manifest.VERSION),
        "cometmq.store": bounds.store_id,
        "cometmq.segment": str(start),
    }
    return parquet.ParquetWriter(
        path,
        manifest.arrow_schema().with_metadata(notes),
        compression=codec,
        compression_level=3 if codec == "zstd" else None,
        use_dictionary=list(DICTIONARY),
        column_encoding=dict.fromkeys(DELTAS, "DELTA_BINARY_PACKED"),
        write_statistics=["topic", "queue_id", "queue_offset", "store_ts", "physical_offset"],
    )


def _queues(lanes: list[dict[str, Any]]) -> list[ArchivedQueue]:
    """Of all days together."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for lane in lanes:
        found.setdefault((lane["topic"], lane["queue_id"]), []).append(lane)
    return [
        ArchivedQueue(
            *key, min(lane["first_offset"] for lane in mine),
            max(lane["last_offset"] for lane in mine), sum(lane["count"] for lane in mine),
            sum(lane["size_bytes"] for lane in mine),
        )
        for key, mine in sorted(found.items())
    ]  # fmt: skip


def _date(day: int) -> str:
    """A store time is the broker's word; a year that there cannot be is no error."""
    if not 0 <= day < 2_900_000:
        return "unknown"
    return (EPOCH + timedelta(days=day)).date().isoformat()


def _data_end(memory: FileMap, begin: int, end: int) -> int:
    """Behind the last byte of [begin, end) that is not zero; `begin` if all are."""
    while end > begin:
        low = max(begin, end - CHUNK)
        rest = memory[low:end].rstrip(b"\0")
        if rest:
            return low + len(rest)
        end = low
    return begin
