"""Pulls that wait for a message, found by their queue and by the end of their time.

A reader may hold a pull for each of many thousand queues. When something has been appended, only
the pulls of queues whose end has moved past what these pulls have seen are looked at, and when time
is up only those whose time it is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from cometmq.actors.runtime.request import Request
from cometmq.protocol.commands import PullMessages
from cometmq.shm.kernel._kernel import STRIPES, ReadCell
from cometmq.shm.live.queue_table import QueueTable

Key = tuple[str, int]  # topic, queue id


class Held:
    """A pull that waits for a message.

    `queue_offset`: everything below was looked through. `deadline`: time.monotonic().
    """

    __slots__ = ("command", "deadline", "is_held", "key", "number", "queue_offset", "request")

    def __init__(
        self, request: Request, command: PullMessages, queue_offset: int, deadline: float
    ) -> None:
        self.request = request
        self.command = command
        self.queue_offset = queue_offset
        self.deadline = deadline
        self.key: Key = (command.topic, command.queue_id)
        self.is_held = False
        self.number = 0  # in the order in which they came

    def __lt__(self, other: Held) -> bool:
        return (self.deadline, self.number) < (other.deadline, other.number)


class HeldPulls:
    """All that one reader holds.

    Args:
        table: says how far queues reach.
        stripes: of the control file, see `QueueWatch`.
    """

    def __init__(self, table: QueueTable, stripes: Sequence[ReadCell]) -> None:
        self._table = table
        self._by_queue: dict[Key, dict[Held, None]] = {}
        # These queues, with the least offset that a pull has seen.
        self._watch = table.watch(stripes)
        self._unplaced: set[Key] = set()  # queues that are not in the table yet
        self._table_seen = 0  # queues of the table that have been compared with these
        self._due: list[Held] = []  # a heap, with some that are held no longer
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Held]:
        """All of them. They may be removed meanwhile."""
        return iter([held for of_queue in self._by_queue.values() for held in of_queue])

    def add(self, held: Held) -> None:
        held.is_held, held.number = True, next(self._numbers)
        self._count += 1
        self._by_queue.setdefault(held.key, {})[held] = None
        heapq.heappush(self._due, held)
        self.looked(held.key)

    def remove(self, held: Held) -> None:
        """It is answered."""
        held.is_held = False
        self._count -= 1
        of_queue = self._by_queue[held.key]
        del of_queue[held]
        if not of_queue:
            del self._by_queue[held.key]
            self._unplaced.discard(held.key)
            self._watch.discard(held.key)
        if len(self._due) > 2 * self._count + 64:
            self._due = [each for each in self._due if each.is_held]
            heapq.heapify(self._due)

    def of(self, key: Key) -> list[Held]:
        return list(self._by_queue.get(key, ()))

    def looked(self, key: Key) -> None:
        """The pulls of this queue have seen all up to their offsets."""
        of_queue = self._by_queue.get(key)
        slot = self._table.slot_of(*key) if of_queue else None
        if of_queue and slot is not None:
            self._watch.set(key, slot, min(held.queue_offset for held in of_queue))
        elif of_queue:
            self._unplaced.add(key)

    def is_behind(self, key: Key) -> bool:
        """Whether the writer has come further with the queue than a pull has seen."""
        of_queue = self._by_queue.get(key)
        slot = self._table.slot_of(*key) if of_queue else None
        if not of_queue or slot is None:
            return False
        return self._watch.end(slot) > min(held.queue_offset for held in of_queue)

    def with_news(self, count_max: int) -> list[Key]:
        """Queues with something that a pull waits for, at most so many beside new ones. Each is
        named once, until `looked` is called for it."""
        new = []
        for key in self._table.queues_from(self._table_seen) if self._unplaced else ():
            self._table_seen += 1
            if key in self._unplaced:
                self._unplaced.discard(key)
                new.append(key)  # the dispatcher shows it, and the writer may not tell of it yet
        return new + self._watch.news(count_max)

    def stripes(self, key: Key | None = None) -> list[int]:
        """On which to sleep for the pulls, or for those of one queue; -1: on the counter `queues`,
        since a queue has no place in the table yet."""
        if key is not None:
            slot = self._table.slot_of(*key)
            return [-1 if slot is None else slot % STRIPES]
        return [*self._watch.stripes(), *([-1] if self._unplaced else [])]

    @property
    def next_deadline(self) -> float | None:
        while self._due and not self._due[0].is_held:
            heapq.heappop(self._due)
        return self._due[0].deadline if self._due else None

    def overdue(self, now: float, count_max: int) -> list[Held]:
        """Those whose time is up, at most so many; they are held no longer."""
        found: list[Held] = []
        while len(found) < count_max:
            deadline = self.next_deadline
            if deadline is None or deadline > now:
                break
            held = heapq.heappop(self._due)
            self.remove(held)
            found.append(held)
        return found
