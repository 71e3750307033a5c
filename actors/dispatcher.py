"""From the CommitLog to the ConsumeQueues, and to the index."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from typing import ClassVar, Final

from cometmq.actors.family import Family
from cometmq.actors.indexing import Indexing
from cometmq.actors.service import Request, ServiceActor, Timer
from cometmq.conf import FlushDiskType
from cometmq.protocol.commands import Command, Done, Finish, RebuildIndex
from cometmq.protocol.errors import DiskFull
from cometmq.shm import _kernel
from cometmq.shm.consume_queue import UNIT, QueueFiles, WindowCache, list_queues
from cometmq.shm.control import Counter, Phase
from cometmq.shm.delay import delay_tags_code
from cometmq.shm.files import COMMITLOG_DIR, list_segments, map_segment, segment_name
from cometmq.shm.queue_table import QueueRange

log = logging.getLogger(__name__)

WINDOWS_MAX: Final = 4096
ROUNDS_MAX: Final = 64  # before the inbox is looked at again
NAP_S: Final = 0.002
RETRY_S: Final = 1


class DispatcherActor(ServiceActor):
    """Writes a ConsumeQueue entry for every record, and tells how far it has come.

    Writes, alone: consumequeue/, the queue table, `queues`, `dispatched` and its timestamp; index/
    and its counters (`Indexing`).
    Wakes on: `wrote`; under SYNC_FLUSH on `flushed`, so that nobody is shown what a power cut
    could take back. While nobody waits for messages it naps between two looks, so that a stream of
    single messages does not wake it for each; a reader that begins to wait rings it.
    Dies of: a record below `wrote` that is none. An entry's place is its record's queue offset, so
    the next process may write the last entries once more.
    """

    role = "dispatcher"
    internal_commands: ClassVar[tuple[type[Command], ...]] = (Finish, RebuildIndex)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._segment_bytes = settings.mapped_file_size_commit_log_bytes
        self._queue_bytes = settings.mapped_file_size_consume_queue_bytes
        control = family.control
        sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._limit = control.sleep_on(Counter.FLUSHED if sync else Counter.WROTE, family.doorbell)
        self._wrote = control.read(Counter.WROTE)
        self._min = control.sleep_on(Counter.MIN_OFFSET, family.doorbell)
        self._dispatched = control.own(Counter.DISPATCHED)
        self._timestamp = control.own(Counter.DISPATCHED_TIMESTAMP)
        self._queues = control.own(Counter.QUEUES)
        self._napping = control.own(Counter.NAPPING)
        self._nap: Timer | None = None
        self._retry: Timer | None = None  # when the disk is full
        self._table = family.queue_table(writable=True)
        self._kernel = _kernel.Dispatcher()
        self._windows = WindowCache(self._kernel, WINDOWS_MAX)
        self._files: list[QueueFiles] = []  # by the kernel's slot number, which is the table's
        self._log_map: tuple[int, mmap.mmap] | None = None
        self._log_min = 0
        self._rebuilding = False
        self._index = Indexing(family)
        self._index_refused = False  # the disk was full when it was last tried

    # --- start ---

    def on_start(self) -> None:
        control = self._family.control
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        took_over = bool(self._queues.value or control.read(Counter.DISPATCHED).value)
        if took_over:
            self._take_over()
        else:
            self._recover()
        self._run_until_caught_up()
        self._index.start(self._log_min, self._wrote.value, took_over=took_over)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._work()

    def _take_over(self) -> None:
        """Go on where the process before this one stopped: the table has outlived it."""
        for topic, queue_id in self._table.queues():
            found = self._table.range_of(topic, queue_id)
            assert found is not None
            self._register(topic, queue_id, found)
        self._log_min = self._min.value
        log.info("going on at %d with %d queues", self._dispatched.value, len(self._files))

    def _recover(self) -> None:
        """Cut the queues to the log, and find where dispatching has to begin."""
        began = time.monotonic()
        starts = list_segments(self._family.store / COMMITLOG_DIR, self._segment_bytes)
        self._log_min = starts[0] if starts else 0
        redo_from = self._family.control.read(Counter.RECOVERED_FROM).value
        end = self._wrote.value
        begin = -1
        for topic, queue_id in list_queues(self._family.store):
            files = self._queue_files(topic, queue_id)
            queue_end = files.cut(min(end, redo_from))
            begin = max(begin, queue_end.max_physical_offset)
            low = files.first_index_from(self._log_min, queue_end.next_index)
            self._register(topic, queue_id, QueueRange(low, queue_end.next_index))
        if not self._family.clean:
            begin = min(begin, redo_from)
        begin = max(begin, self._log_min)
        self._rebuilding = begin == self._log_min
        self._dispatched.reset(begin)
        log.info(
            "%d queues recovered, dispatching from %d to %d; %.0f ms",
            len(self._files), begin, end, (time.monotonic() - began) * 1000,
        )  # fmt: skip

    def _run_until_caught_up(self) -> None:
        """Everything that is stored gets its entry before the broker serves."""
        while self._dispatched.value < self._wrote.value:
            self._dispatch(self._wrote.value)

    def _queue_files(self, topic: str, queue_id: int) -> QueueFiles:
        return QueueFiles(self._family.store, topic, queue_id, self._queue_bytes)

    def _register(self, topic: str, queue_id: int, found: QueueRange) -> int:
        slot = len(self._files)
        if slot >= self._queues.value:
            self._table.fill_slot(slot, topic, queue_id, found)
        number = self._kernel.add_queue(
            topic, queue_id, found.max_queue_offset, self._table.memory, self._table.max_at(slot)
        )
        assert number == slot
        self._files.append(self._queue_files(topic, queue_id))
        if slot >= self._queues.value:
            self._queues.advance(slot + 1)
        return slot

    # --- the loop ---

    def on_doorbell(self) -> None:
        self._work()

    def _work(self) -> None:
        self._end_nap()
        try:
            self._dispatch_what_is_there()
        except DiskFull as error:
            if self._retry is None:
                log.error("no room for ConsumeQueue entries: %s", error)
            self._retry = self.after(RETRY_S, self._work)
        else:
            self._retry = None

    def _dispatch_what_is_there(self) -> None:
        """Then nap, or sleep when nothing came during a whole nap."""
        worked = False
        for _ in range(ROUNDS_MAX):
            if self._min.value > self._log_min:
                self._follow_log_min()
            if self._work_once():
                worked = True
                continue
            if worked and self._begin_nap():
                return
            self._limit.arm()
            self._min.arm()
            if self._dispatched.value >= self._limit.value:
                return
        self.call_soon(self._work)

    def _work_once(self) -> bool:
        """Messages first, then their keys. False if there was nothing to do."""
        worked = False
        if self._dispatched.value < self._limit.value:
            self._dispatch(self._limit.value)
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
        self._nap = self.after(NAP_S, self._work)
        return True

    def _end_nap(self) -> None:
        if self._nap is not None:
            self._nap.cancel()
            self._nap = None
            self._napping.reset(0)

    def _dispatch(self, limit: int) -> None:
        """From `dispatched` to the limit or the end of the segment, whichever comes first."""
        begin = self._dispatched.value
        start = begin // self._segment_bytes * self._segment_bytes
        end = min(limit, start + self._segment_bytes)
        memory = self._segment(start)
        while begin < end:
            begin, reason, slot, index = self._kernel.dispatch(memory, start, begin, end)
            if reason == _kernel.DISPATCH_BLANK:
                begin = start + self._segment_bytes
                break
            if reason != _kernel.DISPATCH_DONE:
                restart = self._settle_reason(reason, slot, index, memory, begin, start)
                if restart is not None:
                    self._dispatched.reset(restart)
                    return
                if reason == _kernel.DISPATCH_SPECIAL:
                    begin += self._put_special(memory, begin - start, slot, index)
        self._timestamp.reset(self._kernel.last_store_timestamp)
        self._dispatched.advance(begin)

    def _segment(self, start: int) -> mmap.mmap:
        if self._log_map is None or self._log_map[0] != start:
            path = self._family.store / COMMITLOG_DIR / segment_name(start)
            memory = map_segment(path, self._segment_bytes, writable=False)
            if self._log_map is not None:
                self._log_map[1].close()
            self._log_map = start, memory
        return self._log_map[1]

    def _settle_reason(
        self, reason: int, slot: int, index: int, memory: mmap.mmap, at: int, start: int
    ) -> int | None:
        """Do what the kernel stopped for. An offset: dispatching begins there anew."""
        if reason == _kernel.DISPATCH_NEW_QUEUE:
            message = self._message(memory, at - start)
            self._register(message.topic, message.queue_id, QueueRange(0, 0))
        elif reason == _kernel.DISPATCH_NEED_ROOM:
            self._windows.make_room(slot, self._files[slot], index, self._family.store)
        elif reason == _kernel.DISPATCH_GAP:
            return self._settle_gap(slot, index)
        elif reason == _kernel.DISPATCH_BAD:
            raise AssertionError(
                f"physical offset {at} below `wrote` {self._wrote.value}: {_kernel.REASONS[index]}"
            )
        return None

    def _settle_gap(self, slot: int, index: int) -> int | None:
        """Entries are missing before this one: build them from the log, once.

        Where the log itself does not hold them any more, RocketMQ's fillers stand for them.
        """
        files = self._files[slot]
        if not self._rebuilding:
            log.warning(
                "%s lacks entries before %d: building all queues from the log's beginning",
                files.folder, index,
            )  # fmt: skip
            self._rebuilding = True
            return self._log_min
        have = self._kernel.next_index(slot)
        first_of_segment = index // files.per_segment * files.per_segment
        self._windows.make_room(slot, files, index, self._family.store)
        _kernel.fill_units(
            self._windows.window(slot), max(have - first_of_segment, 0), index - first_of_segment
        )
        if have == 0:
            at = self._table.min_at(slot)
            self._table.memory[at : at + 8] = index.to_bytes(8, "little")
        self._kernel.set_next_index(slot, index)
        return None

    def _put_special(self, memory: mmap.mmap, at: int, slot: int, index: int) -> int:
        """The delay topic's tagsCode is a time; the record's size."""
        message = self._message(memory, at)
        self._kernel.put(
            slot, index, message.physical_offset, message.size, delay_tags_code(message)
        )
        return message.size

    def _message(self, memory: mmap.mmap, at: int) -> _kernel.Message:
        size = int.from_bytes(memory[at : at + 4], "big")
        (message,) = _kernel.decode(memory[at : at + size], None, False)
        return message

    def _follow_log_min(self) -> None:
        """The cleaner has removed segments: the queues begin later now."""
        self._log_min = self._min.value
        for slot, files in enumerate(self._files):
            low = files.first_index_from(self._log_min, self._kernel.next_index(slot))
            at = self._table.min_at(slot)
            self._table.memory[at : at + 8] = low.to_bytes(8, "little")

    def on_rebuild_index(self, command: RebuildIndex, _request: Request) -> Command:
        self._index.rebuild(command.file, self._dispatched.value)
        self.call_soon(self._work)
        return Done()

    def settle(self) -> None:
        """Dispatch all that was written, flushed or not: nothing more will come."""
        self._run_until_caught_up()
        self._windows.close()
        self._index.settle(self._dispatched.value)

    def statistics(self) -> dict[str, int | float | str]:
        behind = self._wrote.value - self._dispatched.value
        found = self._index.statistics(self._dispatched.value)
        return {"queues": len(self._files), "behind_bytes": behind, "entry_bytes": UNIT} | found
