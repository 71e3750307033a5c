"""Popped messages of queue-less groups: what is out, and what is acknowledged. Pure: no I/O.

Below the *floor* everything is acknowledged; it is the group's offset. Between floor and *top*
messages are out under a handle, or acknowledged out of order. Nothing from the top on was popped.

Every change may come a second time, on top of a snapshot that has it already: what was popped below
the top is passed over, and an acknowledgement adds nothing where there is one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from cometmq.actors.books.book import Book
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    MessagesPopped,
    OffsetsForgotten,
    PopExtended,
    PopsAcked,
    PopsForgotten,
)

Key = tuple[str, str, int]  # group, topic, queue id
Stretch = tuple[int, int]  # queue offsets [first, end)

_first: Final = itemgetter(0)
_end: Final = itemgetter(1)


class Out(NamedTuple):
    """What somebody has."""

    first: int
    end: int
    until_ms: int


class PoppedQueue:
    """One queue of one group."""

    __slots__ = ("acked", "floor", "out", "top")

    def __init__(self, floor: int, top: int | None = None) -> None:
        self.floor = floor
        self.top = floor if top is None else top
        self.acked: list[Stretch] = []  # above the floor; in order, none touches another
        self.out: dict[int, Out] = {}  # by handle

    def left_of(self, first: int, end: int) -> list[Stretch]:
        """What is not acknowledged of a stretch."""
        left = []
        at = max(first, self.floor)
        for done in self.acked[bisect_right(self.acked, at, key=_end) :]:
            if done[0] >= end:
                break
            if at < done[0]:
                left.append((at, done[0]))
            at = max(at, done[1])
        if at < end:
            left.append((at, end))
        return left

    def ack(self, first: int, end: int) -> None:
        """Merge a stretch into what is acknowledged, and raise the floor."""
        end = min(end, self.top)
        first = max(first, self.floor)
        if first >= end:
            return
        low = bisect_left(self.acked, first, key=_end)
        high = bisect_right(self.acked, end, key=_first)
        if low < high:
            first, end = min(first, self.acked[low][0]), max(end, self.acked[high - 1][1])
        self.acked[low:high] = [(first, end)]
        if self.acked[0][0] <= self.floor:
            self.floor = self.acked.pop(0)[1]


class _Undo(NamedTuple):
    key: Key
    queue: PoppedQueue | None  # what the fields below are of; None: there was none
    floor: int = 0
    top: int = 0
    acked: tuple[Stretch, ...] = ()
    handle: int = 0
    out: Out | None = None  # what it had


class PopBook(Book):
    """All queues of all queue-less groups.

    Args:
        queues: to begin with.
    """

    kinds = (
        MessagesPopped, PopsAcked, PopExtended, PopsForgotten, OffsetsForgotten, GroupRemoved,
    )  # fmt: skip

    def __init__(self, queues: dict[Key, PoppedQueue]) -> None:
        self.queues = queues  # changed here only
        self.count = sum(len(queue.out) for queue in queues.values())  # handles, of all queues

    def get(self, group: str, topic: str, queue_id: int) -> PoppedQueue | None:
        return self.queues.get((group, topic, queue_id))

    def items(self) -> Iterator[tuple[Key, PoppedQueue]]:
        """May be changed meanwhile."""
        return iter(list(self.queues.items()))

    def beyond(self, ends: Mapping[tuple[str, int], int]) -> list[Key]:
        """Queues of which more was popped than there is now."""
        return [key for key, each in self.queues.items() if each.top > ends.get(key[1:], 0)]

    # --- changing ---

    def apply(self, change: Change) -> Iterable[_Undo]:
        """Make the change; what `undo` wants to take it back."""
        if isinstance(change, OffsetsForgotten):
            keys = [key for key in self.queues if key[1] == change.topic]
        elif isinstance(change, GroupRemoved):
            keys = [key for key in self.queues if key[0] == change.group]
        elif isinstance(change, PopsForgotten):
            key = (change.group, change.topic, change.queue_id)
            keys = [key] if key in self.queues else []
        elif isinstance(change, MessagesPopped | PopsAcked | PopExtended):
            return self._apply(change)
        else:
            return ()
        self.changes += len(keys)
        return [_Undo(key, self._drop(key)) for key in keys]

    def _apply(self, change: MessagesPopped | PopsAcked | PopExtended) -> Iterable[_Undo]:
        self.changes += 1
        key = (change.group, change.topic, change.queue_id)
        queue = self.queues.get(key)
        if queue is None:
            if not isinstance(change, MessagesPopped):
                return ()
            self.queues[key] = queue = PoppedQueue(change.first)
            self._pop(queue, change)
            return [_Undo(key, None)]
        handle = change.handle
        out = queue.out.get(handle)
        undo = _Undo(key, queue, queue.floor, queue.top, tuple(queue.acked), handle, out)
        if isinstance(change, MessagesPopped):
            self._pop(queue, change)
        elif isinstance(change, PopsAcked):
            queue.ack(change.first, change.end)
            if out is not None and not queue.left_of(out.first, out.end):
                self._set(queue, handle, None)
        elif out is not None:
            self._set(queue, handle, out._replace(until_ms=change.until_ms))
        return [undo]

    def _pop(self, queue: PoppedQueue, change: MessagesPopped) -> None:
        if change.end > queue.top:
            queue.top = change.end
            self._set(queue, change.handle, Out(change.first, change.end, change.until_ms))

    def undo(self, undo: Iterable[_Undo]) -> None:
        """Take a change back; the last one first."""
        for each in undo:
            self.changes += 1
            there = self.queues.get(each.key)
            if each.queue is None:
                self._drop(each.key)
            elif there is not each.queue:  # it was forgotten
                self.queues[each.key] = each.queue
                self.count += len(each.queue.out)
            else:
                there.floor, there.top, there.acked = each.floor, each.top, list(each.acked)
                self._set(there, each.handle, each.out)

    def _drop(self, key: Key) -> PoppedQueue:
        queue = self.queues.pop(key)
        self.count -= len(queue.out)
        return queue

    def _set(self, queue: PoppedQueue, handle: int, out: Out | None) -> None:
        self.count -= handle in queue.out
        if out is None:
            queue.out.pop(handle, None)
        else:
            queue.out[handle] = out
            self.count += 1


def table_of(book: PopBook) -> list[Any]:
    """The book as plain lists, for a snapshot."""
    return [
        [*key, queue.floor, queue.top, list(queue.acked), [[handle, *out] for handle, out in
         list(queue.out.items())]]
        for key, queue in book.items()
    ]  # fmt: skip
