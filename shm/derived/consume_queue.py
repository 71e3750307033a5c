"""ConsumeQueues as the dispatcher writes them: RocketMQ's 20-byte entries, one file set a queue."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap, fillers_end, last_real, units_before, units_end
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.os.files import (
    CONSUME_QUEUE_DIR,
    count_dirty,
    list_segments,
    map_segment,
    segment_name,
    zero_tail,
)

log = logging.getLogger(__name__)

UNIT: Final = CONSUME_QUEUE_UNIT.size


def queue_folder(store: Path, topic: str, queue_id: int) -> Path:
    return store.joinpath(CONSUME_QUEUE_DIR, topic, str(queue_id))


def list_queues(store: Path) -> Iterator[tuple[str, int]]:
    """Every queue that has a folder; names that cannot be a queue's are passed over."""
    root = store / CONSUME_QUEUE_DIR
    if not root.is_dir():
        return
    for topic in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        for queue in sorted(entry.name for entry in os.scandir(root / topic) if entry.is_dir()):
            if queue.isascii() and queue.isdigit() and codec.is_queue_name(topic, int(queue)):
                yield topic, int(queue)


def is_filler(unit: Mapping[str, int]) -> bool:
    """Whether it is RocketMQ's entry that stands for nothing; the kernel has the rule."""
    return fillers_end(CONSUME_QUEUE_UNIT.pack(**unit), 0, 1) == 1


class QueueEnd(msgspec.Struct, frozen=True):
    """Where a ConsumeQueue ends."""

    next_index: int  # one past the last valid entry
    max_physical_offset: int  # end of the last entry's record; -1 without an entry


def last_end(units: FileMap, count: int) -> int:
    """The end of the record of the last of the first `count` entries; -1 without one."""
    real = last_real(units, 0, count)
    if real < 0:
        return -1
    last = CONSUME_QUEUE_UNIT.unpack(units, real * UNIT)
    return int(last["physical_offset"] + last["size"])


class QueueFiles:
    """The segments of one queue."""

    def __init__(self, store: Path, topic: str, queue_id: int, segment_bytes: int) -> None:
        self.folder = queue_folder(store, topic, queue_id)
        self.segment_bytes = segment_bytes
        self.per_segment = segment_bytes // UNIT

    def starts(self) -> list[int]:
        return list_segments(self.folder, self.segment_bytes)

    def path(self, start: int) -> Path:
        return self.folder / segment_name(start)

    def remove(self) -> None:
        """All files, whatever they are, the newest first: no hole is left by a kill in between."""
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name, reverse=True):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)

    def find_end(self) -> QueueEnd:
        """Scan from the third-last segment for the first entry that is not valid (RocketMQ)."""
        starts = self.starts()
        index, max_physical = (starts[0] // UNIT if starts else 0), -1
        for start in starts[-3:]:
            with map_segment(self.path(start), self.segment_bytes, writable=False) as memory:
                found = units_end(memory, 0, self.per_segment)
                max_physical = max(max_physical, last_end(memory, found))
                index = start // UNIT + found
            if found < self.per_segment:
                break
        return QueueEnd(index, max_physical)

    def file_behind(self, next_index: int) -> Path | None:
        """A segment that something is written in behind an end: it is none then, there is a gap."""
        for start in self.starts():
            at = max(0, next_index * UNIT - start)
            if at < self.segment_bytes:
                with self.path(start).open("rb") as file:
                    if count_dirty(file.fileno(), at, self.segment_bytes):
                        return self.path(start)
        return None

    def cut(self, physical_offset: int, end: QueueEnd | None = None) -> QueueEnd:
        """Drop all entries whose record begins at or behind `physical_offset`; zero what is cut.

        Args:
            end: where the queue ends, if it is known.
        """
        end = end or self.find_end()
        starts = self.starts()
        while starts:
            start = starts[-1]
            kept = self._kept_in(start, end.next_index, physical_offset)
            if kept or len(starts) == 1:
                zero_tail(self.path(start), kept * UNIT)
                return self._end_after(start, kept)
            self.path(start).unlink()
            starts.pop()
        return QueueEnd(0, -1)

    def _kept_in(self, start: int, next_index: int, physical_offset: int) -> int:
        """How many entries of a segment lie before `physical_offset`."""
        count = max(0, min(self.per_segment, next_index - start // UNIT))
        if not count:
            return 0
        with map_segment(self.path(start), self.segment_bytes, writable=False) as memory:
            return units_before(memory, count, physical_offset)

    def _end_after(self, start: int, kept: int) -> QueueEnd:
        if not kept:
            return QueueEnd(start // UNIT, -1)
        with map_segment(self.path(start), self.segment_bytes, writable=False) as memory:
            return QueueEnd(start // UNIT + kept, last_end(memory, kept))

    def entry(self, index: int) -> dict[str, int] | None:
        """The entry at an index; None where no file holds it, or nothing was written."""
        unit = self.anything_at(index)
        return unit if unit and unit["size"] > 0 else None

    def anything_at(self, index: int) -> dict[str, int] | None:
        """What stands at the place of an entry, be it one or not; None for zeros."""
        start = index // self.per_segment * self.segment_bytes
        try:
            with self.path(start).open("rb") as segment:
                segment.seek(index * UNIT - start)
                raw = segment.read(UNIT)
        except FileNotFoundError:
            return None
        return CONSUME_QUEUE_UNIT.unpack(raw) if len(raw) == UNIT and any(raw) else None

    def last_physical_offset(self, start: int) -> int:
        """Of the last entry in a segment that is full; -1 where all are fillers.

        RocketMQ looks at the last entry whatever it is; a filler there would say 0. The one before
        is looked at as well: for one that is damaged no segment is deleted.
        """
        found = -1
        with map_segment(self.path(start), self.segment_bytes, writable=False) as memory:
            real = self.per_segment
            for _ in range(2):
                real = last_real(memory, 0, real) if real > 0 else -1
                if real >= 0:
                    unit = CONSUME_QUEUE_UNIT.unpack(memory, real * UNIT)
                    found = max(found, unit["physical_offset"])
        return found

    def first_index_from(self, log_min: int, next_index: int, *, skip_fillers: bool = True) -> int:
        """The queue's minimum: the first entry whose record is not below the log (RocketMQ).

        `next_index` where all records are gone: the queue is empty, but keeps its place.
        RocketMQ counts fillers at the queue's beginning as messages: `skip_fillers=False`.
        """
        starts = self.starts()
        for start in starts:
            count = min(self.per_segment, next_index - start // UNIT)
            if count <= 0:
                break
            try:
                below = self._kept_in(start, next_index, log_min)
            except FileNotFoundError:
                continue  # the cleaner has deleted it just now: it lay below the log
            if not skip_fillers and log_min == 0:
                below = 0
            if below < count:
                return start // UNIT + below
        return next_index
