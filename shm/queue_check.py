"""Whether the ConsumeQueues fit the log: a look whose cost hardly grows with the store."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import StoreNotOurs
from cometmq.shm import _kernel
from cometmq.shm._kernel import Message
from cometmq.shm.consume_queue import UNIT, QueueFiles, list_queues
from cometmq.shm.files import (
    COMMITLOG_DIR,
    CONSUME_QUEUE_DIR,
    list_segments,
    map_segment,
    segment_name,
)
from cometmq.shm.layout import (
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
)

SAMPLES_PER_SEGMENT: Final = 32


@dataclass(frozen=True)
class QueueFault:
    """Why a queue cannot be trusted."""

    topic: str
    queue_id: int
    reason: str

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic}: {self.reason}"


@dataclass(frozen=True)
class StoreFiles:
    """A store and its segment sizes."""

    store: Path
    segment_bytes: int
    queue_segment_bytes: int

    def queue(self, topic: str, queue_id: int) -> QueueFiles:
        return QueueFiles(self.store, topic, queue_id, self.queue_segment_bytes)

    def log_starts(self) -> list[int]:
        return list_segments(self.store / COMMITLOG_DIR, self.segment_bytes)

    def map_log(self, start: int) -> mmap.mmap:
        path = self.store / COMMITLOG_DIR / segment_name(start)
        return map_segment(path, self.segment_bytes, writable=False)


def find_faults(
    files: StoreFiles, before: Mapping[tuple[str, int], int], settled: int
) -> list[QueueFault]:
    """Queues that are missing, have holes, or say something else than the log.

    Looks at the files' names and holes, at the last entry of each queue, and at the first records
    of each log segment below `settled`, from where everything is dispatched anew in any case.

    Args:
        before: the queues of the last run, as far as they are known.
    """
    faults: dict[tuple[str, int], str] = {}
    for key in list_queues(files.store):
        reason = files_not_ours(files, *key)
        reason = reason or _broken_files(files.queue(*key))
        reason = reason or _last_entry_lies(files, *key, settled)
        if reason:
            faults[key] = reason
    for key, maximum in before.items():
        if maximum and key not in faults and not files.queue(*key).starts():
            faults.setdefault(key, f"its files are missing, it had entries up to {maximum}")
    for message in sampled_records(files, settled):
        key = message.topic, message.queue_id
        if key not in faults and (reason := entry_lies(files, message)):
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


def _broken_files(queue: QueueFiles) -> str:
    """Segments that do not follow each other, or unwritten stretches before the end."""
    starts = queue.starts()
    for start, after in pairwise(starts):
        if start + queue.segment_bytes != after:
            return f"the segment after {segment_name(start)} is missing"
    last_entries = queue.find_end().next_index * UNIT - starts[-1] if starts else 0
    for start in starts:
        used = queue.segment_bytes // UNIT * UNIT if start != starts[-1] else last_entries
        descriptor = os.open(queue.path(start), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if used > 0 and os.lseek(descriptor, 0, os.SEEK_HOLE) < used:
                return f"{segment_name(start)} has a hole"
        finally:
            os.close(descriptor)
    return ""


def _last_entry_lies(files: StoreFiles, topic: str, queue_id: int, settled: int) -> str:
    queue = files.queue(topic, queue_id)
    index = queue.find_end().next_index - 1
    unit = queue.entry(index) if index >= 0 else None
    if unit is None or unit["physical_offset"] + unit["size"] > settled:
        return ""
    message = record_at(files, unit["physical_offset"], unit["size"])
    if message is None or message.physical_offset != unit["physical_offset"]:
        return ""  # gone, or damaged: that is not the queue's fault
    if (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, index):
        return f"entry {index} points at a message of another place"
    return ""


def entry_lies(files: StoreFiles, message: Message) -> str:
    """What is wrong with the entry of a record; empty if nothing is."""
    if not is_queued(message):
        return ""
    unit = files.queue(message.topic, message.queue_id).entry(message.queue_offset)
    if unit is None:
        return f"entry {message.queue_offset} is missing"
    if unit["physical_offset"] == message.physical_offset and unit["size"] == message.size:
        return ""
    if 0 < unit["physical_offset"] < message.physical_offset:
        # The first record keeps the place, if it is one: a second claims it in vain.
        holder = record_at(files, unit["physical_offset"], unit["size"])
        if holder is not None and _place(holder) == _place(message):
            return ""
    return (
        f"entry {message.queue_offset} says physical offset {unit['physical_offset']}, "
        f"the record lies at {message.physical_offset}"
    )


def _place(message: Message) -> tuple[str, int, int]:
    return message.topic, message.queue_id, message.queue_offset


def is_queued(message: Message) -> bool:
    kind = message.sys_flag & SYS_TRANSACTION_MASK
    return kind not in (SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK)


def sampled_records(files: StoreFiles, settled: int) -> Iterator[Message]:
    """The first whole records of every segment."""
    for start in files.log_starts():
        stop = min(settled, start + files.segment_bytes)
        if start >= stop:
            return
        with files.map_log(start) as memory:
            yield from records_in(memory, start, start, stop, SAMPLES_PER_SEGMENT)


def records_in(
    memory: mmap.mmap, start: int, begin: int, stop: int, count_max: int
) -> Iterator[Message]:
    """The whole records from `begin` on, up to the first that does not hold."""
    reached = _kernel.scan(memory, start, begin, stop, True, True, count_max)[0]
    yield from _kernel.decode(memory[begin - start : reached - start], None, False)


def record_at(files: StoreFiles, physical_offset: int, size: int) -> Message | None:
    """The record there, its body unchecked; None if there is none."""
    start = physical_offset // files.segment_bytes * files.segment_bytes
    try:
        with files.map_log(start) as memory:
            at = physical_offset - start
            if size > files.segment_bytes - at:
                return None
            (message,) = _kernel.decode(memory[at : at + size], None, False)
    except (FileNotFoundError, ValueError, _kernel.RecordDamaged):
        return None
    return message
