"""Flushing: what was written becomes durable, by interval or when a send waits for it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.disk_actor import DiskActor
from cometmq.actors.runtime.family import Family, out_of_service
from cometmq.conf import FlushDiskType
from cometmq.shm.derived.consume_queue import UNIT, queue_folder
from cometmq.shm.derived.index_file import IndexFlusher
from cometmq.shm.live.control import HOT_STEP_BYTES, Counter, Phase
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.os.durable import sync_data_if_there
from cometmq.shm.os.files import (
    COMMITLOG_DIR,
    Checkpoint,
    begin_writing,
    map_segment,
    segment_name,
)

log = logging.getLogger(__name__)

PAGE: Final = 4096  # RocketMQ's, whatever the system's is


class Mark(NamedTuple):
    """How far the log had come at some moment."""

    timestamp: int  # store time of the last message, ms
    end: int  # physical offset


class FlushActor(DiskActor):
    """Makes what was written durable: many messages, one msync.

    Writes, alone: its word of `flushed`, `flushes`, the checkpoint.
    Wakes on: `wrote`, to begin its intervals, which are those of RocketMQ's settings; then on
    `sync_wanted`, which moves with every send under SYNC_FLUSH, and else when an actor asks for a
    flushed cover; and on `steps` under ASYNC_FLUSH, to have the system begin writing, so that dirty
    pages do not pile up until the interval is over.
    Under SYNC_FLUSH the commitlog process has made durable what it did not ask for.
    A failed sync ends the process, and the broker: the system may have dropped the dirty
    pages, and a second call could report success for lost bytes.
    """

    role = "flush"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._settings = family.settings
        self._sync = family.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        control = family.control
        self._wrote = control.sleep_on(Counter.WROTE, family.doorbell)
        self._wanted = control.sleep_on(Counter.SYNC_WANTED, family.doorbell)
        self._wrote_timestamp = control.read(Counter.WROTE_TIMESTAMP)
        self._dispatched_timestamp = control.read(Counter.DISPATCHED_TIMESTAMP)
        self._flushed = control.own(Counter.FLUSHED)
        self._flushes = control.own(Counter.FLUSHES)
        self._errno = control.own(Counter.FLUSH_ERRNO)
        self._steps = control.sleep_on(Counter.STEPS, family.doorbell)
        self._writes_behind = not self._sync
        self._begun = 0  # physical offset: the system has been told to write what lies below
        self._segments: dict[int, SegmentFile] = {}  # by their start
        self._checkpoint = Checkpoint(family.store)
        self._checkpoint_fits = True  # on the disk, when it was last written
        self._queues = QueueFlusher(family)
        self._index = IndexFlusher(family.store, family.index_shape)
        self._index_files_full = control.read(Counter.INDEX_FILES_FULL)
        self._index_files_flushed = 0  # value of the counter when they were flushed
        self._last_thorough = time.monotonic()
        self._timer_runs = False
        # Store time of the last message that is on the disk.
        self._physic_timestamp = self._checkpoint.words["physic_msg_timestamp"]
        self._mark = Mark(self._physic_timestamp, self._flushed.value)  # when it last looked

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        if not self._flushed.value:
            # What recovery found may still be in the page cache only.
            self._flush(self._family.control.read(Counter.RECOVERED_FROM).value)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._work()

    def on_doorbell(self) -> None:
        if self._writes_behind:
            self._write_behind()
        self._work()

    def _write_behind(self) -> None:
        """Only whole steps, so that the pages being filled are not written twice."""
        self._steps.arm()
        end = self._wrote.value // HOT_STEP_BYTES * HOT_STEP_BYTES
        begin = max(self._begun, self._flushed.value)
        size = self._segment_bytes
        while begin < end:
            start = begin // size * size
            stop = min(end, start + size)
            try:
                self._segment(start).begin_writing(begin - start, stop - start)
            except FileNotFoundError:
                pass  # cleaned meanwhile
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE):
                    out_of_service(f"{self._path(start)} could not be written", error, self._errno)
                self._writes_behind = False
                log.warning("pages are written at flushes only: %s", error.strerror)
                return
            begin = stop
        self._begun = end

    def _work(self) -> None:
        """Begin to count the interval; flush at once what was asked for."""
        self._begin_interval()
        while True:
            self._wanted.arm()
            if self._wanted.value <= self._flushed.value:
                return
            self._flush(self._flushed.value)

    def _begin_interval(self) -> None:
        if not self._timer_runs:
            self._wrote.arm()
            if not self._is_settled:
                self._timer_runs = True
                self.after(self._interval_s, self._tick)

    @property
    def _is_settled(self) -> bool:
        """Whether everything written is on the disk, and the checkpoint may say so."""
        wrote = self._wrote.value
        return self._flushed.value == wrote == self._mark.end

    @property
    def _interval_s(self) -> float:
        if self._sync:
            return self._settings.flush_interval_consume_queue_ms / 1000
        return self._settings.flush_interval_commit_log_ms / 1000

    def _tick(self) -> None:
        """One round of the timers; they rest when there is nothing left to flush."""
        self._timer_runs = False
        settings = self._settings
        now = time.monotonic()
        thorough = (now - self._last_thorough) * 1000 >= min(
            settings.flush_commit_log_thorough_interval_ms,
            settings.flush_consume_queue_thorough_interval_ms,
        )
        dirty_pages = self._wrote.value // PAGE - self._flushed.value // PAGE
        if self._sync:
            self._follow_commitlog()
        elif thorough or dirty_pages >= settings.flush_commit_log_least_pages:
            self._flush(self._flushed.value)
        if thorough or self._queues.dirty_pages() >= settings.flush_consume_queue_least_pages:
            self._flush_queues(thorough)
        if self._index_files_full.value != self._index_files_flushed:
            self._flush_index()
        if thorough:
            self._last_thorough = now
        if not self._is_settled or self._queues.dirty_pages():
            self._timer_runs = True
            self.after(self._interval_s, self._tick)
        else:
            self._work()

    def _follow_commitlog(self) -> None:
        """Learn from when the last message is that the commitlog process has made durable."""
        if self._flushed.value < self._mark.end:
            # For a whole interval: it was killed before it could ask.
            self._flush(self._flushed.value)
        self._note_durable()  # when it was last looked; it may never have caught up with `wrote`
        self._mark = self._look()
        self._note_durable()

    def _look(self) -> Mark:
        return Mark(self._wrote_timestamp.value, self._wrote.value)

    def _note_durable(self) -> None:
        if self._flushed.value >= self._mark.end:
            self._physic_timestamp = self._mark.timestamp

    def _flush(self, begin: int) -> None:
        """Make everything durable from `begin` to what is written now."""
        self._mark = self._look()
        end, size = self._mark.end, self._segment_bytes
        for start in range(begin // size * size, end, size):
            if max(begin, start) < end:
                self._make_durable(start, max(begin, start), min(end, start + size))
        for start in [s for s in self._segments if s + size <= end]:
            self._segments.pop(start).close()
        self._flushed.advance(end)
        self._note_durable()
        self._flushes.advance(self._flushes.value + 1)

    def _make_durable(self, start: int, begin: int, end: int) -> None:
        try:
            self._segment(start).sync(begin - start, end - start)
        except OSError as error:
            out_of_service(f"{self._path(start)} could not be flushed", error, self._errno)

    def _segment(self, start: int) -> SegmentFile:
        if start not in self._segments:
            self._segments[start] = SegmentFile(self._path(start), self._segment_bytes)
        return self._segments[start]

    def _path(self, start: int) -> Path:
        return self._family.store / COMMITLOG_DIR / segment_name(start)

    def _flush_queues(self, thorough: bool) -> None:
        """The ConsumeQueues, and then the checkpoint that says so."""
        logics = self._dispatched_timestamp.value  # before: what is dispatched meanwhile is later
        try:
            self._queues.flush()
            if thorough:
                self._store_checkpoint(logics)
        except OSError as error:
            out_of_service("ConsumeQueues or checkpoint could not be flushed", error, self._errno)

    def _flush_index(self) -> None:
        """Index files that are full, and the checkpoint that says so (RocketMQ 4.3)."""
        full = self._index_files_full.value
        try:
            timestamp = self._index.flush_full()
            if timestamp:
                self._keep_checkpoint(index_msg_timestamp=timestamp)
        except OSError as error:
            out_of_service("index files or checkpoint could not be flushed", error, self._errno)
        self._index_files_flushed = full

    def _store_checkpoint(self, logics: int) -> None:
        self._keep_checkpoint(
            physic_msg_timestamp=self._physic_timestamp,
            logics_msg_timestamp=logics,
            confirm_physical_offset=0,
        )

    def _keep_checkpoint(self, **words: int) -> None:
        """Where the disk has no room for it the one before holds: a start after a bad end looks at
        more. Raises what else there is."""
        try:
            self._checkpoint.store(**words)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self._checkpoint_fits:
                log.warning("%s is not written: %s", self._checkpoint.path, error.strerror)
            self._checkpoint_fits = False
        else:
            self._checkpoint_fits = True

    def settle(self) -> None:
        """All of it, whatever the intervals say."""
        self._flush(self._flushed.value)
        self._flush_index()
        try:
            self._index.flush_all()
        except OSError as error:
            out_of_service("index files could not be flushed", error, self._errno)
        self._flush_queues(thorough=True)

    def statistics(self) -> meters.Figures:
        return {
            meters.FLUSHES: self._flushes.value,
            meters.BEHIND_BYTES: self._wrote.value - self._flushed.value,
        }


class SegmentFile:
    """A segment as the flush process has it. Positions are bytes from its beginning."""

    def __init__(self, path: Path, segment_bytes: int) -> None:
        # Never written to, but msync passes over a mapping that nobody could have written through.
        self._memory = map_segment(path, segment_bytes, writable=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def sync(self, begin: int, end: int) -> None:
        """Make a range durable. Raises OSError.

        msync where fdatasync would do as well, but also write the pages ahead of the tail, which
        are made ready by dirtying them.
        """
        self._memory.sync(begin, end - begin)

    def begin_writing(self, begin: int, end: int) -> None:
        begin_writing(self._descriptor, begin, end - begin)

    def close(self) -> None:
        self._memory.let_go()
        os.close(self._descriptor)


class QueueFlusher:
    """Knows which ConsumeQueue segments have changed since they were last flushed."""

    def __init__(self, family: Family) -> None:
        self._store = family.store
        self._segment_bytes = family.settings.mapped_file_size_consume_queue_bytes
        self._table: QueueTable = family.queue_table()
        self._flushed: dict[tuple[str, int], int] = {}

    def _changed(self) -> dict[tuple[str, int], tuple[int, int]]:
        changed = {}
        for topic, queue_id in self._table.queues():
            found = self._table.range_of(topic, queue_id)
            assert found is not None
            before = self._flushed.get((topic, queue_id), found.min_queue_offset)
            if before < found.max_queue_offset:
                changed[topic, queue_id] = before, found.max_queue_offset
        return changed

    def dirty_pages(self) -> int:
        ranges = self._changed().values()
        return sum(after * UNIT // PAGE - before * UNIT // PAGE + 1 for before, after in ranges)

    def flush(self) -> None:
        for (topic, queue_id), (before, after) in self._changed().items():
            folder = queue_folder(self._store, topic, queue_id)
            first = before * UNIT // self._segment_bytes * self._segment_bytes
            for start in range(first, after * UNIT, self._segment_bytes):
                sync_data_if_there(folder / segment_name(start))
            self._flushed[topic, queue_id] = after
