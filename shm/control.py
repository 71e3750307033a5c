"""The control file: the counters that tie the processes of one broker run together.

One page of header, then a cell of two cache lines for each counter: the value, and who sleeps on
it. Every word has exactly one writer: where two processes move a counter (TWO_WRITERS) each has a
word of its own, and the larger one counts. The file becomes valid by its last write, the magic; it
is made anew at every start and removed at an orderly end. Anybody may map it read-only.

    min_offset <= flushed | dispatched <= wrote <= allocated
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from cometmq.protocol.errors import StoreError
from cometmq.shm import _kernel
from cometmq.shm._kernel import OwnedCell, ReadCell, SleepCell

CONTROL_FILE: Final = "cometmq.control"
MAGIC: Final = b"COMETMQ1"
_PAGE: Final = 4096
_META_AT: Final = 64
_META_LENGTH: Final = struct.Struct("<I")


class Counter(IntEnum):
    """Cells of the control file, with their one writer. Offsets are physical and exclusive:
    they name the first byte that is *not* covered."""

    MIN_OFFSET = 0  # cleaner: the log begins here
    ALLOCATED = 1  # allocator: file space is reserved below this
    WROTE = 2  # commitlog: whole records below this
    FLUSHED = 3  # flush; commitlog, of what it syncs itself: everything below this is on the disk
    DISPATCHED = 4  # dispatcher: every record below this has its ConsumeQueue entry
    QUEUES = 5  # dispatcher: slots in use in the queue table
    WROTE_TIMESTAMP = 6  # commitlog: store time of the last record, ms
    DISPATCHED_TIMESTAMP = 7  # dispatcher: store time of the last record dispatched, ms
    MESSAGES = 8  # commitlog: messages stored in this run
    RECOVERED_FROM = 9  # commitlog: dispatch must begin here at the latest
    PHASE = 10  # commitlog: see Phase
    FLUSHES = 11  # flush: how often it has synced the log in this run
    STEPS = 12  # commitlog: `wrote` in steps of HOT_STEP_BYTES; wakes who works ahead or behind
    LOCKED_BYTES = 13  # allocator: bytes of the hot window that are locked in memory
    ALLOCATE_ERRNO = 14  # allocator: why the next segment cannot be had, 0 = it can
    NAPPING = 15  # dispatcher: 1 while it naps and nothing but its doorbell wakes it
    INDEXED = 16  # dispatcher: every record below this can be found by its keys
    INDEX_FILES_FULL = 17  # dispatcher: index files that it has filled in this run
    CONTINUED = 18  # commitlog: 1 where the counters of a killed run hold, and are gone on with
    FLUSH_ERRNO = 19  # flush; commitlog: why the disk did not take what was written, 0 = it did
    SYNC_WANTED = 20  # commitlog: under SYNC_FLUSH, flush has to sync everything below this at once
    SYNCS = 21  # commitlog: how often it has synced the log itself in this run


TWO_WRITERS: Final = frozenset({Counter.FLUSHED, Counter.FLUSH_ERRNO})


HOT_STEP_BYTES: Final = 4 * 1_048_576


class Phase:
    """How far the commitlog process has come."""

    STARTING: Final = 0
    RECOVERED: Final = 1  # `wrote` is known; the dispatcher may catch up
    SERVING: Final = 2
    STOPPED: Final = 3  # nothing more will be written


class Doorbell(IntEnum):
    """The number of each process's eventfd. Readers count on from READER."""

    COMMITLOG = 0
    ALLOCATOR = 1
    DISPATCHER = 2
    FLUSH = 3
    CLEANER = 4
    COORDINATOR = 5
    BROKER = 6
    NAMESRV = 7
    APPENDERS = 8  # threads of the commitlog process that wait for a segment, or for the disk
    READER = 9


class ControlFile:
    """A mapping of the control file.

    Args:
        doorbells: eventfd by number, for the processes of the family; nobody else can be woken.
    """

    def __init__(self, path: Path, memory: mmap.mmap, doorbells: Sequence[int] = ()) -> None:
        self.path = path
        self._memory = memory
        self._doorbells = tuple(doorbells)

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any], doorbells: Sequence[int] = ()) -> ControlFile:
        """A fresh file in place of any old one. Who has the old one mapped keeps it."""
        path.unlink(missing_ok=True)
        text = json.dumps(meta).encode()
        size = _PAGE + len(Counter) * _kernel.COUNTER_BYTES
        if len(text) > _PAGE - _META_AT - _META_LENGTH.size:
            raise StoreError(f"{path}: {len(text)} bytes of description do not fit")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        memory[_META_AT : _META_AT + _META_LENGTH.size] = _META_LENGTH.pack(len(text))
        begin = _META_AT + _META_LENGTH.size
        memory[begin : begin + len(text)] = text
        memory[: len(MAGIC)] = MAGIC
        return cls(path, memory, doorbells)

    @classmethod
    def open(cls, path: Path, doorbells: Sequence[int] = (), *, writable: bool) -> ControlFile:
        """Map an existing file. Raises StoreError when it is none of ours."""
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreError(f"{path}: no broker is running on this store") from None
        try:
            size = os.fstat(descriptor).st_size
            if size < _PAGE + len(Counter) * _kernel.COUNTER_BYTES:
                raise StoreError(f"{path}: {size} bytes are no control file of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            memory = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
        magic = memory[: len(MAGIC)]
        if magic != MAGIC:
            memory.close()
            raise StoreError(f"{path}: begins with {magic!r}, not {MAGIC!r}")
        return cls(path, memory, doorbells)

    @property
    def meta(self) -> dict[str, Any]:
        """What the supervisor wrote at the start: pid, addresses, version."""
        (length,) = _META_LENGTH.unpack_from(self._memory, _META_AT)
        begin = _META_AT + _META_LENGTH.size
        found = json.loads(self._memory[begin : begin + min(length, _PAGE - begin)])
        assert isinstance(found, dict)
        return found

    def read(self, counter: Counter) -> ReadCell:
        return ReadCell(self._memory, _cell_at(counter), _words(counter))

    def sleep_on(self, counter: Counter, doorbell: int) -> SleepCell:
        return SleepCell(self._memory, _cell_at(counter), doorbell, _words(counter))

    def own(self, counter: Counter) -> OwnedCell:
        """The writer's end; see Counter for who that is."""
        return OwnedCell(self._memory, _cell_at(counter), self._doorbells, _words(counter))

    def own_second(self, counter: Counter) -> OwnedCell:
        """The end of the second of its two writers."""
        assert counter in TWO_WRITERS, counter.name
        return OwnedCell(self._memory, _cell_at(counter), self._doorbells, 2, second=True)

    def values(self) -> dict[str, int]:
        return {counter.name.lower(): self.read(counter).value for counter in Counter}


def _words(counter: Counter) -> int:
    return 2 if counter in TWO_WRITERS else 1


def _cell_at(counter: Counter) -> int:
    return _PAGE + counter * _kernel.COUNTER_BYTES
