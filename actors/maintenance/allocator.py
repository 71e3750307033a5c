"""Preallocation: segments and hot pages before the writer needs them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cometmq.actors.maintenance.hot_window import HotWindow
from cometmq.actors.maintenance.reach import Reach
from cometmq.actors.maintenance.reserve import STEPS, Demand
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.disk_actor import DiskActor
from cometmq.actors.runtime.family import Family, out_of_service
from cometmq.actors.runtime.service import Timer
from cometmq.conf.settings import SendSettings
from cometmq.protocol.errors import DiskFull
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.log.segments import SegmentMaker
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import COMMITLOG_DIR, Pages, segment_name
from cometmq.shm.os.memory import memory_has_room, memory_of

log = logging.getLogger(__name__)

AHEAD: Final = 2  # segments ready behind the one in use
RETRY_S: Final = 1
CALM_S: Final = 5  # between two looks whether there is file space that nobody needs any more
MEMORY_PART: Final = 8  # of which one at most is made ready ahead of the tail
PACE_S: Final = 0.02  # between two pieces of recycling, as long as there is time
PAGE: Final = 4096
CGROUP: Final = Path("/sys/fs/cgroup")


class AllocatorActor(DiskActor):
    """Keeps file space ready ahead of the tail, and the pages just ahead of it in memory.

    The next two segments are there, without file space: of that there is as much as the writer
    takes in a moment (`reserve.py`), and what nobody needs any more is given back. The second of
    them comes from a retired segment, if there is one, in small steps with a pause between; a
    writer that is faster than that gets a fresh one.

    Writes, alone: segments that nothing was written to yet; `allocated`, `locked_bytes`.
    Wakes on: `steps`, which moves with every 4 MiB written; `space_wanted`, when a writer waits;
    timers while it recycles, while there is none to be had, and while there is too much.
    Dies of nothing: without it the log goes on until the ready segments are used up.
    """

    role = "allocator"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._segment_bytes = settings.mapped_file_size_commit_log_bytes
        self._folder = family.store / COMMITLOG_DIR
        control = family.control
        self._wrote = control.read(Counter.WROTE)
        self._phase = control.read(Counter.PHASE)
        self._steps = control.sleep_on(Counter.STEPS, family.doorbell)
        self._wanted = control.sleep_on(Counter.SPACE_WANTED, family.doorbell)
        self._allocated = control.own(Counter.ALLOCATED)
        self._errno = control.own(Counter.ALLOCATE_ERRNO)
        self._limits: dict[str, str] = {}  # what could not be had, in words
        self._next: Timer | None = None
        self._begun = False
        self._made = 0  # physical offset: segments are there below it, with file space or without
        self._demand = Demand(settings.hot_window_bytes)
        self._maker = SegmentMaker(
            family.store, self._segment_bytes, small_pages=family.log_pages is Pages.SINGLE
        )
        self._hot = HotWindow(
            family.store,
            self._segment_bytes,
            reach=self._reach(settings),
            pages=family.log_pages,
            lock=settings.mlock_enable,
            say=self._say,
            on_locked=control.own(Counter.LOCKED_BYTES).reset,
        )

    def _reach(self, settings: SendSettings) -> Reach:
        """How far the hot window may go: as far as there will be segments, to an eighth of the
        machine's memory, and to a quarter of what the control group allows."""
        least = settings.hot_window_bytes
        most = min(
            settings.hot_window_max_bytes,
            AHEAD * self._segment_bytes,
            memory_of("MemTotal") // MEMORY_PART,
        )
        limit = memory_limit_bytes()
        if limit is not None and max(least, most) > limit // 4:
            what = f"is {limit // 4} bytes instead of {least}"
            if least <= limit // 4:
                what = f"grows to {limit // 4} bytes instead of {most}"
            self._say(
                "memory",
                f"the hot window {what}: the control group may use {limit} bytes of memory",
            )
            least, most = min(least, limit // 4), min(most, limit // 4)
        return Reach(least, most, has_room=memory_has_room)

    def _say(self, what: str, text: str) -> None:
        """Once in the log, and in the statistics for as long as it holds."""
        if self._limits.get(what) != text:
            self._limits[what] = text
            log.warning("%s", text)

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        self._come_back(self._make_segments())
        # The broker is not kept from serving by pages: the first writes may come before them.
        self.after(0, self._work)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)

    def on_doorbell(self) -> None:
        self._work()

    def _work(self) -> None:
        """One round: never so long that a segment that is needed at once would wait for it."""
        self._steps.arm()
        self._wanted.arm()
        self._come_back(RETRY_S)  # should this fail
        pauses_s = [self._make_segments(), self._heat()]
        self._come_back(min((pause for pause in pauses_s if pause is not None), default=None))

    def _come_back(self, pause_s: float | None) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = None if pause_s is None else self.after(pause_s, self._work)

    def _heat(self) -> float | None:
        """Move the hot window on; when to come back."""
        try:
            is_there = self._hot.follow(self._wrote.value, self._allocated.value)
        except OSError as error:
            out_of_service(f"{self._folder} could not be written", error, self._errno)
        return None if is_there else 0

    def _make_segments(self) -> float | None:
        """Make what is needed next; when to come back."""
        try:
            if not self._begun:
                self._begin()
            pauses_s = [self._keep_ahead(), self._keep_space()]
        except (DiskFull, OSError) as error:
            self._say("segment", f"no segment ahead: {error}")
            self._errno.reset(_number_of(error))  # which the writer turns into a refusal
            return RETRY_S
        if self._limits.pop("segment", None):
            log.info("segments can be had again")
            self._errno.reset(0)
        return min((pause for pause in pauses_s if pause is not None), default=None)

    def _begin(self) -> None:
        """Takes room as well: on a full disk it is tried again."""
        self._maker.begin()
        if not self._maker.reserves():
            self._say("reserve", "segments are filled by writing: the file system lacks fallocate")
        if not self._allocated.value:  # what a killed run had reserved
            self._give_back(self._tail, self._current + (1 + AHEAD) * self._segment_bytes)
        self._begun = True

    @property
    def _tail(self) -> int:
        return self._wrote.value

    @property
    def _current(self) -> int:
        """Where the segment begins that is in use."""
        return self._tail // self._segment_bytes * self._segment_bytes

    def _keep_ahead(self) -> float | None:
        """The segment in use, the next, and the one behind it: as files."""
        size, current = self._segment_bytes, self._current
        last = current + AHEAD * size
        if self._made > last:
            return None
        if not self._may_recycle(last):
            self._make_until(last + size)
            return None
        self._make_until(last)
        if not self._maker.step():
            return PACE_S if self._tail - current < size // 2 else 0
        self._maker.publish(last)
        self._hot.written.add(last)
        self._announce(last + size)
        return 0

    def _may_recycle(self, start: int) -> bool:
        """Not where the file is there: one that was killed here may have come so far."""
        if (self._folder / segment_name(start)).exists():
            return False
        return self._maker.is_recycling or self._maker.take_retired()

    def _make_until(self, end: int) -> None:
        size = self._segment_bytes
        for start in range(max(self._current, self._made), end, size):
            self._maker.make(start)
            self._announce(start + size)

    def _announce(self, made: int) -> None:
        """Segments are there for ever before anybody uses them: a flush syncs the file alone."""
        sync_folder(self._folder)
        self._made = made

    # --- file space ---

    def _keep_space(self) -> float | None:
        """As much as may be needed soon, and not much more; when to look again."""
        ahead = self._demand.look(self._tail)
        step = ahead // STEPS
        enough = min(self._made, (self._tail + ahead) // step * step)
        wanted = min(self._made, self._wanted.value)
        if self._allocated.value < max(enough, wanted):
            self._reserve_until(max(enough, wanted))
        elif self._allocated.value >= enough + self._demand.least_bytes:
            self._take_back(enough)
        return CALM_S if self._allocated.value > self._tail + self._demand.least_bytes else None

    def _reserve_until(self, end: int) -> None:
        size = self._segment_bytes
        # The segment before may be gone, and the page that it ends in is no business of ours.
        begin = max(self._allocated.value, self._current, self._tail // PAGE * PAGE)
        while begin < end:
            start = begin // size * size
            until = self._maker.reserve(start, begin - start, min(size, end - start))
            begin = start + until
            self._allocated.advance(begin)  # there may be no room for the next

    def _take_back(self, end: int) -> None:
        """First it is said what is there from now on, then looked what the writer has taken, or is
        about to: see `_take_space` there."""
        allocated = self._allocated.value
        self._allocated.reset(end)
        self._wanted.arm()  # a full barrier
        kept = min(allocated, max(end, self._wanted.value))
        if kept > end:
            self._allocated.reset(kept)
        self._hot.forget(kept)
        self._give_back(kept, allocated)

    def _give_back(self, begin: int, end: int) -> None:
        size = self._segment_bytes
        for start in range(begin // size * size, end, size):
            self._maker.give_back(start, max(begin - start, 0), min(end - start, size))

    def settle(self) -> None:
        """Remove segments that were never used, as RocketMQ does at an orderly end, and give back
        the file space behind the tail.

        Not while the commitlog process goes on: it may be about to use it.
        """
        self._come_back(None)
        self._hot.close()
        self._maker.close()
        if self._phase.value != Phase.STOPPED:
            return
        size, tail = self._segment_bytes, self._tail
        first = -(-tail // size) * size
        for start in range(first, max(self._made, self._allocated.value), size):
            (self._folder / segment_name(start)).unlink(missing_ok=True)
        sync_folder(self._folder)
        self._give_back(tail, first)

    def statistics(self) -> meters.Figures:
        return {
            meters.ALLOCATED: self._allocated.value,
            meters.RESERVED_BYTES: max(0, self._allocated.value - self._tail),
            meters.FRESH_SEGMENTS: self._maker.fresh_count,
            meters.RECYCLED_SEGMENTS: self._maker.recycled_count,
            meters.HOT_WINDOW: self._hot.state,
            meters.LIMITS: "; ".join(list(self._limits.values())),
        }


def _number_of(error: DiskFull | OSError) -> int:
    cause = error.__cause__ if isinstance(error, DiskFull) else error
    return (cause.errno if isinstance(cause, OSError) else None) or errno.ENOSPC


def memory_limit_bytes(groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """What this process's control group and those above it may use; None for no limit."""
    found = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, name = CGROUP / "memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = CGROUP, "memory.max"
        else:
            continue
        folder = root / path.lstrip("/")
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(root) and (limit := _limit_in(parent / name)):
                found.append(limit)
    return min(found, default=None)


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None
