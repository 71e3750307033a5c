"""What queues are about to get: the records between `dispatched` and the end of what may be shown.

A process that waits for the next message of a queue need not wait for its ConsumeQueue entry. It
reads the log from where the dispatcher stands, each byte once for all its queues, and makes the
entries for itself: the dispatcher may then nap, and write many at once.

What is shown so is in the log, and outlives a killed process as a dispatched message does. Under
SYNC_FLUSH nothing is shown that is not on the disk: the end is `flushed` there, and `wrote` else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import LogView, Tail, TailView
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.live.queue_table import QueueRange

BEHIND_MAX: Final = 256 * 1_048_576  # bytes that are looked through; more is for the dispatcher
KEPT_MAX: Final = 4 * 1_048_576  # bytes that the dispatcher has come through, and were looked at


class LogTail:
    """The tails of a live store's queues. One thread uses it.

    Args:
        cover: the counter below which messages may be shown.
        range_of: how far the dispatcher has come with a queue.
        view: the log, which `map_segment` adds segments to; None: it is not there any more.
    """

    def __init__(
        self,
        control: ControlFile,
        cover: Counter,
        range_of: Callable[[str, int], QueueRange | None],
        view: LogView,
        map_segment: Callable[[int], object | None],
    ) -> None:
        self._dispatched = control.read(Counter.DISPATCHED)
        self._cover = control.read(cover)
        self._range_of = range_of
        self._segment_bytes = view.segment_bytes
        self._map_segment = map_segment
        self._tail = Tail(view)

    def of(self, topic: str, queue_id: int, queue_offset: int, count_max: int) -> TailView:
        """As far as may be shown at this moment, with entries from that queue offset on."""
        dispatched = self._dispatched.value  # first: all below it is counted in what follows
        found = self._range_of(topic, queue_id)
        self._follow(dispatched, self._cover.value)
        return self._tail.view(topic, queue_id, found[1] if found else 0, queue_offset, count_max)

    def _follow(self, dispatched: int, end: int) -> None:
        tail = self._tail
        is_done = not tail.begin <= dispatched < tail.reached
        if is_done or dispatched - tail.begin > max(KEPT_MAX, end - dispatched):
            tail.restart(dispatched)
        if end - tail.reached > BEHIND_MAX:
            tail.give_up()
        while tail.scan(end) == codec.TAIL_UNMAPPED:
            start = tail.reached // self._segment_bytes * self._segment_bytes
            if self._map_segment(start) is None:
                tail.give_up()
