"""Reading a store: messages of a queue, searches by time, single records.

One class serves the reader processes of a live broker and tools that open a closed store; they
differ in where they learn how far log and queues reach (`Positions`).
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from cometmq.protocol.commands import QueueParts
from cometmq.protocol.errors import MessageNotFound, StoreDamaged
from cometmq.shm.derived.consume_queue import UNIT, QueueFiles
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap, Filter, Message, TailView
from cometmq.shm.kernel.layout import BLANK, CONSUME_QUEUE_UNIT, RECORD_HEAD
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.live.queue_table import QueueRange
from cometmq.shm.log.references import LogMaps
from cometmq.shm.os.files import map_segment, maps_are_many
from cometmq.shm.os.memory import memory_of
from cometmq.shm.reading.damage import told
from cometmq.shm.reading.positions import Positions, ScannedPositions, file_sizes
from cometmq.shm.reading.tail import LogTail

log = logging.getLogger(__name__)

_I32: Final = struct.Struct(">i")
MAPS_PART: Final = 8  # of the segments that are mapped, so many go at a time
MARKS_MAX: Final = 65_536  # of one measuring
_EMPTY: Final = QueueRange(0, 0)
ENTRIES_MAX: Final = 4_194_304  # looked at in one measuring: some milliseconds


class GetStatus(IntEnum):
    """RocketMQ GetMessageStatus."""

    FOUND = 0
    NO_MATCHED_MESSAGE = 1
    MESSAGE_WAS_REMOVING = 2
    OFFSET_FOUND_NULL = 3
    OFFSET_OVERFLOW_BADLY = 4
    OFFSET_OVERFLOW_ONE = 5
    OFFSET_TOO_SMALL = 6
    NO_MATCHED_LOGIC_QUEUE = 7
    NO_MESSAGE_IN_QUEUE = 8


class GetResult(msgspec.Struct, frozen=True):
    status: GetStatus
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    count: int = 0
    payload: bytes | None = None  # the records, one after the other


class ReadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer may hold; the defaults are RocketMQ's."""

    hot_bytes: int = 262_144  # maxTransferBytesOnMessageInMemory
    hot_count: int = 32
    cold_bytes: int = 65_536  # maxTransferBytesOnMessageInDisk
    cold_count: int = 8
    scan_bytes: int = 16_000  # maxFilterMessageSize, in bytes of ConsumeQueue entries
    memory_ratio: int = 40  # accessMessageInMemoryMaxRatio, per cent of the machine's memory
    # RocketMQ passes over the rest of a segment when an entry's record cannot be read.
    skip_removed: bool = True
    # RocketMQ hands out a record whose body has changed; its clients find that out.
    check_crc: bool = True


class StoreReader:
    """Reads messages. One thread uses it. Everything is mapped read-only, as it is needed."""

    def __init__(
        self,
        store: Path,
        *,
        segment_bytes: int,
        queue_segment_bytes: int,
        positions: Positions,
        limits: ReadLimits | None = None,
    ) -> None:
        self.store = store
        self.shown = store  # what people call it
        self.positions = positions
        self.limits = limits or ReadLimits()
        self._segment_bytes = segment_bytes
        self._queue_segment_bytes = queue_segment_bytes
        self._memory_bytes = memory_of("MemTotal") * self.limits.memory_ratio // 100
        self._log = self.log = codec.LogView(segment_bytes)  # as far as it is mapped
        # (topic, queue id, queue offset) of what was not delivered because it does not hold.
        self.damaged: set[tuple[str, int, int]] = set()
        # Is told instead, before anything is handed out: of a replica, whose damage others have
        # whole, so that nothing is passed over.
        self.on_damage: Callable[[str], NoReturn] | None = None
        self._segments = LogMaps(store, segment_bytes)
        self._windows: OrderedDict[tuple[str, int, int], FileMap] = OrderedDict()
        self.tail: LogTail | None = None

    def read_tail(self, control: ControlFile, cover: Counter) -> None:
        """Hand out also what has no ConsumeQueue entry yet, up to that counter; for a live store's
        reader."""
        self.tail = LogTail(control, cover, self.positions.queue_range, self._log, self._map)

    @classmethod
    def open_closed(
        cls, store: Path, limits: ReadLimits | None = None, *, real_minimum: bool = False
    ) -> StoreReader:
        """A store that no broker has open, with the segment sizes that its files have.

        Limits and minima are RocketMQ's; see docs/recovery.md for where a live broker differs.
        """
        segment_bytes, queue_segment_bytes = file_sizes(store)
        return cls(
            store,
            segment_bytes=segment_bytes,
            queue_segment_bytes=queue_segment_bytes,
            positions=ScannedPositions(
                store, segment_bytes, queue_segment_bytes, real_minimum=real_minimum
            ),
            limits=limits,
        )

    # --- messages of a queue ---

    def get_message(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_count: int = 32,
        *,
        max_bytes: int = 134_217_728,
        tags: Iterable[str] | None = None,
        filter: Filter | None = None,
        check_crc: bool = True,
    ) -> GetResult:
        """Read messages like RocketMQ's getMessage, with the same statuses, limits and next offset
        (store-format 9)."""
        chooses = tags is not None or filter is not None
        looked_at = max(max_count, self.limits.scan_bytes // UNIT) if chooses else max_count
        low, high, tail = self._reach(topic, queue_id, queue_offset, looked_at)
        status, moved = outside(queue_offset, low, high)
        if status is not None:
            return GetResult(status, moved, low, high)
        entries = self._entries(topic, queue_id, queue_offset, high, tail)
        if entries is None:
            after = self._next_segment_index(topic, queue_id, queue_offset)
            return GetResult(GetStatus.OFFSET_FOUND_NULL, after, low, high)
        units, first_index, end = entries
        codes = None if tags is None else tuple(codec.java_hash(tag) for tag in tags)
        payload, count, next_index, unreadable = self._gather(
            topic, queue_id, units, first_index, queue_offset, end, max_count, max_bytes, codes,
            filter, check_crc,
        )  # fmt: skip
        if count:
            return GetResult(GetStatus.FOUND, next_index, low, high, count, payload)
        nothing = GetStatus.MESSAGE_WAS_REMOVING if unreadable else GetStatus.NO_MATCHED_MESSAGE
        return GetResult(nothing, next_index, low, high)

    def _gather(
        self,
        topic: str,
        queue_id: int,
        units: FileMap | bytes,
        first_index: int,
        begin: int,
        end: int,
        max_count: int,
        max_bytes: int,
        codes: tuple[int, ...] | None,
        filter: Filter | None,
        check_crc: bool,
    ) -> tuple[bytes | None, int, int, int]:
        limits = self.limits
        name = topic.encode()
        while True:
            log_min, log_max = self.positions.log_range()
            reason, payload, count, next_index, unreadable, detail, _, damaged = codec.gather(
                self._log, units, first_index, begin, end, log_min, log_max, name, queue_id,
                (max_count, max_bytes, max(limits.scan_bytes, max_count * UNIT) // UNIT,
                 self._memory_bytes, limits.hot_bytes, limits.hot_count, limits.cold_bytes,
                 limits.cold_count),
                codes, limits.skip_removed, limits.check_crc and check_crc, filter,
            )  # fmt: skip
            if damaged is not None:
                self._report(topic, queue_id, damaged)
                unreadable += len(damaged)
            if reason != codec.GATHER_UNMAPPED:
                return payload, count, next_index, unreadable
            if self._map(detail) is None:
                # Deleted between looking and mapping: the log begins later now.
                return None, 0, begin, 1

    def _report(self, topic: str, queue_id: int, damaged: list[tuple[int, int, int]]) -> None:
        """A line for each message that does not hold, once."""
        for queue_offset, physical_offset, reason in damaged:
            place = topic, queue_id, queue_offset
            if place in self.damaged:
                continue
            text = told(self.shown, self._segment_bytes, *place, physical_offset, reason)
            if self.on_damage is not None:
                self.on_damage(text)
            self.damaged.add(place)
            log.error("%s", text)

    def _reach(
        self, topic: str, queue_id: int, queue_offset: int, count_max: int
    ) -> tuple[int, int, TailView | None]:
        """How far the queue reaches for who reads at an offset, and its tail if that is looked at:
        only where there is no entry. A tail that is stuck tells of nobody that he is behind its
        end: he may have got it from another reader, and is to wait.

        RocketMQ makes a queue when it is asked for: one that does not exist is empty.
        """
        low, high = self.positions.queue_range(topic, queue_id) or _EMPTY
        if self.tail is None or low <= queue_offset < high:
            return low, high, None
        tail = self.tail.of(topic, queue_id, queue_offset, count_max)
        return low, max(high, tail.end, queue_offset if tail.is_stuck else 0), tail

    def _entries(
        self, topic: str, queue_id: int, index: int, high: int, tail: TailView | None
    ) -> tuple[FileMap | bytes, int, int] | None:
        """(entries, index of the first one, end of those that may be read) around an index that
        is in the queue; None if they are not there."""
        if tail is not None:
            if index >= tail.first:
                return tail.units, tail.first, tail.first + len(tail.units) // UNIT
            high = tail.first  # dispatched meanwhile
        window = self._window(topic, queue_id, index)
        if window is None:
            return None
        units, first_index = window
        return units, first_index, min(high, first_index + len(units) // UNIT)

    def _window(self, topic: str, queue_id: int, index: int) -> tuple[FileMap, int] | None:
        """The mapped segment that holds an entry, and the index of its first entry."""
        per_segment = self._queue_segment_bytes // UNIT
        start = index // per_segment * self._queue_segment_bytes
        key = (topic, queue_id, start)
        memory = self._windows.get(key)
        if memory is None:
            self._make_room()
            path = self._files(topic, queue_id).path(start)
            try:
                memory = map_segment(path, self._queue_segment_bytes, writable=False)
            except FileNotFoundError:
                return None
            self._windows[key] = memory
        else:
            self._windows.move_to_end(key)
        return memory, start // UNIT

    def _make_room(self) -> None:
        """Let go of what was not needed for longest, when this process has all that it may have.

        What an answer is being made of is the newest, and stays.
        """
        if not maps_are_many():
            return
        for _ in range(len(self._windows) // MAPS_PART):
            self._windows.popitem(last=False)[1].close()
        self._let_go(self._segments.oldest(len(self._segments) // MAPS_PART))

    def _next_segment_index(self, topic: str, queue_id: int, index: int) -> int:
        """Where the queue goes on behind a segment that the cleaner has deleted. It never deletes
        the last one: where there is none, somebody has taken the files away, all of the store's
        perhaps, and nothing is known of the queue. Raises StoreDamaged."""
        files = self._files(topic, queue_id)
        after = next((start // UNIT for start in files.starts() if start // UNIT > index), None)
        if after is None:
            path = files.path(
                index // (self._queue_segment_bytes // UNIT) * self._queue_segment_bytes
            )
            raise StoreDamaged(
                f"{path} is not there, nor any behind it: message {index} of {topic}/{queue_id} "
                "was in it"
            )
        return after

    def _files(self, topic: str, queue_id: int) -> QueueFiles:
        return QueueFiles(self.store, topic, queue_id, self._queue_segment_bytes)

    # --- how much lies in a queue ---

    def parts(
        self,
        topic: str,
        queue_id: int,
        begin: int,
        end: int,
        *,
        bytes_max: int,
        count_max: int,
        marks_max: int = MARKS_MAX,
    ) -> QueueParts:
        """Where parts of [begin, end) begin that hold so many bytes or messages at most."""
        marks: list[int] = []
        total = held_bytes = held_count = 0
        stop = min(end, begin + ENTRIES_MAX)
        while begin < stop and len(marks) < marks_max:
            window = self._window(topic, queue_id, begin)
            if window is None:
                break
            units, first = window
            limit = min(stop, first + len(units) // UNIT)
            found, begin, size, held_bytes, held_count = codec.unit_marks(
                units, first, begin, limit, bytes_max, count_max, held_bytes, held_count,
                marks_max - len(marks),
            )  # fmt: skip
            marks += found
            total += size
            if begin < limit:
                break
        return QueueParts(marks, begin, total)

    def end_below(self, topic: str, queue_id: int, physical_offset: int) -> int:
        """One past the last message whose record ends at or below a physical offset."""
        low, index = self.positions.queue_range(topic, queue_id) or (0, 0)
        while index > low:
            window = self._window(topic, queue_id, index - 1)
            if window is None:
                break
            units, first = window
            begin = max(low, first)
            index = first + codec.units_below(units, begin - first, index - first, physical_offset)
            if index > begin:
                break
        return index

    # --- the log ---

    def _map(self, start: int) -> FileMap | None:
        memory = self._segments.mapped(start)
        if memory is not None:
            return memory
        log_min = self.positions.log_range()[0]
        self._let_go_of_log(log_min)
        if start + self._segment_bytes <= log_min:
            return None
        self._make_room()
        try:
            memory = self._segments.map(start)
        except FileNotFoundError:
            return None
        self._log.set(start, memory)
        return memory

    def let_go_of_deleted(self) -> None:
        """Unmap what the store no longer has: its space comes back only then."""
        self._let_go_of_log(self.positions.log_range()[0])
        for topic, queue_id, start in list(self._windows):
            found = self.positions.queue_range(topic, queue_id)
            end = (start + self._queue_segment_bytes) // UNIT
            if found is not None and end <= found.min_queue_offset:
                self._windows.pop((topic, queue_id, start)).let_go()

    def _let_go_of_log(self, log_min: int) -> None:
        self._let_go(self._segments.below(log_min))

    def _let_go(self, starts: Iterable[int]) -> None:
        for start in starts:
            self._log.drop(start)
            self._segments.let_go(start)

    def record_at(self, physical_offset: int) -> Message:
        """The record that begins there. Raises MessageNotFound."""
        nothing = MessageNotFound(f"no record begins at physical offset {physical_offset}")
        place = self.place_of(physical_offset)
        if place is None:
            raise nothing
        memory, at, end = place
        (size,) = _I32.unpack_from(memory, at)
        if not RECORD_HEAD.size <= size <= end - at:
            raise nothing
        try:
            (message,) = codec.decode(memory[at : at + size])
        except (codec.RecordDamaged, ValueError):
            raise nothing from None
        if message.physical_offset != physical_offset:
            raise nothing
        return message

    def place_of(self, physical_offset: int) -> tuple[FileMap, int, int] | None:
        """The mapped segment, where in it a record or a blank may begin there, and where the log
        ends in it; None where there can be none."""
        log_min, log_max = self.positions.log_range()
        if not log_min <= physical_offset <= log_max - BLANK.size:
            return None
        start = physical_offset // self._segment_bytes * self._segment_bytes
        memory = self._map(start)
        if memory is None:
            return None
        at, end = physical_offset - start, min(log_max - start, len(memory))
        return (memory, at, end) if at <= end - BLANK.size else None

    # --- time ---

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool = False
    ) -> int:
        """RocketMQ's getOffsetInQueueByTime (store-format 3.9).

        Lower: the first message stored at or after the time, the maximum if there is none. Upper:
        the last one stored at or before it, the minimum if there is none.
        """
        found = self.positions.queue_range(topic, queue_id)
        if found is None or found.max_queue_offset == 0:
            return 0
        low, high = found
        last = self._store_time(topic, queue_id, high - 1)
        if last is not None and last < timestamp_ms:
            return high - 1 if upper else high
        while low < high:  # the first entry later than the time (upper) or not before it (lower)
            middle = (low + high) // 2
            stored = self._store_time(topic, queue_id, middle)
            if stored is None:
                if self.limits.skip_removed:
                    return found.min_queue_offset  # as RocketMQ: one that is not there ends it
                stored = self._store_time_before(topic, queue_id, middle, low)
            if stored < timestamp_ms or (upper and stored == timestamp_ms):
                low = middle + 1
            else:
                high = middle
        return max(found.min_queue_offset, low - 1) if upper else low

    def _store_time(self, topic: str, queue_id: int, index: int) -> int | None:
        """-1 where the record has been deleted: very old. None where there never was one."""
        window = self._window(topic, queue_id, index)
        if window is None:
            return -1
        units, first_index = window
        unit = CONSUME_QUEUE_UNIT.unpack(units, (index - first_index) * UNIT)
        physical_offset = unit["physical_offset"]
        log_min, log_max = self.positions.log_range()
        if physical_offset < log_min:
            return -1
        if physical_offset > log_max - unit["size"]:  # a filler has an impossible size
            return None
        start = physical_offset // self._segment_bytes * self._segment_bytes
        memory = self._map(start)
        if memory is None:
            return -1
        return codec.stored_at(
            memory, start, physical_offset, unit["size"], topic.encode(), queue_id, index
        )

    def _store_time_before(self, topic: str, queue_id: int, index: int, low: int) -> int:
        """What a place without a record counts as: the time of the one before it, or very old."""
        for before in range(index - 1, low - 1, -1):
            stored = self._store_time(topic, queue_id, before)
            if stored is not None:
                return stored
        return -1

    def close(self) -> None:
        self._log.clear()
        self._segments.close()
        for memory in self._windows.values():
            memory.let_go()
        self._windows.clear()


def outside(queue_offset: int, low: int, high: int) -> tuple[GetStatus | None, int]:
    """RocketMQ's answer to an offset that is not in the queue, and where to go on."""
    if high == 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, 0
    if queue_offset < low:
        return GetStatus.OFFSET_TOO_SMALL, low
    if queue_offset == high:
        return GetStatus.OFFSET_OVERFLOW_ONE, queue_offset
    if queue_offset > high:
        return GetStatus.OFFSET_OVERFLOW_BADLY, high
    return None, queue_offset
