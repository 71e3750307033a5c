"""RocketMQ's timer files: the wheel, the timer log, and how far both are good (timercheck).

They are made of what the topic of timers holds, and may be made anew of it. The wheel is made at
every start of the timer log, which says all of it. Unlike RocketMQ's, file space is taken before it
is written, and a part of the timer log in which nothing waits any more is deleted.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, NamedTuple

from cometmq.protocol.errors import StoreNotOurs
from cometmq.protocol.integers import INT64_MAX
from cometmq.shm.kernel.codec import FileMap, LogView
from cometmq.shm.kernel.layout import TIMER_CHECK, TIMER_SLOT, TIMER_WHEEL_SLOTS
from cometmq.shm.kernel.store import TimerWheel
from cometmq.shm.os.durable import keep_words, no_room_is_disk_full
from cometmq.shm.os.files import (
    CONFIG_DIR,
    STAGING_DIR,
    create_segment,
    list_segments,
    map_segment,
    remove_folder,
    reserve,
    segment_name,
)

log = logging.getLogger(__name__)

TIMER_LOG_DIR: Final = "timerlog"
WHEEL_FILE: Final = "timerwheel"
CHECK_FILE: Final = "timercheck"
CHECK_BYTES: Final = 4096
ZEROED_BYTES: Final = 1 << 20  # at once
WHEEL_BYTES: Final = TIMER_SLOT.size * TIMER_WHEEL_SLOTS


class TimerCheck(NamedTuple):
    """What timercheck says."""

    read_ms: int  # what was due before is delivered
    log_end: int  # of the timer log
    queue_offset: int  # of the topic of timers: what is before is in the timer log


def read_check(store: Path) -> TimerCheck | None:
    """None: there is none, or it is cut off."""
    try:
        content = (store / CONFIG_DIR / CHECK_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < TIMER_CHECK.size:
        return None
    words = TIMER_CHECK.unpack(content)
    return TimerCheck(words["last_read_ms"], words["log_end"], words["queue_offset"])


def write_check(store: Path, check: TimerCheck, now_ms: int) -> None:
    """Raises OSError."""
    (store / CONFIG_DIR).mkdir(exist_ok=True)
    words = TIMER_CHECK.pack(
        last_read_ms=check.read_ms,
        log_end=check.log_end,
        queue_offset=check.queue_offset,
        # RocketMQ goes on behind its last unit in the timer log, but not behind this. What we have
        # put there since would be in the wheel twice, and be delivered twice.
        master_queue_offset=INT64_MAX,
        state_version=0,
        version_ms=now_ms,
        version_counter=0,
    )
    keep_words(store / CONFIG_DIR / CHECK_FILE, words, size=CHECK_BYTES)


class TimerFiles:
    """The wheel and the timer log of a store, mapped to be written. Has one user.

    Raises StoreNotOurs for a timer log of other segments; DiskFull, OSError.
    """

    def __init__(self, store: Path, segment_bytes: int) -> None:
        self._store = store
        self._segment_bytes = segment_bytes
        self._folder = store / TIMER_LOG_DIR
        self._maps: dict[int, FileMap] = {}
        self._wheel = _new_wheel(store / WHEEL_FILE)
        self.units = LogView(segment_bytes)
        try:
            starts = list_segments(self._folder, segment_bytes)
        except StoreNotOurs as error:
            log.error("%s: the timer log is made anew", error)
            starts = []
            remove_folder(self._folder)
        for start in starts:
            self._take(start)

    def wheel(
        self, at_due: int, at_place: int, passed: list[tuple[int, int, int]], log_max: int
    ) -> TimerWheel:
        """What waits by the timer log, as far as it is good and its records are below `log_max`."""
        begin = min(self._maps, default=0)
        wheel = TimerWheel(self._wheel, self.units, begin, at_due, at_place, passed)
        wheel.load(log_max)
        self._cut(wheel.end)
        return wheel

    def clear(self) -> None:
        """Nothing is in the wheel and the timer log any more."""
        for start in list(self._maps):
            self.drop(start)
        self._wheel.let_go()
        self._wheel = _new_wheel(self._store / WHEEL_FILE)

    def add(self, end: int) -> None:
        """A segment more, for the unit at that position. Raises DiskFull, OSError."""
        start = end - end % self._segment_bytes
        create_segment(
            self._folder,
            start,
            self._segment_bytes,
            self._store / STAGING_DIR,
            reserve_bytes=self._segment_bytes,
        )
        self._take(start)

    def drop(self, start: int) -> None:
        """Delete a segment."""
        self.units.drop(start)
        self._maps.pop(start).let_go()
        (self._folder / segment_name(start)).unlink(missing_ok=True)

    def sync(self) -> None:
        """Raises OSError."""
        for memory in (*self._maps.values(), self._wheel):
            memory.sync(0, len(memory))

    def close(self) -> None:
        self.units.clear()
        for memory in self._maps.values():
            memory.let_go()
        self._maps.clear()
        self._wheel.let_go()

    def _take(self, start: int) -> None:
        path = self._folder / segment_name(start)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, 0, self._segment_bytes, path)  # RocketMQ's may have holes
        finally:
            os.close(descriptor)
        memory = map_segment(path, self._segment_bytes, writable=True)
        self._maps[start] = memory
        self.units.set(start, memory)

    def _cut(self, end: int) -> None:
        """Nothing stands behind the end: it would be taken for units some day."""
        for start in [each for each in self._maps if each > end]:
            self.drop(start)
        start = end - end % self._segment_bytes
        memory = self._maps.get(start)
        if memory is not None and any(memory[end - start : end - start + 4]):
            path = self._folder / segment_name(start)
            log.info("%s is cut off at %d: what follows is read again", path, end)
            with path.open("r+b") as file:
                for at in range(end - start, self._segment_bytes, ZEROED_BYTES):
                    there = memory[at : at + ZEROED_BYTES]
                    if there.count(0) < len(there):  # most of it was never written
                        file.seek(at)
                        file.write(bytes(len(there)))


def _new_wheel(path: Path) -> FileMap:
    """An empty wheel, in place of the one that was there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        with no_room_is_disk_full(path):
            os.ftruncate(descriptor, WHEEL_BYTES)
            reserve(descriptor, 0, WHEEL_BYTES, path)
        return FileMap(descriptor, WHEEL_BYTES, writable=True)
    finally:
        os.close(descriptor)
