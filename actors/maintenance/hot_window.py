"""Prefaulting: the pages just ahead of the log's tail are in memory before they are needed."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

import msgspec

from cometmq.actors.maintenance.reach import Reach
from cometmq.shm.kernel.codec import FileMap
from cometmq.shm.os.files import COMMITLOG_DIR, Pages, map_log, segment_name, write_out

POPULATE_READ: Final = 22  # MADV_POPULATE_READ, Linux 5.14
POPULATE_WRITE: Final = 23
LARGE_STEP_BYTES: Final = 16 * 1_048_576
# Under SYNC_FLUSH a commit that meets a step on its way to the disk waits for it.
SMALL_STEP_BYTES: Final = 1_048_576
LOCK_STEP_BYTES: Final = 4 * 1_048_576  # half of the usual limit
STEPS_AT_ONCE: Final = 4
PAGE: Final = mmap.PAGESIZE
_NOT_HERE: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE)

Say = Callable[[str, str], None]  # takes a limit: of what, and in words


class _Segment(msgspec.Struct, frozen=True):
    memory: FileMap
    descriptor: int

    def close(self) -> None:
        self.memory.let_go()
        os.close(self.descriptor)


class _Piece(msgspec.Struct, frozen=True):
    """What is worked on at a time: a range of one segment."""

    segment: _Segment
    start: int  # of the segment
    begin: int  # physical offset
    end: int

    @property
    def range(self) -> tuple[int, int]:
        """In the segment: where, and how many bytes."""
        return self.begin - self.start, self.end - self.begin


class HotWindow:
    """Faults pages in ahead of the tail, and locks them in memory where that is allowed.

    By MADV_POPULATE_WRITE and never by a store: a store would race with the writer.
    Offsets are the log's; pages are counted from the beginning of each segment, which a FileMap
    does: a segment need not have a whole number of them.

    Under SYNC_FLUSH the pages are then written out as they are. That turns reserved file space
    into written file space, so that no later commit has to wait for the file system's journal; and
    they are faulted in one by one (MADV_RANDOM), so that no commit has to write a large folio.

    So much for what is near, the least of the reach. Beyond it the pages are brought into memory
    and stay clean (MADV_POPULATE_READ), which spares the writer most of the cost: they are not
    written to the disk before they hold something, and under pressure the system may drop them.

    Args:
        reach: how far; its least is near.
        pages: how they come; SINGLE is the SYNC_FLUSH way.
        say: is told of each limit that is met.
        on_locked: is told how many bytes are locked.
    """

    def __init__(
        self,
        store: Path,
        segment_bytes: int,
        *,
        reach: Reach,
        pages: Pages,
        lock: bool,
        say: Say,
        on_locked: Callable[[int], None],
    ) -> None:
        self._folder = store / COMMITLOG_DIR
        self._segment_bytes = segment_bytes
        self._reach = reach
        self._near_bytes = reach.bytes
        self._pages = pages
        self._durable = durable = pages is Pages.SINGLE
        self._say = say
        self._on_locked = on_locked
        # A window that is smaller than a step stays as small as it is set.
        large = min(LARGE_STEP_BYTES, max(self._near_bytes, SMALL_STEP_BYTES))
        self._step_bytes = SMALL_STEP_BYTES if durable else large
        self.written: set[int] = set()  # segments whose space is written already: used again
        self._segments: dict[int, _Segment] = {}
        self._ready = 0  # physical offset: what is near is prepared below it
        self._cached = 0  # physical offset: what is far is in memory below it
        self._locked: list[tuple[int, int]] = []  # physical ranges
        self._locked_to = 0  # physical offset
        self._lock_max = self._near_bytes if lock else 0
        self._populates = True
        self._reads = False  # instead, with an old kernel
        self._writes_out = durable

    @property
    def locked_bytes(self) -> int:
        return sum(end - begin for begin, end in self._locked)

    @property
    def state(self) -> str:
        """In words, for statistics."""
        mib = 1_048_576
        words = [f"{self._reach.bytes / mib:g} MiB ahead"]
        if self._reach.bytes > self._near_bytes:
            words[0] += f" ({self._near_bytes / mib:g} MiB at least)"
        if self._populates or self._reads:
            words.append("populated" if self._populates else "read ahead")
        if self._writes_out:
            words.append("written as single pages")
        words.append(f"{self.locked_bytes / mib:g} MiB locked")
        return ", ".join(words)

    def follow(self, tail: int, reserved: int) -> bool:
        """Go on towards the window's distance from the tail, in a few steps; whether it is there.

        What is near comes first. Nothing is touched beyond `reserved`, a physical offset: there is
        no file space.
        """
        self._let_go_behind(tail)
        if not self._near_bytes:
            return True
        ready = max(self._ready, self._cached)
        is_all = tail < reserved <= ready  # what is there is ready: this is no writer's haste
        reach_bytes = self._reach.look(tail, tail + self._reach.bytes if is_all else ready)
        near_end = min(reserved, self._whole_steps(tail + self._near_bytes))
        far_end = min(reserved, self._whole_steps(tail + reach_bytes))
        overtaken = 0 < self._ready < tail and not self._durable
        pieces = chain(
            self._pieces(max(self._ready, tail), near_end),
            self._pieces(max(self._cached, near_end), far_end),
        )
        for piece in islice(pieces, STEPS_AT_ONCE):
            if piece.begin >= near_end:
                self._populate(piece, POPULATE_READ)
                self._cached = piece.end
                continue
            self._prepare(piece, in_haste=overtaken)
            self._ready = piece.end
        self._lock(tail)
        return next(pieces, None) is None

    def forget(self, end: int) -> None:
        """The file space beyond `end` was given back, and the pages with it."""
        self._ready, self._cached = min(self._ready, end), min(self._cached, end)
        self.written = {start for start in self.written if start + self._segment_bytes <= end}

    def _whole_steps(self, physical_offset: int) -> int:
        return -(-physical_offset // self._step_bytes) * self._step_bytes

    def _pieces(self, at: int, end: int) -> Iterator[_Piece]:
        """From `at` on, one step each. Ends where a segment is not made yet: whoever makes it
        comes back here."""
        while at < end:
            start = at // self._segment_bytes * self._segment_bytes
            segment = self._segment(start)
            if segment is None:
                return
            stop = min(end, start + self._segment_bytes, at + self._step_bytes)
            yield _Piece(segment, start, at, stop)
            at = stop

    def _segment(self, start: int) -> _Segment | None:
        if start not in self._segments:
            try:
                self._segments[start] = self._open(self._folder / segment_name(start))
            except FileNotFoundError:
                return None
            except OSError as error:
                self._say("window", f"pages ahead of the tail are not got ready: {error}")
                return None
        return self._segments[start]

    def _open(self, path: Path) -> _Segment:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = map_log(path, self._segment_bytes, self._pages)
        except BaseException:
            os.close(descriptor)
            raise
        return _Segment(memory, descriptor)

    def _prepare(self, piece: _Piece, *, in_haste: bool) -> None:
        """In haste: in memory, which is what takes the writer longest, and clean."""
        written = piece.start in self.written
        self._populate(piece, POPULATE_READ if written or in_haste else POPULATE_WRITE)
        if self._writes_out and not written:
            self._write_out(piece)

    def _populate(self, piece: _Piece, advice: int) -> None:
        begin, count = piece.range
        if self._populates:
            try:
                piece.segment.memory.advise(advice, begin, count)
            except OSError as error:
                self._cannot_populate(error)
        if self._reads:
            piece.segment.memory[begin : begin + count : PAGE]  # a byte of each

    def _cannot_populate(self, error: OSError) -> None:
        self._populates = self._writes_out = False
        self._reads = error.errno == errno.EINVAL
        old = " (MADV_POPULATE_WRITE needs Linux 5.14)" if self._reads else ""
        self._say("populate", f"pages ahead of the tail are not populated: {error.strerror}{old}")

    def _write_out(self, piece: _Piece) -> None:
        """Raises OSError when the disk fails: a page that the writer had filled may be lost."""
        try:
            write_out(piece.segment.descriptor, *piece.range)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._writes_out = False
            self._say("write-ahead", f"pages ahead are not written out: {error.strerror}")

    # --- locking ---

    def _lock(self, tail: int) -> None:
        """Lock what is ready; where the limit is lower than the window, what is nearest."""
        stop = self._page(min(self._ready, tail + self._lock_max))
        at = max(self._locked_to, self._page(tail))
        while at < stop:
            start = at // self._segment_bytes * self._segment_bytes
            end = min(stop, start + self._segment_bytes, at + LOCK_STEP_BYTES)
            try:
                self._segments[start].memory.lock(at - start, end - at)
            except OSError as error:
                self._lock_max = self.locked_bytes
                self._say(
                    "lock",
                    f"{self.locked_bytes} of the {self._near_bytes} bytes of the hot window are "
                    f"locked in memory ({error.strerror}): raise the memlock limit "
                    "(ulimit -l) or set mlockEnable=false",
                )
                return
            self._locked.append((at, end))
            self._locked_to = at = end
        self._on_locked(self.locked_bytes)

    def _page(self, physical_offset: int) -> int:
        """Where the page begins that it lies in."""
        start = physical_offset // self._segment_bytes * self._segment_bytes
        return start + (physical_offset - start) // PAGE * PAGE

    def _let_go_behind(self, tail: int) -> None:
        kept = []
        for begin, end in self._locked:
            if end > tail:
                kept.append((begin, end))
                continue
            start = begin // self._segment_bytes * self._segment_bytes
            self._segments[start].memory.unlock(begin - start, end - begin)
        self._locked = kept
        for start in [s for s in self._segments if s + self._segment_bytes <= tail]:
            self._segments.pop(start).close()
            self.written.discard(start)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._locked.clear()
        self._on_locked(0)
