"""One log file for all processes of a broker, and its rotation."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Final

from cometmq.shm.os.durable import PRIVATE, SHARED

FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
OPEN_TRIES: Final = 3


class LogFile(logging.Handler):
    """Handler that appends whole lines to a file to which other processes append as well.

    A process that finds the file full renames it to `.1` (`.1` to `.2` and so on), under a lock on
    the file itself. The other processes notice that the name refers to another file, also if
    another program, such as logrotate, has moved it.

    The first file has mode 0640, whatever the umask of a process is. An existing file keeps its
    mode; new files get the mode and group of the file before them.

    Args:
        bytes_max: size from which a file is replaced by a new one; 0: never.
        count: number of old files to keep.

    Raises OSError when it cannot be opened.
    """

    def __init__(self, path: Path, bytes_max: int, count: int) -> None:
        super().__init__()
        self._path = path
        self._bytes_max = bytes_max
        self._count = count
        self._descriptor = self._open(None)

    def _open(self, before: os.stat_result | None) -> int:
        """Open the log file, or create it.

        Args:
            before: status of the file that a new one follows; None: there is none.
        """
        for _ in range(OPEN_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self._path, FLAGS)
            try:
                descriptor = os.open(self._path, FLAGS | os.O_CREAT | os.O_EXCL, PRIVATE)
            except FileExistsError:
                continue  # another process has just created it
            with contextlib.suppress(OSError):  # logging works without the group, too
                if before is not None and before.st_gid != os.fstat(descriptor).st_gid:
                    os.fchown(descriptor, -1, before.st_gid)
            with contextlib.suppress(OSError):
                mode = SHARED if before is None else stat.S_IMODE(before.st_mode)
                os.fchmod(descriptor, mode)
            return descriptor
        return os.open(self._path, FLAGS | os.O_CREAT, SHARED)  # a dangling link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # of the new file: the old one takes the line
                self._follow_name()
                if self._bytes_max and os.fstat(self._descriptor).st_size >= self._bytes_max:
                    self._rotate()
            os.write(self._descriptor, line)  # one write: lines of several processes do not mix
        except OSError:
            self.handleError(record)

    def _follow_name(self) -> None:
        """Open the file anew if the name stands for another one, or for none."""
        if not self._has_name():
            self._open_anew()

    def _has_name(self) -> bool:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        own = os.fstat(self._descriptor)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _open_anew(self) -> None:
        """The old one is closed last: if this fails, the number must not become another file's."""
        old, self._descriptor = self._descriptor, self._open(os.fstat(self._descriptor))
        os.close(old)

    def _rotate(self) -> None:
        locked = os.dup(self._descriptor)
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
            if self._has_name():
                self._rename()
            self._open_anew()
        finally:
            fcntl.flock(locked, fcntl.LOCK_UN)
            os.close(locked)

    def _rename(self) -> None:
        if not self._count:
            os.unlink(self._path)
        for number in range(self._count, 0, -1):
            before = self._path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.rename(before, self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        super().close()
