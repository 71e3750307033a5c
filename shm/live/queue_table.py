"""The queue table: how far every queue reaches, for all processes to see.

RocketMQ keeps this in memory only; nothing on disk tells where a queue ends. The dispatcher alone
writes the slots; one is added by filling it and then moving the counter QUEUES past it.

Behind the slots lies a word for each of them, its *end*: how far the commitlog process has come
with the queue, which alone writes it, after `wrote`. Whoever sees a queue offset there finds the
records below it in the log, though maybe not in the ConsumeQueue yet. 0: it has not told of the
queue.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cometmq.protocol.errors import StoreError, SystemBusy
from cometmq.shm.kernel import codec, live
from cometmq.shm.kernel.layout import Layout
from cometmq.shm.kernel.live import OwnedCell, QueueEnds, QueueWatch, ReadCell
from cometmq.shm.os.durable import replace_file
from cometmq.shm.os.files import reserve

QUEUES_FILE: Final = "cometmq.queues"
# The table of the run before: recovery learns from it which queues there were.
QUEUES_BEFORE_FILE: Final = "cometmq.queues.before"
SLOTS_MAX: Final = 131_072
SLOT_BYTES: Final = 320
RESERVE_BYTES: Final = 64 * 1_024  # of the table at a time; it has a whole number of these
ENDS_AT: Final = SLOTS_MAX * SLOT_BYTES  # of the table
_END_BYTES: Final = 8
TABLE_BYTES: Final = ENDS_AT + SLOTS_MAX * _END_BYTES
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
_RANGE: Final = struct.Struct("<QQ")  # what is asked for most, and for each single message
assert (SLOT.at["max_queue_offset"], SLOT.at["min_queue_offset"]) == (0, 8)
_TOPIC_AT: Final = SLOT.size
assert _TOPIC_AT + _TOPIC_MAX <= SLOT_BYTES
assert ENDS_AT % RESERVE_BYTES == 0
assert TABLE_BYTES % RESERVE_BYTES == 0


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


def forget_queues(store: Path) -> None:
    """Remove the tables of the queues of earlier runs."""
    for name in (QUEUES_FILE, QUEUES_BEFORE_FILE):
        (store / name).unlink(missing_ok=True)


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
                topic, queue_id = name.decode(errors="replace"), fields["queue_id"]
                if codec.is_queue_name(topic, queue_id):  # or paths would lead anywhere
                    found[topic, queue_id] = fields["max_queue_offset"]
    except FileNotFoundError:
        pass
    return found


def write_before(store: Path, ends: Mapping[tuple[str, int], int]) -> None:
    """Set what `queues_before` tells the next start, in place of the table of the last run."""
    table = bytearray()
    for (topic, queue_id), end in ends.items():
        name = topic.encode()
        slot = SLOT.pack(
            max_queue_offset=end, min_queue_offset=0, queue_id=queue_id, topic_bytes=len(name)
        )
        table += (slot + name).ljust(SLOT_BYTES, b"\0")
    replace_file(store / QUEUES_BEFORE_FILE, table)


class QueueTable:
    """A mapping of the table. Readers see the slots that QUEUES covers."""

    def __init__(self, path: Path, memory: mmap.mmap, count: ReadCell) -> None:
        self.path = path
        self.memory = memory
        self._count = count
        self._is_file = False  # else it is in memory only
        self._reserved: dict[int, int] = {}  # up to where the file has room, by where that begins
        self._slots: dict[tuple[str, int], int] = {}
        self._names: list[tuple[str, int]] = []  # by slot
        self._known = 0
        self._of_topic: dict[str, list[int]] = {}  # topic -> queue ids, of the first slots
        self._indexed = 0  # so many of them

    @classmethod
    def create(cls, path: Path, count: ReadCell) -> QueueTable:
        keep_as_before(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, TABLE_BYTES)  # sparse: only used slots take space
            return cls(path, mmap.mmap(descriptor, TABLE_BYTES), count)
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls) -> tuple[QueueTable, OwnedCell]:
        """A table and its counter that nobody else sees: for tools."""
        count = OwnedCell(mmap.mmap(-1, live.COUNTER_BYTES), 0, ())
        return cls(Path(QUEUES_FILE), mmap.mmap(-1, TABLE_BYTES), count), count

    @classmethod
    def open(cls, path: Path, count: ReadCell, *, writable: bool = False) -> QueueTable:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != TABLE_BYTES:
                raise StoreError(f"{path} is no queue table of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            table = cls(path, mmap.mmap(descriptor, 0, access=access), count)
            table._is_file = True
            return table
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
            self._names[slot : slot + 1] = [(name, fields["queue_id"])]  # or another thread did
        self._known = count

    def queues(self) -> Iterator[tuple[str, int]]:
        self.refresh()
        return iter(tuple(self._names))

    def queues_from(self, number: int) -> list[tuple[str, int]]:
        """The queues behind the first `number` ones, in the order in which they were added."""
        if self._known != self._count.value:
            self.refresh()
        return self._names[number:]

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
        high, low = _RANGE.unpack_from(self.memory, slot * SLOT_BYTES)
        return QueueRange(low, high)

    def ranges_of(self, topic: str) -> dict[int, QueueRange]:
        """The queues of a topic to which anything was ever dispatched."""
        for name, queue_id in self.queues_from(self._indexed):
            self._of_topic.setdefault(name, []).append(queue_id)
        self._indexed = self._known
        found = {}
        for queue_id in self._of_topic.get(topic, ()):
            found[queue_id] = self.range_of(topic, queue_id) or QueueRange(0, 0)
        return found

    def slot_of(self, topic: str, queue_id: int) -> int | None:
        """The queue's number; None while nothing was ever dispatched to it."""
        return None if self.range_of(topic, queue_id) is None else self._slots[topic, queue_id]

    def watch(self, stripes: Sequence[ReadCell]) -> QueueWatch:
        """Looks at the ends of many queues; the control file has the stripes."""
        return QueueWatch(self.memory, ENDS_AT, SLOTS_MAX, stripes)

    # --- the commitlog process's side ---

    def tell(self, stripes: Sequence[OwnedCell], dispatcher_fd: int) -> QueueEnds:
        return QueueEnds(self.memory, ENDS_AT, SLOTS_MAX, stripes, dispatcher_fd)

    # --- the dispatcher's side ---

    def fill_slot(self, slot: int, topic: str, queue_id: int, queue_range: QueueRange) -> None:
        """Prepare a slot; it is seen by others once QUEUES has moved past it.

        Raises DiskFull, SystemBusy.
        """
        if slot >= SLOTS_MAX:
            raise SystemBusy(f"{SLOTS_MAX} queues are in use, no more can be served")
        self._reserve(0, (slot + 1) * SLOT_BYTES)
        self._reserve(ENDS_AT, (slot + 1) * _END_BYTES)
        raw = topic.encode()
        at = slot * SLOT_BYTES
        self.memory[at : at + SLOT.size] = SLOT.pack(
            max_queue_offset=queue_range.max_queue_offset,
            min_queue_offset=queue_range.min_queue_offset,
            queue_id=queue_id,
            topic_bytes=len(raw),
        )
        self.memory[at + _TOPIC_AT : at + _TOPIC_AT + len(raw)] = raw

    def _reserve(self, begin: int, size: int) -> None:
        """A store into a hole of the file, on a full disk, would kill the process that does it."""
        have = self._reserved.get(begin, 0)
        if not self._is_file or size <= have:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            wanted = -(-size // RESERVE_BYTES) * RESERVE_BYTES
            reserve(descriptor, begin + have, wanted - have, self.path)
            self._reserved[begin] = wanted
        finally:
            os.close(descriptor)

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
        replace_file(store / QUEUES_BEFORE_FILE, self.memory[: self._count.value * SLOT_BYTES])
