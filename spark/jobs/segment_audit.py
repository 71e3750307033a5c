"""The audit of one segment, as a task: every record natively, and the entries that point at it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cometmq.shm.derived.delay import tags_code_of
from cometmq.shm.kernel import codec, columns
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.kernel.columns import LogWalk
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name
from cometmq.spark.jobs.findings import (
    ERROR,
    WARNING,
    Finding,
    Lane,
    SegmentAudit,
    holes_in,
    queue_files,
    texts_of,
)
from cometmq.spark.jobs.running import LogBounds

WINDOWS_MAX: Final = 4096
_WARNINGS: Final = frozenset({"TIME_BACKWARD", "OFFSET_GAP", "DIRTY_TAIL"})
_OF_REASON: Final = {
    "no record magic": "BAD_MAGIC",
    "impossible size": "BAD_SIZE",
    "fields and size disagree": "BAD_SIZE",
    "stored position is not its place": "POSITION",
    "its topic, queue id or queue offset cannot be one": "BAD_TOPIC",
}


@dataclass(frozen=True)
class AuditTask:
    bounds: LogBounds
    start: int
    findings_max: int


def audit_segment(task: AuditTask) -> bytes:
    """In a worker: everything that is wrong in one segment, and its queues."""
    return msgspec.json.encode(_SegmentAuditing(task).run())


def _delay_code(record: bytes) -> int:
    (message,) = codec.decode(record, None, False)
    return tags_code_of(message)


@dataclass
class _SegmentAuditing:
    task: AuditTask
    windows: list[FileMap] = field(default_factory=list)
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
        memory.advise(mmap.MADV_SEQUENTIAL)
        try:
            self._go_over(memory, task.start, task.bounds.stop_of(task.start))
            self._finish()
        finally:
            self._let_go()
            memory.close()
        return self.found

    def _go_over(self, memory: FileMap, start: int, stop: int) -> None:
        at = start
        while at < stop:
            at, reason, lane, number = self.walk.audit(memory, start, at, stop)
            if reason == columns.WALK_BLANK:
                return
            if reason == columns.WALK_WINDOW:
                self._attach(lane, number)
            elif reason == columns.WALK_DAMAGED:
                found = codec.find_record(memory, start, min(at + 1, stop), stop)
                self._damaged(at, found if found >= 0 else stop, codec.REASONS[number])
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
        files = queue_files(self.task.bounds, topic, queue_id)
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
        kind = columns.WALK_KINDS[number]
        topic, queue_id = self.walk.name(lane) if lane >= 0 else ("", -1)
        if kind == "OFFSET_GAP":
            self._gap(topic, queue_id, (a, b), (c, at))
            return
        expected, actual = texts_of(kind, at, (a, b, c, d, e))
        self._say(kind, topic, queue_id, index, at, expected, actual)

    def _gap(
        self, topic: str, queue_id: int, offsets: tuple[int, int], places: tuple[int, int]
    ) -> None:
        bounds, damages = self.task.bounds, self.found.damages
        for finding in holes_in(bounds, damages, topic, queue_id, offsets, places):
            self.found.findings.append(finding)
