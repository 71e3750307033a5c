"""Reading a store into Arrow columns: queue by queue, or segment by segment of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import StoreError
from cometmq.shm.derived.consume_queue import UNIT, QueueFiles, list_queues
from cometmq.shm.derived.queue_check import StoreFiles, holds_at_end
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.columns import (
    COLUMNS_DONE,
    COLUMNS_GONE,
    COLUMNS_UNMAPPED,
    Columns,
    QueueSpans,
)
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueRange, QueueTable
from cometmq.shm.log.recovery import find_end
from cometmq.shm.log.torn import without_torn_end
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, map_segment, segment_name
from cometmq.shm.os.locks import check_not_in_use
from cometmq.shm.reading.positions import LivePositions, Positions, file_sizes
from cometmq.shm.reading.store_reader import StoreReader

LOOK_S: Final = 0.002
_BLANK: Final = 1  # an index into codec.REASONS


class FixedPositions:
    """As far as somebody has found out before. Queues are asked for by who found out."""

    def __init__(self, log_min: int, log_max: int) -> None:
        self._range = log_min, log_max

    def log_range(self) -> tuple[int, int]:
        return self._range

    def queue_range(self, topic: str, queue_id: int) -> QueueRange | None:
        raise StoreError(f"the range of {topic}/{queue_id} is not known here")


class ClosedPositions:
    """Of a store that was closed in order: its queues say how far the log reaches.

    Nobody has to walk the log for that. A queue that begins above 0 begins with its first message.

    Attributes:
        distrust: why they do not say it; "" if they do.
    """

    def __init__(self, store: Path, segment_bytes: int, queue_segment_bytes: int) -> None:
        starts = list_segments(store / COMMITLOG_DIR, segment_bytes)
        self._log_min = self._log_max = starts[0] if starts else 0
        log_files = StoreFiles(store, segment_bytes, queue_segment_bytes)
        self.distrust = ""
        self._queues: dict[tuple[str, int], QueueRange] = {}
        for topic, queue_id in list_queues(store):
            files = QueueFiles(store, topic, queue_id, queue_segment_bytes)
            end = files.find_end()
            if holds_at_end(log_files, topic, queue_id, end.next_index):
                self._log_max = max(self._log_max, end.max_physical_offset)
            else:
                self.distrust = f"the last entry of {files.folder}, {end.next_index - 1}, is wrong"
            if (gap := files.file_behind(end.next_index)) is not None:
                self.distrust = f"{gap} has entries behind a gap at queue offset {end.next_index}"
            self._queues[topic, queue_id] = QueueRange(
                files.first_index_from(self._log_min, end.next_index), end.next_index
            )

        if not self.distrust and _has_more(store, segment_bytes, self._log_max):
            self.distrust = f"its queues end at physical offset {self._log_max}, its log does not"

    def log_range(self) -> tuple[int, int]:
        return self._log_min, self._log_max

    def queue_range(self, topic: str, queue_id: int) -> QueueRange | None:
        return self._queues.get((topic, queue_id))

    def queues(self) -> Iterator[tuple[str, int]]:
        return iter(self._queues)


class ColumnReader(StoreReader):
    """A StoreReader that hands out columns. One thread uses it."""

    @classmethod
    def at(cls, store: Path, positions: Positions) -> ColumnReader:
        """With the segment sizes that the files have."""
        return cls._with_sizes(store, file_sizes(store), positions)

    @classmethod
    def up_to(cls, store: Path, log_max: int) -> ColumnReader:
        """Return a reader for a store whose log is known to be whole up to a physical offset."""
        sizes = file_sizes(store)  # examines every file: once for each task of a query
        starts = list_segments(store / COMMITLOG_DIR, sizes[0])
        return cls._with_sizes(store, sizes, FixedPositions(starts[0] if starts else 0, log_max))

    @classmethod
    def _with_sizes(cls, store: Path, sizes: tuple[int, int], positions: Positions) -> ColumnReader:
        segment_bytes, queue_segment_bytes = sizes
        return cls(
            store,
            segment_bytes=segment_bytes,
            queue_segment_bytes=queue_segment_bytes,
            positions=positions,
        )

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    def file_of(self, physical_offset: int) -> Path:
        start = physical_offset // self._segment_bytes * self._segment_bytes
        return self.store / COMMITLOG_DIR / segment_name(start)

    def gather_columns(
        self, columns: Columns, topic: str, queue_id: int, begin: int, end: int
    ) -> tuple[int, int]:
        """Take the messages [begin, end) of a queue: (a COLUMNS_ reason, queue offset reached)."""
        log_min, log_max = self.positions.log_range()
        name = topic.encode()
        while begin < end:
            window = self._window(topic, queue_id, begin)
            if window is None:
                return COLUMNS_GONE, begin
            units, first = window
            stop = min(end, first + len(units) // UNIT)
            reason, begin = columns.gather(
                self._log, units, first, begin, stop, log_min, log_max, name, queue_id
            )
            if reason == COLUMNS_UNMAPPED:
                if self._map(columns.detail) is None:
                    return COLUMNS_GONE, begin
            elif reason != COLUMNS_DONE:
                return reason, begin
        return COLUMNS_DONE, begin

    def first_kept(self, topic: str, queue_id: int, begin: int, end: int) -> int:
        """The first of [begin, end) whose record is still there, after some have expired."""
        starts = list_segments(self.store / COMMITLOG_DIR, self._segment_bytes)
        log_max = self.positions.log_range()[1]
        log_min = starts[0] if starts else log_max
        self.positions = FixedPositions(log_min, log_max)
        return max(begin, self._files(topic, queue_id).first_index_from(log_min, end))

    def scan_columns(
        self, columns: Columns, begin: int, end: int, wanted: QueueSpans | None = None
    ) -> tuple[int, int]:
        """Take the log's records [begin, end): (a COLUMNS_ reason, physical offset reached)."""
        while begin < end:
            start = begin // self._segment_bytes * self._segment_bytes
            stop = min(end, start + self._segment_bytes)
            memory = self._map(start)
            if memory is None:
                return COLUMNS_GONE, begin
            reason, begin = columns.scan(memory, start, begin, stop, wanted)
            if reason != COLUMNS_DONE:
                return reason, begin
        return COLUMNS_DONE, begin

    def after_damage(self, physical_offset: int, end: int) -> int:
        """Where the next whole record begins behind a damaged one; `end` if there is none."""
        for start, begin, stop in self._stretches(physical_offset + 1, end):
            memory = self._map(start)
            if memory is not None:
                found = codec.find_record(memory, start, begin, stop)
                if found >= 0:
                    return found
        return end

    def _stretches(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(segment, from where, to where) of what lies in [begin, end): of the files that there
        are, whatever `end` somebody was told."""
        for start in list_segments(self.store / COMMITLOG_DIR, self._segment_bytes):
            stop = min(end, start + self._segment_bytes)
            if max(begin, start) < stop:
                yield start, max(begin, start), stop

    def survey(self, end: int) -> QueueSpans:
        """The queues of all records below `end`, from the log alone."""
        found = QueueSpans()
        for start, at, stop in self._stretches(self.positions.log_range()[0], end):
            memory = self._map(start)
            while memory is not None and at < stop:
                at, reason = found.survey(memory, start, at, stop)
                if reason == _BLANK:
                    break
                if reason:
                    at = codec.find_record(memory, start, min(at + 1, stop), stop)
                    if at < 0:
                        break
        return found


def _has_more(store: Path, segment_bytes: int, at: int) -> bool:
    """Whether records lie there, where queues are said to end, that are of a queue."""
    found = QueueSpans()
    while not len(found):
        start = at // segment_bytes * segment_bytes
        path = store / COMMITLOG_DIR / segment_name(start)
        if not path.exists():
            return False
        with map_segment(path, segment_bytes, writable=False) as memory:
            at, reason = found.survey(memory, start, at, start + segment_bytes)
        if reason == _BLANK:
            at = start + segment_bytes
        elif reason:
            return bool(len(found))
    return True


def is_served(store: Path) -> bool:
    """Whether a broker of ours has the store open. Raises StoreLocked if it is somebody else's."""
    try:
        check_not_in_use(store)
    except StoreError:
        if (store / CONTROL_FILE).exists():
            return True
        raise
    return False


class Served:
    """The counters and queues of a store that a broker has open, as it keeps them."""

    def __init__(self, store: Path) -> None:
        self._control = ControlFile.open(store / CONTROL_FILE, writable=False)
        self.table = QueueTable.open(store / QUEUES_FILE, self._control.read(Counter.QUEUES))
        self.positions = LivePositions(self._control, self.table)
        self._flushed = self._control.read(Counter.FLUSHED)
        self._dispatched = self._control.read(Counter.DISPATCHED)

    @property
    def waits_for_archive(self) -> bool:
        """Whether its cleaner has to be told what is archived (archiveHold)."""
        return bool(self._control.meta.get("archive_hold"))

    @property
    def flushed(self) -> int:
        """A physical offset: fdatasync has returned for everything below."""
        return self._flushed.value

    @property
    def dispatched(self) -> int:
        """A physical offset: everything below has its entry."""
        return self._dispatched.value

    def wait_dispatched(self, physical_offset: int, timeout_s: float) -> bool:
        """Until everything below has its entry; False if that takes longer. What may only be read
        has no bell: it is looked at again and again."""
        deadline = time.monotonic() + timeout_s
        while self.dispatched < physical_offset:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True


def log_end(store: Path) -> int:
    """Where the log of a store that was not closed ends, behind its last whole record."""
    segment_bytes, _ = file_sizes(store)
    end = find_end(store, segment_bytes, clean=False)
    return without_torn_end(store, segment_bytes, end).physical_offset
