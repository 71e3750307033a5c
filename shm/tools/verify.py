"""Verification of a closed store: every record, every ConsumeQueue and index entry. Reads only.

What a record is, and whether an entry holds, is asked of shm/kernel/records.pxd.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm.derived.consume_queue import UNIT, QueueFiles, list_queues
from cometmq.shm.derived.index_file import IndexShape, find_shape, list_index_files, read_header
from cometmq.shm.derived.other_queues import topics_not_served
from cometmq.shm.derived.queue_check import StoreFiles
from cometmq.shm.kernel import codec, columns
from cometmq.shm.kernel.codec import FileMap, Message
from cometmq.shm.kernel.columns import StoreVerify
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT, INDEX_ENTRY, INDEX_HEADER, RECORD_HEAD
from cometmq.shm.log.recovery import find_end
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    INDEX_DIR,
    dirty_chunks,
    map_segment,
    maps_are_many,
    segment_name,
)
from cometmq.shm.reading.positions import file_sizes

Progress = Callable[[int, int], None]  # bytes done, bytes in all

DECODE_BYTES: Final = 4 << 20
STEP_BYTES: Final = 64 << 20  # from one look at Ctrl-C to the next


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str  # damaged, dirty, entry, missing, extra, size, index
    file: str
    offset: int  # in the file, bytes
    expected: str
    actual: str


class Verified(msgspec.Struct, frozen=True):
    """What was looked at, and what was found."""

    store: str
    segment_bytes: int
    queue_segment_bytes: int
    log_min: int
    log_max: int
    records: int
    queues: int
    findings: list[Finding]


def store_files(store: Path) -> StoreFiles:
    """A store with the segment sizes that its files have. Raises StoreNotOurs."""
    return StoreFiles(store, *file_sizes(store))


def verify_store(store: Path, progress: Progress | None = None) -> Verified:
    """Everything that is wrong with a store that nobody writes to.

    Args:
        progress: is called with every 64 MiB, of a way that goes over the log twice.

    Raises StoreNotOurs.
    """
    return _Verifying(store_files(store), progress).run()


def dirty_tails(files: StoreFiles, end: int, reason: str) -> Iterator[Finding]:
    """Bytes that are not zero behind the last record."""
    for start in files.log_starts():
        if start + files.segment_bytes <= end:
            continue
        path = files.store / COMMITLOG_DIR / segment_name(start)
        begin = max(0, end - start)
        with path.open("rb") as segment:
            chunks = dirty_chunks(segment.fileno(), begin, files.segment_bytes)
            for low, chunk in chunks:
                at = low + len(chunk) - len(chunk.lstrip(b"\0"))
                yield Finding("dirty", str(path), at, "zeros behind the last record", reason)
                break


def whole_records(files: StoreFiles, begin: int, end: int) -> Iterator[Message]:
    """Every whole record in [begin, end), in the order of the log; damage is passed over."""
    for start in files.log_starts():
        stop = min(end, start + files.segment_bytes)
        if stop <= begin or start >= end:
            continue
        with files.map_log(start) as memory:
            at = max(begin, start)
            while 0 <= at < stop:
                reached = yield from _stretch(memory, start, at, stop)
                at = codec.find_record(memory, start, min(reached + 1, stop), stop)


def _stretch(memory: FileMap, start: int, at: int, stop: int) -> Generator[Message, None, int]:
    """The whole records from `at` on without a break; returns where they end."""
    while at < stop:
        limit = min(stop, at + DECODE_BYTES)
        reached, _, count, _, _ = codec.scan(memory, start, at, limit)
        if not count:
            # Nothing whole, or a record larger than one step.
            reached, _, count, _, _ = codec.scan(memory, start, at, stop, True, True, 1)
        if not count:
            break
        yield from codec.decode(memory[at - start : reached - start], None, False)
        at = reached
    return at


class _Verifying:
    """One look: the log by itself, its records against the queues, the queues and the index against
    the log."""

    def __init__(self, files: StoreFiles, progress: Progress | None) -> None:
        self._files = files
        self._tell = progress or (lambda _done, _total: None)
        self._starts = files.log_starts()
        self._log_min = self._starts[0] if self._starts else 0
        self._walk = StoreVerify()
        self._windows: list[FileMap] = []
        self._segments: dict[int, FileMap] = {}  # of the log
        self._no_file: set[Path] = set()
        self._said: dict[tuple[str, int], set[int]] = {}  # entries that were found to be wrong
        self._findings: list[Finding] = []
        self._others = topics_not_served(files.store)  # their records have no entries

    def run(self) -> Verified:
        store, size = self._files.store, self._files.segment_bytes
        total = 2 * size * len(self._starts)
        self._end = find_end(
            store, size, clean=True, whole_log=True,
            on_step=lambda at: self._tell(at - self._log_min, total),
        )  # fmt: skip
        self._findings += [
            Finding(
                "damaged",
                damage.file,
                damage.physical_offset % size,
                "a whole record",
                f"{damage.reason}; {damage.size_bytes} bytes without one",
            )
            for damage in self._end.damages
        ]
        self._findings += dirty_tails(self._files, self._end.physical_offset, self._end.reason)
        try:
            for start in self._starts:
                self._records(start, total)
            self._say_records()
            queues = [key for key in list_queues(store) if key[0] not in self._others]
            for key in queues:
                self._queue(*key)
            for name in list_index_files(store):
                self._index(store / INDEX_DIR / name)
        finally:
            self._let_go()
        self._tell(total, total)
        return Verified(
            str(store), size, self._files.queue_segment_bytes, self._log_min,
            self._end.physical_offset, self._end.records, len(queues), self._findings,
        )  # fmt: skip

    # --- records, each against its entry ---

    def _records(self, start: int, total: int) -> None:
        """Those of a segment; damage was found already and is passed over."""
        stop = min(self._end.physical_offset, start + self._files.segment_bytes)
        if start >= stop:
            return
        with self._files.map_log(start) as memory:
            memory.advise(mmap.MADV_SEQUENTIAL)
            at = start
            while at < stop:
                limit = min(stop, at + STEP_BYTES)
                at, reason, lane, number = self._walk.verify(memory, start, at, limit)
                if reason == columns.WALK_WINDOW:
                    self._attach(lane, number, memory, at - start)
                elif reason != columns.WALK_DONE:
                    found = codec.find_record(memory, start, min(at + 1, stop), stop)
                    at = found if found >= 0 else stop
                self._tell(total // 2 + at - self._log_min, total)

    def _attach(self, lane: int, index: int, log: FileMap, at: int) -> None:
        """Give a lane the window that holds an entry; `at`: where its record is in the segment."""
        queue = self._files.queue(*self._walk.name(lane))
        first = index // queue.per_segment * queue.per_segment
        path = queue.path(first // queue.per_segment * queue.segment_bytes)
        if maps_are_many():
            self._let_go()
        window = None
        try:
            window = map_segment(path, queue.segment_bytes, writable=False)
            self._windows.append(window)
        except (FileNotFoundError, StoreNotOurs):
            if (
                path not in self._no_file and self._walk.name(lane)[0] not in self._others
            ):  # a file that is missing is one finding
                self._no_file.add(path)
                head = RECORD_HEAD.unpack(log, at)
                expected = f"physical offset {head['physical_offset']}, {head['total_size']} bytes"
                self._say_entry("missing", queue, index, expected, "no such file")
        self._walk.attach(lane, window, first, first + queue.per_segment)

    def _say_records(self) -> None:
        for kind, lane, index, at, size, code, phys, has_size, has_code in self._walk.findings:
            key = self._walk.name(lane)
            if key[0] in self._others:
                continue
            self._said.setdefault(key, set()).add(index)
            if columns.WALK_KINDS[kind] == "CQ_TAGS":
                expected, actual = f"tagsCode {code}", f"tagsCode {has_code}"
            else:
                expected = f"physical offset {at}, {size} bytes"
                actual = f"physical offset {phys}, {has_size} bytes"
            self._say_entry("entry", self._files.queue(*key), index, expected, actual)

    def _say_entry(
        self, kind: str, queue: QueueFiles, index: int, expected: str, actual: str
    ) -> None:
        start = index // queue.per_segment * queue.segment_bytes
        at = index * UNIT - start
        self._findings.append(Finding(kind, str(queue.path(start)), at, expected, actual))

    # --- entries, each against its record ---

    def _queue(self, topic: str, queue_id: int) -> None:
        """Entries that are no record's: behind the last one of their queue, or before it."""
        queue = self._files.queue(topic, queue_id)
        try:
            end = queue.find_end().next_index
        except StoreNotOurs as error:
            wanted = f"segments of {queue.segment_bytes} bytes"
            self._findings.append(Finding("size", str(queue.folder), 0, wanted, str(error)))
            return
        next_index, matched = self._walk.tally_of(topic, queue_id) or (end, 0)
        self._entries(queue, topic, queue_id, min(end, next_index), matched)
        unit = queue.entry(next_index) if end > next_index else None
        if unit is not None and unit["physical_offset"] >= self._log_min:
            actual = f"{end - next_index} more, to physical offset {unit['physical_offset']}"
            self._say_entry("extra", queue, next_index, f"no entry behind {next_index - 1}", actual)

    def _entries(
        self, queue: QueueFiles, topic: str, queue_id: int, end: int, matched: int
    ) -> None:
        """Follow them, where there are more than the records have."""
        windows = [
            (start // UNIT, map_segment(queue.path(start), queue.segment_bytes, writable=False))
            for start in queue.starts()
            if start // UNIT < end
        ]
        try:
            live = sum(
                columns.live_units(units, 0, min(queue.per_segment, end - first), self._log_min)
                for first, units in windows
            )
            if live == matched:
                return
            said = self._said.get((topic, queue_id), set())
            for first, units in windows:
                limit = min(first + queue.per_segment, end)
                for index, why in self._wrong_units(units, first, limit, topic, queue_id):
                    if index not in said:
                        self._say_wrong(queue, units, first, index, why)
        finally:
            for _, units in windows:
                units.close()

    def _wrong_units(
        self, units: FileMap, first: int, limit: int, topic: str, queue_id: int
    ) -> Iterator[tuple[int, str]]:
        index, log, log_start = first, None, 0
        while True:
            index, reason, why = columns.wrong_unit(
                units, first, index, limit, log, log_start, *self._reach, topic.encode(), queue_id
            )
            if reason == columns.VERIFY_DONE:
                return
            if reason == columns.VERIFY_SEGMENT:
                place = CONSUME_QUEUE_UNIT.unpack(units, (index - first) * UNIT)["physical_offset"]
                log, log_start = self._segment(place)
                if log is not None:
                    continue
                why = codec.REASONS.index("no record can lie there")
            yield index, codec.REASONS[why]
            index += 1

    @property
    def _reach(self) -> tuple[int, int, int]:
        return self._log_min, self._end.physical_offset, self._files.segment_bytes

    def _segment(self, physical_offset: int) -> tuple[FileMap | None, int]:
        """The log's segment with a place in it, which may be missing; that was found already."""
        size = self._files.segment_bytes
        start = physical_offset // size * size
        if start not in self._segments:
            if maps_are_many():
                self._let_go()
            try:
                self._segments[start] = self._files.map_log(start)
            except FileNotFoundError:
                return None, start
        return self._segments[start], start

    def _say_wrong(
        self, queue: QueueFiles, units: FileMap, first: int, index: int, why: str
    ) -> None:
        unit = CONSUME_QUEUE_UNIT.unpack(units, (index - first) * UNIT)
        if self._is_damaged(unit["physical_offset"]):
            return
        actual = f"physical offset {unit['physical_offset']}, {unit['size']} bytes: {why}"
        self._say_entry("entry", queue, index, f"the message of queue offset {index}", actual)

    def _is_damaged(self, physical_offset: int) -> bool:
        """Whether a place lies in a stretch that is a finding already."""
        at = bisect_right(self._end.damages, physical_offset, key=lambda each: each.physical_offset)
        damage = self._end.damages[at - 1] if at else None
        return damage is not None and physical_offset < damage.physical_offset + damage.size_bytes

    # --- index files ---

    def _index(self, path: Path) -> None:
        """Every chain, and every entry against its record."""
        header, size = read_header(path), path.stat().st_size
        if header is None:
            self._say_index(path, 0, f"{INDEX_HEADER.size} bytes or more", f"{size} bytes")
            return
        if header.index_count in (0, 1):
            return
        if header.index_count < 0:
            self._say_index(path, 0, "the next entry's number", str(header.index_count))
            return
        with map_segment(path, size, writable=False) as memory:
            shape = find_shape(memory, header)
            if shape is None:
                self._say_index(path, 0, "slots and chains that hold", "they do not")
                return
            for number, why in self._wrong_index_entries(memory, shape):
                at = shape.entries_at + INDEX_ENTRY.size * number
                place = INDEX_ENTRY.unpack(memory, at)["physical_offset"]
                if not self._is_damaged(place):
                    expected = "a message with a key of this hash"
                    self._say_index(path, at, expected, f"physical offset {place}: {why}")

    def _say_index(self, path: Path, at: int, expected: str, actual: str) -> None:
        self._findings.append(Finding("index", str(path), at, expected, actual))

    def _wrong_index_entries(self, memory: FileMap, shape: IndexShape) -> Iterator[tuple[int, str]]:
        number, log, log_start = 1, None, 0
        while True:
            number, reason, why = columns.wrong_index_entry(
                memory, shape.slots, shape.entries, number, log, log_start, *self._reach
            )
            if reason == columns.VERIFY_DONE:
                return
            if reason == columns.VERIFY_SEGMENT:
                at = shape.entries_at + INDEX_ENTRY.size * number
                log, log_start = self._segment(INDEX_ENTRY.unpack(memory, at)["physical_offset"])
                if log is not None:
                    continue
                why = codec.REASONS.index("no record can lie there")
            yield number, codec.REASONS[why]
            number += 1

    def _let_go(self) -> None:
        self._walk.detach()
        for memory in (*self._windows, *self._segments.values()):
            memory.close()
        self._windows.clear()
        self._segments.clear()
