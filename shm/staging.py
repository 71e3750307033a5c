"""Staged batches as files: what a sink has sent and nobody has committed yet.

    cometmq.stages/<sink>/<epoch>.<stage>.open     batches are added
                          <epoch>.<stage>.closed   whole and on the disk
                          record                   which epoch was committed last, what is decided

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
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.errors import DiskFull, MessageNotFound, StoreDamaged
from cometmq.shm import _kernel
from cometmq.shm.files import sync_folder
from cometmq.shm.layout import BATCH_ELEMENT, STAGE_ENTRY

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
    """How much of what was decided a queue has."""

    topic: str
    queue_id: int
    done: int  # messages in the log, at its end when `base` was looked at
    base: int  # the queue's next offset then

    def look(self, next_offset: int, count: int) -> bool:
        """Take notice of where the queue ends now; whether that is new.

        Between decision and record nothing else enters the log: what a queue has grown by is ours,
        and what a power cut took from its end was ours first.
        """
        done = max(0, min(count, self.done + next_offset - self.base))
        moved = (done, next_offset) != (self.done, self.base)
        self.done, self.base = done, next_offset
        return moved


class Decision(msgspec.Struct):
    """These stages are to be in the log, whatever happens."""

    epoch: int
    stages: list[str]
    queues: list[QueueProgress]


class SinkRecord(msgspec.Struct):
    epoch: int = -1  # the last that was committed
    decision: Decision | None = None


_encode_head: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(StagedHead).decode


class OpenStage:
    """A stage that is being written. Raises StoreDamaged, DiskFull."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.batches = self.size = 0
        if os.fstat(self._descriptor).st_size:
            for _, _, self.size in _entries(path):
                self.batches += 1
            os.ftruncate(self._descriptor, self.size)

    def append(self, head: StagedHead, batch: memoryview) -> int:
        """Add one batch, whole or not at all; bytes taken."""
        packed = _encode_head(head)
        crc = _kernel.crc32(batch, _kernel.crc32(packed))
        fields = STAGE_ENTRY.pack(crc=crc, head_bytes=len(packed), batch_bytes=len(batch))
        parts: list[bytes | memoryview] = [fields, packed, batch]
        wanted = sum(len(part) for part in parts)
        try:
            written = os.pwritev(self._descriptor, parts, self.size)
            if written != wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self.path}: no room for {wanted} bytes more") from None
            raise
        self.size += wanted
        self.batches += 1
        return wanted

    def make_durable(self) -> None:
        """Sync it and give it its name as a closed one. Any thread may do that."""
        os.fdatasync(self._descriptor)
        self.path.rename(self.path.with_name(self.path.name.removesuffix(OPEN) + CLOSED))
        sync_folder(self.path.parent)
        sync_folder(self.path.parent.parent)

    def close(self) -> None:
        os.close(self._descriptor)


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
    if _kernel.crc32(view[begin:end]) != fields["crc"]:
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
        self.size = sum(each.stat().st_size for each in self.folder.glob("*/*.*"))  # bytes

    def _path(self, sink: str, epoch: int, stage: str, suffix: str) -> Path:
        return self.folder / sink / f"{epoch}.{stage}{suffix}"

    # --- writing ---

    def open(self, sink: str, epoch: int, stage: str) -> OpenStage:
        """To be added to. Raises MessageNotFound when it is closed already."""
        path = self._path(sink, epoch, stage, OPEN)
        found = self._open.get(path)
        if found is None:
            if self.is_closed(sink, epoch, stage):
                raise MessageNotFound(f"stage {stage} of {sink} is closed")
            found = self._open[path] = OpenStage(path)
        return found

    def is_closed(self, sink: str, epoch: int, stage: str) -> bool:
        return self._path(sink, epoch, stage, CLOSED).exists()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def let_go(self, opened: OpenStage) -> None:
        if self._open.pop(opened.path, None) is not None:
            opened.close()

    # --- reading ---

    def batches(
        self, sink: str, epoch: int, stages: list[str]
    ) -> Generator[tuple[StagedHead, memoryview], None, None]:
        """What closed stages hold. Raises MessageNotFound, StoreDamaged."""
        for stage in stages:
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
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{RECORD}-new")
        try:
            with made.open("wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{made}: {os.strerror(error.errno)}") from None
            raise
        made.replace(path)
        sync_folder(path.parent)
        self._records[sink] = record

    def decided(self) -> list[str]:
        """Sinks with something that has to be finished."""
        sinks = sorted(path.parent.name for path in self.folder.glob(f"*/{RECORD}"))
        return [sink for sink in sinks if self._is_decided(sink)]

    def _is_decided(self, sink: str) -> bool:
        try:
            return self.record(sink).decision is not None
        except StoreDamaged as error:
            log.error("%s; the sink cannot go on", error)
            return False

    # --- cleaning ---

    def drop(self, sink: str, epoch: int, stages: list[str]) -> None:
        for stage in stages:
            for suffix in (OPEN, CLOSED):
                self._remove(self._path(sink, epoch, stage, suffix))

    def drop_up_to(self, sink: str, epoch: int) -> None:
        """All stages of an epoch and of those before it."""
        for path in self._stages(sink):
            number = path.name.partition(".")[0]
            if not number.isdigit() or int(number) <= epoch:
                self._remove(path)

    def sweep(self, older_than_s: float, records_older_than_s: float) -> int:
        """Remove stages, then records of sinks, that nobody has touched for so long; how many."""
        removed, now = 0, time.time()
        for folder in self.folder.glob("*"):
            if self._is_decided(folder.name):
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

    def _stages(self, sink: str) -> list[Path]:
        return list((self.folder / sink).glob("*.*"))

    def _remove(self, path: Path) -> None:
        opened = self._open.get(path)
        if opened is not None:
            self.let_go(opened)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self.size -= size

    def close(self) -> None:
        for opened in list(self._open.values()):
            self.let_go(opened)
