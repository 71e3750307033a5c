"""Acknowledgements of one queue: the smallest offset that is not acknowledged, and gaps."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter

from cometmq.shm.kernel.codec import Message

_queue_offset = attrgetter("queue_offset")


class _Sparse:
    """A stretch of a queue of which only some messages were delivered: the others have no tag."""

    __slots__ = ("end", "offsets", "start")

    def __init__(self, start: int, end: int, offsets: Sequence[int]) -> None:
        self.start = start
        self.end = end
        self.offsets = array("q", offsets)

    def skipped(self, start: int, end: int) -> int:
        """Offsets of [start, end) that were not delivered."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return 0
        return end - start - (bisect_left(self.offsets, end) - bisect_left(self.offsets, start))


class Progress:
    """Acknowledgements of one queue. Whoever uses it sees to it that one thread does at a time.

    Acknowledged stretches beyond the first gap are kept as sorted, disjoint ranges; in order there
    are none, and an acknowledgement is a comparison and an assignment. With a tag expression it
    also keeps 8 bytes for every message that was delivered and is not acknowledged yet.
    """

    __slots__ = ("_ends", "_sparse", "_starts", "delivered", "done")

    def __init__(self, queue_offset: int) -> None:
        self.done = queue_offset  # everything below is acknowledged: what gets committed
        self.delivered = queue_offset  # what was handed out lies below
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._sparse: list[_Sparse] = []

    @property
    def outstanding(self) -> bool:
        """Whether something was handed out that is not acknowledged."""
        return self.done < self.delivered

    def arrived(self, start: int, end: int, messages: Sequence[Message]) -> None:
        """Queue offsets [start, end) were read, and of those only `messages` will be delivered."""
        if not messages:
            self.add(start, end)
        elif (
            len(messages) < end - start
            or messages[0].queue_offset != start
            or messages[-1].queue_offset != end - 1
        ):
            self._sparse.append(_Sparse(start, end, list(map(_queue_offset, messages))))

    def acknowledge(self, queue_offset: int) -> None:
        if queue_offset < self.done:
            return
        start, end = self._stretch(queue_offset)
        self.add(start, end)

    def acknowledge_run(self, first: int, last: int, count: int) -> bool:
        """Acknowledge `count` messages between these offsets, both included.

        False, and nothing done, unless these are all that were delivered there.
        """
        if last - first + 1 - sum(each.skipped(first, last + 1) for each in self._sparse) != count:
            return False
        self.add(self._stretch(first)[0], self._stretch(last)[1])
        return True

    def add(self, start: int, end: int) -> None:
        """Everything in [start, end) is done with."""
        if start <= self.done and not self._starts:
            if end > self.done:
                self.done = end
                self._prune()
            return
        start = max(start, self.done)
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # the first range that reaches up to it
        last = bisect_right(self._starts, end)  # the first that begins behind it
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        if self._starts[0] <= self.done:
            self.done = self._ends.pop(0)
            self._starts.pop(0)
            self._prune()

    def forget_from(self, queue_offset: int) -> None:
        """What lies there and behind it has not arrived: it is read anew. Not below `done`."""
        if self._sparse and self._sparse[-1].end > queue_offset:
            kept = [each for each in self._sparse if each.start < queue_offset]
            if kept and kept[-1].end > queue_offset:
                last = kept[-1]
                count = bisect_left(last.offsets, queue_offset)
                kept[-1] = _Sparse(last.start, queue_offset, last.offsets[:count])
            self._sparse = kept
            self._prune()
        count = bisect_left(self._starts, queue_offset)
        del self._starts[count:], self._ends[count:]
        if count:
            self._ends[-1] = min(self._ends[-1], queue_offset)

    def _stretch(self, queue_offset: int) -> tuple[int, int]:
        """The offset and what was skipped before it; behind the last one also what follows."""
        sparse = self._sparse_at(queue_offset)
        if sparse is None:
            return queue_offset, queue_offset + 1
        index = bisect_left(sparse.offsets, queue_offset)
        start = sparse.offsets[index - 1] + 1 if index else sparse.start
        is_last = index >= len(sparse.offsets) - 1
        return start, sparse.end if is_last else queue_offset + 1

    def _sparse_at(self, queue_offset: int) -> _Sparse | None:
        if not self._sparse:
            return None
        index = bisect_right(self._sparse, queue_offset, key=lambda each: each.start) - 1
        if index >= 0 and queue_offset < self._sparse[index].end:
            return self._sparse[index]
        return None

    def _prune(self) -> None:
        count = 0
        for each in self._sparse:
            if each.end > self.done:
                break
            count += 1
        if count:
            del self._sparse[:count]
