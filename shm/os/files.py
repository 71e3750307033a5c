"""Files of the store as files: names, creation, cutting, mapping, and RocketMQ's checkpoint."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import DiskFull, StoreDamaged, StoreError, StoreNotOurs
from cometmq.shm.kernel.codec import FileMap, file_maps
from cometmq.shm.kernel.layout import CHECKPOINT, CHECKPOINT_FILE_BYTES
from cometmq.shm.os import libc
from cometmq.shm.os.durable import keep_words, no_room_is_disk_full

log = logging.getLogger(__name__)

COMMITLOG_DIR: Final = "commitlog"
CONSUME_QUEUE_DIR: Final = "consumequeue"
CONFIG_DIR: Final = "config"
INDEX_DIR: Final = "index"
STAGING_DIR: Final = "cometmq.tmp"  # segments in the making; never in the strict directories
RETIRED_DIR: Final = "cometmq.retired"  # segments that have left the log; see shm/log/retired.py
# Written by releases that stored filter bitmaps. An orderly shutdown removes them.
FILTERS_FILE: Final = "cometmq.filters"
FILTER_MAPS_DIR: Final = "cometmq.filtermaps"
LOCK_FILE: Final = "lock"
ABORT_FILE: Final = "abort"
CHECKPOINT_FILE: Final = "checkpoint"
SLAVE_FILE: Final = "cometmq.slave"  # the last broker on this store copied a master

_CHUNK: Final = 1_048_576
_BLOCK: Final = 65_536  # at most, of a file system


def segment_name(start: int) -> str:
    return f"{start:020d}"


def remove_folder(folder: Path) -> None:
    """A folder of ours with plain files in it, if it is there."""
    if folder.is_dir():
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


def list_segments(folder: Path, segment_bytes: int) -> list[int]:
    """Start offsets of the segments in a folder, ascending.

    As RocketMQ, every regular file must be a segment of exactly the configured size; sub-folders
    are passed over, and so is an empty file that sorts last. Raises StoreNotOurs.
    """
    try:
        entries = sorted(
            (entry for entry in os.scandir(folder) if not entry.is_dir()),
            key=lambda entry: entry.name,
        )
    except FileNotFoundError:
        return []
    starts = []
    for position, entry in enumerate(entries):
        name = entry.name
        try:
            size = entry.stat().st_size
        except FileNotFoundError:  # the cleaner has it since it was listed
            continue
        if size == 0 and position == len(entries) - 1:
            continue
        if size != segment_bytes:
            raise StoreNotOurs(f"{entry.path}: {size} bytes, segments here have {segment_bytes}")
        if not (name.isascii() and name.isdigit()) or int(name) % segment_bytes:
            raise StoreNotOurs(
                f"{entry.path}: not the start offset of a segment of {segment_bytes} bytes"
            )
        starts.append(int(name))
    return starts


def create_segment(
    folder: Path, start: int, segment_bytes: int, staging: Path, *, reserve_bytes: int
) -> Path:
    """Make a zero-filled segment. It appears under its name whole, or not at all.

    Args:
        reserve_bytes: how much file space is taken at once; the rest is sparse.

    Raises DiskFull when the space is not there.
    """
    path = folder / segment_name(start)
    made = staging / f"{os.getpid()}-{segment_name(start)}"
    with no_room_is_disk_full(path):
        staging.mkdir(exist_ok=True)
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, segment_bytes)
            reserve(descriptor, 0, reserve_bytes, made)
            folder.mkdir(parents=True, exist_ok=True)
            os.rename(made, path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    return path


def reserve(descriptor: int, start: int, count: int, path: Path) -> None:
    """Take file space, so that a store into the mapping can never fail. Raises DiskFull."""
    if count <= 0:
        return
    try:
        os.posix_fallocate(descriptor, start, count)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: no room for {count} bytes more on the disk") from error
        raise


def map_segment(path: Path, segment_bytes: int, *, writable: bool) -> FileMap:
    """Map a whole segment. Raises StoreNotOurs when it has another size, OSError."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        size = os.fstat(descriptor).st_size
        if size != segment_bytes:
            raise StoreNotOurs(f"{path}: {size} bytes, segments here have {segment_bytes}")
        return FileMap(descriptor, segment_bytes, writable)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OSError(
            errno.ENOMEM,
            f"this process has {file_maps()} segments mapped, the system allows it no more: raise "
            f"vm.max_map_count ({_max_map_count()})",
            str(path),
        ) from None
    finally:
        os.close(descriptor)


class Pages(Enum):
    """How pages of the log that are not in memory come, where they are written to."""

    #: With as many around them as the disk's read-ahead says. Where that is 8 MiB it takes up to
    #: 50 ms, in which no other process has the processor.
    AROUND = auto()
    #: Alone: SYNC_FLUSH would have to write a large folio as a whole.
    SINGLE = auto()
    #: In folios of 2 MiB: for a writer that may wait for the one that it is in while that is
    #: flushed.
    LARGE = auto()


def map_log(path: Path, segment_bytes: int, pages: Pages) -> FileMap:
    """Map a segment of the log to write to it. Raises what `map_segment` does."""
    memory = map_segment(path, segment_bytes, writable=True)
    if pages is Pages.LARGE:
        with contextlib.suppress(OSError):  # a system without
            memory.advise(mmap.MADV_HUGEPAGE)
            memory.advise(mmap.MADV_RANDOM)  # one, and none beside it
    elif pages is Pages.SINGLE:
        memory.advise(mmap.MADV_RANDOM)
    return memory


def _max_map_count() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530  # what Linux has if nobody changes it


# Of segments in this process, for all that keep them mapped because they may be needed again. The
# other half of what the system allows is for the interpreter, libraries and the rest of a service.
FILE_MAPS_MAX: Final = _max_map_count() // 2


def maps_are_many() -> bool:
    """Whether who wants to map another segment has to unmap some of his first."""
    return file_maps() >= FILE_MAPS_MAX


def data_ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the file may hold something else than zeros."""
    at = start
    while at < end:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        if begin >= end:
            return
        at = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE))
        yield begin, at


def dirty_chunks(descriptor: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) of each chunk in [start, end) that is not all zeros."""
    zeros = bytes(_CHUNK)
    for begin, stop in data_ranges(descriptor, start, end):
        for at in range(begin, stop, _CHUNK):
            chunk = os.pread(descriptor, min(_CHUNK, stop - at), at)
            if chunk != zeros[: len(chunk)]:
                yield at, chunk


def count_dirty(descriptor: int, start: int, end: int, zeros_max: int | None = None) -> int:
    """Bytes from `start` up to the last one that is not zero.

    Args:
        zeros_max: look no further behind so many zeros.
    """
    last = start
    while True:
        stop = end if zeros_max is None else min(end, last + zeros_max)
        before = last
        for at, chunk in dirty_chunks(descriptor, last, stop):
            last = at + len(chunk.rstrip(b"\0"))
        if stop == end or last == before:
            return last - start


def zero_tail(path: Path, start: int, zeros_max: int | None = None) -> int:
    """Make everything from byte `start` on zero, durably; how many bytes were not.

    What is cut must not be found again: stale bytes behind the end that happen to form a record
    would be taken for one after the next crash.

    Args:
        zeros_max: behind so many zeros nothing was written, so that the rest need not be read.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        end = os.fstat(descriptor).st_size
        dirty = count_dirty(descriptor, start, end, zeros_max)
        if dirty:
            _zero(descriptor, start, dirty)
            os.fdatasync(descriptor)
        return dirty
    finally:
        os.close(descriptor)


def punch_hole(descriptor: int, begin: int, end: int) -> None:
    """Give back the file space of whole blocks: nobody has to write their zeros to the disk either,
    or to read them at the next start. The file's size stays, and what was there is zeros.

    Where the file system cannot do that, nothing happens.
    """
    begin = -(-begin // _BLOCK) * _BLOCK
    if end > begin:
        with contextlib.suppress(OSError):
            libc.fallocate(descriptor, libc.PUNCH_HOLE, begin, end - begin)


def _zero(descriptor: int, start: int, count: int) -> None:
    for mode in (libc.ZERO_RANGE, libc.PUNCH_HOLE):
        try:
            libc.fallocate(descriptor, mode, start, count)
        except OSError:
            continue  # a file system that cannot do that
        if mode == libc.PUNCH_HOLE:
            os.posix_fallocate(descriptor, start, count)
        return
    for at in range(start, start + count, _CHUNK):
        os.pwrite(descriptor, bytes(min(_CHUNK, start + count - at)), at)


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Have the system begin to write a range's dirty pages. Raises OSError."""
    libc.sync_file_range(descriptor, start, count, libc.WRITE_RANGE)


def write_out(descriptor: int, start: int, count: int) -> None:
    """Write a range's dirty pages and wait for it. Raises OSError.

    No promise for a power cut: the device is not told to flush.
    """
    libc.sync_file_range(descriptor, start, count, libc.WRITE_RANGE_AND_WAIT)


class Checkpoint:
    """RocketMQ's `checkpoint`: up to which store times log and queues are safely on the disk."""

    def __init__(self, store: Path) -> None:
        self.path = store / CHECKPOINT_FILE
        self.words = dict.fromkeys(CHECKPOINT.fields, 0)
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        if not content:
            return  # whoever made it got no further: it says as little as none
        if len(content) < CHECKPOINT.size:
            raise StoreDamaged(
                f"{self.path}: {len(content)} bytes, {CHECKPOINT_FILE_BYTES} expected"
            )
        self.words = CHECKPOINT.unpack(content)

    @property
    def min_timestamp(self) -> int:
        """Records older than this need no second look. RocketMQ keeps 3 s of slack."""
        oldest = min(self.words["physic_msg_timestamp"], self.words["logics_msg_timestamp"])
        return max(0, oldest - 3000)

    def store(self, **words: int) -> None:
        """Write the words, durably: it is the old or the new state. Raises OSError."""
        self.words.update(words)
        keep_words(self.path, CHECKPOINT.pack(**self.words), size=CHECKPOINT_FILE_BYTES)


def check_store_folder(store: Path) -> None:
    """Refuse a folder that holds other things than a store. Changes nothing.

    Raises StoreNotOurs with the name of the first foreign file; StoreError for a dangling link.
    """
    known = {
        COMMITLOG_DIR, CONSUME_QUEUE_DIR, CONFIG_DIR, STAGING_DIR, LOCK_FILE, ABORT_FILE,
        CHECKPOINT_FILE, INDEX_DIR, "abort.bak", "consumequeue_ext", "batchconsumequeue",
        "timerwheel", "timerlog", "compaction", "epochFileCheckpoint", "brokerIdentity", "kvStore",
    }  # fmt: skip
    for path in (*reversed(store.parents), store, *(store / name for name in sorted(known))):
        if path.is_symlink() and not path.exists():
            raise StoreError(
                f"{path} is a link to {path.readlink()}, which does not exist: mount the disk "
                "that has it, or create the folder"
            )
    if store.exists() and not store.is_dir():
        raise StoreNotOurs(f"{store} is a file, a store is a directory")
    if store.is_dir() and not (store / COMMITLOG_DIR).is_dir():
        foreign = [
            entry.name
            for entry in os.scandir(store)
            if entry.name not in known and not entry.name.startswith("cometmq.")
        ]
        if foreign:
            raise StoreNotOurs(
                f"{store} has no {COMMITLOG_DIR}/ but {min(foreign)!r}: it is not a store; "
                "name an empty or a new directory"
            )


def make_store_folders(store: Path) -> None:
    """Raises StoreError."""
    for folder in (COMMITLOG_DIR, CONSUME_QUEUE_DIR, CONFIG_DIR):
        try:
            (store / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{error.filename or store / folder}: {error.strerror}") from None
