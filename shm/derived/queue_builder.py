"""Building ConsumeQueues from the log, and bringing them to it at a start.

One class serves the dispatcher process and the tools that repair a closed store.
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import Final

import msgspec

from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.derived.delay import LEVELS_MS, tags_code_of
from cometmq.shm.derived.other_queues import OtherTopics, list_served_queues
from cometmq.shm.derived.queue_check import (
    QueueEnds,
    QueueFault,
    StoreFiles,
    entry_holds,
    find_ends,
    find_faults,
)
from cometmq.shm.derived.windows import WindowCache
from cometmq.shm.kernel import codec, store
from cometmq.shm.kernel.codec import QUEUE_OFFSET_MAX, FileMap
from cometmq.shm.kernel.live import OwnedCell
from cometmq.shm.live.queue_table import (
    QUEUES_BEFORE_FILE,
    QueueRange,
    QueueTable,
    queues_before,
    write_before,
)
from cometmq.shm.log.recovery import SEGMENT_MISSING, Damage
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name

log = logging.getLogger(__name__)

REBUILD_FILE: Final = "cometmq.rebuild"  # while it is there, a start begins with the whole log
# A record whose queue offset leaves more than so many places free is taken for damaged.
GAP_MAX: Final = 1_000_000


class QueuesRecovered(msgspec.Struct, frozen=True):
    """What was done to the queues before dispatching begins."""

    begin: int  # physical offset from where everything is dispatched anew
    rebuilt: bool  # from the log's beginning
    faults: tuple[QueueFault, ...]


class QueueBuilder:
    """Writes a ConsumeQueue entry for every record. Has one user, the writer of consumequeue/.

    An entry's place is its record's queue offset, so writing it twice changes nothing.

    Args:
        table, count: where the queues' ends are published, and how many of its slots are in use.
    """

    def __init__(
        self,
        files: StoreFiles,
        table: QueueTable,
        count: OwnedCell,
        delay_levels_ms: tuple[int, ...] = LEVELS_MS,
    ) -> None:
        self._delay_levels_ms = delay_levels_ms
        self._store_files = files
        self._store = files.store
        self._segment_bytes = files.segment_bytes
        self._table = table
        self._count = count
        self._kernel = store.Dispatcher(array("q", delay_levels_ms))
        self._windows = WindowCache(self._kernel)
        self.files: list[QueueFiles] = []  # by the kernel's slot number, which is the table's
        self._log = LogMaps(files.store, files.segment_bytes)
        self.log_min = 0
        self._rebuilding = False
        self._others = OtherTopics(files.store)
        self._said: set[str] = set()  # topics that a warning was logged for: not served
        self.damages: list[Damage] = []  # what was passed over

    @property
    def last_store_timestamp(self) -> int:
        return self._kernel.last_store_timestamp

    # --- start ---

    def take_over(self, log_min: int) -> None:
        """Go on where the process before this one stopped: the table has outlived it."""
        for topic, queue_id in self._table.queues():
            found = self._table.range_of(topic, queue_id)
            assert found is not None
            self._register(topic, queue_id, found)
        self.follow_log_min(log_min)  # which that process may not have come to
        self._rebuilding = (self._store / REBUILD_FILE).exists()

    def recover(
        self,
        *,
        clean: bool,
        redo_from: int,
        end: int,
        rebuild: bool = False,
        ends: QueueEnds | None = None,
    ) -> QueuesRecovered:
        """Cut the queues to the log, and find where dispatching has to begin.

        Where the queues cannot be trusted everything is built from the log's beginning; a file
        says so until that is done. Killed after any line, the next start does the same again.

        Args:
            ends: what `find_ends` has found, if that was asked before.
        """
        began = time.monotonic()
        ends = find_ends(self._store_files) if ends is None else ends
        starts = self._store_files.log_starts()
        self.log_min = starts[0] if starts else 0
        settled = max(self.log_min, min(end, redo_from))
        faults, rebuild = self._examine(clean, settled, rebuild, ends)
        keep_below = self.log_min if rebuild else settled
        broken = {(fault.topic, fault.queue_id) for fault in faults} if rebuild else set()
        begin, ranges = self._cut_queues(keep_below, broken, ends)
        if rebuild or not clean:
            begin = min(begin, keep_below)
        begin = max(min(begin, end), self.log_min)
        for key, found in ranges.items():
            self._register(*key, found)
        self._rebuilding = rebuild or begin == self.log_min
        log.info(
            "%d queues recovered%s, dispatching from %d to %d; %.0f ms",
            len(ranges), ", all are rebuilt" if rebuild else "", begin, end,
            (time.monotonic() - began) * 1000,
        )  # fmt: skip
        return QueuesRecovered(begin, rebuild, tuple(faults))

    def _examine(
        self, clean: bool, settled: int, rebuild: bool, ends: QueueEnds
    ) -> tuple[list[QueueFault], bool]:
        """What is wrong with the queues, and whether all are to be built anew."""
        before = queues_before(self._store)
        if rebuild and not any(list_served_queues(self._store)):
            faults = []  # none is there to be found wrong: they are to be made
        else:
            faults = find_faults(self._store_files, before, settled, ends, clean=clean)
        for fault in faults:
            log.warning("%s", fault)
        marker = self._store / REBUILD_FILE
        # After a bad end of somebody else's process nobody knows which queues there should be.
        unknown = not clean and not before and settled > self.log_min
        if unknown:
            log.info("the queues of the last run are not known: all are compared with the log")
        rebuild = rebuild or bool(faults) or unknown or marker.exists()
        if rebuild and clean and not before:
            write_before(self._store, self._ends(ends))
        if rebuild:
            self._mark_rebuild()
        return faults, rebuild

    def _ends(self, ends: QueueEnds) -> dict[tuple[str, int], int]:
        """How far the queues reach that can be read, a last entry that is damaged included."""
        reach = {}
        for key, end in ends.items():
            behind = self._store_files.queue(*key).anything_at(end.next_index)
            reach[key] = end.next_index + (behind is not None)
        return reach

    def _cut_queues(
        self, physical_offset: int, broken: set[tuple[str, int]], ends: QueueEnds
    ) -> tuple[int, dict[tuple[str, int], QueueRange]]:
        """Drop what will be dispatched anew; the furthest end of what is left, and all ranges."""
        begin = -1
        ranges = {}
        for key in list_served_queues(self._store):
            files = self._store_files.queue(*key)
            if key in broken:
                # The folder stays, so that a second start counts the same queues.
                files.remove()
            end = files.cut(physical_offset, None if key in broken else ends[key])
            begin = max(begin, end.max_physical_offset)
            low = files.first_index_from(self.log_min, end.next_index)
            ranges[key] = QueueRange(low, end.next_index)
        return begin, ranges

    def finish_recovery(self) -> None:
        """Everything is dispatched: the next start may trust the queues again."""
        if (self._store / REBUILD_FILE).exists():
            self._keep_ends()
        for name in (REBUILD_FILE, QUEUES_BEFORE_FILE):
            (self._store / name).unlink(missing_ok=True)

    def _keep_ends(self) -> None:
        """No queue ends before the place where it ended: its last messages may be damaged, or
        expired, but nobody else gets their queue offsets."""
        for (topic, queue_id), end in queues_before(self._store).items():
            if end > QUEUE_OFFSET_MAX or self._others.why(topic):
                continue
            slot = self._kernel.find(topic, queue_id)
            have = self._kernel.next_index(slot) if slot >= 0 else 0
            if have >= end:
                continue
            if have and end - have > GAP_MAX:
                log.error(
                    "queue %d of %s is said to have ended at %d: that is not believed, it ends "
                    "at %d", queue_id, topic, end, have,
                )  # fmt: skip
                continue
            log.warning(
                "queue %d of %s ended at %d, and the log holds its messages up to %d only: it "
                "goes on at %d", queue_id, topic, end, have, end,
            )  # fmt: skip
            if slot < 0:
                slot = len(self.files)
                self._register(topic, queue_id, QueueRange(0, 0))
            self._fill(slot, have, end)

    def _register(self, topic: str, queue_id: int, found: QueueRange) -> None:
        slot = len(self.files)
        self._table.fill_slot(slot, topic, queue_id, found)
        number = self._kernel.add_queue(
            topic, queue_id, found.max_queue_offset, self._table.memory, self._table.max_at(slot)
        )
        assert number == slot
        self.files.append(self._store_files.queue(topic, queue_id))
        if slot >= self._count.value:
            self._count.advance(slot + 1)

    # --- dispatching ---

    def dispatch(
        self, begin: int, limit: int, *, step_bytes: int | None = None, step_s: float | None = None
    ) -> int:
        """From `begin` to the limit or the end of the segment, whichever comes first; or until a
        step is done, which is so many bytes or seconds.

        How far it came. Less than `begin`: entries are missing, everything from there anew.
        """
        enough = limit if step_bytes is None else begin + step_bytes
        gone_by = None if step_s is None else time.monotonic() + step_s
        start = begin // self._segment_bytes * self._segment_bytes
        end = min(limit, start + self._segment_bytes)
        memory = self._segment(start)
        if memory is None:
            return self._pass_over(begin, end, SEGMENT_MISSING)
        while begin < end:
            begin, reason, slot, index = self._kernel.dispatch(memory, start, begin, end, enough)
            if reason == store.DISPATCH_BLANK:
                return start + self._segment_bytes
            if reason == store.DISPATCH_BAD:
                found = codec.find_record(memory, start, min(begin + 1, end), end)
                resumed = found if found >= 0 else end
                begin = self._pass_over(begin, resumed, codec.REASONS[index])
            elif reason == store.DISPATCH_GAP and not self._rebuilding:
                return self._begin_anew(slot, index)
            elif reason != store.DISPATCH_DONE:
                begin += self._settle(reason, slot, index, memory, begin - start)
            if begin >= enough or (gone_by is not None and time.monotonic() > gone_by):
                break
        return begin

    def _segment(self, start: int) -> FileMap | None:
        try:
            return self._log.only(start)
        except FileNotFoundError:
            return None

    def _settle(self, reason: int, slot: int, index: int, memory: FileMap, at: int) -> int:
        """Do what the kernel stopped for; how many bytes of the log that settles."""
        if reason == store.DISPATCH_NEW_QUEUE:
            message = _message(memory, at)
            if self._others.why(message.topic):
                return self._leave_out(message)
            self._register(message.topic, message.queue_id, QueueRange(0, 0))
        elif reason == store.DISPATCH_NEED_ROOM:
            self._windows.make_room(slot, self.files[slot], index, self._store)
        elif reason == store.DISPATCH_TAKEN:
            return self._take_place(_message(memory, at), slot, index)
        elif reason == store.DISPATCH_GAP:
            return self._fill_gap(memory, at, slot, index)
        return 0

    def _leave_out(self, message: codec.Message) -> int:
        """Skip a record of a topic that is not served. Return its size."""
        if message.topic not in self._said:
            self._said.add(message.topic)
            log.warning(
                "topic %s has messages from physical offset %d on, and is not served (%s): they "
                "stay in the log for RocketMQ",
                message.topic, message.physical_offset, self._others.why(message.topic),
            )  # fmt: skip
        return message.size

    def _take_place(self, message: codec.Message, slot: int, index: int) -> int:
        """The record's place has an entry of an earlier one, if that entry holds; its size."""
        key = message.topic, message.queue_id
        unit = self.files[slot].entry(index)
        if unit is not None and entry_holds(self._store_files, *key, index, unit):
            text = f"its place in queue {message.queue_id} of {message.topic}, {index}, is taken"
            return self._pass_over_record(message, text)
        log.warning(
            "%s: entry %d pointed at no message of that place; it is written anew",
            self.files[slot].folder, index,
        )  # fmt: skip
        code = tags_code_of(message, self._delay_levels_ms)
        self._kernel.put(slot, index, message.physical_offset, message.size, code)
        return message.size

    def _pass_over_record(self, message: codec.Message, reason: str) -> int:
        """A whole record that gets no entry; its size."""
        at = message.physical_offset
        return self._pass_over(at, at + message.size, reason) - at

    def _pass_over(self, begin: int, end: int, reason: str) -> int:
        start = begin // self._segment_bytes * self._segment_bytes
        file = str(self._store / COMMITLOG_DIR / segment_name(start))
        damage = Damage(begin, end - begin, reason, file)
        log.error("%s", damage)
        self.damages.append(damage)
        return end

    def _begin_anew(self, slot: int, index: int) -> int:
        """Entries are missing before this one: build all queues from the log, once."""
        log.warning(
            "%s lacks entries before %d: building all queues from the log's beginning",
            self.files[slot].folder, index,
        )  # fmt: skip
        self._rebuilding = True
        self._mark_rebuild()
        self._windows.close()
        for number, files in enumerate(self.files):
            self._kernel.set_next_index(number, files.cut(self.log_min).next_index)
        return self.log_min

    def _mark_rebuild(self) -> None:
        (self._store / REBUILD_FILE).touch()
        sync_folder(self._store)

    def _fill_gap(self, memory: FileMap, at: int, slot: int, index: int) -> int:
        """RocketMQ's fillers stand for entries whose records the log does not hold (any more)."""
        have = self._kernel.next_index(slot)
        if have and index - have > GAP_MAX:
            text = f"queue offset {index} where {have} was expected"
            return self._pass_over_record(_message(memory, at), text)
        self._fill(slot, have, index)
        return 0

    def _fill(self, slot: int, have: int, index: int) -> None:
        files = self.files[slot]
        first = have or index // files.per_segment * files.per_segment
        self._write_fillers(slot, first, index)
        if have == 0:
            self._table.set_min(slot, index)
        self._kernel.set_next_index(slot, index)

    def _write_fillers(self, slot: int, begin: int, end: int) -> None:
        files = self.files[slot]
        while begin < end:
            segment_first = begin // files.per_segment * files.per_segment
            stop = min(end, segment_first + files.per_segment)
            self._windows.make_room(slot, files, stop - 1, self._store)
            codec.fill_units(
                self._windows.window(slot), begin - segment_first, stop - segment_first
            )
            begin = stop

    def follow_log_min(self, log_min: int) -> None:
        """The cleaner has removed segments: the queues begin later now."""
        self.log_min = log_min
        self._log.let_go_below(log_min)
        for slot, files in enumerate(self.files):
            low = files.first_index_from(log_min, self._kernel.next_index(slot))
            self._table.set_min(slot, low)

    def close(self) -> None:
        self._windows.close()
        self._log.close()


def _message(memory: FileMap, at: int) -> codec.Message:
    size = int.from_bytes(memory[at : at + 4], "big")
    (message,) = codec.decode(memory[at : at + size], None, False)
    return message
