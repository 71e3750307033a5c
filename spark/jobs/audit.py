"""Is a store what it claims to be? Every record, every queue entry, both ways. Reads only.

Each task walks one segment natively: CRC, position, store time, and for each record the entry that
RocketMQ's rules of dispatch make of it. What the queues hold beyond that is found where offsets are
missing in the log, and at the queues' ends.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.protocol.errors import StoreError
from cometmq.shm import _kernel
from cometmq.shm._kernel import LogWalk
from cometmq.shm.consume_queue import QueueFiles, list_queues
from cometmq.shm.delay import delay_tags_code
from cometmq.shm.files import COMMITLOG_DIR, map_segment, segment_name
from cometmq.shm.queue_builder import QueueBuilder, is_queue_name
from cometmq.shm.queue_check import StoreFiles
from cometmq.shm.queue_table import QueueTable
from cometmq.shm.verify import dirty_tails
from cometmq.spark.catalog import BATCH_QUEUES_DIR
from cometmq.spark.jobs.running import (
    JobFailed,
    LogBounds,
    Progress,
    log_bounds,
    parts_of,
    run_tasks,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILLER_SIZE: Final = 0x7FFFFFFF
# What Spark spends on one task, 0.1 s, is what the walk takes for some 300 MiB.
PART_BYTES: Final = 1 << 30
WINDOWS_MAX: Final = 4096
LIGHT_QUEUES: Final = "%LMQ%"  # RocketMQ's light queues: entries of other topics' records
LOOKED_AT_MAX: Final = 10_000  # entries of one hole in a queue's offsets
ERROR: Final = "error"
WARNING: Final = "warning"
_WARNINGS: Final = frozenset({"TIME_BACKWARD", "OFFSET_GAP", "DIRTY_TAIL"})
_OF_REASON: Final = {
    "no record magic": "BAD_MAGIC",
    "impossible size": "BAD_SIZE",
    "fields and size disagree": "BAD_SIZE",
    "stored position is not its place": "POSITION",
}


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    severity: str
    broker: str
    segment: str  # its file's name; empty for what concerns a queue's end
    topic: str
    queue_id: int  # -1: in no queue
    queue_offset: int  # -1: of no message
    physical_offset: int
    expected: str
    actual: str


class QueueSummary(msgspec.Struct, frozen=True):
    """A queue as the log has it."""

    broker: str
    topic: str
    queue_id: int
    log_count: int
    cq_count: int
    min_offset: int
    max_offset: int
    size_bytes: int
    checksum_log: str
    checksum_cq: str
    gaps: int  # queue offsets that no record has


class Audited(msgspec.Struct, frozen=True):
    """What was looked at, and what was found."""

    store: str
    broker: str
    log_min: int
    log_max: int
    segments: int
    expired: int  # segments that the cleaner took away meanwhile
    records: int
    seconds: float
    findings: list[Finding]
    left_out: int  # findings that were only counted
    not_checked: list[str]  # queues for which there are no rules here
    queues: list[QueueSummary]


class Lane(msgspec.Struct):
    """A queue in one segment."""

    topic: str
    queue_id: int
    count: int
    size_bytes: int
    first_offset: int
    last_offset: int
    first_physical: int
    last_physical: int
    first_ms: int  # the earliest store time
    last_ms: int
    log_sum: int
    queue_sum: int
    missing: int


class SegmentAudit(msgspec.Struct):
    """What one task answers."""

    start: int
    records: int = 0
    expired: bool = False
    left_out: int = 0
    damages: list[tuple[int, int]] = msgspec.field(default_factory=list)  # physical offset, bytes
    findings: list[Finding] = msgspec.field(default_factory=list)
    lanes: list[Lane] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class AuditTask:
    bounds: LogBounds
    start: int
    findings_max: int


@dataclass(frozen=True)
class AuditPlan:
    """What an audit would read."""

    bounds: LogBounds
    findings_max: int = 100

    @property
    def tasks(self) -> list[AuditTask]:
        return [AuditTask(self.bounds, start, self.findings_max) for start in self.bounds.starts]

    @property
    def size_bytes(self) -> int:
        bounds = self.bounds
        return sum(bounds.stop_of(start) - start for start in bounds.starts)


def plan_audit(store: Path, findings_max: int = 100) -> AuditPlan:
    """Raises StoreError; JobFailed for a store whose queues have another format."""
    bounds = log_bounds(store)
    if (store / BATCH_QUEUES_DIR).is_dir():
        raise JobFailed(f"{store} has BatchConsumeQueues: an audit does not know their entries yet")
    return AuditPlan(bounds, findings_max)


def audit(
    spark: SparkSession,
    store: Path,
    *,
    findings_max: int = 100,
    progress: Progress | None = None,
) -> Audited:
    """Compare log and queues of a store, which a broker may be serving. Raises StoreError.

    Args:
        findings_max: rows of one kind and queue in a segment; what is more is counted.
    """
    plan = plan_audit(store, findings_max)
    began = time.monotonic()
    parts = parts_of(spark, plan.size_bytes, PART_BYTES)
    answers = run_tasks(spark, plan.tasks, audit_segment, progress, parts=parts)
    found = [msgspec.json.decode(answer, type=SegmentAudit) for answer in answers]
    return _Merging(plan.bounds, found).audited(began)


# --- one segment ---


def audit_segment(task: AuditTask) -> bytes:
    """In a worker: everything that is wrong in one segment, and its queues."""
    return msgspec.json.encode(_SegmentAuditing(task).run())


def _delay_code(record: bytes) -> int:
    (message,) = _kernel.decode(record, None, False)
    return delay_tags_code(message)


@dataclass
class _SegmentAuditing:
    task: AuditTask
    windows: list[mmap.mmap] = field(default_factory=list)
    no_file: set[tuple[int, int]] = field(default_factory=set)

    def run(self) -> SegmentAudit:
        task = self.task
        self.found = SegmentAudit(task.start)
        self.walk = LogWalk(_delay_code, task.findings_max)
        path = Path(task.bounds.store) / COMMITLOG_DIR / segment_name(task.start)
        try:
            memory = map_segment(path, task.bounds.segment_bytes, writable=False)
        except FileNotFoundError:
            self.found.expired = True
            return self.found
        memory.madvise(mmap.MADV_SEQUENTIAL)
        try:
            self._go_over(memory, task.start, task.bounds.stop_of(task.start))
            self._finish()
        finally:
            self._let_go()
            memory.close()
        return self.found

    def _go_over(self, memory: mmap.mmap, start: int, stop: int) -> None:
        at = start
        while at < stop:
            at, reason, lane, number = self.walk.audit(memory, start, at, stop)
            if reason == _kernel.WALK_BLANK:
                return
            if reason == _kernel.WALK_WINDOW:
                self._attach(lane, number)
            elif reason == _kernel.WALK_DAMAGED:
                found = _kernel.find_record(memory, start, min(at + 1, stop), stop)
                self._damaged(at, found if found >= 0 else stop, _kernel.REASONS[number])
                at = found if found >= 0 else stop

    def _damaged(self, begin: int, end: int, reason: str) -> None:
        self.found.damages.append((begin, end - begin))
        self._say(
            _OF_REASON.get(reason, "BAD_SIZE"), "", -1, -1, begin, "a whole record",
            f"{reason}; {end - begin} bytes without one",
        )  # fmt: skip

    def _say(
        self, kind: str, topic: str, queue_id: int, queue_offset: int, physical_offset: int,
        expected: str, actual: str,
    ) -> None:  # fmt: skip
        bounds = self.task.bounds
        self.found.findings.append(
            Finding(
                kind,
                WARNING if kind in _WARNINGS else ERROR,
                bounds.broker,
                segment_name(self.task.start),
                topic,
                queue_id,
                queue_offset,
                physical_offset,
                expected,
                actual,
            )
        )

    # --- windows on the queues ---

    def _attach(self, lane: int, index: int) -> None:
        if len(self.windows) >= WINDOWS_MAX:
            self._let_go()
        topic, queue_id = self.walk.name(lane)
        if not is_queue_name(topic, queue_id):
            self._say("BAD_TOPIC", topic, queue_id, index, -1, "the name of a topic", repr(topic))
            self.walk.attach(lane, None, 0, 1 << 62)
            return
        files = _queue_files(self.task.bounds, topic, queue_id)
        first = index // files.per_segment * files.per_segment
        path = files.path(first // files.per_segment * files.segment_bytes)
        memory = None
        try:
            memory = map_segment(path, files.segment_bytes, writable=False)
            self.windows.append(memory)
        except FileNotFoundError:
            if (lane, first) not in self.no_file:  # a file that is missing is one finding
                self.no_file.add((lane, first))
                expected = f"entries from {index} on"
                self._say("CQ_MISSING", topic, queue_id, index, -1, expected, f"no file {path}")
        self.walk.attach(lane, memory, first, first + files.per_segment)

    def _let_go(self) -> None:
        self.walk.detach()
        for window in self.windows:
            window.close()
        self.windows.clear()

    # --- findings ---

    def _finish(self) -> None:
        found, walk = self.found, self.walk
        found.records, found.left_out = walk.records, walk.left_out
        for raw in walk.findings:
            self._record_finding(*raw)
        names = set(Lane.__struct_fields__)
        found.lanes = [
            Lane(**{name: value for name, value in each.items() if name in names})
            for each in walk.lanes()
            if each["count"]
        ]

    def _record_finding(
        self, number: int, lane: int, index: int, at: int, a: int, b: int, c: int, d: int, e: int
    ) -> None:
        kind = _kernel.WALK_KINDS[number]
        topic, queue_id = self.walk.name(lane) if lane >= 0 else ("", -1)
        if kind == "OFFSET_GAP":
            self._gap(topic, queue_id, (a, b), (c, at))
            return
        expected, actual = _texts(kind, at, (a, b, c, d, e))
        self._say(kind, topic, queue_id, index, at, expected, actual)

    def _gap(
        self, topic: str, queue_id: int, offsets: tuple[int, int], places: tuple[int, int]
    ) -> None:
        bounds, damages = self.task.bounds, self.found.damages
        for finding in holes_in(bounds, damages, topic, queue_id, offsets, places):
            self.found.findings.append(finding)


def _texts(kind: str, at: int, numbers: Sequence[int]) -> tuple[str, str]:
    """(expected, actual) of what LogWalk noted."""
    a, b, c, d, e = numbers
    if kind == "BODY_CRC":
        return f"CRC {a:#010x}", f"CRC {b:#010x}"
    if kind == "TIME_BACKWARD":
        return f"stored at {a} ms or later", f"{b} ms"
    if kind == "OFFSET_DUP":
        return f"queue offset {a} or higher", f"{b}"
    if kind == "CQ_MISSING":
        return f"physical offset {at}, {a} bytes", "nothing" if d == 0 else "a filler"
    if kind == "CQ_TAGS":
        return f"tagsCode {b}", f"{e}"
    return f"physical offset {at}, {a} bytes", f"physical offset {c}, {d} bytes"


def _queue_files(bounds: LogBounds, topic: str, queue_id: int) -> QueueFiles:
    return QueueFiles(Path(bounds.store), topic, queue_id, bounds.queue_segment_bytes)


def holes_in(
    bounds: LogBounds,
    damages: Sequence[tuple[int, int]],
    topic: str,
    queue_id: int,
    offsets: tuple[int, int],
    places: tuple[int, int],
) -> Iterator[Finding]:
    """What is to be said of queue offsets [begin, end) that no record has.

    Damage between the two `places`, the physical offsets of their neighbours, has been said and
    explains the hole, and entries that point into damage. Other entries are too many.
    """
    begin, end = offsets
    explained = any(places[0] < at < places[1] for at, _ in damages)
    extra = _extra_entries(bounds, damages, topic, queue_id, begin, end)
    for index, physical_offset in extra:
        yield Finding(
            "CQ_EXTRA", ERROR, bounds.broker, "", topic, queue_id, index, physical_offset,
            "no entry: no record has this queue offset", f"physical offset {physical_offset}",
        )  # fmt: skip
    if not explained and not extra:
        yield Finding(
            "OFFSET_GAP", WARNING, bounds.broker, "", topic, queue_id, begin, places[1],
            f"queue offset {begin}", f"{end}: {end - begin} are in no record",
        )  # fmt: skip


def _extra_entries(
    bounds: LogBounds,
    damages: Sequence[tuple[int, int]],
    topic: str,
    queue_id: int,
    begin: int,
    end: int,
) -> list[tuple[int, int]]:
    files = _queue_files(bounds, topic, queue_id)
    found = []
    for index in range(begin, min(end, begin + LOOKED_AT_MAX)):
        unit = files.entry(index)
        if unit is None or (unit["size"] == FILLER_SIZE and unit["physical_offset"] == 0):
            continue
        at = unit["physical_offset"]
        in_damage = any(low <= at < low + size for low, size in damages)
        if bounds.begin <= at < bounds.end and not in_damage:
            found.append((index, at))
    return found


# --- all segments ---


@dataclass
class _Merging:
    """Puts the segments' answers together: what only shows between them."""

    bounds: LogBounds
    parts: list[SegmentAudit]

    def audited(self, began: float) -> Audited:
        bounds = self.bounds
        self.damages = [damage for part in self.parts for damage in part.damages]
        self.damages += [(low, high - low) for low, high in self._missing_segments()]
        queues: dict[tuple[str, int], list[Lane]] = {}
        for part in self.parts:
            for lane in part.lanes:
                queues.setdefault((lane.topic, lane.queue_id), []).append(lane)
        findings = [finding for part in self.parts for finding in part.findings]
        findings += self._segment_gaps()
        findings += self._times()
        if not bounds.served:
            findings += self._dirty_tails()
        for key, lanes in sorted(queues.items()):
            findings += self._around(*key, lanes)
        not_checked: list[str] = []
        findings += self._without_records(set(queues), not_checked)
        return Audited(
            bounds.store, bounds.broker, bounds.begin, bounds.end, len(self.parts),
            sum(part.expired for part in self.parts), sum(part.records for part in self.parts),
            time.monotonic() - began, findings, sum(part.left_out for part in self.parts),
            not_checked,
            [self._summary(key, lanes) for key, lanes in sorted(queues.items())],
        )  # fmt: skip

    def _missing_segments(self) -> list[tuple[int, int]]:
        size = self.bounds.segment_bytes
        return [
            (low + size, high) for low, high in pairwise(self.bounds.starts) if low + size < high
        ]

    def _segment_gaps(self) -> Iterator[Finding]:
        for low, high in self._missing_segments():
            yield Finding(
                "SEGMENT_GAP", ERROR, self.bounds.broker, segment_name(low), "", -1, -1, low,
                f"a segment from {low} on", f"the next begins at {high}",
            )  # fmt: skip

    def _times(self) -> Iterator[Finding]:
        """The first record of a segment against the ones before."""
        latest = -(1 << 63)
        for part in self.parts:
            if not part.lanes:
                continue
            first = min(part.lanes, key=lambda lane: lane.first_physical)
            if first.first_ms < latest:
                yield Finding(
                    "TIME_BACKWARD", WARNING, self.bounds.broker, segment_name(part.start),
                    first.topic, first.queue_id, first.first_offset, first.first_physical,
                    *_texts("TIME_BACKWARD", 0, (latest, first.first_ms, 0, 0, 0)),
                )  # fmt: skip
            latest = max(latest, *(lane.last_ms for lane in part.lanes))

    def _dirty_tails(self) -> Iterator[Finding]:
        bounds = self.bounds
        files = StoreFiles(Path(bounds.store), bounds.segment_bytes, bounds.queue_segment_bytes)
        for found in dirty_tails(files, bounds.end, "the log ends here"):
            name = Path(found.file).name
            yield Finding(
                "DIRTY_TAIL", WARNING, bounds.broker, name, "", -1, -1,
                int(name) + found.offset, found.expected, found.actual,
            )  # fmt: skip

    def _around(self, topic: str, queue_id: int, lanes: list[Lane]) -> Iterator[Finding]:
        """Before the first record of a queue, between segments, and behind the last."""
        if not is_queue_name(topic, queue_id):
            return
        lanes.sort(key=lambda lane: lane.first_physical)
        for before, after in pairwise(lanes):
            offsets = before.last_offset + 1, after.first_offset
            places = before.last_physical, after.first_physical
            if offsets[0] < offsets[1]:
                yield from holes_in(self.bounds, self.damages, topic, queue_id, offsets, places)
            elif offsets[0] > offsets[1]:
                yield Finding(
                    "OFFSET_DUP", ERROR, self.bounds.broker, "", topic, queue_id, offsets[1],
                    places[1], *_texts("OFFSET_DUP", 0, (*offsets, 0, 0, 0)),
                )  # fmt: skip
        files = _queue_files(self.bounds, topic, queue_id)
        first, last = lanes[0].first_offset, max(lane.last_offset for lane in lanes)
        low = files.first_index_from(self.bounds.begin, first)
        yield from self._extra(topic, queue_id, low, first)
        end = last + 1
        while files.entry(end) is not None and end - last <= LOOKED_AT_MAX:
            end += 1
        yield from self._extra(topic, queue_id, last + 1, end)

    def _extra(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[Finding]:
        """One finding for all entries of a stretch where there should be none."""
        if begin >= end:
            return
        found = _extra_entries(self.bounds, self.damages, topic, queue_id, begin, end)
        if found:
            index, at = found[0]
            yield Finding(
                "CQ_EXTRA", ERROR, self.bounds.broker, "", topic, queue_id, index, at,
                "no entry: no record has this queue offset",
                f"{len(found)} entries, the first to physical offset {at}",
            )  # fmt: skip

    def _without_records(
        self, known: set[tuple[str, int]], not_checked: list[str]
    ) -> Iterator[Finding]:
        for topic, queue_id in list_queues(Path(self.bounds.store)):
            if (topic, queue_id) in known:
                continue
            if topic.startswith(LIGHT_QUEUES):
                not_checked.append(f"{topic}/{queue_id}")
                continue
            files = _queue_files(self.bounds, topic, queue_id)
            end = files.find_end().next_index
            low = files.first_index_from(self.bounds.begin, end)
            yield from self._extra(topic, queue_id, low, end)

    def _summary(self, key: tuple[str, int], lanes: list[Lane]) -> QueueSummary:
        log_sum = queue_sum = 0
        for lane in lanes:
            log_sum ^= lane.log_sum
            queue_sum ^= lane.queue_sum
        count = sum(lane.count for lane in lanes)
        low = min(lane.first_offset for lane in lanes)
        high = max(lane.last_offset for lane in lanes)
        return QueueSummary(
            self.bounds.broker, *key, count, count - sum(lane.missing for lane in lanes), low, high,
            sum(lane.size_bytes for lane in lanes), f"{log_sum:016x}", f"{queue_sum:016x}",
            high - low + 1 - count,
        )  # fmt: skip


# --- queues as they should be ---


def rebuild_queues(store: Path, target: Path, progress: Progress | None = None) -> int:
    """Write the ConsumeQueues that the log makes into `target`/consumequeue; their number.

    Nothing is written to the store. Raises StoreError where the target is in it, or is not empty.
    """
    bounds = log_bounds(store)
    target = target.absolute()
    if target.is_relative_to(Path(bounds.store).resolve()) or (
        target.exists() and any(target.iterdir())
    ):
        raise StoreError(f"{target}: name an empty or a new directory outside the store")
    target.mkdir(parents=True, exist_ok=True)
    link = target / COMMITLOG_DIR  # the builder looks for log and queues in one place
    link.symlink_to(Path(bounds.store) / COMMITLOG_DIR, target_is_directory=True)
    table, count = QueueTable.private()
    files = StoreFiles(target, bounds.segment_bytes, bounds.queue_segment_bytes)
    builder = QueueBuilder(files, table, count)
    try:
        at = builder.recover(clean=True, redo_from=bounds.begin, end=bounds.end, rebuild=True).begin
        while at < bounds.end:
            at = builder.dispatch(at, bounds.end)
            if progress is not None:
                progress(at - bounds.begin, bounds.end - bounds.begin)
        builder.finish_recovery()
    finally:
        builder.close()
        link.unlink()
        with suppress(OSError):
            (target / "cometmq.tmp").rmdir()
    return len(builder.files)
