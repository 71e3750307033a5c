"""Finding the end of a CommitLog, and cutting what lies behind it.

Read first, then act: `find_end` only reads; `cut` may be repeated, so a kill between any two lines
of it leaves a store that the next start brings to the same end.

Behind a record that does not hold there may be whole ones. The log ends behind the last whole
record, not before the first damaged one: what lies between is a `Damage`, which is reported and
passed over.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.frames import FRAME_MAX
from cometmq.protocol.progress import Progress
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.log.cutting import finish_cut
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    Checkpoint,
    count_dirty,
    dirty_chunks,
    list_segments,
    map_segment,
    segment_name,
    zero_tail,
)

log = logging.getLogger(__name__)

_WHOLE: Final = 0  # indexes into codec.REASONS
_BLANK: Final = 1
STEP_BYTES: Final = 4 << 20
PAGE: Final = mmap.PAGESIZE
PAGE_END_BYTES: Final = 4
FLUSH_SLACK_MS: Final = 1000  # a message beside the last that was flushed may have its store time
SEGMENT_MISSING: Final = "the segment is missing"
LAST_SEGMENT_FULL: Final = "end of the last segment"
PAGES_LOST: Final = "pages behind it were never written to the disk"
LAST_RUN_ENDED: Final = "the killed run had come to here"
RECORD_OVERHEAD_BYTES: Final = 128 << 10  # what a record has beside its body, at most


class Damage(msgspec.Struct, frozen=True):
    """A stretch of the log that holds no whole record, with whole ones behind it."""

    physical_offset: int
    size_bytes: int
    reason: str  # what is wrong with the record at its beginning
    file: str

    def __str__(self) -> str:
        return (
            f"{self.file}: damaged at physical offset {self.physical_offset}: {self.reason}; "
            f"{self.size_bytes} bytes are passed over"
        )


class LogEnd(msgspec.Struct, frozen=True):
    """Where a log ends, and why the scan stopped there."""

    scanned_from: int  # physical offset
    physical_offset: int  # end of the last whole record
    reason: str  # one of codec.REASONS, or of the constants above
    last_store_timestamp: int  # of the last whole record, 0 without one
    records: int  # seen by the scan
    damages: tuple[Damage, ...] = ()


def find_end(
    store: Path,
    segment_bytes: int,
    *,
    clean: bool,
    check_crc: bool = True,
    cut_at_damage: bool = False,
    whole_log: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> LogEnd:
    """Walk the records to the end of the last one that holds. Reads only.

    After an orderly end the last written segment is enough; else the walk begins where the
    checkpoint says that everything older is safely on the disk (RocketMQ 7.4).

    Args:
        cut_at_damage: RocketMQ's way: the log ends at the first record that does not hold.
        whole_log: begin with the first segment, whatever the checkpoint says.
        on_step: is called with the physical offset that the walk has come to.
    """
    folder = store / COMMITLOG_DIR
    starts = list_segments(folder, segment_bytes)
    if not starts:
        return LogEnd(0, 0, "the log is empty", 0, 0)
    checkpoint = None if clean else Checkpoint(store)
    oldest_unsafe = None if checkpoint is None else checkpoint.min_timestamp
    first = 0 if whole_log else _first_to_scan(folder, starts, segment_bytes, oldest_unsafe)
    walk = _Walk(folder, segment_bytes, check_crc, cut_at_damage, starts[first])
    walk.on_step = on_step or walk.on_step
    if checkpoint is not None:
        walk.unflushed_from_ms = checkpoint.words["physic_msg_timestamp"] - FLUSH_SLACK_MS
    for start in starts[first:]:
        if not walk.segment(start):
            break
    return LogEnd(
        starts[first], walk.end, walk.reason, walk.timestamp, walk.records, tuple(walk.damages)
    )


class _Walk(msgspec.Struct):
    """A walk over the log that goes on behind damage."""

    folder: Path
    segment_bytes: int
    check_crc: bool
    cut_at_damage: bool
    end: int  # of the last whole record, or of the blank behind it
    reason: str = LAST_SEGMENT_FULL  # why it ended there
    unflushed_from_ms: int | None = None  # store time; None: everything was flushed
    timestamp: int = 0
    records: int = 0
    damages: list[Damage] = msgspec.field(default_factory=list)
    buffer: bytearray = msgspec.field(default_factory=lambda: bytearray(STEP_BYTES))
    on_step: Callable[[int], None] = lambda _at: None

    def segment(self, start: int) -> bool:
        """Walk one segment; False if nothing behind it can count any more."""
        if start != self.end and self.reason == LAST_SEGMENT_FULL:
            self.reason = SEGMENT_MISSING
            if self.cut_at_damage:
                return False
        path = self.folder / segment_name(start)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with map_segment(path, self.segment_bytes, writable=False) as memory:
                at = start
                while at >= 0:
                    at = self._stretch(memory, descriptor, start, at)
        finally:
            os.close(descriptor)
        return self.reason == LAST_SEGMENT_FULL or not (
            self.cut_at_damage or self.reason == PAGES_LOST
        )

    def _stretch(self, memory: FileMap, descriptor: int, start: int, at: int) -> int:
        """Take the whole records from `at` on; where the next ones begin, -1 for nowhere."""
        stop = start + self.segment_bytes
        reached, why, count, timestamp = self._scan(memory, descriptor, start, at)
        if count:
            if at != self.end:
                if self._has_lost_pages(at):
                    self.reason = PAGES_LOST
                    return -1
                self._add_damage(at)
            self.end, self.timestamp = reached, timestamp
            self.records += count
        if self.end == reached and why in (_WHOLE, _BLANK):
            self.end, self.reason = stop, LAST_SEGMENT_FULL
            return -1
        if self.end == reached:
            self.reason = codec.REASONS[why]
        if self.cut_at_damage:
            return -1
        # A stale record of an earlier life, at its old place, is older than what it lies behind.
        not_before = self.timestamp if start < self.end else 0
        return find_whole(memory, descriptor, start, reached + 1, stop, not_before)

    def _scan(
        self, memory: FileMap, descriptor: int, start: int, at: int
    ) -> tuple[int, int, int, int]:
        """The kernel's scan to the segment's end: (reached, reason, records, last store time).

        Read in steps into one buffer: the system reads ahead for that, and less so for a mapping.
        """
        stop = start + self.segment_bytes
        seen = timestamp = 0
        while True:
            read = os.preadv(descriptor, [self.buffer], at - start)
            view = memoryview(self.buffer)[:read]
            reached, why, count, _, last = codec.scan(view, at, at, at + read, self.check_crc)
            seen, timestamp = seen + count, last if count else timestamp
            self.on_step(reached)
            if at + read >= stop or why == _BLANK:
                return reached, why, seen, timestamp
            if not count:
                # Larger than a step, or none.
                reached, why, count, _, last = codec.scan(memory, start, at, stop, self.check_crc)
                return reached, why, seen + count, last if count else timestamp
            at = reached

    def _has_lost_pages(self, resumed_at: int) -> bool:
        """Whether what follows the log's end so far may not have been flushed, and was not.

        A power cut leaves those pages that the system happened to have written, in any order. A
        page that is lost has zeros to its end, as it had when it was made ready. Whole records
        behind one are younger than what is missing: with them the log would have a hole.
        """
        if self.unflushed_from_ms is None or self.timestamp < self.unflushed_from_ms:
            return False
        size = self.segment_bytes
        for start in range(self.end // size * size, resumed_at, size):
            begin, end = max(self.end, start), min(resumed_at, start + size)
            try:
                if _ends_pages_with_zeros(
                    self.folder / segment_name(start), begin - start, end - start
                ):
                    return True
            except FileNotFoundError:
                continue
        return False

    def _add_damage(self, resumed_at: int) -> None:
        size = self.segment_bytes
        file = str(self.folder / segment_name(self.end // size * size))
        damage = Damage(self.end, resumed_at - self.end, self.reason, file)
        self.damages.append(damage)


def _ends_pages_with_zeros(path: Path, begin: int, end: int) -> bool:
    """Whether a page in that range of a segment has nothing but zeros at its end."""
    with path.open("rb") as segment:
        for page_end in range(-(-(begin + 1) // PAGE) * PAGE, end + 1, PAGE):
            count = min(PAGE_END_BYTES, page_end - begin)
            segment.seek(page_end - count)
            if not any(segment.read(count)):
                return True
    return False


def find_whole(
    memory: FileMap, descriptor: int, start: int, begin: int, end: int, not_before: int
) -> int:
    """The first whole record in [begin, end) of a segment, or -1. Zeros are passed over."""
    for at, chunk in dirty_chunks(descriptor, begin - start, end - start):
        # A record's first bytes may be zeros at the end of the chunk before.
        low, high = max(start + at - 8, begin), min(start + at + len(chunk), end)
        found = codec.find_record(memory, start, low, high, not_before)
        if found >= 0:
            return found
    return -1


def _first_to_scan(
    folder: Path, starts: list[int], segment_bytes: int, oldest_unsafe: int | None
) -> int:
    """The last segment whose first record is whole and, after a bad end, old enough."""
    for position in range(len(starts) - 1, 0, -1):
        start = starts[position]
        with map_segment(folder / segment_name(start), segment_bytes, writable=False) as memory:
            _, _, count, _, timestamp = codec.scan(
                memory, start, start, start + segment_bytes, True, True, 1
            )
        if count and timestamp and (oldest_unsafe is None or timestamp <= oldest_unsafe):
            return position
    return 0


def warn_of_whole(
    store: Path, segment_bytes: int, physical_offset: int, zeros_max: int | None = None
) -> None:
    """Log a warning with the number of whole records behind that offset, if there are any.

    Args:
        zeros_max: stop the search after so many zeros.
    """
    folder = store / COMMITLOG_DIR
    records = timestamp = 0
    for start in list_segments(folder, segment_bytes):
        end = start + segment_bytes
        if end <= physical_offset:
            continue
        begin, path = max(start, physical_offset), folder / segment_name(start)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            dirty = count_dirty(descriptor, begin - start, segment_bytes, zeros_max)
            stop = begin + dirty
            with map_segment(path, segment_bytes, writable=False) as memory:
                at = find_whole(memory, descriptor, start, begin, stop, 0) if dirty else -1
                while at >= 0:
                    reached, _, count, _, timestamp = codec.scan(memory, start, at, end, True)
                    records += count
                    at = find_whole(memory, descriptor, start, reached, stop, 0)
        finally:
            os.close(descriptor)
        if zeros_max is not None and end - begin - dirty >= zeros_max:
            break
    if records:
        log.warning(
            "%d whole records behind %d are removed, the last of them stored at %d ms: the broker "
            "that stored them ended before it acknowledged them",
            records, physical_offset, timestamp,
        )  # fmt: skip


def cut(store: Path, segment_bytes: int, physical_offset: int) -> int:
    """Remove everything from `physical_offset` on. Return how many of the bytes were not zero.

    Segments behind it are deleted; the rest of its own segment is zeroed, so that it is never found
    again. A warning tells of whole records among the bytes.
    """
    folder = store / COMMITLOG_DIR
    warn_of_whole(store, segment_bytes, physical_offset)
    dirty = 0
    removed = False
    for start in reversed(list_segments(folder, segment_bytes)):
        path = folder / segment_name(start)
        if start >= physical_offset:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                dirty += count_dirty(descriptor, 0, segment_bytes)
            finally:
                os.close(descriptor)
            path.unlink()
            removed = True
        elif start + segment_bytes > physical_offset:
            dirty += zero_tail(path, physical_offset - start)
    if removed:
        sync_folder(folder)
    return dirty


def zero_behind(
    store: Path, segment_bytes: int, physical_offset: int, max_message_bytes: int
) -> int:
    """Zero the unfinished writes of a dead writer; prepared segments stay. Return how many of the
    bytes were not zero. A warning tells of whole records among them.

    The writer wrote one record behind the other, so its writes end at the first run of more zeros
    than a record can hold, even for a copy of a message that is too large to be sent now.
    """
    folder = store / COMMITLOG_DIR
    zeros_max = 2 * (max(max_message_bytes, FRAME_MAX) + RECORD_OVERHEAD_BYTES)
    warn_of_whole(store, segment_bytes, physical_offset, zeros_max)
    dirty = 0
    for start in list_segments(folder, segment_bytes):
        end = start + segment_bytes
        if end <= physical_offset:
            continue
        begin = max(start, physical_offset)
        found = zero_tail(folder / segment_name(start), begin - start, zeros_max)
        dirty += found
        if end - begin - found >= zeros_max:
            break
    return dirty


def find_end_of_last_run(store: Path, segment_bytes: int, last: LastRun) -> LogEnd | None:
    """Where a killed writer had come to, if the log bears its counters out. Reads only.

    What `flushed` covers is on the disk; the rest, whose size does not grow with the store, is
    read, and something before it, so that counters which belong to other files are noticed. None:
    recover from the checkpoint.
    """
    folder = store / COMMITLOG_DIR
    starts = list_segments(folder, segment_bytes)
    look_back = 2 * (last.max_message_bytes + RECORD_OVERHEAD_BYTES)
    begin = at = _record_before(folder, starts, segment_bytes, last.flushed, look_back)
    if begin < 0:
        return None
    records = 0
    while at < last.wrote:
        start = at // segment_bytes * segment_bytes
        if start not in starts:
            return None
        stop = min(last.wrote, start + segment_bytes)
        with map_segment(folder / segment_name(start), segment_bytes, writable=False) as memory:
            reached, why, count, _, _ = codec.scan(memory, start, at, stop, True)
        if reached != stop and (why != _BLANK or stop != start + segment_bytes):
            return None
        records += count
        at = stop
    return LogEnd(begin, last.wrote, LAST_RUN_ENDED, last.wrote_timestamp, records)


def _record_before(
    folder: Path, starts: list[int], segment_bytes: int, physical_offset: int, look_back: int
) -> int:
    """Where a whole record begins so many bytes before that offset, or further; -1 for nowhere."""
    if starts and physical_offset <= starts[0]:
        return starts[0]
    start = (physical_offset - 1) // segment_bytes * segment_bytes
    if start not in starts:
        return -1
    end, found = physical_offset, -1
    path = folder / segment_name(start)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with map_segment(path, segment_bytes, writable=False) as memory:
            while found < 0 and end > start:
                begin, stop = max(start, end - look_back), end
                end, found = begin, find_whole(memory, descriptor, start, begin, stop, 0)
            return found
    finally:
        os.close(descriptor)


def telling(store: Path, segment_bytes: int) -> Callable[[int], None]:
    """For `on_step`: says in the log how far it is."""
    progress = Progress("recovering the log", log.info)
    starts = list_segments(store / COMMITLOG_DIR, segment_bytes)
    begin = -1

    def step(at: int) -> None:
        nonlocal begin
        begin = max(0, at - 1) // segment_bytes * segment_bytes if begin < 0 else begin
        progress.show(at - begin, starts[-1] + segment_bytes - begin)

    return step


def recover_log(
    store: Path,
    segment_bytes: int,
    *,
    clean: bool,
    check_crc: bool = True,
    cut_at_damage: bool = False,
    last_run: LastRun | None = None,
    without_torn: Callable[[Path, int, LogEnd], LogEnd] = lambda _store, _bytes, end: end,
) -> LogEnd:
    """Bring the CommitLog to the end of its last whole record, and say so in one line.

    Args:
        without_torn: what is cut at the end as well, since it is not whole (shm/log/torn.py).
        last_run: where a killed run says that it ended. It is looked at first: nothing has to be
            searched then, and a batch that was not whole yet goes as a whole.
    """
    began = time.monotonic()
    begun = finish_cut(store, segment_bytes)  # of when the store was a replica's
    if begun is not None:
        last_run = begun.counters(last_run)
    end = last_run and find_end_of_last_run(store, segment_bytes, last_run)
    if last_run and end:
        dirty = zero_behind(store, segment_bytes, end.physical_offset, last_run.max_message_bytes)
    else:
        end = find_end(
            store, segment_bytes, clean=clean, check_crc=check_crc, cut_at_damage=cut_at_damage,
            on_step=telling(store, segment_bytes),
        )  # fmt: skip
        end = without_torn(store, segment_bytes, end)
        dirty = cut(store, segment_bytes, end.physical_offset)
    say_recovered(end, clean, dirty, began)
    return end


def say_recovered(end: LogEnd, clean: bool, dirty: int, began: float) -> None:
    """Args:
    dirty: bytes that were cut.
    began: time.monotonic()
    """
    report(end.damages)
    log.info(
        "commitlog recovered after %s end: scanned %d..%d, %d records, stopped at: %s; "
        "%d damaged stretches; cut %d bytes; %.0f ms",
        "an orderly" if clean else "a bad",
        end.scanned_from,
        end.physical_offset,
        end.records,
        end.reason,
        len(end.damages),
        dirty,
        (time.monotonic() - began) * 1000,
    )


def report(damages: Sequence[Damage]) -> None:
    """A line for each: nothing that is passed over is passed over in silence."""
    for damage in damages:
        log.error("%s", damage)
