"""What a queue is about to get: its records between `dispatched` and the end of the log.

Whoever waits for the next message need not wait for its ConsumeQueue entry. He reads the log from
where the dispatcher stands, and makes the entries himself, for himself: the dispatcher may then
nap, and write many at once.

What is shown so is in the log, and outlives a killed process as a dispatched message does. Under
SYNC_FLUSH nobody is to see what is not on the disk: there this is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cometmq.shm import _kernel
from cometmq.shm._kernel import LogView
from cometmq.shm.consume_queue import UNIT
from cometmq.shm.control import ControlFile, Counter
from cometmq.shm.queue_table import QueueRange

BEHIND_MAX: Final = 256 * 1_048_576  # bytes looked through for a queue that was not known before
QUEUES_MAX: Final = 4_096  # remembered


class QueueTail:
    """Entries [first, end) of a queue, of the records below `scanned_to`."""

    __slots__ = ("first", "is_stuck", "scanned_to", "units")

    def __init__(self, first: int, scanned_to: int) -> None:
        self.first = first
        self.scanned_to = scanned_to  # physical offset
        self.units = bytearray()
        self.is_stuck = False  # what comes next is for the dispatcher to judge

    @property
    def end(self) -> int:
        return self.first + len(self.units) // UNIT

    def follow(self, dispatched: int, high: int) -> bool:
        """The dispatcher has come to `dispatched`, and the queue to `high`. False if entries may
        lie between what it has written and what is known here: then this is of no use."""
        if self.is_stuck or self.scanned_to < dispatched or high < self.first:
            return False
        if high > self.end:
            return False
        del self.units[: (high - self.first) * UNIT]
        self.first = high
        return True


class LogTail:
    """The tails of a live store's queues. One thread uses it.

    Args:
        range_of: how far the dispatcher has come with a queue.
        view: the log, which `map_segment` adds segments to; None: it is not there any more.
    """

    def __init__(
        self,
        control: ControlFile,
        range_of: Callable[[str, int], QueueRange | None],
        view: LogView,
        map_segment: Callable[[int], object | None],
    ) -> None:
        self._dispatched = control.read(Counter.DISPATCHED)
        self._wrote = control.read(Counter.WROTE)
        self._range_of = range_of
        self._view = view
        self._map_segment = map_segment
        self._queues: dict[tuple[str, int], QueueTail] = {}

    def of(self, topic: str, queue_id: int) -> QueueTail:
        """As far as the log is written at this moment. It is good until the next call."""
        dispatched = self._dispatched.value  # first: all below it is counted in what follows
        found = self._range_of(topic, queue_id)
        high = 0 if found is None else found.max_queue_offset
        wrote = self._wrote.value
        tail = self._queues.get((topic, queue_id))
        if tail is None or not tail.follow(dispatched, high):
            tail = self._begin(topic, queue_id, high, dispatched, wrote)
        while tail.scanned_to < wrote and not tail.is_stuck:
            self._scan(tail, topic, queue_id, wrote)
        return tail

    def _begin(
        self, topic: str, queue_id: int, high: int, dispatched: int, wrote: int
    ) -> QueueTail:
        if len(self._queues) >= QUEUES_MAX:
            self._queues.clear()
        tail = self._queues[topic, queue_id] = QueueTail(high, dispatched)
        tail.is_stuck = wrote - dispatched > BEHIND_MAX
        return tail

    def _scan(self, tail: QueueTail, topic: str, queue_id: int, wrote: int) -> None:
        reason, tail.scanned_to, units = _kernel.tail_units(
            self._view, tail.scanned_to, wrote, topic, queue_id, tail.end
        )
        tail.units += units
        if reason == _kernel.TAIL_UNMAPPED:
            size = self._view.segment_bytes
            tail.is_stuck = self._map_segment(tail.scanned_to // size * size) is None
        elif reason == _kernel.TAIL_STRANGE:
            tail.is_stuck = True
