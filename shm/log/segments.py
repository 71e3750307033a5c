"""The log's next segments: made fresh, or from one that has left the log.

    retired/N --rename--> cometmq.tmp/recycled --zeros, synced--> renamed to commitlog/<next start>
                          cometmq.tmp/fresh    --sparse--------> renamed to commitlog/<next start>

A fresh segment takes file space as it is reserved, ahead of what is written (`reserve`); a
recycled one has its own.

What lies in `commitlog/` was all zeros when it came there, and on the disk too: not even after a
power cut can bytes of an earlier life be taken for records, by us or by a RocketMQ that opens the
store. Killed at any line, the next one finds a half-made segment in staging and begins it again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import DiskFull
from cometmq.shm.os import libc
from cometmq.shm.os.ballast import BASE_BYTES, free_bytes
from cometmq.shm.os.durable import no_room_is_disk_full
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    RETIRED_DIR,
    STAGING_DIR,
    punch_hole,
    reserve,
    segment_name,
    write_out,
)

log = logging.getLogger(__name__)

STEP_BYTES: Final = 8 * 1_048_576
PAGE: Final = 4096
_WRITE_BYTES: Final = 1_048_576


class SegmentMaker:
    """Makes segments. Has one user, the allocator.

    Args:
        small_pages: write the zeros of a recycled segment 4 KiB at a time, so that the page cache
            holds them in folios of one page: a commit then costs one page of disk traffic and
            not a whole folio, of up to 1 MiB.
    """

    def __init__(self, store: Path, segment_bytes: int, *, small_pages: bool) -> None:
        self._log_folder = store / COMMITLOG_DIR
        self._retired = store / RETIRED_DIR
        self._staging = store / STAGING_DIR
        self._segment_bytes = segment_bytes
        self._small_pages = small_pages
        self._zeros = bytes(PAGE if small_pages else _WRITE_BYTES)
        self._descriptor = -1  # of the segment that is being recycled
        self._zeroed = 0
        self.fresh_count = 0
        self.recycled_count = 0

    @property
    def _fresh_path(self) -> Path:
        return self._staging / "fresh"

    @property
    def _recycled_path(self) -> Path:
        return self._staging / "recycled"

    def begin(self) -> None:
        """Remove what a killed one left half made; a half recycled one is begun again."""
        self._staging.mkdir(exist_ok=True)
        self._fresh_path.unlink(missing_ok=True)

    def reserves(self) -> bool:
        """Whether the file system has fallocate; else space is taken by writing, which is slow."""
        made = self._fresh_path
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            libc.fallocate(descriptor, 0, 0, PAGE)
        except OSError as error:
            return error.errno != errno.EOPNOTSUPP
        else:
            return True
        finally:
            os.close(descriptor)
            made.unlink()

    # --- fresh ---

    def make(self, start: int) -> None:
        """A segment without file space, unless there is one. Raises DiskFull or OSError."""
        path = self._log_folder / segment_name(start)
        if path.exists():
            return
        made = self._fresh_path
        with no_room_is_disk_full(path):
            descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, self._segment_bytes)
            os.rename(made, path)
        except OSError as error:
            made.unlink(missing_ok=True)
            if error.errno != errno.EFBIG:
                raise
            raise DiskFull(
                f"{path}: a file of {self._segment_bytes} bytes is over this process's limit "
                "(ulimit -f)"
            ) from error
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.fresh_count += 1

    def reserve(self, start: int, begin: int, end: int) -> int:
        """Take file space from byte `begin` to `end` of a segment, or as much as there is; up to
        where. Raises DiskFull where there is none, OSError.

        It is the same for a segment that was found, which may be sparse: RocketMQ makes them so.
        """
        path = self._log_folder / segment_name(start)
        free = free_bytes(self._log_folder)
        room = (free - BASE_BYTES) // PAGE * PAGE
        if room <= 0:
            raise DiskFull(
                f"{path}: {free} bytes are free, and {BASE_BYTES} of them are left for what else "
                f"a broker writes: the log needs {end - begin} more"
            )
        end = min(end, begin + room)
        with _opened(path) as descriptor:
            reserve(descriptor, begin, end - begin, path)
        return end

    def give_back(self, start: int, begin: int, end: int) -> None:
        """Free the file space of whole blocks from byte `begin` to `end` of a segment, where the
        file system can do that. They are zeros before and after."""
        path = self._log_folder / segment_name(start)
        with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
            punch_hole(descriptor, begin, end)

    # --- recycled ---

    @property
    def is_recycling(self) -> bool:
        return self._descriptor >= 0

    def take_retired(self) -> bool:
        """Begin to recycle, if there is anything; `step` does the work."""
        while self._recycled_path.exists() or self._take_oldest():
            if self._open_taken():
                return True
        return False

    def _take_oldest(self) -> bool:
        try:
            names = sorted(filter(_is_plain, os.listdir(self._retired)))
        except FileNotFoundError:
            return False
        for name in names:
            try:
                os.rename(self._retired / name, self._recycled_path)
            except FileNotFoundError:  # the cleaner was faster
                continue
            return True
        return False

    def _open_taken(self) -> bool:
        """Open what was taken; what is no segment of this store's size is removed."""
        path = self._recycled_path
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._segment_bytes:
            log.warning(
                "a retired segment of %d bytes cannot be used again, they have %d here",
                status.st_size,
                self._segment_bytes,
            )
            path.unlink()
            return False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._zeroed = 0
        return True

    def step(self) -> bool:
        """Zero the next piece, through to the disk; whether that was the last.

        Raises DiskFull or OSError; the segment is given up then.
        """
        try:
            if not self._zeroed:
                self._prepare()
            return self._zero_piece()
        except (DiskFull, OSError):
            self.close()
            self._recycled_path.unlink(missing_ok=True)
            raise

    def _prepare(self) -> None:
        reserve(self._descriptor, 0, self._segment_bytes, self._recycled_path)  # it may be sparse
        if self._small_pages:  # its cached pages may be large ones
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _zero_piece(self) -> bool:
        begin = self._zeroed
        end = min(begin + STEP_BYTES, self._segment_bytes)
        for at in range(begin, end, len(self._zeros)):
            os.pwrite(self._descriptor, self._zeros[: end - at], at)
        write_out(self._descriptor, begin, end - begin)
        self._zeroed = end
        if end < self._segment_bytes:
            return False
        os.fdatasync(self._descriptor)
        return True

    def publish(self, start: int) -> None:
        """Give the recycled segment its new name, unless a segment has it already."""
        assert self._zeroed == self._segment_bytes, "bytes of an earlier life are left"
        path = self._log_folder / segment_name(start)
        assert not path.exists(), f"{path} is there already"
        os.rename(self._recycled_path, path)
        self.close()
        self.recycled_count += 1

    def close(self) -> None:
        """Leave what is half done to the next one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_plain(name: str) -> bool:
    return len(name) == 20 and name.isascii() and name.isdigit()
