"""ConsumeQueues as the dispatcher writes them: RocketMQ's 20-byte entries, one file set a queue."""

from __future__ import annotations

import logging
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from cometmq.shm.kernel import _kernel
from cometmq.shm.kernel._kernel import FileMap
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.os.files import (
    CONSUME_QUEUE_DIR,
    STAGING_DIR,
    count_dirty,
    create_segment,
    list_segments,
    map_segment,
    maps_are_many,
    reserve,
    segment_name,
    zero_tail,
)

log = logging.getLogger(__name__)

UNIT: Final = CONSUME_QUEUE_UNIT.size
RESERVE_FIRST_BYTES: Final = 4096
RESERVE_STEP_MAX: Final = 262_144


def queue_folder(store: Path, topic: str, queue_id: int) -> Path:
    return store.joinpath(CONSUME_QUEUE_DIR, topic, str(queue_id))


def list_queues(store: Path) -> Iterator[tuple[str, int]]:
    """Every queue that has a folder; names that cannot be a queue's are passed over."""
    root = store / CONSUME_QUEUE_DIR
    if not root.is_dir():
        return
    for topic in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        for queue in sorted(entry.name for entry in os.scandir(root / topic) if entry.is_dir()):
            if queue.isascii() and queue.isdigit() and _kernel.is_queue_name(topic, int(queue)):
                yield topic, int(queue)


def is_filler(unit: Mapping[str, int]) -> bool:
    """Whether it is RocketMQ's entry that stands for nothing; the kernel has the rule."""
    return _kernel.fillers_end(CONSUME_QUEUE_UNIT.pack(**unit), 0, 1) == 1


class QueueEnd(msgspec.Struct, frozen=True):
    """Where a ConsumeQueue ends."""

    next_index: int  # one past the last valid entry
    max_physical_offset: int  # end of the last entry's record; -1 without an entry


def last_end(units: FileMap, count: int) -> int:
    """The end of the record of the last of the first `count` entries; -1 without one."""
    real = _kernel.last_real(units, 0, count)
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
                found = _kernel.units_end(memory, 0, self.per_segment)
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
            return _kernel.units_before(memory, count, physical_offset)

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
                real = _kernel.last_real(memory, 0, real) if real > 0 else -1
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


class WindowCache:
    """Writable mappings of the queue segments in use, the least recently needed closed first.

    As many as this process may have. Queues in turns that are more than that cost a mapping for
    every message, which is hundreds of times a message's own work.
    """

    def __init__(self, dispatcher: _kernel.Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._open: OrderedDict[int, tuple[FileMap, int, int]] = OrderedDict()

    def make_room(self, slot: int, files: QueueFiles, index: int, store: Path) -> None:
        """Attach the window that holds `index`, with file space for it and some to come."""
        start = index // files.per_segment * files.segment_bytes
        memory, opened_start, reserved = self._open.pop(slot, (None, -1, 0))
        if memory is not None and opened_start != start:
            self._dispatcher.detach(slot)
            memory.let_go()
            memory = None
        if memory is None:
            self._let_go_of_oldest()
            memory, reserved = self._map(files, start, store), 0
        position = (index + 1) * UNIT - start
        while reserved < position:
            reserved = min(files.segment_bytes, max(RESERVE_FIRST_BYTES, 2 * reserved, position))
            reserved = min(reserved, position + RESERVE_STEP_MAX)
        self._reserve(files.path(start), reserved)
        self._open[slot] = memory, start, reserved
        self._dispatcher.attach(slot, memory, start // UNIT, start // UNIT + reserved // UNIT)

    def _let_go_of_oldest(self) -> None:
        while self._open and maps_are_many():
            slot, (memory, _, _) = self._open.popitem(last=False)
            self._dispatcher.detach(slot)
            memory.let_go()

    def _map(self, files: QueueFiles, start: int, store: Path) -> FileMap:
        path = files.path(start)
        if not path.exists() or not path.stat().st_size:  # a RocketMQ that was killed left it empty
            create_segment(
                files.folder, start, files.segment_bytes, store / STAGING_DIR, reserve_bytes=0
            )
        memory = map_segment(path, files.segment_bytes, writable=True)
        # Or the first store into a queue's page reads on around it: 1.6 ms in place of 10 us.
        memory.advise(mmap.MADV_RANDOM)
        return memory

    def _reserve(self, path: Path, count: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, 0, count, path)
        finally:
            os.close(descriptor)

    def window(self, slot: int) -> FileMap:
        return self._open[slot][0]

    def close(self) -> None:
        for slot, (memory, _, _) in self._open.items():
            self._dispatcher.detach(slot)
            memory.let_go()
        self._open.clear()
