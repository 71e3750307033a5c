"""Popped messages of queue-less groups: what is out, and what is acknowledged. Pure: no I/O.

Below the *floor* everything is acknowledged; it is the group's offset. Between floor and *top*
messages are out under a handle, acknowledged out of order, or *free*: released by a consumer that
had not started to process them. Free messages are popped before any others. No message at or above
the top was popped.

A change may be applied twice, on top of a snapshot that already contains it: a pop below the top
has an effect only if its whole range is free, a release only on messages that are out under its
handle, and an acknowledgement none on messages that are already acknowledged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from cometmq.actors.tables.book import Book
from cometmq.protocol.commands import PopAck
from cometmq.protocol.ledger import (
    Change,
    GroupRemoved,
    MessagesPopped,
    OffsetsForgotten,
    PopExtended,
    PopsAcked,
    PopsForgotten,
    PopsReleased,
)

Key = tuple[str, str, int]  # group, topic, queue id
Stretch = tuple[int, int]  # queue offsets [first, end)

_first: Final = itemgetter(0)
_end: Final = itemgetter(1)


class Out(NamedTuple):
    """Messages that one pop delivered: [first, end) without the released and acknowledged ones."""

    first: int
    end: int
    until_ms: int
    attempt: str = ""  # the consumer's name for the request that this answers
    released: tuple[Stretch, ...] = ()  # sorted, with a gap between any two


class PoppedQueue:
    """One queue of one group."""

    __slots__ = ("acked", "floor", "free", "out", "top")

    def __init__(self, floor: int, top: int | None = None) -> None:
        self.floor = floor
        self.top = floor if top is None else top
        self.acked: list[Stretch] = []  # above the floor; in order, none touches another
        self.free: list[Stretch] = []  # sorted, with a gap between any two
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

    def left_under(self, handle: int, first: int, end: int) -> list[Stretch]:
        """Return the stretches of [first, end) that are out under that handle."""
        out = self.out.get(handle)
        if out is None:
            return []
        left = self.left_of(max(first, out.first), min(end, out.end))
        return without(left, out.released)

    def is_free(self, first: int, end: int) -> bool:
        """Return whether all of [first, end) is free."""
        at = bisect_right(self.free, first, key=_end)
        return at < len(self.free) and self.free[at][0] <= first < end <= self.free[at][1]

    def ack(self, first: int, end: int) -> None:
        """Merge a stretch into what is acknowledged, and raise the floor."""
        end = min(end, self.top)
        first = max(first, self.floor)
        if first >= end:
            return
        if self.free:
            self.free = without(self.free, [(first, end)])
        merge(self.acked, first, end)
        if self.acked[0][0] <= self.floor:
            self.floor = self.acked.pop(0)[1]


def merge(stretches: list[Stretch], first: int, end: int) -> None:
    """Add a stretch to a sorted list in which any two have a gap between them."""
    low = bisect_left(stretches, first, key=_end)
    high = bisect_right(stretches, end, key=_first)
    if low < high:
        first, end = min(first, stretches[low][0]), max(end, stretches[high - 1][1])
    stretches[low:high] = [(first, end)]


def without(stretches: Iterable[Stretch], gone: Sequence[Stretch]) -> list[Stretch]:
    """Return `stretches` without the offsets in `gone`; both are sorted."""
    left = []
    at = 0  # in `gone`: every entry before it ends before the stretch
    for first, end in stretches:
        while at < len(gone) and gone[at][1] <= first:
            at += 1
        cut = at
        while cut < len(gone) and gone[cut][0] < end:
            if first < gone[cut][0]:
                left.append((first, gone[cut][0]))
            first = gone[cut][1]
            cut += 1
        if first < end:
            left.append((first, end))
    return left


class _Undo(NamedTuple):
    key: Key
    queue: PoppedQueue | None  # what the fields below are of; None: there was none
    floor: int = 0
    top: int = 0
    acked: tuple[Stretch, ...] = ()
    free: tuple[Stretch, ...] = ()
    handle: int = 0
    out: Out | None = None  # what it had


class PopBook(Book):
    """All queues of all queue-less groups.

    Args:
        queues: to begin with.
    """

    kinds = (
        MessagesPopped, PopsAcked, PopExtended, PopsReleased, PopsForgotten, OffsetsForgotten,
        GroupRemoved,
    )  # fmt: skip

    def __init__(self, queues: dict[Key, PoppedQueue]) -> None:
        self.queues = queues  # changed here only
        self.count = sum(len(queue.out) for queue in queues.values())  # handles, of all queues

    def get(self, group: str, topic: str, queue_id: int) -> PoppedQueue | None:
        return self.queues.get((group, topic, queue_id))

    def items(self) -> Iterator[tuple[Key, PoppedQueue]]:
        """May be changed meanwhile."""
        return iter(list(self.queues.items()))

    def out_of(self, group: str, attempt: str) -> list[PopAck]:
        """Return the messages that are out as the answer to that pop request."""
        return [
            PopAck(key[1], key[2], handle, first, end - first)
            for key, queue in self.queues.items()
            if key[0] == group
            for handle, out in queue.out.items()
            if out.attempt == attempt
            for first, end in queue.left_under(handle, out.first, out.end)
        ]

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
        elif isinstance(change, MessagesPopped | PopsAcked | PopExtended | PopsReleased):
            return self._apply(change)
        else:
            return ()
        self.changes += len(keys)
        return [_Undo(key, self._drop(key)) for key in keys]

    def _apply(
        self, change: MessagesPopped | PopsAcked | PopExtended | PopsReleased
    ) -> Iterable[_Undo]:
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
        undo = _Undo(
            key, queue, queue.floor, queue.top, tuple(queue.acked), tuple(queue.free), handle, out
        )
        if isinstance(change, MessagesPopped):
            self._pop(queue, change)
        elif isinstance(change, PopsAcked):
            queue.ack(change.first, change.end)
            if out is not None and not queue.left_under(handle, out.first, out.end):
                self._set(queue, handle, None)
        elif isinstance(change, PopsReleased):
            self._release(queue, handle, change.first, change.end)
        elif out is not None:
            self._set(queue, handle, out._replace(until_ms=change.until_ms))
        return [undo]

    def _pop(self, queue: PoppedQueue, change: MessagesPopped) -> None:
        if change.end > queue.top:
            queue.top = change.end
        elif queue.is_free(change.first, change.end):
            queue.free = without(queue.free, [(change.first, change.end)])
        else:
            return
        out = Out(change.first, change.end, change.until_ms, change.attempt)
        self._set(queue, change.handle, out)

    def _release(self, queue: PoppedQueue, handle: int, first: int, end: int) -> None:
        released = list(queue.out[handle].released) if handle in queue.out else []
        for each in queue.left_under(handle, first, end):
            merge(released, *each)
            merge(queue.free, *each)
        if (out := queue.out.get(handle)) is not None:
            self._set(queue, handle, out._replace(released=tuple(released)))
            if not queue.left_under(handle, out.first, out.end):
                self._set(queue, handle, None)

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
                there.free = list(each.free)
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
         list(queue.out.items())], list(queue.free)]
        for key, queue in book.items()
    ]  # fmt: skip
