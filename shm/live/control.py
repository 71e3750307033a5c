"""The control file: the counters that tie the processes of one broker run together.

One page of header, then a cell of two cache lines for each counter: the value, and who sleeps on
it. Every word has exactly one writer: where two processes move a counter (TWO_WRITERS) each has a
word of its own, and the larger one counts. The file becomes valid by its last write, the magic; it
is made anew at every start and removed at an orderly end. Anybody may map it read-only.

    min_offset <= flushed | dispatched <= wrote <= allocated
    replicated <= wrote

Behind the counters are the cells of the stripes, which share the queues among them by their slots
in the queue table. Each counts how often the commitlog process has told of queues of that stripe.

A process of the family sleeps on its doorbell, after a note in the cell. Any other process of this
machine sleeps on the cell's wake word (futex), in a file of its own: `cometmq.sleepers`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Collection, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from cometmq.protocol.errors import StoreError
from cometmq.shm.kernel import live
from cometmq.shm.kernel.live import STRIPES, OwnedCell, ReadCell, SleepCell, WakeWords

CONTROL_FILE: Final = "cometmq.control"
SLEEPERS_FILE: Final = "cometmq.sleepers"
MAGIC: Final = b"COMETMQ1"
IN_GROUP: Final = "in_group"  # of the description: this is a replica of a group, see LivePositions
_PAGE: Final = 4096
_META_AT: Final = 64
_META_LENGTH: Final = struct.Struct("<I")


class Counter(IntEnum):
    """Cells of the control file, with their one writer. Offsets are physical and exclusive:
    they name the first byte that is *not* covered."""

    MIN_OFFSET = 0  # cleaner: the log begins here
    ALLOCATED = 1  # allocator: file space is reserved below this; lower when it takes some back
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
    SPACE_WANTED = 22  # commitlog: it stores nothing beyond this, and needs file space below it
    # dispatcher: 1 once each queue ends where it has to, in this run, and `dispatched` says where
    QUEUES_RECOVERED = 23
    # commitlog: what lies at or above is needed to know how far derivers have come; 0 until it has
    # looked
    MARKS_FROM = 24
    # ha: as many slaves as are waited for have everything below this; in a group that elects its
    # master: all below this is confirmed
    REPLICATED = 25
    SLAVES = 26  # ha: that are connected and close enough to be waited for
    # ha: slaves still read what lies at or above this, plus one; 0 while none is connected
    SLAVES_FROM = 27
    SERVICE = 28  # ha, in a group that elects its master: see Service
    # ha, in a group that elects its master: 1 once `replicated` says what is confirmed, in this
    # run; nothing is dispatched before
    CONFIRM_KNOWN = 29
    # ha, of the master of a group: until then nobody else can be master; ms of CLOCK_BOOTTIME
    SURE_UNTIL = 30
    DISK_STATE = 31  # cleaner: see Disk


_NAMES: Final = [counter.name.lower() for counter in Counter]
STRIPES_FROM: Final = 64  # their cells are numbered behind those of the counters
_CELLS: Final = STRIPES_FROM + STRIPES
TWO_WRITERS: Final = frozenset({Counter.FLUSHED, Counter.FLUSH_ERRNO})

# What a counter is never above. Checked natively where its cell is published; a violation ends its
# writer. The appender, which moves `wrote`, lays nothing beyond the file space that it has taken.
# `reset` begins an epoch and is not checked: at a start, and where a process takes over from a dead
# one, `wrote` may be told before `allocated`, and the log's beginning before `flushed`.
BOUNDS: Final[dict[Counter, tuple[Counter, ...]]] = {
    Counter.WROTE: (Counter.ALLOCATED,),
    Counter.FLUSHED: (Counter.WROTE,),
    Counter.DISPATCHED: (Counter.WROTE,),
    Counter.INDEXED: (Counter.WROTE,),
    Counter.REPLICATED: (Counter.WROTE,),
    Counter.MIN_OFFSET: (Counter.FLUSHED, Counter.DISPATCHED),
}

HOT_STEP_BYTES: Final = 4 * 1_048_576


class Phase:
    """How far the commitlog process has come."""

    STARTING: Final = 0
    RECOVERED: Final = 1  # `wrote` is known; the dispatcher may catch up
    SERVING: Final = 2
    STOPPED: Final = 3  # nothing more will be written


class Service:
    """What the master of a group does for clients, as of now (actions.Service)."""

    NONE: Final = 0  # a follower, or nothing is known yet
    OPEN: Final = 1  # everything
    UNSURE: Final = 2  # sends and reads, but no invisibility of popped messages, and no locks
    SHORT: Final = 3  # reads: in-sync replicas not enough
    DEPOSED: Final = 4  # its session is lost: nothing


class Disk:
    """What the cleaner makes of how full the disk is."""

    UNKNOWN: Final = 0  # it has not looked yet
    WRITABLE: Final = 1
    TOO_FULL: Final = 2  # the log takes nothing


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
    SCHEDULER = 9
    HA = 10
    READER = 11


def end_run(path: Path) -> None:
    """Take the magic from a control file, before anything of the store is changed that was final
    while its run lasted: clients that have the store mapped may not have noticed its end yet."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.pwrite(descriptor, bytes(len(MAGIC)), 0)
    finally:
        os.close(descriptor)


def create_sleepers(path: Path) -> WakeWords:
    """In place of the last run's."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(descriptor, 0, live.WAKE_WORDS_BYTES)
        return WakeWords(mmap.mmap(descriptor, live.WAKE_WORDS_BYTES))
    finally:
        os.close(descriptor)


def open_sleepers(path: Path) -> WakeWords:
    """Map them; to read only, where this process may do no more. Raises OSError, StoreError."""
    flags, access = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mmap.ACCESS_WRITE
    try:
        descriptor = os.open(path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        descriptor, access = os.open(path, os.O_RDONLY | flags), mmap.ACCESS_READ
    try:
        size = os.fstat(descriptor).st_size
        if size != live.WAKE_WORDS_BYTES:
            raise StoreError(f"{path}: {size} bytes are no wake words of this version")
        return WakeWords(mmap.mmap(descriptor, size, access=access))
    finally:
        os.close(descriptor)


def run_number(nonce: str | None) -> int:
    """The number by which clients know a run of the broker; 0: there is no nonce. The nonce itself
    is only for those that can read the broker's files."""
    if not nonce:
        return 0
    return int.from_bytes(hashlib.sha256(nonce.encode()).digest()[:8], "big") >> 1 | 1


class ControlFile:
    """A mapping of the control file.

    Args:
        wake_words: for who sleeps without a doorbell, and for the family, which wakes them.
        doorbells: eventfd by number, for the processes of the family; nobody else can be woken.
        owns: the counters that may be taken for writing; None: all of them.
        owns_second: the same of second words.
    """

    def __init__(
        self,
        path: Path,
        memory: mmap.mmap,
        doorbells: Sequence[int] = (),
        owns: Collection[Counter] | None = None,
        owns_second: Collection[Counter] = TWO_WRITERS,
        wake_words: WakeWords | None = None,
    ) -> None:
        self.path = path
        self.wake_words = wake_words
        self._memory = memory
        self._doorbells = tuple(doorbells)
        self._owns = Counter if owns is None else owns
        self._owns_second = owns_second

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any], doorbells: Sequence[int] = ()) -> ControlFile:
        """A fresh file in place of any old one. Who has the old one mapped keeps it, and sees that
        its run is over."""
        end_run(path)
        path.unlink(missing_ok=True)
        wake_words = create_sleepers(path.with_name(SLEEPERS_FILE))
        text = json.dumps(meta).encode()
        size = _PAGE + _CELLS * live.COUNTER_BYTES
        if len(text) > _PAGE - _META_AT - _META_LENGTH.size:
            raise StoreError(f"{path}: {len(text)} bytes of description do not fit")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        memory[_META_AT : _META_AT + _META_LENGTH.size] = _META_LENGTH.pack(len(text))
        begin = _META_AT + _META_LENGTH.size
        memory[begin : begin + len(text)] = text
        memory[: len(MAGIC)] = MAGIC
        return cls(path, memory, doorbells, wake_words=wake_words)

    @classmethod
    def open(
        cls,
        path: Path,
        doorbells: Sequence[int] = (),
        *,
        writable: bool,
    ) -> ControlFile:
        """Map an existing file. Raises StoreError when it is none of ours."""
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreError(f"{path}: no broker is running on this store") from None
        try:
            size = os.fstat(descriptor).st_size
            if size < _PAGE + _CELLS * live.COUNTER_BYTES:
                raise StoreError(f"{path}: {size} bytes are no control file of this version")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            memory = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
        magic = memory[: len(MAGIC)]
        if magic != MAGIC:
            memory.close()
            raise StoreError(f"{path}: begins with {magic!r}, not {MAGIC!r}")
        wake_words = open_sleepers(path.with_name(SLEEPERS_FILE)) if writable else None
        return cls(path, memory, doorbells, wake_words=wake_words)

    def owned(
        self, owns: Collection[Counter], owns_second: Collection[Counter] = TWO_WRITERS
    ) -> ControlFile:
        """The same mapping, for a process that may write these counters alone."""
        return ControlFile(
            self.path, self._memory, self._doorbells, owns, owns_second, self.wake_words
        )

    @property
    def meta(self) -> dict[str, Any]:
        """What the supervisor wrote at the start: pid, addresses, version. Raises StoreError."""
        (length,) = _META_LENGTH.unpack_from(self._memory, _META_AT)
        begin = _META_AT + _META_LENGTH.size
        try:
            found = json.loads(self._memory[begin : begin + min(length, _PAGE - begin)])
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path}: its description cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise StoreError(f"{self.path}: its description is a {type(found).__name__}")
        return found

    @property
    def is_over(self) -> bool:
        """Whether the store is another run's now. To be asked after reading: what was read before
        a no is of this run, and nothing of a recovery was seen."""
        return self._memory[: len(MAGIC)] != MAGIC

    def read(self, counter: Counter) -> ReadCell:
        return ReadCell(
            self._memory, _cell_at(counter), _words(counter), self.wake_words, int(counter)
        )

    def sleep_on(self, counter: Counter, doorbell: int) -> SleepCell:
        return SleepCell(
            self._memory, _cell_at(counter), doorbell, _words(counter), self.wake_words,
            int(counter),
        )  # fmt: skip

    def own(self, counter: Counter) -> OwnedCell:
        """The writer's end; see Counter for who that is."""
        assert counter in self._owns, f"{counter.name} is another one's"
        return self._bounded(counter, self._owned(counter, _words(counter)))

    def own_second(self, counter: Counter) -> OwnedCell:
        """The end of the second of its two writers."""
        assert counter in TWO_WRITERS, counter.name
        assert counter in self._owns_second, f"the second word of {counter.name} is another one's"
        return self._bounded(counter, self._owned(counter, 2, second=True))

    def _bounded(self, counter: Counter, cell: OwnedCell) -> OwnedCell:
        bounds = BOUNDS.get(counter, ())
        cell.bounded(_NAMES[counter], tuple((_NAMES[each], self.read(each)) for each in bounds))
        return cell

    def _owned(self, number: int, words: int = 1, *, second: bool = False) -> OwnedCell:
        return OwnedCell(
            self._memory, _cell_at(number), self._doorbells, words, second, self.wake_words,
            int(number),
        )  # fmt: skip

    # --- stripes, all of them in their order ---

    def read_stripes(self) -> list[ReadCell]:
        return [
            ReadCell(self._memory, _cell_at(number), 1, self.wake_words, number)
            for number in range(STRIPES_FROM, _CELLS)
        ]

    def sleep_on_stripes(self, doorbell: int) -> list[SleepCell]:
        return [
            SleepCell(self._memory, _cell_at(number), doorbell)
            for number in range(STRIPES_FROM, _CELLS)
        ]

    def own_stripes(self) -> list[OwnedCell]:
        """For the commitlog process."""
        assert Counter.WROTE in self._owns, "the stripes are another one's"
        return [self._owned(number) for number in range(STRIPES_FROM, _CELLS)]

    def values(self) -> dict[str, int]:
        return {_NAMES[counter]: self.read(counter).value for counter in Counter}


def _words(counter: Counter) -> int:
    return 2 if counter in TWO_WRITERS else 1


def _cell_at(number: int) -> int:
    return _PAGE + number * live.COUNTER_BYTES
