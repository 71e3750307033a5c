"""Locks of the store: which processes have it, taken on bytes of RocketMQ's `lock`.

byte 0   the writer's; RocketMQ takes this one
byte 1   the supervisor's, over restarts of the writer
byte 2   all processes of a broker together
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import StoreLocked
from cometmq.shm.os.files import LOCK_FILE
from cometmq.shm.os.processes import command_of

FLOCK: Final = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid
# Locks of this process, by device and inode of the file, and byte; with the process's id, since a
# fork inherits the table and not the locks.
_held: Final[dict[tuple[int, int, int], int]] = {}


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
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            holder = self._holder(byte)
            os.close(self._descriptor)
            raise StoreLocked(f"{self.path} is held by {holder}") from None
        found = os.fstat(self._descriptor)
        self._key = found.st_dev, found.st_ino, byte
        _held[self._key] = os.getpid()
        # Never rewritten: from its time the next start knows which program opened the store last.
        if os.pread(self._descriptor, len(self.FILE), 0) != self.FILE:
            os.pwrite(self._descriptor, self.FILE, 0)
            os.fdatasync(self._descriptor)

    def _holder(self, byte: int) -> str:
        return describe_process(_lock_holder(self._descriptor, byte, 1) or 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            _held.pop(self._key, None)
            os.close(self._descriptor)
            self._descriptor = -1


def lock_state(store: Path) -> str:
    """Return size and modification time of the file `lock`; empty if there is none.

    RocketMQ rewrites the file, with the same content, whenever it opens the store. A CometMQ broker
    does not rewrite it.
    """
    try:
        found = (store / LOCK_FILE).stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_size}@{found.st_mtime_ns}"


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
    descriptor = os.open(store / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def _lock_holder_by_proc(path: Path) -> int | None:
    """The same without opening the file, for all bytes; -1 for the processes of a broker."""
    inode = str(path.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()  # 1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE FIRST LAST
        if len(words) >= 8 and words[-3].rpartition(":")[2] == inode:
            return int(words[-4])
    return None


def check_not_in_use(store: Path) -> None:
    """Look at the store's lock without taking it. Raises StoreLocked."""
    _check_not_held_here(store / LOCK_FILE, 0, 1)
    try:
        descriptor = os.open(store / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except PermissionError:  # it is the owner's alone, also where a group may read the store
        pid = _lock_holder_by_proc(store / LOCK_FILE)
    else:
        try:
            pid = _lock_holder(descriptor, 0, 3)
        finally:
            os.close(descriptor)
    if pid is not None:
        raise StoreLocked(
            f"{store / LOCK_FILE} is held by {describe_process(pid)}: end it first (Ctrl-C, or "
            "kill without -9)"
        )


def describe_process(pid: int) -> str:
    if pid <= 0:  # an open file description's lock: several processes have it
        return "processes of a broker"
    command = command_of(pid)
    return f"process {pid} ({command[:120]})" if command else f"process {pid}"
