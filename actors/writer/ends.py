"""Queue ends: how far each queue is written, told natively by whoever appends."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cometmq.actors.runtime.family import Family
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender
from cometmq.shm.live.control import Counter, Doorbell


class Ends:
    """Gives each cursor its word in the queue table, as soon as its queue has a slot there.

    The dispatcher adds the slots, when it meets the first message of a queue: the kernel rings it
    for that message, and this process sleeps on `queues`. Processes that wait for messages of a
    queue without a slot, on a full disk say, sleep on `queues` as well, and the dispatcher, once it
    has room for the slot, shows them what came meanwhile.
    """

    def __init__(self, family: Family, appender: LogAppender) -> None:
        self._table = family.queue_table(writable=True)
        self._count = family.control.sleep_on(Counter.QUEUES, family.doorbell)
        doorbell = family.doorbells[Doorbell.DISPATCHER]
        self._ends = self._table.tell(family.control.own_stripes(), doorbell)
        self._unplaced: dict[tuple[str, int], QueueCursor] = {}
        self._seen = 0  # queues of the table
        self._lock = threading.Lock()  # a service's threads add queues as well
        appender.tells(self._ends)

    def add(self, queues: Iterable[QueueCursor]) -> None:
        """Before the first message of these is appended. From any thread."""
        with self._lock:
            self._count.arm()
            for queue in queues:
                self._unplaced[queue.topic, queue.queue_id] = queue
                self._place(queue.topic, queue.queue_id)

    def place_new(self) -> None:
        """The table may have become longer. Armed first: nothing is missed."""
        with self._lock:
            self._count.arm()
            for key in self._table.queues_from(self._seen):
                self._seen += 1
                self._place(*key)

    def _place(self, topic: str, queue_id: int) -> None:
        queue = self._unplaced.get((topic, queue_id))
        slot = None if queue is None else self._table.slot_of(topic, queue_id)
        if queue is not None and slot is not None:
            self._ends.place(queue, slot)
            del self._unplaced[topic, queue_id]
