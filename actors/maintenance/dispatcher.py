"""Dispatch (RocketMQ: reput): from the CommitLog to ConsumeQueues, and to the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from cometmq.actors.maintenance.indexing import Indexing
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import Unforeseen, explained
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import Command, Done, RebuildIndex
from cometmq.protocol.errors import CometError, DiskFull
from cometmq.protocol.progress import Progress
from cometmq.shm.derived.consume_queue import UNIT
from cometmq.shm.derived.queue_builder import QueueBuilder
from cometmq.shm.derived.queue_check import QueueEnds, StoreFiles, find_ends
from cometmq.shm.live.control import Counter, Phase

log = logging.getLogger(__name__)

# Before the inbox is looked at again:
WORK_S: Final = 0.005
STEP_BYTES: Final = 4 * 1_048_576  # of the log, in one go
NAP_S: Final = 0.002
# Where little has come since the last nap, or on a slave: what comes there is older already.
LONG_NAP_S: Final = 0.01
LITTLE_BYTES: Final = 64 << 10
RETRY_S: Final = 1


class DispatcherActor(ServiceActor):
    """Actor that writes a ConsumeQueue entry for every record, and publishes its progress.

    Writes, alone: consumequeue/, the queue table, `queues`, `dispatched` and its timestamp; index/
    and its counters (`Indexing`).
    Wakes on: `wrote`; under SYNC_FLUSH on `flushed`, so that no reader sees a message that a power
    cut could remove; in a group on `replicated`, for the same reason; its doorbell, by the
    commitlog process for the first message of a new queue.
    While no reader sleeps on `dispatched`, it naps between two passes, so that a stream of single
    messages does not wake it for each; a reader that begins to wait wakes it.
    The queue offset of a record determines the place of its entry, so the next process may write
    the last entries again. An invalid record is reported and skipped.
    """

    role = "dispatcher"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._segment_bytes = settings.mapped_file_size_commit_log_bytes
        self._queue_bytes = settings.mapped_file_size_consume_queue_bytes
        self._nap_s = LONG_NAP_S if settings.is_slave else NAP_S
        self._napped_at = 0  # `dispatched`, when the last nap began
        control = family.control
        self._limit = control.sleep_on(family.cover, family.doorbell)
        self._recover_end: int | None = None  # of the log, which recovers the queues; None: done
        self._wrote = control.read(Counter.WROTE)
        self._min = control.sleep_on(Counter.MIN_OFFSET, family.doorbell)
        self._dispatched = control.own(Counter.DISPATCHED)
        self._timestamp = control.own(Counter.DISPATCHED_TIMESTAMP)
        self._queues = control.own(Counter.QUEUES)
        self._napping = control.own(Counter.NAPPING)
        self._nap: Timer | None = None
        self._retry: Timer | None = None  # when the disk is full
        self._table = family.queue_table(writable=True)
        self._store_files = StoreFiles(family.store, self._segment_bytes, self._queue_bytes)
        levels = settings.delay_levels_ms
        self._builder = QueueBuilder(self._store_files, self._table, self._queues, levels)
        self._index = Indexing(family)
        self._index_refused = False  # the disk was full when it was last tried

    # --- start ---

    def on_start(self) -> None:
        took_over = bool(self._dispatched.value)
        # What does not depend on the log's end is looked at while that is being found.
        ends = None if took_over else find_ends(self._store_files)
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        if self._family.settings.is_in_group:
            self._family.wait_for(Counter.CONFIRM_KNOWN, 1)
        if took_over:
            self._builder.take_over(self._min.value)
            log.info(
                "going on at %d with %d queues", self._dispatched.value, len(self._builder.files)
            )
            self._take_over()
        else:
            self._catch_up(self._recover(ends))
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        # It serves before it looks at the index, and indexes what it may have to index again.
        self.call_soon(lambda: self._start_index(self._wrote.value, took_over))

    def _take_over(self) -> None:
        """Resume where the previous process stopped. On a full disk, serve like that process, and
        leave messages for whose entries there is no space pending."""
        try:
            self._catch_up(self._dispatched.value)
        except DiskFull as error:
            if not self._family.control.read(Counter.QUEUES_RECOVERED).value:
                raise  # readers are not served before the queues are recovered
            log.error("dispatching is suspended at %d: %s", self._dispatched.value, error)

    def _start_index(self, log_end: int, took_over: bool) -> None:
        try:
            self._index.start(self._builder.log_min, log_end, took_over=took_over)
        except (CometError, OSError) as error:
            log.error("the index could not be examined, again in %d s: %s", RETRY_S, error)
            self.after(RETRY_S, lambda: self._start_index(log_end, took_over))
        else:
            self._work()

    def _recover(self, ends: QueueEnds | None) -> int:
        recovered = self._builder.recover(
            clean=self._family.clean,
            redo_from=self._family.control.read(Counter.RECOVERED_FROM).value,
            end=self._wrote.value,
            ends=ends,
        )
        return recovered.begin

    def _catch_up(self, reached: int) -> None:
        """Everything that is stored gets its entry before the broker serves; in a group, what is
        confirmed. The rest follows as it is."""
        began, progress = reached, Progress("bringing the queues to the log's end", log.info)
        self._recover_end = self._wrote.value
        while reached < (end := self._catch_up_end()):
            self._dispatched.reset(reached)
            reached = self._builder.dispatch(reached, end)
            progress.show(max(0, reached - began), end - began)
        # First how far into the log the queues reach: who reads an entry beyond that, and beyond
        # what is known to be confirmed, takes it for damage.
        self._tell(reached)
        self._family.control.own(Counter.QUEUES_RECOVERED).reset(1)

    def _catch_up_end(self) -> int:
        family = self._family
        return family.confirmed_end if family.settings.is_in_group else self._wrote.value

    def _finish_recovery(self, reached: int) -> None:
        """When `dispatched` comes to the log's end the writer takes the queues' ends for the
        offsets that come next: the queues have to be finished before."""
        if self._recover_end is not None and reached >= self._recover_end:
            self._builder.finish_recovery()
            self._recover_end = None

    # --- the loop ---

    def on_doorbell(self) -> None:
        self._work()

    def _work(self) -> None:
        """Goes on by itself, whatever happens: whoever wakes it may have come already."""
        self._end_nap()
        try:
            self._dispatch_what_is_there()
        except Exception as caught:
            error = explained(caught, "dispatching failed at %d", self._dispatched.value)
            if not isinstance(error, Unforeseen) and self._retry is None:
                log.error("dispatching has to wait at %d: %s", self._dispatched.value, error)
            if self._retry is not None:
                self._retry.cancel()
            self._retry = self.after(RETRY_S, self._work)
        else:
            self._retry = None

    def _dispatch_what_is_there(self) -> None:
        """Then nap, or sleep when nothing came during a whole nap."""
        worked = False
        gone_by = time.monotonic() + WORK_S
        while time.monotonic() < gone_by:
            if self._min.value > self._builder.log_min:
                self._builder.follow_log_min(self._min.value)
                self._index.follow_log_min(self._builder.log_min)
            if self._work_once():
                worked = True
                continue
            if worked and self._begin_nap():
                return
            self._limit.arm()
            self._min.arm()
            # What has moved between looking and arming wakes nobody.
            is_done = self._dispatched.value >= self._limit.value
            if is_done and self._min.value <= self._builder.log_min:
                return
        self.call_soon(self._work)

    def _work_once(self) -> bool:
        """Dispatch messages first, then their keys. Return False if there was nothing to do."""
        worked = False
        limit = self._limit.value
        if self._dispatched.value < limit:
            self._dispatch(limit)
            worked = True
        if self._index.is_behind(self._dispatched.value):
            self._index_once()
            worked = True
        return worked

    def _index_once(self) -> None:
        """Without room for index files messages are dispatched all the same."""
        try:
            self._index.step(self._dispatched.value)
            self._index_refused = False
        except DiskFull as error:
            if not self._index_refused:
                log.error("no room for index entries: %s", error)
            self._index_refused = self._index.paused = True
            self.after(RETRY_S, self._resume_index)

    def _resume_index(self) -> None:
        self._index.paused = False
        self._work()

    def _begin_nap(self) -> bool:
        """False if somebody waits for messages: then every one of them counts."""
        self._napping.reset(1)
        if self._dispatched.has_sleepers():
            self._napping.reset(0)
            return False
        reached = self._dispatched.value
        is_little = reached < self._napped_at + LITTLE_BYTES
        self._napped_at = reached
        self._nap = self.after(LONG_NAP_S if is_little else self._nap_s, self._work)
        return True

    def _end_nap(self) -> None:
        if self._nap is not None:
            self._nap.cancel()
            self._nap = None
            self._napping.reset(0)

    def _dispatch(self, limit: int, *, whole: bool = False) -> None:
        """From `dispatched` to the limit or the end of the segment, whichever comes first; a step
        of it, unless the whole is wanted."""
        begin = self._dispatched.value
        if whole:
            reached = self._builder.dispatch(begin, limit)
        else:
            reached = self._builder.dispatch(begin, limit, step_bytes=STEP_BYTES, step_s=WORK_S)
        self._tell(reached)

    def _tell(self, reached: int) -> None:
        self._finish_recovery(reached)
        if self._builder.last_store_timestamp:  # else the process before has told of the last one
            self._timestamp.reset(self._builder.last_store_timestamp)
        if reached < self._dispatched.value:
            self._dispatched.reset(reached)
        else:
            self._dispatched.advance(reached)

    def on_rebuild_index(self, command: RebuildIndex, _request: Request) -> Command:
        self._index.rebuild(command.file, self._dispatched.value)
        self.call_soon(self._work)
        return Done()

    def settle(self) -> None:
        """Dispatch all that was written, flushed or not: nothing more will come. In a group others
        may still decide otherwise of what is not confirmed."""
        while self._dispatched.value < (end := self._catch_up_end()):
            self._dispatch(end, whole=True)
        self._builder.close()
        self._index.settle(self._dispatched.value)

    def statistics(self) -> meters.Figures:
        behind = self._wrote.value - self._dispatched.value
        found = self._index.statistics(self._dispatched.value)
        queues = len(self._builder.files)
        return {
            meters.QUEUES: queues,
            meters.BEHIND_BYTES: behind,
            meters.ENTRY_BYTES: UNIT,
        } | found
