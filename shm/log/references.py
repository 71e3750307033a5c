"""References: segments of the log that are in use, counted over all processes.

A user of a segment holds a shared lock on one byte of `cometmq.references`, the byte of the
segment's number. The locks are those of the open file, not of the process (`F_OFD_SETLK`): two
users in one process do not disturb each other, a child that is forked keeps what it inherited, and
the kernel drops them with the last descriptor, however a process ends. Reading the file is enough,
so that others may look at a store which they must not write.

Nobody takes such a byte exclusively. The cleaner first moves a segment out of `commitlog/`, then
looks at its byte: who comes later finds no file, who came before is seen.
"""

from __future__ import annotations

import fcntl
import os
from itertools import islice
from pathlib import Path
from typing import Final

from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name
from cometmq.shm.os.locks import FLOCK
from cometmq.shm.os.processes import name_of, pids

REFERENCES_FILE: Final = "cometmq.references"


def create_references(store: Path) -> None:
    """The file stays from run to run: a user may outlive a broker."""
    os.close(os.open(store / REFERENCES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))


class References:
    """One user's references. Without the file no broker has ever cleaned there: none are needed."""

    def __init__(self, store: Path, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        try:
            self._descriptor = os.open(store / REFERENCES_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._descriptor = -1

    def take(self, start: int) -> None:
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, start)

    def drop(self, start: int) -> None:
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start)

    def is_used(self, start: int) -> bool:
        """Whether anybody else has a reference to the segment."""
        return self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start) != fcntl.F_UNLCK

    def _lock(self, operation: int, kind: int, start: int) -> int:
        if self._descriptor < 0:
            return fcntl.F_UNLCK
        wanted = FLOCK.pack(kind, os.SEEK_SET, start // self._segment_bytes, 1, 0)
        found: int = FLOCK.unpack(fcntl.fcntl(self._descriptor, operation, wanted))[0]
        return found

    def users_of(self, start: int) -> str:
        """Who that is, as far as /proc tells us; for people."""
        number = start // self._segment_bytes
        inode = os.fstat(self._descriptor).st_ino
        found = [pid for pid in pids() if _process_locks(pid, inode, number)]
        return ", ".join(_describe(pid) for pid in found) or "a process that cannot be seen"

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _process_locks(pid: int, inode: int, byte: int) -> bool:
    """Whether a descriptor of the process carries a lock on that byte."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # gone, or another user's
        return False
    return any(_descriptor_locks(pid, name, inode, byte) for name in descriptors)


def _descriptor_locks(pid: int, descriptor: str, inode: int, byte: int) -> bool:
    try:
        if not os.readlink(f"/proc/{pid}/fd/{descriptor}").endswith(REFERENCES_FILE):
            return False
        info = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    except OSError:  # closed meanwhile
        return False
    for line in info.splitlines():  # lock: 1: OFDLCK ADVISORY READ -1 DEVICE:INODE FIRST LAST
        words = line.split()
        if words[0] == "lock:" and words[-3].endswith(f":{inode}"):
            last = byte if words[-1] == "EOF" else int(words[-1])
            if int(words[-2]) <= byte <= last:
                return True
    return False


def _describe(pid: int) -> str:
    name = name_of(pid)
    return f"process {pid} ({name})" if name else f"process {pid}"


class LogMaps:
    """Segments of the log mapped read-only, each counted as used for as long as it is mapped.

    One thread uses it. Who maps segments of a live store lets go of them when `min_offset` has
    passed them: their space comes back only then.
    """

    def __init__(self, store: Path, segment_bytes: int) -> None:
        self._folder = store / COMMITLOG_DIR
        self._segment_bytes = segment_bytes
        self._references = References(store, segment_bytes)
        self._maps: dict[int, FileMap] = {}

    def mapped(self, start: int) -> FileMap | None:
        return self._maps.get(start)

    def map(self, start: int) -> FileMap:
        """The segment. Raises FileNotFoundError once it is deleted."""
        memory = self._maps.get(start)
        if memory is None:
            path = self._folder / segment_name(start)
            self._references.take(start)  # before it is looked for: see above
            try:
                memory = map_segment(path, self._segment_bytes, writable=False)
            except BaseException:
                self._references.drop(start)
                raise
            self._maps[start] = memory
        return memory

    def only(self, start: int) -> FileMap:
        """The segment, and no other. Raises FileNotFoundError."""
        memory = self.map(start)
        for other in [other for other in self._maps if other != start]:
            self.let_go(other)
        return memory

    def __len__(self) -> int:
        return len(self._maps)

    def oldest(self, count: int) -> list[int]:
        """Of the mapped segments, those that were mapped first."""
        return list(islice(self._maps, count))

    def below(self, log_min: int) -> list[int]:
        """Mapped segments that the log no longer has."""
        return [start for start in self._maps if start + self._segment_bytes <= log_min]

    def let_go(self, start: int) -> None:
        """Nobody may look at its memory any more. Raises BufferError where somebody still does."""
        self._maps[start].close()
        del self._maps[start]
        self._references.drop(start)

    def let_go_if_unseen(self, start: int) -> bool:
        """As `let_go`; False, and it stays, where somebody still looks at its memory."""
        try:
            self.let_go(start)
        except BufferError:
            return False
        return True

    def drop(self, start: int) -> None:
        """As `let_go`, of a segment that is gone, or whose file was exchanged: whoever still looks
        at its memory sees what the file held, and unmaps it with the last look."""
        self._maps.pop(start).let_go()
        self._references.drop(start)

    def let_go_below(self, log_min: int) -> None:
        for start in self.below(log_min):
            self.drop(start)

    def close(self) -> None:
        """Drop all segments. Threads that still use one finish first."""
        for start in list(self._maps):
            self.drop(start)
        self._references.close()
