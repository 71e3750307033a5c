"""Judging records for a filter's map, from the ConsumeQueue's entries."""

from __future__ import annotations

from cometmq.shm.derived.consume_queue import UNIT
from cometmq.shm.kernel._kernel import Filter, FilterBlock
from cometmq.shm.reading.store_reader import StoreReader


class JudgingReader(StoreReader):
    """A StoreReader that fills the blocks of filters' maps."""

    def judge(
        self, block: FilterBlock, topic: str, queue_id: int, end: int, filter: Filter, time_s: float
    ) -> None:
        """Look at the queue's messages from `block.next_offset` on, below `end`, for about so long;
        what has no record, or a damaged one, is for others to see. At least one."""
        window = self._window(topic, queue_id, block.next_offset)
        if window is None:  # deleted just now
            per_segment = self._queue_segment_bytes // UNIT
            block.pass_over(min(end, (block.next_offset // per_segment + 1) * per_segment))
            return
        units, first_index = window
        end = min(end, first_index + len(units) // UNIT)
        name, time_ns = topic.encode(), int(time_s * 1e9)
        while True:
            log_min, log_max = self.positions.log_range()
            unmapped = block.fill(
                self._log, units, first_index, end, log_min, log_max, name, queue_id, filter,
                time_ns,
            )  # fmt: skip
            if unmapped < 0:
                return
            if self._map(unmapped) is None:  # likewise
                block.pass_over(block.next_offset + 1)
                return
