"""A broker on this machine: agreeing with it on its mapped store, and which queues have news."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

from cometmq.client.receiving.buffer import Queue
from cometmq.protocol.commands import Attended, AttendQueues, Command, GetLocal, LocalStore
from cometmq.protocol.errors import CometError, NotMapped
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.protocol.wire.long_poll import ask_held
from cometmq.shm.kernel.live import QueueWatch, ReadCell
from cometmq.shm.live.control import Counter
from cometmq.shm.os.processes import boot_id
from cometmq.shm.reading.local import MappedStore

NEWS_MAX: Final = 256  # queues that are named at a look
HOLD_MS: Final = 5_000  # a broker's answer to AttendQueues

Answer = TypeVar("Answer", LocalStore, Attended)
Outcome = LocalStore | Attended | CometError


class LocalBroker:
    """A broker that may be on this machine, by the address of its first reader.

    `store` is there once it is mapped; `serving` while the broker says that it still is its own.
    Nothing is read meanwhile, so that another store's messages are never taken for this one's.

    Args:
        post: takes what came of a question, in the channel's thread.
    """

    def __init__(self, endpoint: str, post: Callable[[LocalBroker, Outcome], None]) -> None:
        self.endpoint = endpoint
        self._post = post
        self.channel = Channel(endpoint, f"the reader at {endpoint}")
        self.lock = threading.Lock()  # guards the store's reader
        self.store: MappedStore | None = None
        self.queues: MappedShare | None = None  # as long as the store is mapped
        self.serving = False
        self.refusal: CometError | None = None  # it goes by ZeroMQ
        self.again_at = math.inf  # time.monotonic(): then it is asked again all the same
        self.asked_at = 0.0  # time.monotonic() of a question that is not answered; 0: none
        self.parked: dict[Queue, None] = {}  # that wait for an answer
        self.holding = False  # one request is held
        self.closed = False

    # --- agreeing ---

    def ask(self) -> None:
        """Where the store is; or whether the one that is mapped is still the broker's."""
        self.asked_at = time.monotonic()
        if self.store is not None:
            self.attend(0)
        else:
            self._request(
                GetLocal(boot_id()), lambda done: self._post(self, _outcome(done, LocalStore))
            )

    def attend(self, wait_ms: int) -> None:
        """Have the broker confirm the store, and tell within that time when segments go."""
        store = self.store
        if store is not None and not self.closed:
            log_min = store.control.read(Counter.MIN_OFFSET).value
            command = AttendQueues(store.nonce, [], log_min, wait_ms, store.is_silent)
            self._request(command, partial(self._attended, wait_ms), wait_ms)

    def _request(
        self, command: Command, on_done: Callable[[Pending], None], wait_ms: int = 0
    ) -> None:
        try:
            ask_held(self.channel, command, wait_ms / 1000, on_done)
        except CometError as error:
            self._post(self, error)

    def _attended(self, wait_ms: int, pending: Pending) -> None:
        """In the channel's thread: deleted segments are let go also while nobody polls."""
        outcome = _outcome(pending, Attended)
        if isinstance(outcome, CometError):
            self._post(self, outcome)
            return
        with self.lock:
            if self.store is not None:
                self.store.reader.let_go_of_deleted()
        if not wait_ms:
            self._post(self, outcome)
        else:
            self.attend(HOLD_MS)

    # --- queues ---

    def map(self, store: MappedStore) -> None:
        self.store, self.queues = store, MappedShare(store)

    def next_ready(self) -> Queue | None:
        return None if self.queues is None else self.queues.next_ready()

    def is_stuck(self, queue: Queue) -> bool:
        """Whether its tail is for the dispatcher to judge. What is read may be let go by the thread
        that hears of deletions: under the lock."""
        with self.lock:
            tail = None if self.store is None else self.store.reader.tail
            return tail is not None and tail.of(queue.topic, queue.queue_id, 0, 0).is_stuck

    @property
    def is_idle(self) -> bool:
        return not self.parked and not (self.queues and len(self.queues))

    def take_queues(self) -> list[Queue]:
        """All of them; it has none any more."""
        found = list(self.parked)
        if self.queues is not None and self.store is not None:
            found += self.queues
            self.queues = MappedShare(self.store)
        self.parked.clear()
        self.serving = self.holding = False
        self.asked_at = 0.0
        return found

    def close(self) -> None:
        self.closed = True
        self.serving = False
        self.channel.close()
        with self.lock:
            store, self.store, self.queues = self.store, None, None
        if store is not None:
            store.close()


class MappedShare:
    """The queues that are read from one mapped store, by what is to be done with them.

    A queue is *ready* when there is something to read, maybe; *blocked* when there is something
    that may not be shown yet: before it is on the disk (SYNC_FLUSH), or before the dispatcher has
    judged it; else the kernel watches its end. `changed` is set when sleepers have to know other
    cells. What a look costs does not depend on how many queues there are.
    """

    def __init__(self, store: MappedStore) -> None:
        control = store.control
        self._store = store
        self._stripes = control.read_stripes()
        self._watch: QueueWatch = store.table.watch(self._stripes)
        self._cover = control.read(store.cover)
        self._dispatched = control.read(Counter.DISPATCHED)
        self._count = control.read(Counter.QUEUES)
        self._wrote = control.read(Counter.WROTE)
        self._slots: dict[Queue, int | None] = {}  # None: not in the queue table yet
        self._unplaced: dict[tuple[str, int], Queue] = {}
        self._table_seen = 0  # queues of the table that were compared with these
        self._ready: dict[Queue, None] = {}  # the next to look at first
        self._blocked: dict[Queue, tuple[ReadCell, int]] = {}  # what it waits for, from where
        self._looked_at = 0, 0  # `cover` and `dispatched`, before the last queue was read
        self.changed = True

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._slots)

    def __contains__(self, queue: Queue) -> bool:
        return queue in self._slots

    def add(self, queue: Queue) -> None:
        """Look at it from now on; if it is there already, once more: it may have been moved."""
        if queue in self._blocked:
            self._unblock(queue)
        elif queue not in self._slots:
            self._place(queue, self._store.table.slot_of(queue.topic, queue.queue_id))
        if self._slots[queue] is not None or queue.next_offset > 0:
            self._ready[queue] = None

    def _place(self, queue: Queue, slot: int | None) -> None:
        self._slots[queue] = slot
        if slot is None:
            self._unplaced[queue.topic, queue.queue_id] = queue
        self.changed = True

    def discard(self, queue: Queue) -> None:
        if queue in self._slots:
            del self._slots[queue]
            self._unplaced.pop((queue.topic, queue.queue_id), None)
            self._ready.pop(queue, None)
            self._blocked.pop(queue, None)
            self._watch.discard(queue)
            self.changed = True

    def next_ready(self) -> Queue | None:
        """One that may have something to read; `looked` says what became of it."""
        if not self._ready:
            self._find_news()
            if not self._ready:
                return None
        queue = next(iter(self._ready))
        del self._ready[queue]
        self._looked_at = self._cover.value, self._dispatched.value
        return queue

    def _find_news(self) -> None:
        for queue, (cell, seen) in list(self._blocked.items()):
            if cell.value != seen:
                self._unblock(queue)
        if self._unplaced and self._count.value != self._table_seen:
            for key in self._store.table.queues_from(self._table_seen):
                self._table_seen += 1
                placed = self._unplaced.pop(key, None)
                if placed is not None:
                    self._place(placed, self._store.table.slot_of(*key))
                    self._ready[placed] = None
        self._ready.update(dict.fromkeys(self._watch.news(NEWS_MAX)))

    def looked(self, queue: Queue, *, moved: bool, stuck: Callable[[], bool]) -> None:
        """It was read; whether anything came of it, and whether its tail is for the dispatcher."""
        slot = self._slots.get(queue)
        if slot is None:
            return
        if not self._has_more(queue, slot):
            self.changed = self.changed or queue not in self._watch
            self._watch.set(queue, slot, queue.next_offset)
        elif moved:
            self._ready[queue] = None
        else:
            cover, dispatched = self._looked_at
            waits_for = (self._dispatched, dispatched) if stuck() else (self._cover, cover)
            self._blocked[queue] = waits_for
            self.changed = True

    def _has_more(self, queue: Queue, slot: int) -> bool:
        end = self._watch.end(slot)
        if not end:  # the writer does not tell of it yet
            found = self._store.table.range_of(queue.topic, queue.queue_id)
            end = 0 if found is None else found.max_queue_offset
        return end > queue.next_offset

    def unblock(self) -> None:
        """Look again at what could not be shown."""
        for queue in list(self._blocked):
            self._unblock(queue)

    def _unblock(self, queue: Queue) -> None:
        del self._blocked[queue]
        self._ready[queue] = None
        self.changed = True

    def cells(self) -> list[ReadCell]:
        """What moves when there is something to look at."""
        found = [self._stripes[number] for number in self._watch.stripes()]
        return found + self._counters()

    def coarse_cells(self) -> list[ReadCell]:
        """The same with fewer cells, which move for others' queues as well."""
        return [self._wrote, *self._counters()] if len(self._watch) else self._counters()

    def _counters(self) -> list[ReadCell]:
        found = {cell for cell, _ in self._blocked.values()}
        return [*found, self._count] if self._unplaced else [*found]


def _outcome(pending: Pending, kind: type[Answer]) -> Answer | CometError:
    try:
        answer, _ = pending.result()
    except CometError as error:
        return error
    if isinstance(answer, kind):
        return answer
    return NotMapped(f"answered by {type(answer).__name__}")
