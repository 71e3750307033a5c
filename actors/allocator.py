"""Segments before they are needed."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cometmq.actors.family import Family
from cometmq.actors.service import ServiceActor
from cometmq.protocol.errors import DiskFull
from cometmq.shm.control import HOT_STEP_BYTES, Counter, Phase
from cometmq.shm.files import (
    COMMITLOG_DIR,
    STAGING_DIR,
    create_segment,
    map_segment,
    reserve,
    segment_name,
    sync_folder,
)

log = logging.getLogger(__name__)

AHEAD: Final = 2  # segments ready behind the one in use
RETRY_S: Final = 1
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc: Final = ctypes.CDLL(None, use_errno=True)
_PAGE: Final = mmap.PAGESIZE


class AllocatorActor(ServiceActor):
    """Keeps the next two segments ready, and the pages just ahead of the tail in memory.

    Writes, alone: segments that nothing was written to yet; `allocated`, `locked_bytes`.
    Wakes on: `steps`, which moves with every 4 MiB written; a timer while the disk is full.
    Dies of nothing: without it the log goes on until the ready segments are used up.
    """

    role = "allocator"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        control = family.control
        self._wrote = control.read(Counter.WROTE)
        self._phase = control.read(Counter.PHASE)
        self._steps = control.sleep_on(Counter.STEPS, family.doorbell)
        self._allocated = control.own(Counter.ALLOCATED)
        self._errno = control.own(Counter.ALLOCATE_ERRNO)
        self._hot = HotWindow(family)

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        self._work()
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)

    def on_doorbell(self) -> None:
        self._work()

    def _work(self) -> None:
        self._steps.arm()
        try:
            self._make_ready()
        except DiskFull as error:
            if not self._errno.value:
                log.error("no segment ahead: %s", error)
            self._errno.reset(errno.ENOSPC)  # which the writer turns into a refusal
            self.after(RETRY_S, self._work)
        else:
            if self._errno.value:
                log.info("segments can be had again")
                self._errno.reset(0)
        self._hot.follow(self._wrote.value)

    def _make_ready(self) -> None:
        """The segment in use and the two behind it, with all their file space."""
        size = self._segment_bytes
        folder = self._family.store / COMMITLOG_DIR
        current = self._wrote.value // size * size
        made = False
        for start in range(current, current + (AHEAD + 1) * size, size):
            if start + size <= self._allocated.value:
                continue
            if (folder / segment_name(start)).exists():
                self._reserve_rest(folder / segment_name(start))
            else:
                staging = self._family.store / STAGING_DIR
                create_segment(folder, start, size, staging, reserve_bytes=size)
                made = True
            self._allocated.advance(start + size)
        if made:
            sync_folder(folder)

    def _reserve_rest(self, path: Path) -> None:
        """A segment that we found may be sparse: RocketMQ makes them so."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, 0, self._segment_bytes, path)
        finally:
            os.close(descriptor)

    def settle(self) -> None:
        """Remove what was never used, as RocketMQ does at an orderly end.

        Not while the commitlog process goes on: it may be about to use it.
        """
        folder = self._family.store / COMMITLOG_DIR
        self._hot.close()
        if self._phase.value != Phase.STOPPED:
            return
        wrote = self._wrote.value
        first = -(-wrote // self._segment_bytes) * self._segment_bytes
        for start in range(first, self._allocated.value, self._segment_bytes):
            (folder / segment_name(start)).unlink(missing_ok=True)
        sync_folder(folder)

    def statistics(self) -> dict[str, int | float | str]:
        return {"allocated": self._allocated.value, "hot_window": self._hot.state}


class HotWindow:
    """The pages ahead of the tail: faulted in before they are written, and locked where allowed.

    Faulted in by MADV_POPULATE_WRITE and never by a store: a store would race with the writer.
    """

    def __init__(self, family: Family) -> None:
        settings = family.settings
        self._folder = family.store / COMMITLOG_DIR
        self._segment_bytes = settings.mapped_file_size_commit_log_bytes
        self._ahead = settings.hot_window_bytes
        self._locked_bytes = family.control.own(Counter.LOCKED_BYTES)
        self._may_lock = settings.mlock_enable
        self._may_populate = True
        self._maps: dict[int, mmap.mmap] = {}
        self._populated = 0  # physical offset
        self._locked: list[tuple[int, int]] = []  # physical ranges

    @property
    def state(self) -> str:
        populated = "populated" if self._may_populate else "not populated"
        locked = "locked" if self._may_lock else "not locked"
        return f"{populated}, {locked}"

    def follow(self, tail: int) -> None:
        """Bring the window up to its distance ahead of the tail."""
        end = tail + self._ahead
        at = max(self._populated, tail // _PAGE * _PAGE)
        while at < end:
            start = at // self._segment_bytes * self._segment_bytes
            stop = min(end, start + self._segment_bytes, at + HOT_STEP_BYTES)
            memory = self._map(start)
            if memory is None:
                break
            page = (at - start) // _PAGE * _PAGE
            self._populate(memory, page, stop - start - page)
            self._lock(memory, start, start + page, stop)
            at = stop
        self._populated = at
        self._let_go_behind(tail)

    def _map(self, start: int) -> mmap.mmap | None:
        if start not in self._maps:
            try:
                self._maps[start] = map_segment(
                    self._folder / segment_name(start), self._segment_bytes, writable=True
                )
            except FileNotFoundError:
                return None
        return self._maps[start]

    def _populate(self, memory: mmap.mmap, at: int, count: int) -> None:
        if not self._may_populate:
            return
        try:
            memory.madvise(POPULATE_WRITE, at, count)
        except OSError as error:
            self._may_populate = False
            log.warning("pages ahead of the tail are not faulted in: %s", error.strerror)

    def _lock(self, memory: mmap.mmap, start: int, at: int, stop: int) -> None:
        if not self._may_lock:
            return
        if self._call("mlock", memory, at - start, stop - at):
            self._locked.append((at, stop))
            self._locked_bytes.reset(sum(end - begin for begin, end in self._locked))
            return
        self._may_lock = False
        log.warning(
            "the hot window of %d bytes is not locked in memory (%s): raise the memlock limit "
            "(ulimit -l) or set mlockEnable=false",
            self._ahead,
            os.strerror(ctypes.get_errno()),
        )

    def _call(self, name: str, memory: mmap.mmap, at: int, count: int) -> bool:
        anchor = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor) + at)
        done: int = getattr(_libc, name)(address, ctypes.c_size_t(count))
        del anchor  # or the mapping could not be closed
        return done == 0

    def _let_go_behind(self, tail: int) -> None:
        kept = []
        for begin, end in self._locked:
            if end > tail:
                kept.append((begin, end))
                continue
            start = begin // self._segment_bytes * self._segment_bytes
            self._call("munlock", self._maps[start], begin - start, end - begin)
        if len(kept) != len(self._locked):
            self._locked = kept
            self._locked_bytes.reset(sum(end - begin for begin, end in kept))
        for start in [s for s in self._maps if s + self._segment_bytes <= tail]:
            self._maps.pop(start).close()

    def close(self) -> None:
        for memory in self._maps.values():
            memory.close()
        self._maps.clear()
        self._locked.clear()
        self._locked_bytes.reset(0)
