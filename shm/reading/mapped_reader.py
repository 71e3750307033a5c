"""Reading messages of a live store in the process that wants them."""

from __future__ import annotations

import mmap
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from cometmq.protocol.commands import PullStatus
from cometmq.shm.derived.consume_queue import UNIT
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap, Message
from cometmq.shm.kernel.layout import CONSUME_QUEUE_UNIT
from cometmq.shm.reading.positions import Positions
from cometmq.shm.reading.selection import Selection
from cometmq.shm.reading.store_reader import GetStatus, StoreReader, outside

SCAN_COUNT: Final = 65_536  # entries looked at for one answer, whatever the tags
# Likewise of records, where no map tells of them, which cost more: other threads wait for it.
FILTERED_COUNT: Final = 16_384
AHEAD_BYTES: Final = 128 * 1_048_576  # the system is asked to have in memory
STEP_BYTES: Final = 16 * 1_048_576  # at a time
STREAMS: Final = 4  # places of the log that are read from in turns
CODES_MAX: Final = 32  # as many as the kernel compares

PULL_STATUS: Final = {
    GetStatus.FOUND: PullStatus.FOUND,
    GetStatus.NO_MATCHED_MESSAGE: PullStatus.NO_MATCHED_MESSAGE,
    GetStatus.MESSAGE_WAS_REMOVING: PullStatus.NO_MATCHED_MESSAGE,
    GetStatus.OFFSET_OVERFLOW_ONE: PullStatus.NO_NEW_MESSAGE,
    GetStatus.OFFSET_FOUND_NULL: PullStatus.OFFSET_MOVED,
    GetStatus.OFFSET_OVERFLOW_BADLY: PullStatus.OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: PullStatus.OFFSET_MOVED,
}


class Found(NamedTuple):
    """What a reader process would have answered, with the messages in place of their bytes."""

    status: int  # PullStatus
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    messages: list[Message]
    size: int  # bytes of their records


class MappedReader(StoreReader):
    """A StoreReader that hands out messages. Whoever has several threads locks it.

    Args:
        root: the store, by a name that stays the same folder's.
        shown: what people call it.
    """

    def __init__(
        self,
        root: Path,
        shown: str,
        *,
        segment_bytes: int,
        queue_segment_bytes: int,
        positions: Positions,
    ) -> None:
        super().__init__(
            root,
            segment_bytes=segment_bytes,
            queue_segment_bytes=queue_segment_bytes,
            positions=positions,
        )
        self.shown = Path(shown)
        # Physical offsets that the system was asked up to, the newest first.
        self._asked: list[int] = []

    def messages(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_count: int,
        max_bytes: int,
        selection: Selection,
    ) -> Found:
        """As `get_message`, with the limits of the caller alone."""
        tags, filter = selection
        scanned = SCAN_COUNT if filter is None else FILTERED_COUNT
        looked_at = max_count if selection.is_all else max(max_count, scanned)
        low, high, tail = self._reach(topic, queue_id, queue_offset, looked_at)
        status, moved = outside(queue_offset, low, high)
        if status is GetStatus.NO_MESSAGE_IN_QUEUE:
            empty = PullStatus.OFFSET_MOVED if queue_offset else PullStatus.NO_NEW_MESSAGE
            return Found(empty, moved, low, high, [], 0)
        if status is not None:
            return Found(PULL_STATUS[status], moved, low, high, [], 0)
        entries = self._entries(topic, queue_id, queue_offset, high, tail)
        if entries is None:
            after = self._next_segment_index(topic, queue_id, queue_offset)
            return Found(PullStatus.OFFSET_MOVED, after, low, high, [], 0)
        units, first_index, end = entries
        if tail is None:
            self._read_ahead(units, (queue_offset - first_index) * UNIT)
        name = topic.encode()
        while True:
            log_min, log_max = self.positions.log_range()
            reason, messages, size, next_index, _, detail, damaged = codec.deliver(
                self._log, units, first_index, queue_offset, end, log_min, log_max, name, queue_id,
                max_count, max_bytes, max(scanned, max_count), _codes_of(tags), tags,
                filter,
            )  # fmt: skip
            if damaged is not None:
                self._report(topic, queue_id, damaged)
            if reason != codec.GATHER_UNMAPPED:
                status_code = PullStatus.FOUND if messages else PullStatus.NO_MATCHED_MESSAGE
                return Found(status_code, next_index, low, high, messages, size)
            if self._map(detail) is None:
                # Deleted between looking and mapping: the log begins later now.
                return Found(PullStatus.NO_MATCHED_MESSAGE, queue_offset, low, high, [], 0)

    # --- what is not in memory ---

    def _read_ahead(self, units: FileMap | bytes, at: int) -> None:
        """Have what comes next read in large pieces, and not page by page when it is met."""
        physical_offset = CONSUME_QUEUE_UNIT.unpack(units, at)["physical_offset"]
        start = physical_offset // self._segment_bytes * self._segment_bytes
        memory = self._segments.mapped(start)
        if memory is None:
            return
        segment_end = start + self._segment_bytes
        end = min(segment_end, physical_offset + AHEAD_BYTES, self.positions.log_range()[1])
        # At the log's end, with others' messages between, it has come beyond what it asked for.
        near = [s for s in self._asked if -STEP_BYTES <= s - physical_offset <= AHEAD_BYTES]
        begin = max(near, default=0)
        begin = max(begin, physical_offset)
        if begin >= end or (near and end < segment_end and end - begin < STEP_BYTES):
            return  # a little at a time would be as slow as page by page
        memory.advise(mmap.MADV_WILLNEED, begin - start, end - begin)
        self._asked = [end, *(stop for stop in self._asked if stop not in near)][:STREAMS]


@lru_cache(maxsize=4096)
def _codes_of(tags: frozenset[str] | None) -> tuple[int, ...] | None:
    """What the entries are filtered by; the texts are compared in any case."""
    if tags is None or len(tags) > CODES_MAX:
        return None
    return tuple(map(codec.java_hash, tags))
