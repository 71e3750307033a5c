"""Is a store what it claims to be? Every record, every queue entry, both ways. Reads only.

Each task walks one segment natively: CRC, position, store time, and for each record the entry that
RocketMQ's rules of dispatch make of it. What the queues hold beyond that is found where offsets are
missing in the log, and at the queues' ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cometmq.protocol.errors import StoreError
from cometmq.shm.derived.consume_queue import list_queues
from cometmq.shm.derived.queue_builder import QueueBuilder
from cometmq.shm.derived.queue_check import StoreFiles
from cometmq.shm.kernel.codec import is_queue_name
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name
from cometmq.shm.tools.verify import dirty_tails
from cometmq.spark.catalog import BATCH_QUEUES_DIR
from cometmq.spark.jobs.findings import (
    ERROR,
    LOOKED_AT_MAX,
    WARNING,
    Audited,
    Finding,
    Lane,
    QueueSummary,
    SegmentAudit,
    extra_entries,
    holes_in,
    queue_files,
    texts_of,
)
from cometmq.spark.jobs.running import (
    JobFailed,
    LogBounds,
    Progress,
    log_bounds,
    parts_of,
    run_tasks,
)
from cometmq.spark.jobs.segment_audit import AuditTask, audit_segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What Spark spends on one task, 0.1 s, is what the walk takes for some 300 MiB.
PART_BYTES: Final = 1 << 30
LIGHT_QUEUES: Final = "%LMQ%"  # RocketMQ's light queues: entries of other topics' records


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
                    *texts_of("TIME_BACKWARD", 0, (latest, first.first_ms, 0, 0, 0)),
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
                    places[1], *texts_of("OFFSET_DUP", 0, (*offsets, 0, 0, 0)),
                )  # fmt: skip
        files = queue_files(self.bounds, topic, queue_id)
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
        found = extra_entries(self.bounds, self.damages, topic, queue_id, begin, end)
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
            files = queue_files(self.bounds, topic, queue_id)
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
