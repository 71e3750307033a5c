"""Durable small files: replaced whole by write, fsync, rename and fsync of the folder.

    path.tmp --written, synced--> renamed to path --folder synced--> it survives a power cut

Every small file of a store, and of what belongs to one, is written by `replace_file`, and killed at
any line, or cut off from power, it holds the old content or the new one.

- A temporary file that a killed writer left is removed, not opened: neither its mode nor what it
  may be a link to is taken over.
- Where the disk is full, or anything else fails before the rename, the temporary file goes and the
  old content stays. If it is only the folder that cannot be synced, the new one stands.
- The mode is the one named, less the process's umask; see shm/state/permission.py.
- A file has one writer at a time.

What is larger appears by `whole_file`. Two small files are overwritten in place instead, by
`keep_words`: they fit into one sector, and are written too often to be made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import DiskFull
from cometmq.shm.os import libc

SHARED: Final = 0o640  # what the umask leaves of it: the owner's, or the store's group's as well
PRIVATE: Final = 0o600
SECTOR_BYTES: Final = 512  # what a disk writes whole or not at all


def replace_file(path: Path, content: bytes | bytearray, *, mode: int = SHARED) -> None:
    """Write a small file anew, durably. Raises DiskFull, OSError."""
    with no_room_is_disk_full(path):
        put_in_place(write_beside(path, content, mode=mode), path)


def write_beside(
    path: Path,
    content: bytes | bytearray,
    *,
    mode: int = SHARED,
    durable: bool = True,
    several: bool = False,
) -> Path:
    """Write what `path` is to hold into a temporary file beside it, whose path is returned.

    Args:
        durable: sync it. What is renamed without may be empty after a power cut.
        several: processes may write it at the same time, each has a temporary file of its own.

    Raises OSError; then there is no temporary file.
    """
    made = beside(path, several=several)
    with contextlib.suppress(FileNotFoundError):
        made.unlink()
    file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        if durable:
            os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink()  # on a full disk, half a file is in the way
        raise
    finally:
        os.close(file)
    return made


def beside(path: Path, *, several: bool = False) -> Path:
    """The temporary file that is to become `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp" if several else f"{path.name}.tmp")


def put_in_place(made: Path, path: Path, *, durable: bool = True) -> None:
    """Give a temporary file its name, in place of what has that name. Raises OSError."""
    os.replace(made, path)
    if durable:
        sync_folder(path.parent)


@contextmanager
def whole_file(path: Path, made: Path) -> Iterator[Path]:
    """A large file that somebody else writes: `made` becomes `path` when it is whole and synced.

    It goes where the writing fails. Raises OSError.
    """
    try:
        yield made
        sync_file(made)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    put_in_place(made, path)


def keep_words(path: Path, words: bytes, *, size: int = 0, durable: bool = True) -> None:
    """Overwrite the beginning of a small file in place. In one sector, so that after a power cut it
    is the old or the new one.

    Args:
        size: bytes that the file has altogether, zeros behind the words; 0: as many as there are.

    Raises OSError.
    """
    assert len(words) <= SECTOR_BYTES, (path, len(words))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SHARED)
    try:
        if size and os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        os.pwrite(descriptor, words, 0)
        if durable:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """What was written to a file, by whomever, is on the disk. Raises OSError."""
    _sync(path, os.O_RDONLY, os.fsync)


def sync_data_if_there(path: Path) -> None:
    """As `sync_file`, of a file whose size and name are durable and that may have been removed."""
    with contextlib.suppress(FileNotFoundError):
        _sync(path, os.O_RDWR, os.fdatasync)


def sync_folder(folder: Path) -> None:
    """Make creations, renames and deletions in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY, os.fsync)


def sync_all(folder: Path) -> None:
    """Everything of the file system that the folder is on is on the disk. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY, libc.syncfs)


def _sync(path: Path, flags: int, sync: Callable[[int], object]) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def no_room_is_disk_full(path: Path) -> Iterator[None]:
    """Whatever takes space may find none: a file's name and a folder take some, too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: {error.strerror}") from error
        raise
