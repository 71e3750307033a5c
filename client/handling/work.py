"""Work for handlers: messages that any worker may take, and messages one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from operator import length_hint
from typing import Any

from cometmq.client.receiving.buffer import Queue
from cometmq.shm.kernel.codec import Message

Unit = Any  # what a handler gets at once: a Message, or a list of them


def messages_of(unit: Unit) -> list[Message]:
    return unit if isinstance(unit, list) else [unit]


def describe(unit: Unit) -> str:
    """Topic, queue, offset, keys and attempt; of a batch the first message's."""
    messages = messages_of(unit)
    first = messages[0]
    keys = "" if first.keys is None else f" keys {first.keys[:100]}"
    more = "" if len(messages) == 1 else f" and {len(messages) - 1} more"
    return (
        f"{first.topic}/{first.queue_id} offset {first.queue_offset}{keys} "
        f"(attempt {first.reconsume_times + 1}){more}"
    )


class Track:
    """A queue whose messages are handled. The pump owns it; workers append to `finished`."""

    __slots__ = ("finished", "held", "in_hand", "progress", "queue", "strand")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.progress = queue.progress
        self.finished: deque[Unit] = deque()  # done with, not acknowledged yet
        self.held: deque[list[Message]] = deque()  # too far ahead of what is not done
        self.in_hand = 0  # messages that were handed out and are not acknowledged
        self.strand: Strand | None = None  # in order

    @property
    def is_lost(self) -> bool:
        """Another member's by now, or moved: what was handed out of it counts no longer."""
        return self.queue.dropped or self.queue.progress is not self.progress


class Parcel:
    """Messages of one queue that workers take in any order, also several workers at a time: one
    `next` of a list's iterator is indivisible."""

    __slots__ = ("_units_left", "track")

    def __init__(self, track: Track, units: list[Unit]) -> None:
        self.track = track
        self._units_left = iter(units)

    def __iter__(self) -> Iterator[Unit]:
        return self._units_left

    def __len__(self) -> int:
        """How many units nobody has taken yet."""
        return length_hint(self._units_left)

    def take_rest(self) -> list[Unit]:
        """Take the units that no worker has taken."""
        return list(self._units_left)


class Strand:
    """Messages one after the other: of a key, or of a queue in order. One worker at a time has it.

    Args:
        key: under which the dispatcher knows it.
        batch: messages in a unit, at most; 1: units are messages.
    """

    __slots__ = ("again", "batch", "in_use", "key", "resting", "track", "waiting")

    def __init__(self, track: Track, key: Hashable, batch: int) -> None:
        self.track = track  # of the unit that was taken last
        self.key = key
        self.batch = batch
        self.waiting: deque[tuple[Track, Message]] = deque()
        self.again: tuple[Track, Unit] | None = None  # comes before what waits
        self.in_use = False  # a worker has it, or will, or it rests; guarded by the dispatcher
        self.resting = False  # the unit that was taken last is not settled: no next one

    def __iter__(self) -> Iterator[Unit]:
        return self

    def __next__(self) -> Unit:
        if self.resting:
            raise StopIteration
        again, self.again = self.again, None
        if again is not None:
            self.track, unit = again
            return unit
        try:
            self.track, first = self.waiting.popleft()
        except IndexError:
            raise StopIteration from None
        if self.batch == 1:
            return first
        unit = [first]
        while len(unit) < self.batch and self.waiting and self.waiting[0][0] is self.track:
            unit.append(self.waiting.popleft()[1])
        return unit

    def __len__(self) -> int:
        return 0 if self.resting else len(self.waiting) + (self.again is not None)

    def take_rest(self) -> list[Unit]:
        """Take the units that no worker has taken."""
        return list(self)


Work = Parcel | Strand


class Seat:
    """Where one worker is: what it has in hand, and since when. Written by the worker alone, but
    for `expired` and what was told, which are the pump's.

    Either the worker settles a unit or the pump, which gives back what takes too long. The worker
    leaves it first, and then looks at `expired`; the pump does so the other way about: so one of
    the two sees the other, and what they do then is decided under the lock.
    """

    __slots__ = ("_is_late", "_lock", "expired", "since", "told_of", "told_s", "track", "unit")

    def __init__(self) -> None:
        self.unit: Unit = None
        self.track: Track | None = None
        self.since = 0.0  # time.monotonic()
        self.expired: Unit = None  # it took too long: its worker asks `is_late` when it has left it
        self.told_of: Unit = None  # the log has said that it takes long
        self.told_s = 0.0  # how long it had taken then
        self._lock = threading.Lock()
        self._is_late = False

    def expire(self, unit: Unit) -> bool:
        """The pump settles it, once; False: its worker does, which has left it already."""
        with self._lock:
            if self.expired is unit:
                return False
            self.expired = unit
            self._is_late = self.unit is unit
            return self._is_late

    def is_late(self) -> bool:
        """What has expired, and was left, is not the worker's to settle."""
        with self._lock:
            is_late, self._is_late = self._is_late, False
            self.expired = None  # the same may be handed out here again
        return is_late
