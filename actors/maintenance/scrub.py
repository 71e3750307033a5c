"""Verification of a log in use: all of it is read again from time to time, slowly.

What lies on a disk for long may be damaged, and neither a start after kill -9 nor anybody else
looks at it before it is needed. Here it is found while other replicas, or backups, have it whole.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cometmq.shm.kernel.codec import REASONS, scan
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

log = logging.getLogger(__name__)

STEP_BYTES: Final = 1 << 20
LOOK_AGAIN_S: Final = 60.0  # where no segment is full yet
_BLANK: Final = REASONS.index("end of segment")
_OF_THE_DISK: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENOENT)


class Scrub:
    """Of the cleaner: so no segment goes while a step looks at it.

    A pass reads the segments that are full when it begins, in turn from a random one on, since a
    broker may be restarted more often than a pass takes. Every record's place, sizes and CRC are
    checked. Pages that were not in memory before do not stay there.

    Args:
        bytes_per_s: at most; 0: nothing is read.
        interval_s: from one beginning of a pass to the next, at least.
        range_of: what of the log is kept and written: physical offsets.
        on_damage: is told of the first damage in a segment, whose rest is not looked at then.
        after: has a call made after so many seconds.
    """

    def __init__(
        self,
        store: Path,
        segment_bytes: int,
        *,
        bytes_per_s: int,
        interval_s: float,
        range_of: Callable[[], tuple[int, int]],
        on_damage: Callable[[str], object],
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._folder = store / COMMITLOG_DIR
        self._segment_bytes = segment_bytes
        self._bytes_per_s = bytes_per_s
        self._interval_s = interval_s
        self._range_of = range_of
        self._on_damage = on_damage
        self._after = after
        self._left: list[int] = []  # segments of this pass
        self._at = 0  # physical offset, in the first of them
        self._began = 0.0  # time.monotonic()
        self._has_looked = False  # in this pass
        self.read_bytes = 0
        self.passes = 0  # that are over
        self.damages = 0

    def begin(self) -> None:
        if self._bytes_per_s:
            self._begin_pass()

    def _begin_pass(self) -> None:
        low, high = self._range_of()
        size = self._segment_bytes
        full = list(range(-(-low // size) * size, high - size + 1, size))
        turn = random.randrange(len(full)) if full else 0
        self._left = full[turn:] + full[:turn]
        self._at = self._left[0] if self._left else 0
        self._began = time.monotonic()
        self._has_looked = bool(full)
        self._go_on(0)

    def _go_on(self, count: int) -> None:
        """After the pause that so many bytes cost."""
        if self._left:
            self._after(count / self._bytes_per_s, self._step)
            return
        pause_s = self._began + self._interval_s - time.monotonic()
        if self._has_looked:
            self.passes += 1
        else:
            pause_s = min(pause_s, LOOK_AGAIN_S)
        self._after(max(1.0, pause_s), self._begin_pass)

    def _step(self) -> None:
        start, at, before = self._left[0], self._at, self.read_bytes
        low, _ = self._range_of()
        try:
            end = self._look(start, at) if start >= low else -1
        except OSError as error:
            self._on_error(start, at, error)
            end = -1
        if end < 0 or end >= start + self._segment_bytes:
            del self._left[0]
            end = self._left[0] if self._left else 0
        self._at = end
        self._go_on(self.read_bytes - before)

    def _look(self, start: int, at: int) -> int:
        """At the records from there on; where the next step begins, -1 behind damage."""
        stop = start + self._segment_bytes
        descriptor = os.open(self._path(start), os.O_RDONLY | os.O_CLOEXEC)
        try:
            count = min(STEP_BYTES, stop - at)
            reached, why = self._scan(descriptor, start, at, count)
            if reached == at and why != _BLANK:  # damage, or a record larger than a step
                size = _size_at(descriptor, at - start)
                if count < size <= stop - at:
                    reached, why = self._scan(descriptor, start, at, size)
            if why == _BLANK and _size_at(descriptor, reached - start) == stop - reached:
                return stop
        finally:
            os.close(descriptor)
        if reached > at:
            return reached  # what lies there may reach beyond what was read
        self._tell(start, at, "a blank of another size" if why == _BLANK else REASONS[why])
        return -1

    def _scan(self, descriptor: int, start: int, at: int, count: int) -> tuple[int, int]:
        content = read_past_cache(descriptor, at - start, count)
        self.read_bytes += count
        reached, why, _, _, _ = scan(content, at, at, at + count, True)
        return reached, why

    def _on_error(self, start: int, at: int, error: OSError) -> None:
        """Of the disk, or of a system that has no descriptors, say."""
        if error.errno in _OF_THE_DISK:
            self._tell(start, at, f"it cannot be read: {error.strerror}")
        else:
            log.error("%s is not verified this time: %s", self._path(start), error.strerror)

    def _tell(self, start: int, at: int, why: str) -> None:
        self.damages += 1
        self._on_damage(
            f"{self._path(start)}: damaged at {at - start}, physical offset {at}: {why}"
        )

    def _path(self, start: int) -> Path:
        return self._folder / segment_name(start)


def _size_at(descriptor: int, place: int) -> int:
    """Of what lies there, as it says."""
    return int.from_bytes(os.pread(descriptor, 4, place), "big")


def read_past_cache(descriptor: int, begin: int, count: int) -> bytearray:
    """Read a stretch of a file, whose pages stay in memory only if all were there before. Raises
    OSError."""
    content = bytearray(count)
    view = memoryview(content)
    try:
        done = os.preadv(descriptor, [view], begin, os.RWF_NOWAIT)
    except OSError:  # nothing of it is in memory, or the file system cannot say
        done = 0
    if done == count:
        return content
    while done < count:
        got = os.preadv(descriptor, [view[done:]], begin + done)
        if not got:
            break  # the file ends there; zeros are no record
        done += got
    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)
    return content
