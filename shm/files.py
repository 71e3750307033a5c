"""Files of the store as files: names, creation, cutting, the lock and the marker of a bad end."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from cometmq.protocol.errors import DiskFull, StoreDamaged, StoreError, StoreLocked, StoreNotOurs
from cometmq.shm.layout import CHECKPOINT, CHECKPOINT_FILE_BYTES

log = logging.getLogger(__name__)

COMMITLOG_DIR: Final = "commitlog"
CONSUME_QUEUE_DIR: Final = "consumequeue"
CONFIG_DIR: Final = "config"
INDEX_DIR: Final = "index"
STAGING_DIR: Final = "cometmq.tmp"  # segments in the making; never in the strict directories
RETIRED_DIR: Final = "cometmq.retired"  # segments that have left the log; see shm/retired.py
LOCK_FILE: Final = "lock"
ABORT_FILE: Final = "abort"
CHECKPOINT_FILE: Final = "checkpoint"

_ZERO_RANGE: Final = 0x10 | 0x01  # FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE: Final = 0x02 | 0x01
_WRITE_RANGE: Final = 2  # SYNC_FILE_RANGE_WRITE
_WRITE_RANGE_AND_WAIT: Final = 1 | 2 | 4  # ..._WAIT_BEFORE, ..._WRITE, ..._WAIT_AFTER
_CHUNK: Final = 1_048_576
FLOCK: Final = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid
_libc: Final = ctypes.CDLL(None, use_errno=True)
# Locks of this process, by device and inode of the file, and byte; with the process's id, since a
# fork inherits the table and not the locks.
_held: Final[dict[tuple[int, int, int], int]] = {}


def segment_name(start: int) -> str:
    return f"{start:020d}"


def sync_folder(folder: Path) -> None:
    """Make creations, renames and deletions in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file anew, durably: it is the old or the new one. Raises DiskFull, OSError."""
    made = path.with_name(f"{path.name}.new")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError as error:
        made.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: no room for {len(content)} bytes") from None
        raise
    finally:
        os.close(descriptor)
    os.rename(made, path)
    sync_folder(path.parent)


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
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    except FileNotFoundError:
        return []
    starts = []
    for position, name in enumerate(names):
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # the cleaner has it since it was listed
            continue
        if size == 0 and position == len(names) - 1:
            continue
        if size != segment_bytes:
            raise StoreNotOurs(f"{path}: {size} bytes, segments here have {segment_bytes}")
        if not (name.isascii() and name.isdigit()) or int(name) % segment_bytes:
            raise StoreNotOurs(
                f"{path}: not the start offset of a segment of {segment_bytes} bytes"
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
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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


@contextmanager
def no_room_is_disk_full(path: Path) -> Iterator[None]:
    """Whatever takes space may find none: a file's name and a folder take some, too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: {error.strerror}") from error
        raise


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


def map_segment(path: Path, segment_bytes: int, *, writable: bool) -> mmap.mmap:
    """Map a whole segment. Raises StoreNotOurs when it has another size."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        size = os.fstat(descriptor).st_size
        if size != segment_bytes:
            raise StoreNotOurs(f"{path}: {size} bytes, segments here have {segment_bytes}")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(descriptor, segment_bytes, access=access)
    finally:
        os.close(descriptor)


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


def forget_tail(path: Path, start: int) -> None:
    """Turn reserved space that was faulted in ahead, and never used, back into space that is only
    reserved: nobody has to write its zeros to the disk, or to read them at the next start.

    Where the file system cannot do that, nothing happens.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        count = os.fstat(descriptor).st_size - start
        if count > 0:
            _libc.fallocate(
                descriptor, _ZERO_RANGE, ctypes.c_longlong(start), ctypes.c_longlong(count)
            )
    finally:
        os.close(descriptor)


def _zero(descriptor: int, start: int, count: int) -> None:
    for mode in (_ZERO_RANGE, _PUNCH_HOLE):
        done = _libc.fallocate(descriptor, mode, ctypes.c_longlong(start), ctypes.c_longlong(count))
        if done == 0:
            if mode == _PUNCH_HOLE:
                os.posix_fallocate(descriptor, start, count)
            return
    for at in range(start, start + count, _CHUNK):
        os.pwrite(descriptor, bytes(min(_CHUNK, start + count - at)), at)


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Have the system begin to write a range's dirty pages. Raises OSError."""
    _sync_file_range(descriptor, start, count, _WRITE_RANGE)


def write_out(descriptor: int, start: int, count: int) -> None:
    """Write a range's dirty pages and wait for it. Raises OSError.

    No promise for a power cut: the device is not told to flush.
    """
    _sync_file_range(descriptor, start, count, _WRITE_RANGE_AND_WAIT)


def _sync_file_range(descriptor: int, start: int, count: int, flags: int) -> None:
    failed = _libc.sync_file_range(
        descriptor, ctypes.c_longlong(start), ctypes.c_longlong(count), ctypes.c_uint(flags)
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class StoreLock:
    """RocketMQ's `lock`: an exclusive POSIX record lock on a byte of that file.

    Byte 0 is the one RocketMQ takes; the commitlog process holds it, and the kernel releases it
    when that process dies. Byte 1 is the family's: the supervisor holds it over a restart of the
    commitlog process. Byte 2 is held by all of them together, see `lock_for_family`. The lock goes
    when any descriptor of the file in this process is closed.
    """

    FILE: Final = b"lock"

    def __init__(self, store: Path, byte: int) -> None:
        self.path = store / LOCK_FILE
        _check_not_held_here(self.path, byte)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            holder = self._holder(byte)
            os.close(self._descriptor)
            raise StoreLocked(f"{self.path} is held by {holder}") from None
        found = os.fstat(self._descriptor)
        self._key = found.st_dev, found.st_ino, byte
        _held[self._key] = os.getpid()
        if byte == 0:
            os.pwrite(self._descriptor, self.FILE, 0)
            os.fsync(self._descriptor)

    def _holder(self, byte: int) -> str:
        return describe_process(_lock_holder(self._descriptor, byte, 1) or 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            _held.pop(self._key, None)
            os.close(self._descriptor)
            self._descriptor = -1


def _check_not_held_here(path: Path, *held_bytes: int) -> None:
    """Raises StoreLocked without opening the file: to close it again would release the lock."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    for byte in held_bytes:
        if _held.get((found.st_dev, found.st_ino, byte)) == os.getpid():
            raise StoreLocked(f"{path} is held by this process")


def lock_for_family(store: Path, timeout_s: float) -> int:
    """Lock byte 2 of `lock` for this process and all that it forks; a descriptor to keep open.

    The kernel releases the lock when the last of them is gone. Without it a broker could begin to
    recover while children of a killed one are still at work. Waits for such children; raises
    StoreLocked at once where a supervisor lives, or a writer that is none of such children (a real
    RocketMQ, a service that has not noticed yet that its broker was killed), and when the time is
    over.
    """
    descriptor = os.open(store / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    holder = _lock_holder(descriptor, 1, 1)
    taken = threading.Event()

    def take() -> None:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 2, 1, 0))
        taken.set()

    if holder is None:
        waiter = threading.Thread(target=take, daemon=True)  # a blocking call without a timeout
        waiter.start()
        waiter.join(timeout_s)
        if taken.is_set():
            writer = _lock_holder(descriptor, 0, 1)
            if writer is None:
                return descriptor
            os.close(descriptor)
            raise StoreLocked(f"{store / LOCK_FILE} is held by {describe_process(writer)}")
    who = "processes of a killed broker" if holder is None else describe_process(holder)
    raise StoreLocked(f"{store / LOCK_FILE} is held by {who}")


def _lock_holder(descriptor: int, byte: int, count: int) -> int | None:
    """The process that holds a lock on one of these bytes."""
    wanted = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
    kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else int(pid)


def check_not_in_use(store: Path) -> None:
    """Look at the store's lock without taking it. Raises StoreLocked."""
    _check_not_held_here(store / LOCK_FILE, 0, 1)
    try:
        descriptor = os.open(store / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        pid = _lock_holder(descriptor, 0, 3)
    finally:
        os.close(descriptor)
    if pid is not None:
        raise StoreLocked(f"{store / LOCK_FILE} is held by {describe_process(pid)}")


def describe_process(pid: int) -> str:
    if pid <= 0:  # an open file description's lock: several processes have it
        return "processes of a broker"
    try:
        command = " ".join(psutil.Process(pid).cmdline())[:120]
    except psutil.Error:
        return f"process {pid}"
    return f"process {pid} ({command})"


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
        """Write the words, durably. In one sector, so it is the old or the new state."""
        self.words.update(words)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size != CHECKPOINT_FILE_BYTES:
                os.ftruncate(descriptor, CHECKPOINT_FILE_BYTES)
            os.pwrite(descriptor, CHECKPOINT.pack(**self.words), 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def check_store_folder(store: Path) -> None:
    """Refuse a folder that holds other things than a store. Creates what is missing.

    Raises StoreNotOurs naming the first thing that looks like somebody else's.
    """
    known = {
        COMMITLOG_DIR, CONSUME_QUEUE_DIR, CONFIG_DIR, STAGING_DIR, LOCK_FILE, ABORT_FILE,
        CHECKPOINT_FILE, INDEX_DIR, "abort.bak", "consumequeue_ext", "batchconsumequeue",
        "timerwheel", "timerlog", "compaction", "epochFileCheckpoint", "brokerIdentity", "kvStore",
    }  # fmt: skip
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
    try:
        for folder in (COMMITLOG_DIR, CONSUME_QUEUE_DIR, CONFIG_DIR):
            (store / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{store}: {error.strerror}") from None
