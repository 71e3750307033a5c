"""Consumers with the store mapped, which sleep on words of the queue table: for the dispatcher."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from cometmq.protocol.commands import QueueKey
from cometmq.protocol.errors import SystemBusy
from cometmq.shm._kernel import ReadCell, WakeList, wake_sleepers
from cometmq.shm.control import ControlFile, Counter
from cometmq.shm.queue_table import QueueTable

QUEUES_MAX: Final = 16_384  # a look at each costs a nanosecond, after every step


class Sleepers:
    """Wakes who may sleep on the end of a queue, whenever it moves.

    Nobody tells when he sleeps: that would take the right to write here. He tells, through the
    first reader, that he may for some time. A futex that nobody sleeps on costs 0.3 us, and who is
    killed is forgotten when his time is over.
    """

    def __init__(self, control: ControlFile, table: QueueTable) -> None:
        self._control = control
        self._table = table
        self._until: dict[QueueKey, float] = {}  # time.monotonic()
        self._expires_at = 0.0
        self._queues = control.read(Counter.QUEUES)
        self._count = 0  # queues there were when the list was made
        self._list = WakeList(())

    @property
    def expected(self) -> bool:
        """Whether anybody may sleep."""
        return bool(self._until)

    def expect(self, queues: Iterable[QueueKey], lease_s: float) -> None:
        """Somebody may sleep on these for so long. Raises SystemBusy."""
        now = time.monotonic()
        self._forget_overdue(now)
        known = len(self._until)
        self._until.update(dict.fromkeys(queues, now + lease_s))
        if len(self._until) > QUEUES_MAX:
            for key in list(self._until)[known:]:
                del self._until[key]
            raise SystemBusy(f"consumers wait for {QUEUES_MAX} queues already")
        self._expires_at = min(self._until.values(), default=0.0)
        if len(self._until) > known:
            self._make_list()

    def wake(self) -> None:
        """Something was dispatched."""
        if not self._until:
            return
        if self._queues.value != self._count:
            self._list.wake()
            self._make_list()
            wake_sleepers(self._queues)
            return
        self._list.wake()
        now = time.monotonic()
        if now > self._expires_at:
            self._forget_overdue(now)

    def _forget_overdue(self, now: float) -> None:
        overdue = [key for key, until in self._until.items() if until < now]
        for key in overdue:
            del self._until[key]
        if overdue:
            self._make_list()
        self._expires_at = min(self._until.values(), default=0.0)

    def _make_list(self) -> None:
        """Of a queue that is not in the table yet the first message wakes by `queues`."""
        self._count = self._queues.value
        self._list = WakeList([cell for key in self._until if (cell := self._cell(key))])

    def _cell(self, key: QueueKey) -> ReadCell | None:
        if not key.topic:
            return self._control.read(Counter.DISPATCHED)
        return self._table.end_of(key.topic, key.queue_id)
