"""Whether the ConsumeQueues fit the log: a look whose cost hardly grows with the store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm.derived.consume_queue import (
    UNIT,
    QueueEnd,
    QueueFiles,
    is_filler,
)
from cometmq.shm.derived.other_queues import list_served_queues, topics_not_served
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap, Message
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    CONSUME_QUEUE_DIR,
    list_segments,
    map_segment,
    segment_name,
)

SAMPLES_PER_SEGMENT: Final = 32
_OFFSET_MAX: Final = (1 << 63) - 1

QueueEnds = Mapping[tuple[str, int], QueueEnd]


class QueueFault(msgspec.Struct, frozen=True):
    """Why a queue cannot be trusted."""

    topic: str
    queue_id: int
    reason: str

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic}: {self.reason}"


class StoreFiles(msgspec.Struct, frozen=True):
    """A store and its segment sizes."""

    store: Path
    segment_bytes: int
    queue_segment_bytes: int

    def queue(self, topic: str, queue_id: int) -> QueueFiles:
        return QueueFiles(self.store, topic, queue_id, self.queue_segment_bytes)

    def log_starts(self) -> list[int]:
        return list_segments(self.store / COMMITLOG_DIR, self.segment_bytes)

    def map_log(self, start: int) -> FileMap:
        path = self.store / COMMITLOG_DIR / segment_name(start)
        return map_segment(path, self.segment_bytes, writable=False)


def find_ends(files: StoreFiles) -> QueueEnds:
    """Where each queue ends, whatever the log says: of those whose files are segments of it."""
    ends = {}
    for key in list_served_queues(files.store):
        with suppress(StoreNotOurs):
            ends[key] = files.queue(*key).find_end()
    return ends


def find_faults(
    files: StoreFiles,
    before: Mapping[tuple[str, int], int],
    settled: int,
    ends: QueueEnds,
    *,
    clean: bool,
) -> list[QueueFault]:
    """Queues that are missing, have holes, or say something else than the log.

    Looks at the files' names and holes, at the last entry of each queue, and at the first records
    of each log segment below `settled`, from where everything is dispatched anew in any case.

    Args:
        before: the queues of the last run, as far as they are known.
        ends: what `find_ends` has found, since when nothing was changed.
        clean: the store was closed in order: then nothing was left to be dispatched, and every
            queue is as long as it was.
    """
    faults: dict[tuple[str, int], str] = {}
    log_starts = files.log_starts()
    queue_of = cache(files.queue)
    others = topics_not_served(files.store)
    for key in list_served_queues(files.store):
        had = before.get(key, 0) if clean else 0
        reason = files_not_ours(files, *key)
        reason = reason or _broken_files(queue_of(*key), ends[key].next_index)
        reason = reason or _end_lies(
            files, *key, ends[key].next_index, log_starts, settled, had, clean=clean
        )
        if reason:
            faults[key] = reason
    for key, maximum in before.items():
        if key[0] in others:
            continue
        if maximum and key not in faults and not queue_of(*key).starts():
            faults.setdefault(key, f"its files are missing, it had entries up to {maximum}")
    for message in sampled_records(files, settled):
        key = message.topic, message.queue_id
        if (
            key not in faults
            and key[0] not in others
            and (reason := entry_lies(files, queue_of(*key), message))
        ):
            faults[key] = reason
    return [QueueFault(*key, reason) for key, reason in sorted(faults.items())]


def files_not_ours(files: StoreFiles, topic: str, queue_id: int) -> str:
    """Files that cannot be segments of this queue, such as one that was cut off; empty if none.

    Raises StoreNotOurs where no queue of the store has segments of this size: then it is the
    setting that is wrong, and nothing of it must be removed.
    """
    try:
        files.queue(topic, queue_id).starts()
    except StoreNotOurs as error:
        size = files.queue_segment_bytes
        paths = (files.store / CONSUME_QUEUE_DIR).rglob("*")
        if not any(path.is_file() and path.stat().st_size == size for path in paths):
            raise
        return str(error)
    return ""


def _broken_files(queue: QueueFiles, end: int) -> str:
    """Segments that do not follow each other, or unwritten stretches before the end."""
    starts = queue.starts()
    for start, after in pairwise(starts):
        if start + queue.segment_bytes != after:
            return f"the segment after {segment_name(start)} is missing"
    last_entries = end * UNIT - starts[-1] if starts else 0
    for start in starts:
        used = queue.segment_bytes // UNIT * UNIT if start != starts[-1] else last_entries
        descriptor = os.open(queue.path(start), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if used > 0 and os.lseek(descriptor, 0, os.SEEK_HOLE) < used:
                return f"{segment_name(start)} has a hole"
        finally:
            os.close(descriptor)
    return ""


def _end_lies(
    files: StoreFiles,
    topic: str,
    queue_id: int,
    end: int,
    log_starts: Sequence[int],
    settled: int,
    had: int,
    *,
    clean: bool,
) -> str:
    """Why a queue may not end where its entries end; empty if it does.

    A damaged last entry is the end of nothing: the message would be forgotten, and its queue
    offset given to another.

    Args:
        end: of its entries.
        had: one past the last entry that there must be.
    """
    queue = files.queue(topic, queue_id)
    behind = queue.anything_at(end)
    if behind and (clean or behind["physical_offset"] & _OFFSET_MAX < settled):
        return f"entry {end} is none, and not empty"
    if end < had:
        return f"its entries end at {end}, it had them up to {had}"
    unit = queue.entry(end - 1) if end else None
    if unit is None or is_filler(unit):
        return ""
    place = f"entry {end - 1} points at physical offset {unit['physical_offset']}"
    if unit["physical_offset"] + unit["size"] > settled:
        return f"{place}, behind the log's end at {settled}" if clean else ""
    if log_starts and unit["physical_offset"] < log_starts[0]:
        former = queue.entry(end - 2) if end > 1 else None
        falls = (
            former is not None
            and not is_filler(former)
            and former["physical_offset"] >= unit["physical_offset"]
        )
        return f"{place}, before the one in front of it" if falls else ""
    if entry_holds(files, topic, queue_id, end - 1, unit):
        return ""
    return f"{place}, where no message of that place lies"


def entry_holds(
    files: StoreFiles, topic: str, queue_id: int, queue_offset: int, unit: Mapping[str, int]
) -> bool:
    """Whether the record that an entry points at is the queue's message of that offset."""
    physical_offset = unit["physical_offset"]
    start = physical_offset // files.segment_bytes * files.segment_bytes
    try:
        with files.map_log(start) as memory:
            time_ms = codec.stored_at(
                memory, start, physical_offset, unit["size"], topic.encode(), queue_id, queue_offset
            )
    except FileNotFoundError:
        return False
    return time_ms is not None


def holds_at_end(files: StoreFiles, topic: str, queue_id: int, end: int) -> bool:
    """Whether a queue's last entry holds, or stands for nothing that there still is."""
    unit = files.queue(topic, queue_id).entry(end - 1) if end else None
    starts = files.log_starts()
    if unit is None or is_filler(unit):
        return True
    if starts and unit["physical_offset"] < starts[0]:
        return True
    return entry_holds(files, topic, queue_id, end - 1, unit)


def entry_lies(files: StoreFiles, queue: QueueFiles, message: Message) -> str:
    """What is wrong with the entry of a record in its queue; empty if nothing is."""
    if not message.is_queued:
        return ""
    place = message.topic, message.queue_id, message.queue_offset
    unit = queue.entry(message.queue_offset)
    if unit is None:
        return f"entry {message.queue_offset} is missing"
    if unit["physical_offset"] == message.physical_offset and unit["size"] == message.size:
        return ""
    # The first record keeps the place, if it is one: a second claims it in vain.
    if unit["physical_offset"] < message.physical_offset and entry_holds(files, *place, unit):
        return ""
    return (
        f"entry {message.queue_offset} says physical offset {unit['physical_offset']}, "
        f"the record lies at {message.physical_offset}"
    )


def sampled_records(files: StoreFiles, settled: int) -> Iterator[Message]:
    """The first whole records of every segment."""
    for start in files.log_starts():
        stop = min(settled, start + files.segment_bytes)
        if start >= stop:
            return
        with files.map_log(start) as memory:
            yield from records_in(memory, start, start, stop, SAMPLES_PER_SEGMENT)


def records_in(
    memory: FileMap, start: int, begin: int, stop: int, count_max: int
) -> Iterator[Message]:
    """The whole records from `begin` on, up to the first that does not hold."""
    reached = codec.scan(memory, start, begin, stop, True, True, count_max)[0]
    yield from codec.decode(memory[begin - start : reached - start], None, False)
