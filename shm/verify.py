"""Looking a closed store over: every record, every ConsumeQueue entry. Reads only."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm import _kernel
from cometmq.shm._kernel import Message
from cometmq.shm.consume_queue import UNIT, QueueFiles, list_queues
from cometmq.shm.files import (
    COMMITLOG_DIR,
    dirty_chunks,
    map_segment,
    segment_name,
)
from cometmq.shm.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.queue_check import StoreFiles, is_queued
from cometmq.shm.recovery import find_end
from cometmq.shm.store_reader import file_sizes

Progress = Callable[[int, int], None]  # bytes done, bytes in all

FILLER_SIZE: Final = 0x7FFFFFFF
DECODE_BYTES: Final = 4 << 20


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str  # damaged, dirty, entry, missing, extra, size
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
    if not (store / COMMITLOG_DIR).is_dir():
        raise StoreNotOurs(f"{store}: no {COMMITLOG_DIR}/ in it, so it is no store")
    return StoreFiles(store, *file_sizes(store))


def verify_store(store: Path, progress: Progress | None = None) -> Verified:
    """Everything that is wrong with a store that nobody writes to."""
    files = store_files(store)
    starts = files.log_starts()
    end = find_end(store, files.segment_bytes, clean=True, whole_log=True)
    findings = [
        Finding(
            "damaged",
            damage.file,
            damage.physical_offset % files.segment_bytes,
            "a whole record",
            f"{damage.reason}; {damage.size_bytes} bytes without one",
        )
        for damage in end.damages
    ]
    findings += dirty_tails(files, end.physical_offset, end.reason)
    entries = _Entries(files)
    total = end.physical_offset - starts[0]
    for message in whole_records(files, starts[0], end.physical_offset):
        finding = entries.check(message)
        if finding is not None:
            findings.append(finding)
        if progress is not None and not message.physical_offset % 64:
            progress(message.physical_offset - starts[0], total)
    findings += entries.left_over(starts[0])
    entries.close()
    return Verified(
        str(store), files.segment_bytes, files.queue_segment_bytes, starts[0],
        end.physical_offset, end.records, len(list(list_queues(store))), findings,
    )  # fmt: skip


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
                at = _kernel.find_record(memory, start, min(reached + 1, stop), stop)


def _stretch(memory: mmap.mmap, start: int, at: int, stop: int) -> Generator[Message, None, int]:
    """The whole records from `at` on without a break; returns where they end."""
    while at < stop:
        limit = min(stop, at + DECODE_BYTES)
        reached, _, count, _, _ = _kernel.scan(memory, start, at, limit)
        if not count:
            # Nothing whole, or a record larger than one step.
            reached, _, count, _, _ = _kernel.scan(memory, start, at, stop, True, True, 1)
        if not count:
            break
        yield from _kernel.decode(memory[at - start : reached - start], None, False)
        at = reached
    return at


class _Entries:
    """Compares records with the entries of their queues."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._windows: dict[tuple[str, int, int], mmap.mmap | None] = {}
        self._reported: set[tuple[str, int, int]] = set()
        self._next: dict[tuple[str, int], int] = {}  # one past the highest record seen

    def check(self, message: Message) -> Finding | None:
        if not is_queued(message):
            return None
        key = message.topic, message.queue_id
        index = message.queue_offset
        self._next[key] = max(self._next.get(key, 0), index + 1)
        queue = self._files.queue(*key)
        start = index // queue.per_segment * queue.segment_bytes
        at = index * UNIT - start
        units = self._window(queue, key, start)
        expected = f"physical offset {message.physical_offset}, {message.size} bytes"
        if units is None:
            if (*key, start) in self._reported:  # a file that is missing is one finding
                return None
            self._reported.add((*key, start))
            return Finding("missing", str(queue.path(start)), at, expected, "no such file")
        unit = CONSUME_QUEUE_UNIT.unpack(units, at)
        if unit["physical_offset"] == message.physical_offset and unit["size"] == message.size:
            return None
        actual = f"physical offset {unit['physical_offset']}, {unit['size']} bytes"
        return Finding("entry", str(queue.path(start)), at, expected, actual)

    def _window(self, queue: QueueFiles, key: tuple[str, int], start: int) -> mmap.mmap | None:
        place = *key, start
        if place not in self._windows:
            try:
                found = map_segment(queue.path(start), queue.segment_bytes, writable=False)
            except (FileNotFoundError, StoreNotOurs):
                found = None
            self._windows[place] = found
        return self._windows[place]

    def left_over(self, log_min: int) -> Iterator[Finding]:
        """Entries behind the last record of their queue."""
        for key in list_queues(self._files.store):
            queue = self._files.queue(*key)
            try:
                end = queue.find_end().next_index
            except StoreNotOurs as error:
                wanted = f"segments of {queue.segment_bytes} bytes"
                yield Finding("size", str(queue.folder), 0, wanted, str(error))
                continue
            if key in self._next and end > self._next[key]:
                index = self._next[key]
                unit = queue.entry(index)
                if unit is None or unit["physical_offset"] < log_min:
                    continue
                start = index // queue.per_segment * queue.segment_bytes
                actual = f"{end - index} more, to physical offset {unit['physical_offset']}"
                yield Finding(
                    "extra", str(queue.path(start)), index * UNIT - start,
                    f"no entry behind {index - 1}", actual,
                )  # fmt: skip

    def close(self) -> None:
        for memory in self._windows.values():
            if memory is not None:
                memory.close()
