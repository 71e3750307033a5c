"""Pulls that wait for a message, found by the queue that they wait for.

A reader may hold a pull for each of many thousand queues. When something has been appended, only
the pulls of queues whose end has moved past what these pulls have seen are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import PullMessages
from cometmq.shm.kernel.live import STRIPES, ReadCell
from cometmq.shm.live.queue_table import QueueTable

HELD_MAX: Final = 100_000

Key = tuple[str, int]  # topic, queue id


class HeldPull(HeldRequest[Key]):
    """A pull that waits for a message.

    `queue_offset`: everything below was looked through.
    """

    __slots__ = ("command", "queue_offset")

    def __init__(
        self, request: Request, command: PullMessages, queue_offset: int, deadline: float
    ) -> None:
        super().__init__((command.topic, command.queue_id), request, deadline)
        self.command = command
        self.queue_offset = queue_offset


class HeldPulls(TimedRequests[Key, HeldPull]):
    """All that one reader holds.

    Args:
        table: says how far queues reach.
        stripes: of the control file, see `QueueWatch`.
        expire: answers a pull whose deadline has passed.
    """

    def __init__(
        self,
        actor: ServiceActor,
        table: QueueTable,
        stripes: Sequence[ReadCell],
        expire: Callable[[HeldPull], None],
    ) -> None:
        super().__init__(actor, "pulls", HELD_MAX, expire)
        self._table = table
        # Queues of held pulls, with the least offset that a pull has seen.
        self._watch = table.watch(stripes)
        self._unplaced: set[Key] = set()  # queues that are not in the table yet
        self._table_seen = 0  # queues of the table that have been compared with these

    def add(self, held: HeldPull) -> None:
        super().add(held)
        self.looked(held.key)

    def release(self, held: HeldPull) -> Request:
        request = super().release(held)
        if held.key not in self._by_key:
            self._unplaced.discard(held.key)
            self._watch.discard(held.key)
        return request

    def looked(self, key: Key) -> None:
        """The pulls of this queue have seen all up to their offsets."""
        of_queue = self._by_key.get(key)
        slot = self._table.slot_of(*key) if of_queue else None
        if of_queue and slot is not None:
            self._watch.set(key, slot, min(held.queue_offset for held in of_queue))
        elif of_queue:
            self._unplaced.add(key)

    def is_behind(self, key: Key) -> bool:
        """Whether the writer has come further with the queue than a pull has seen."""
        of_queue = self._by_key.get(key)
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
