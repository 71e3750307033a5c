"""Staged batches as files: what a sink has sent and nobody has committed yet.

    cometmq.stages/<sink>/<epoch>.<stage>.open     batches are added
                          <epoch>.<stage>.closed   whole and on the disk
                          record                   of a sink that committed with a release before
                                                   0.2.0: its last epoch, what was decided

A stage is a run of entries (STAGE_ENTRY, head, batch). Killed in mid-write, its torn end is cut
when it is opened again. The commitlog process alone writes here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Collection, Generator, Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import (
    DiskFull,
    MessageNotFound,
    StoreDamaged,
    StoreError,
    SystemBusy,
)
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.layout import BATCH_ELEMENT, STAGE_ENTRY
from cometmq.shm.os.durable import PRIVATE, replace_file, sync_folder

log = logging.getLogger(__name__)

STAGES_DIR: Final = "cometmq.stages"
RECORD: Final = "record"
OPEN: Final = ".open"
CLOSED: Final = ".closed"
HEAD_MAX: Final = 4096  # bytes of an entry's head


class StagedHead(msgspec.Struct, frozen=True, array_like=True):
    """What stands in front of a batch."""

    topic: str
    queue_id: int
    count: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: bytes


class QueueProgress(msgspec.Struct, array_like=True):
    """How much of what was decided a queue had."""

    topic: str
    queue_id: int
    done: int  # messages in the log, at its end when `base` was looked at
    base: int  # the queue's next offset then

    def there(self, next_offset: int, count: int) -> int:
        """How many of its `count` messages the queue has, which ends at `next_offset` now.

        Since the decision nothing else has entered the log: what a queue has grown by is ours, and
        what a power cut took from its end was ours first.
        """
        return max(0, min(count, self.done + next_offset - self.base))


class Decision(msgspec.Struct):
    """These stages are to be in the log, whatever happens. Releases before 0.2.0 decided so; now
    the marks of derived writes say it (actors/writer/staging.py)."""

    epoch: int
    stages: list[str]
    queues: list[QueueProgress]


class SinkRecord(msgspec.Struct):
    epoch: int = -1  # the last that was committed
    decision: Decision | None = None


_encode_head: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(StagedHead).decode


class OpenStage:
    """A stage that is being written. Raises StoreDamaged, DiskFull.

    It alone has its descriptor, by a file object: whoever uses that once it is closed gets
    ValueError, and never meets the file of somebody else who has been given the number since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _make_folder(path.parent)
        self._file = FileIO(path, "r+", opener=_create)
        self.syncing = False  # a thread makes it durable: descriptor and names are that thread's
        self.dropped = False  # meanwhile; it goes when the thread has come to its end
        self.batches = self.size = 0
        if os.fstat(self._file.fileno()).st_size:
            for _, _, self.size in _entries(path):
                self.batches += 1
            self._file.truncate(self.size)

    def append(self, head: StagedHead, batch: memoryview) -> int:
        """Add one batch, whole or not at all; bytes taken."""
        packed = _encode_head(head)
        crc = codec.crc32(batch, codec.crc32(packed))
        fields = STAGE_ENTRY.pack(crc=crc, head_bytes=len(packed), batch_bytes=len(batch))
        parts: list[bytes | memoryview] = [fields, packed, batch]
        wanted = sum(len(part) for part in parts)
        try:
            written = os.pwritev(self._file.fileno(), parts, self.size)
            if written != wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(self.size)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self.path}: no room for {wanted} bytes more") from None
            raise
        self.size += wanted
        self.batches += 1
        return wanted

    def make_durable(self) -> None:
        """Sync it and give it its name as a closed one. Any thread may do that, with `syncing` set
        from before until `StageFiles.synced`."""
        os.fdatasync(self._file.fileno())
        self.path.rename(self.path.with_suffix(CLOSED))
        sync_folder(self.path.parent)
        sync_folder(self.path.parent.parent)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def _inside(folder: Path) -> list[Path]:
    """Not by `glob`, which compiles an expression, in each process anew."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_folder(folder: Path) -> None:
    """A sink's. Nobody but the owner looks at what is staged, whatever a service's umask is."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, PRIVATE)


def _entries(path: Path) -> Iterator[tuple[StagedHead, memoryview, int]]:
    """The whole entries from the beginning on: (head, batch, where the next begins).

    Batches are good until the next one is asked for.
    """
    if not path.stat().st_size:
        return  # and no mapping
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        at = 0
        while (found := _entry(view, at)) is not None:
            head, batch, at = found
            with batch:
                yield head, batch, at


def _entry(view: memoryview, at: int) -> tuple[StagedHead, memoryview, int] | None:
    if len(view) - at < STAGE_ENTRY.size:
        return None
    fields = STAGE_ENTRY.unpack(view[at : at + STAGE_ENTRY.size])
    begin = at + STAGE_ENTRY.size
    middle = begin + fields["head_bytes"]
    end = middle + fields["batch_bytes"]
    if not begin < middle < end <= len(view) or middle - begin > HEAD_MAX:
        return None
    if codec.crc32(view[begin:end]) != fields["crc"]:
        return None
    try:
        return _decode_head(view[begin:middle]), view[middle:end], end
    except msgspec.DecodeError:
        return None


def tail_of(batch: memoryview, skip: int) -> memoryview:
    """A batch body without its first elements."""
    at = 0
    for _ in range(skip):
        at += BATCH_ELEMENT.unpack(batch[at : at + BATCH_ELEMENT.size])["total_size"]
    return batch[at:]


class StageFiles:
    """All stages of a store."""

    def __init__(self, store: Path) -> None:
        self.folder = store / STAGES_DIR
        self._open: dict[Path, OpenStage] = {}
        self._records: dict[str, SinkRecord] = {}
        stages = (each for sink in _inside(self.folder) for each in self._stages(sink.name))
        self.size = sum(each.stat().st_size for each in stages)  # bytes

    def _path(self, sink: str, epoch: int, stage: str, suffix: str) -> Path:
        return self.folder / sink / f"{epoch}.{stage}{suffix}"

    # --- writing ---

    def open(self, sink: str, epoch: int, stage: str) -> OpenStage:
        """To be added to. Raises MessageNotFound when it is closed already, SystemBusy while it is
        being dropped."""
        found = self.find(sink, epoch, stage)
        if found is None:
            if self.is_closed(sink, epoch, stage):
                raise MessageNotFound(f"stage {stage} of {sink} is closed")
            path = self._path(sink, epoch, stage, OPEN)
            found = self._open[path] = OpenStage(path)
        if found.dropped:
            raise SystemBusy(f"stage {stage} of {sink} is being dropped: try again")
        if found.syncing:
            raise MessageNotFound(f"stage {stage} of {sink} is closed")
        return found

    def find(self, sink: str, epoch: int, stage: str) -> OpenStage | None:
        """One that is open, by this process or by one before it that was killed."""
        path = self._path(sink, epoch, stage, OPEN)
        if path not in self._open and path.exists():
            self._open[path] = OpenStage(path)
        return self._open.get(path)

    def is_closed(self, sink: str, epoch: int, stage: str) -> bool:
        """Whole and on the disk."""
        syncs = self._path(sink, epoch, stage, OPEN) in self._open
        return not syncs and self._path(sink, epoch, stage, CLOSED).exists()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def synced(self, opened: OpenStage, error: OSError | None) -> None:
        """`make_durable` has come to its end. Raises StoreError where it failed, MessageNotFound
        where the stage was dropped meanwhile; then nothing of it is left.

        Nor after a failure: the system may have dropped pages that it could not write, and a second
        try would not notice.
        """
        opened.syncing = False
        if error is not None or opened.dropped:
            self._remove(opened.path)
            if error is None:
                raise MessageNotFound(f"{opened.path.name}: it was dropped while it was closed")
            raise StoreError(f"{opened.path}: {error.strerror}; the stage is dropped")
        self._let_go(opened)

    def _let_go(self, opened: OpenStage) -> None:
        """The one that is meant, not the one that has its name."""
        if self._open.get(opened.path) is opened:
            del self._open[opened.path]
        opened.close()

    # --- reading ---

    def batches(
        self, sink: str, epoch: int, stages: list[str]
    ) -> Generator[tuple[StagedHead, memoryview], None, None]:
        """What closed stages hold. Raises MessageNotFound, StoreDamaged."""
        for stage in stages:
            opened = self._open.get(self._path(sink, epoch, stage, OPEN))
            if opened is not None and opened.syncing:
                raise SystemBusy(f"stage {stage} of {sink} is being closed: try again")
            path = self._path(sink, epoch, stage, CLOSED)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise MessageNotFound(
                    f"stage {stage} of {sink}, epoch {epoch}, is not there: it was not closed, or "
                    "its lease ran out (stagedLease)"
                ) from None
            end = 0
            for head, batch, next_at in _entries(path):
                end = next_at
                yield head, batch
            if end != size:
                raise StoreDamaged(f"{path}: what lies at {end} does not hold")

    # --- records ---

    def record(self, sink: str) -> SinkRecord:
        """Raises StoreDamaged."""
        found = self._records.get(sink)
        if found is None:
            path = self.folder / sink / RECORD
            try:
                found = msgspec.json.decode(path.read_bytes(), type=SinkRecord)
            except FileNotFoundError:
                found = SinkRecord()
            except msgspec.DecodeError as error:
                raise StoreDamaged(f"{path}: {error}") from None
            self._records[sink] = found
        return found

    def save(self, sink: str, record: SinkRecord) -> None:
        """Durably: after a kill at any line it is the old or the new one. Raises DiskFull."""
        path = self.folder / sink / RECORD
        self._records.pop(sink, None)  # what is on the disk counts, should this fail
        _make_folder(path.parent)
        replace_file(path, msgspec.json.encode(record), mode=PRIVATE)
        self._records[sink] = record

    def decided(self) -> list[str]:
        """Sinks of which an older release has decided something."""
        sinks = sorted(folder.name for folder in _inside(self.folder))
        return [
            sink
            for sink in sinks
            if (self.folder / sink / RECORD).exists() and self.is_decided(sink)
        ]

    def is_decided(self, sink: str) -> bool:
        """Whether its record has a decision; not, where it is damaged, which is logged."""
        try:
            return self.record(sink).decision is not None
        except StoreDamaged as error:
            log.error("%s; the sink cannot go on", error)
            return False

    # --- cleaning ---

    def drop(self, sink: str, epoch: int, stages: list[str]) -> None:
        for stage in stages:
            self._remove(self._path(sink, epoch, stage, OPEN))

    def drop_up_to(self, sink: str, epoch: int) -> None:
        """All stages of an epoch and of those before it."""
        for path in self._stages(sink):
            number = path.name.partition(".")[0]
            if not number.isdigit() or int(number) <= epoch:
                self._remove(path)

    def sweep(self, older_than_s: float, records_older_than_s: float, kept: Collection[str]) -> int:
        """Remove stages, then records of sinks, that nobody has touched for so long; how many.

        Args:
            kept: sinks with stages that have to stay.
        """
        removed, now = 0, time.time()
        for folder in _inside(self.folder):
            if folder.name in kept:
                continue
            for path in self._stages(folder.name):
                if now - path.stat().st_mtime > older_than_s:
                    self._remove(path)
                    removed += 1
            if now - folder.stat().st_mtime > records_older_than_s:
                self._forget(folder)
        return removed

    def _forget(self, folder: Path) -> None:
        if any(self._stages(folder.name)):
            return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        self._records.pop(folder.name, None)

    def has_stages(self, sink: str) -> bool:
        return bool(self._stages(sink))

    def _stages(self, sink: str) -> list[Path]:
        return [path for path in _inside(self.folder / sink) if path.suffix in (OPEN, CLOSED)]

    def _remove(self, path: Path) -> None:
        """A stage, by either of its names; one that a thread is syncing once that has ended."""
        opened = self._open.get(path.with_suffix(OPEN))
        if opened is not None and opened.syncing:
            opened.dropped = True
            return
        if opened is not None:
            self._let_go(opened)
        for name in {path, path.with_suffix(OPEN), path.with_suffix(CLOSED)}:
            with contextlib.suppress(FileNotFoundError):
                size = name.stat().st_size
                name.unlink()
                self.size -= size

    def close(self) -> None:
        """Once no thread is syncing any more."""
        for opened in list(self._open.values()):
            opened.syncing = False
            if opened.dropped:
                self._remove(opened.path)
            self._let_go(opened)
