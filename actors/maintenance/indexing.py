"""Indexing by key: from the CommitLog to the index files, the dispatcher's second task."""

from __future__ import annotations

import logging
import time
from typing import Final

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.protocol.errors import DiskFull
from cometmq.shm.derived.index_file import IndexFiles, list_index_files
from cometmq.shm.derived.index_recovery import IndexedMark, LogScan, recover_index
from cometmq.shm.kernel import codec, store
from cometmq.shm.live.control import Counter
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.files import INDEX_DIR

log = logging.getLogger(__name__)

MARK_EVERY_BYTES: Final = 64 << 20
STEP_COUNT: Final = 8192  # records in one step: some milliseconds, then dispatching goes on
SETTLE_S: Final = 20


class Indexing:
    """Puts the keys of all records into the index files, behind `dispatched`.

    Writes, alone: index/ (the cleaner deletes there), the counters `indexed` and
    `index_files_full`. It keeps a place of its own in the log: where the index has to be built
    again, messages are served meanwhile, and queries find what has been reached.
    """

    def __init__(self, family: Family) -> None:
        self.enabled = family.settings.message_index_enable
        self.paused = False  # the disk is full
        self._started = False  # before it is known what the files hold nothing is put into them
        self._store = family.store
        self._clean = family.clean
        self._continued = family.control.read(Counter.CONTINUED)
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        self._shape = family.index_shape
        self._min = family.control.read(Counter.MIN_OFFSET)
        self._indexed = family.control.own(Counter.INDEXED)
        self._full = family.control.own(Counter.INDEX_FILES_FULL)
        self._files = IndexFiles(self._store, self._shape)
        self._mark = IndexedMark(family.store)
        self._is_open = False  # the newest file is opened when there is something to put
        self._log = LogMaps(self._store, self._segment_bytes)
        self._log_min = 0
        self._rebuild_until = 0  # what lies below was there at the start, or has been lost

    # --- start ---

    def start(self, log_min: int, log_end: int, *, took_over: bool) -> None:
        """Find where to go on. The process before this one left whole entries, if there was one."""
        self._log_min = log_min
        if not self.enabled:
            return
        if took_over and self._indexed.value:
            self._started = True
            return
        # What a killed run has left is whole: it need not be read like after a power cut.
        self._recover(log_end, clean=self._clean or bool(self._continued.value))
        self._started = True

    def _recover(self, log_end: int, *, clean: bool) -> None:
        began = time.monotonic()
        scan = LogScan(self._store, self._segment_bytes)
        try:
            begin = recover_index(
                self._store, self._shape, scan, log_min=self._log_min, log_end=log_end, clean=clean
            )
        finally:
            scan.close()
        begin = self._mark.resume(begin, log_end)
        self._indexed.reset(begin)
        self._mark.write(begin, durable=True)
        self._rebuild_until = log_end
        log.info(
            "%d index files, indexing from %d to %d; %.0f ms",
            len(list_index_files(self._store)), begin, log_end, (time.monotonic() - began) * 1000,
        )  # fmt: skip

    # --- work ---

    def is_behind(self, limit: int) -> bool:
        return self._started and not self.paused and self._indexed.value < limit

    def step(self, limit: int) -> None:
        """Index some records below `limit`, where a record ends. Raises DiskFull."""
        begin = max(self._indexed.value, self._min.value)  # what is deleted is not looked for
        if begin >= limit:
            self._indexed.advance(limit)
            return
        if not self._is_open:
            self._files.open_newest()
            self._is_open = True
        start = begin // self._segment_bytes * self._segment_bytes
        end = min(limit, start + self._segment_bytes)
        try:
            memory = self._log.only(start)
        except FileNotFoundError:
            self._indexed.advance(end)  # deleted just now
            return
        reached, reason = self._files.index(memory, start, begin, end, STEP_COUNT)
        if reason == store.INDEX_BAD:  # damage that the dispatcher has reported and passed over
            found = codec.find_record(memory, start, reached + 1, end, 0)
            reached = found if found >= 0 else end
        self._indexed.advance(end if reason == store.INDEX_BLANK else reached)
        if self._indexed.value >= self._mark.written + MARK_EVERY_BYTES:
            self._mark.write(self._indexed.value)
        self._full.advance(self._full.value + self._files.full_count)
        self._files.full_count = 0
        if begin < self._rebuild_until <= self._indexed.value:
            log.info("the index has caught up at %d", self._indexed.value)

    def follow_log_min(self, log_min: int) -> None:
        self._log.let_go_below(log_min)

    def rebuild(self, name: str, dispatched: int) -> None:
        """A reader has met damage in that file: build it again, and what comes after it."""
        names = list_index_files(self._store)
        if not self.enabled or name not in names:
            return  # done already
        log.error("index file %s is damaged: building it again from the log", name)
        self._files.close()
        self._indexed.reset(0)  # who takes over after a kill in between looks at the files
        for later in reversed(names[names.index(name) :]):
            (self._store / INDEX_DIR / later).unlink(missing_ok=True)
        self._files = IndexFiles(self._store, self._shape)
        self._is_open = False
        self._log_min = self._min.value
        self._recover(dispatched, clean=True)

    def settle(self, limit: int) -> None:
        """Index the rest, for a bounded time: the next start goes on where this one stopped."""
        gone_by = time.monotonic() + SETTLE_S
        self.paused = False
        try:
            while self.is_behind(limit) and time.monotonic() < gone_by:
                self.step(limit)
        except DiskFull as error:
            log.error("no room for index entries: %s", error)
        if self.is_behind(limit):
            log.warning("the index ends at %d, the log at %d", self._indexed.value, limit)
        if self._started:
            self._mark.write(self._indexed.value)
        self._files.close()
        self._log.close()

    def statistics(self, dispatched: int) -> meters.Figures:
        if not self.enabled:
            return {meters.INDEX: "off"}
        return {meters.INDEX_BEHIND_BYTES: max(0, dispatched - self._indexed.value)}
