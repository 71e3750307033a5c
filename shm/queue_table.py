"""The queue table: how far every ConsumeQueue reaches, for all processes to see.

RocketMQ keeps this in memory only; nothing on disk tells where a queue ends. The dispatcher alone
writes the table; a slot is added by filling it and then moving the counter QUEUES past it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cometmq.protocol.errors import StoreError, SystemBusy
from cometmq.shm import _kernel
from cometmq.shm._kernel import OwnedCell, ReadCell
from cometmq.shm.layout import Layout

QUEUES_FILE: Final = "cometmq.queues"
APPENDED_FILE: Final = "cometmq.appended"
# The table of the run before: recovery learns from it which queues there were.
QUEUES_BEFORE_FILE: Final = "cometmq.queues.before"
SLOTS_MAX: Final = 131_072
SLOT_BYTES: Final = 320
_APPENDED_BYTES: Final = SLOTS_MAX * _kernel.COUNTER_BYTES
_TOPIC_MAX: Final = 255

# Native byte order: the file lives as long as one run on one machine.
SLOT: Final = Layout(
    "QUEUE_SLOT",
    {
        "max_queue_offset": "u64",  # one past the last entry that may be read
        "min_queue_offset": "u64",  # entries below this have lost their records
        "queue_id": "i32",
        "topic_bytes": "u32",
    },
    byte_order="<",
)
_TOPIC_AT: Final = SLOT.size
assert _TOPIC_AT + _TOPIC_MAX <= SLOT_BYTES


class QueueRange(NamedTuple):
    min_queue_offset: int
    max_queue_offset: int


def keep_as_before(store: Path) -> None:
    """Put the table of the last run aside; what an unfinished start has left goes.

    The table of before goes only when recovery is done, so that a start that is killed and begun
    anew still has it.
    """
    path, before = store / QUEUES_FILE, store / QUEUES_BEFORE_FILE
    if before.exists():
        path.unlink(missing_ok=True)
    elif path.exists():
        path.rename(before)


def queues_before(store: Path) -> dict[tuple[str, int], int]:
    """Every queue of the run before with its maximum then; empty if that is not known."""
    found: dict[tuple[str, int], int] = {}
    try:
        with (store / QUEUES_BEFORE_FILE).open("rb") as table:
            while len(raw := table.read(SLOT_BYTES)) == SLOT_BYTES:
                fields = SLOT.unpack(raw)
                name = raw[_TOPIC_AT : _TOPIC_AT + fields["topic_bytes"]]
                if not 0 < fields["topic_bytes"] <= _TOPIC_MAX:
                    break
                found[name.decode(errors="replace"), fields["queue_id"]] = fields[
                    "max_queue_offset"
                ]
    except FileNotFoundError:
        pass
    return found


class QueueTable:
    """A mapping of the table. Readers see the slots that QUEUES covers."""

    def __init__(self, path: Path, memory: mmap.mmap, count: ReadCell) -> None:
        self.path = path
        self.memory = memory
        self._count = count
        self._slots: dict[tuple[str, int], int] = {}
        self._known = 0

    @classmethod
    def create(cls, path: Path, count: ReadCell) -> QueueTable:
        keep_as_before(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, SLOTS_MAX * SLOT_BYTES)  # sparse: only used slots take space
            return cls(path, mmap.mmap(descriptor, SLOTS_MAX * SLOT_BYTES), count)
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls) -> tuple[QueueTable, OwnedCell]:
        """A table and its counter that nobody else sees: for tools."""
        count = OwnedCell(mmap.mmap(-1, _kernel.COUNTER_BYTES), 0, ())
        return cls(Path(QUEUES_FILE), mmap.mmap(-1, SLOTS_MAX * SLOT_BYTES), count), count

    @classmethod
    def open(cls, path: Path, count: ReadCell, *, writable: bool = False) -> QueueTable:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != SLOTS_MAX * SLOT_BYTES:
                raise StoreError(f"{path} is no queue table of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(path, mmap.mmap(descriptor, 0, access=access), count)
        finally:
            os.close(descriptor)

    def refresh(self) -> None:
        """Take notice of slots that were added meanwhile."""
        count = self._count.value
        for slot in range(self._known, count):
            at = slot * SLOT_BYTES
            fields = SLOT.unpack(self.memory, at)
            name = self.memory[at + _TOPIC_AT : at + _TOPIC_AT + fields["topic_bytes"]].decode()
            self._slots[name, fields["queue_id"]] = slot
        self._known = count

    def queues(self) -> Iterator[tuple[str, int]]:
        self.refresh()
        return iter(tuple(self._slots))

    def range_of(self, topic: str, queue_id: int) -> QueueRange | None:
        """The queue's offsets; None while nothing was ever dispatched to it."""
        slot = self._slots.get((topic, queue_id))
        if slot is None:
            if self._known == self._count.value:
                return None
            self.refresh()
            slot = self._slots.get((topic, queue_id))
            if slot is None:
                return None
        fields = SLOT.unpack(self.memory, slot * SLOT_BYTES)
        return QueueRange(fields["min_queue_offset"], fields["max_queue_offset"])

    def end_of(self, topic: str, queue_id: int) -> ReadCell | None:
        """The word that moves with every message of a queue: its maximum."""
        if self.range_of(topic, queue_id) is None:
            return None
        return ReadCell(self.memory, self.max_at(self._slots[topic, queue_id]))

    def slot_of(self, topic: str, queue_id: int) -> int | None:
        """The queue's number; None while nothing was ever dispatched to it."""
        return None if self.range_of(topic, queue_id) is None else self._slots[topic, queue_id]

    # --- the dispatcher's side ---

    def fill_slot(self, slot: int, topic: str, queue_id: int, queue_range: QueueRange) -> None:
        """Prepare a slot; it is seen by others once QUEUES has moved past it."""
        if slot >= SLOTS_MAX:
            raise SystemBusy(f"{SLOTS_MAX} queues are in use, no more can be served")
        raw = topic.encode()
        at = slot * SLOT_BYTES
        self.memory[at : at + SLOT.size] = SLOT.pack(
            max_queue_offset=queue_range.max_queue_offset,
            min_queue_offset=queue_range.min_queue_offset,
            queue_id=queue_id,
            topic_bytes=len(raw),
        )
        self.memory[at + _TOPIC_AT : at + _TOPIC_AT + len(raw)] = raw

    def max_at(self, slot: int) -> int:
        """Where the slot's maximum lies in `memory`; the kernel publishes it there."""
        return slot * SLOT_BYTES + SLOT.at["max_queue_offset"]

    def min_at(self, slot: int) -> int:
        return slot * SLOT_BYTES + SLOT.at["min_queue_offset"]

    def set_min(self, slot: int, min_queue_offset: int) -> None:
        at = self.min_at(slot)
        self.memory[at : at + 8] = min_queue_offset.to_bytes(8, "little")

    def save_as_before(self, store: Path) -> None:
        """For the next start: which queues there are, and how far they reach."""
        made = store / f"{QUEUES_BEFORE_FILE}.new"
        made.write_bytes(self.memory[: self._count.value * SLOT_BYTES])
        made.replace(store / QUEUES_BEFORE_FILE)


class AppendedTable:
    """How far the writer has come with each queue, by the queue's number in the queue table.

    The commitlog process writes it, after `wrote`: whoever sees a queue offset here finds the
    records below it in the log, though maybe not in the ConsumeQueue yet. 0: of this queue the
    writer does not tell, or not yet.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self._memory = memory
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> None:
        """In place of the last run's."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, _APPENDED_BYTES)  # sparse as well
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> AppendedTable:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != _APPENDED_BYTES:
                raise StoreError(f"{path} is none of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(mmap.mmap(descriptor, 0, access=access), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Cells that are still held keep the memory."""
        os.close(self._descriptor)

    def read(self, slot: int) -> ReadCell:
        return ReadCell(self._memory, slot * _kernel.COUNTER_BYTES)

    def told(self, slot: int | None) -> ReadCell | None:
        """The queue's word, if the writer tells of it."""
        if slot is None:
            return None
        cell = self.read(slot)
        return cell if cell.value else None

    def own(self, slot: int) -> OwnedCell:
        """For who has it mapped writable. Raises OSError where the disk has no room for it, which
        a store into a hole of the file would be killed for."""
        at = slot * _kernel.COUNTER_BYTES
        os.posix_fallocate(self._descriptor, at, _kernel.COUNTER_BYTES)
        return OwnedCell(self._memory, at)
