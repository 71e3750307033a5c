"""Queues of brokers on this machine, read where they lie.

The store is mapped read-only; what is in a queue is seen from the counters in shared memory, and
no command is needed to get it. Who has nothing to read sleeps on those counters (futex), and the
dispatcher wakes him. One request is held by the broker's first reader all the time: it says which
queues are slept on, is answered when segments are deleted, and breaks when the broker ends.

What cannot be mapped goes through ZeroMQ, unless `transport="mapped"` forbids that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from cometmq.protocol.channel import Channel, Pending
from cometmq.protocol.commands import (
    Attended,
    AttendQueues,
    BrokerEndpoints,
    Command,
    GetLocal,
    LocalStore,
    QueueKey,
)
from cometmq.protocol.errors import CometError, NotConfirmed, NotMapped, NotReachable, StoreError
from cometmq.shm._kernel import Bell, ReadCell, Sleeper
from cometmq.shm.control import Counter
from cometmq.shm.local import MappedStore, boot_id
from cometmq.shm.mapped_reader import Found

if TYPE_CHECKING:
    from cometmq.client.pulling import Queue

log = logging.getLogger(__name__)

TRANSPORTS: Final = ("auto", "mapped", "zmq")
ASK_S: Final = 3.0  # for the broker to say where its store is
HOLD_MS: Final = 5_000
SLOW_S: Final = 30.0  # who does not answer in time is read by ZeroMQ for so long
QUEUES_MAX: Final = 100  # with more of them one sleeps on the counter `dispatched`
TAIL_QUEUES_MAX: Final = 16  # with more of them the dispatcher is waited for: it looks only once
ANY_QUEUE: Final = QueueKey("", -1)

Answer = TypeVar("Answer", LocalStore, Attended)
Outcome = LocalStore | tuple[QueueKey, ...] | CometError


def check_transport(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: {', '.join(map(repr, TRANSPORTS))}")


def check_mapped(endpoints: BrokerEndpoints) -> None:
    """Raises NotMapped unless the broker's store can be mapped here and now."""
    endpoint = endpoints.readers[0]
    with Channel(endpoint, f"the reader at {endpoint}") as channel:
        try:
            _check_kernel()
            found, _ = channel.ask(GetLocal(boot_id()), timeout_s=ASK_S)
            if not isinstance(found, LocalStore):
                raise NotMapped(f"answered by {type(found).__name__}")
            MappedStore(found, foreign=True).close()
        except (NotConfirmed, NotReachable):
            raise
        except CometError as error:
            raise NotMapped(f"broker {endpoints.broker} at {endpoint}: {error}") from None


@cache
def _check_kernel() -> None:
    try:
        Sleeper((), Bell()).sleep(1e-6)
    except OSError as error:
        raise NotMapped(f"the system cannot wait for several futexes: {error}") from None


class Owner(Protocol):
    """What it needs of the Puller. Called in the polling thread, `ring` in any."""

    def ring(self) -> None: ...
    def pull(self, queue: Queue) -> None: ...
    def failed(self, queue: Queue, text: str) -> None: ...
    def take_found(self, queue: Queue, epoch: int, found: Found) -> None: ...


class LocalBroker:
    """A broker that may be on this machine, by the address of its first reader.

    `store` is there once it is mapped; `serving` while the broker says that it still is its own.
    Nothing is read meanwhile, so that another store's messages are never taken for this one's.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = Channel(endpoint, f"the reader at {endpoint}")
        self.lock = threading.Lock()  # guards the store's reader
        self.store: MappedStore | None = None
        self.serving = False
        self.refusal: CometError | None = None  # it goes by ZeroMQ
        self.again_at = math.inf  # time.monotonic(): then it is asked again all the same
        self.asked_at = 0.0  # time.monotonic() of a question that is not answered; 0: none
        self.queues: deque[Queue] = deque()  # that are read, the next to look at first
        self.ends: dict[Queue, ReadCell | None] = {}  # of these; None: not in the queue table yet
        self.appended: dict[Queue, ReadCell] = {}  # of these, where the writer tells
        self.reads_tail = False  # the writer is slept on, not the dispatcher (shm/tail.py)
        self.tail_stuck_until = 0.0  # time.monotonic(); until then the dispatcher is
        self.parked: dict[Queue, None] = {}  # that wait for an answer
        self.keys: tuple[QueueKey, ...] = ()
        self.holding = False  # one request is held
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.serving = False
        self.channel.close()
        with self.lock:
            store, self.store = self.store, None
        if store is not None:
            self.ends.clear()
            self.appended.clear()
            store.close()


class MappedQueues:
    """All queues that one consumer reads from mapped stores. One thread polls.

    Args:
        max_count, max_bytes: read at once.
        forced: tell `on_refused` what keeps a broker from being mapped.
        spin_s: how long to look without sleeping.
    """

    def __init__(
        self,
        owner: Owner,
        *,
        max_count: int,
        max_bytes: int,
        forced: bool,
        spin_s: float,
        on_refused: Callable[[CometError], None],
    ) -> None:
        self.bell = Bell()
        self._owner = owner
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._forced = forced
        self._spin_s = spin_s
        self._on_refused = on_refused
        self._boot_id = boot_id()
        self._brokers: dict[str, LocalBroker] = {}
        self._arrived: deque[tuple[LocalBroker, Outcome]] = deque()
        self._sleeper = Sleeper((), self.bell)
        self._changed = False  # other queues than the sleeper knows
        self._watcher: Watcher | None = None

    # --- queues ---

    def takes(self, queue: Queue) -> bool:
        """Whether the queue is read here; False sends it through ZeroMQ."""
        endpoint = queue.endpoints().readers[0]
        for other in [each for each in self._brokers.values() if each.endpoint != endpoint]:
            self._leave(other, queue)  # the broker has moved
        broker = self._brokers.get(endpoint)
        if broker is not None and time.monotonic() > broker.again_at:
            self._forget(broker)
            broker = None
        if broker is None:
            broker = self._brokers[endpoint] = LocalBroker(endpoint)
        if broker.refusal is not None:
            return self._forced  # then it is read by nobody, and who polls has been told
        if broker.serving:
            self._add(broker, queue)
        else:
            broker.parked[queue] = None
            if not broker.asked_at:
                self._ask(broker)
        return True

    def _add(self, broker: LocalBroker, queue: Queue) -> None:
        if queue not in broker.ends:
            broker.queues.append(queue)
            broker.ends[queue] = None
            self._changed = True

    def drop(self, queue: Queue) -> None:
        """It is read no longer."""
        for broker in list(self._brokers.values()):
            self._leave(broker, queue)

    def _leave(self, broker: LocalBroker, queue: Queue) -> None:
        broker.parked.pop(queue, None)
        if queue in broker.ends:
            broker.queues.remove(queue)
            del broker.ends[queue]
            broker.appended.pop(queue, None)
            self._changed = True
        if not broker.ends and not broker.parked and broker.refusal is None:
            self._forget(broker)

    def doubt(self, queue: Queue) -> None:
        """It goes through ZeroMQ, and that has failed: ask again whether it has to."""
        broker = self._brokers.get(queue.endpoints().readers[0])
        if broker is not None and broker.refusal is not None:
            self._forget(broker)

    def _forget(self, broker: LocalBroker) -> None:
        self._brokers.pop(broker.endpoint, None)
        self._changed = True
        broker.close()

    # --- agreeing with a broker ---

    def _ask(self, broker: LocalBroker) -> None:
        """Where the store is; or whether the one that is mapped is still the broker's."""
        broker.asked_at = time.monotonic()
        if broker.store is not None:
            self._attend(broker, 0)
            return

        def answered(pending: Pending) -> None:
            self._post(broker, _outcome(pending, LocalStore))

        self._request(broker, GetLocal(self._boot_id), answered)

    def _request(
        self, broker: LocalBroker, command: Command, on_done: Callable[[Pending], None]
    ) -> None:
        try:
            broker.channel.request(command, on_done=on_done)
        except CometError as error:
            self._post(broker, error)

    def _post(self, broker: LocalBroker, outcome: Outcome) -> None:
        """From the channel's thread to the polling one."""
        if not broker.closed:
            self._arrived.append((broker, outcome))
            self._owner.ring()

    def _attend(self, broker: LocalBroker, wait_ms: int) -> None:
        store, keys = broker.store, broker.keys
        if store is not None and not broker.closed:
            log_min = store.control.read(Counter.MIN_OFFSET).value
            command = AttendQueues(store.nonce, list(keys), log_min, wait_ms)
            answered = partial(self._attended, broker, keys, wait_ms)
            self._request(broker, command, answered)

    def _attended(
        self, broker: LocalBroker, keys: tuple[QueueKey, ...], wait_ms: int, pending: Pending
    ) -> None:
        """In the channel's thread: deleted segments are let go also while nobody polls."""
        outcome = _outcome(pending, Attended)
        if isinstance(outcome, CometError):
            self._post(broker, outcome)
            return
        with broker.lock:
            if broker.store is not None:
                broker.store.reader.let_go_of_deleted()
        if not wait_ms:
            self._post(broker, keys)
        else:
            self._attend(broker, HOLD_MS)

    def take_in(self) -> None:
        """What brokers have answered."""
        self._sleeper.hear()
        while self._arrived:
            broker, outcome = self._arrived.popleft()
            if broker.closed:
                continue
            match outcome:
                case LocalStore():
                    self._map(broker, outcome)
                case CometError():
                    self._lost(broker, outcome)
                case keys:
                    self._confirmed(broker, keys)

    def _map(self, broker: LocalBroker, found: LocalStore) -> None:
        try:
            _check_kernel()
            broker.store = MappedStore(found, foreign=self._forced)
        except NotMapped as error:
            self._refused(broker, error)
        else:
            self._attend(broker, 0)

    def _confirmed(self, broker: LocalBroker, keys: tuple[QueueKey, ...]) -> None:
        broker.asked_at = 0.0
        broker.serving = True
        parked, broker.parked = broker.parked, {}
        for queue in parked:
            self._add(broker, queue)
        if not broker.holding:
            broker.holding = True
            self._attend(broker, HOLD_MS)

    def _lost(self, broker: LocalBroker, error: CometError) -> None:
        """The broker does not answer, or it is not ours: what is asked next may be another."""
        if broker.store is None and not isinstance(error, NotConfirmed | NotReachable):
            self._refused(broker, error)
            return
        queues = self._take_queues(broker)
        if isinstance(error, NotMapped):
            self._forget(broker)
        for queue in queues:
            self._owner.failed(queue, str(error))

    def _refused(self, broker: LocalBroker, error: CometError) -> None:
        log.debug("%s is not mapped: %s", broker.endpoint, error)
        queues = self._take_queues(broker)
        broker.close()
        broker.refusal = error
        if self._forced:
            self._on_refused(NotMapped(f"the broker at {broker.endpoint}: {error}"))
        for queue in queues:
            self._owner.pull(queue)  # elsewhere

    def _take_queues(self, broker: LocalBroker) -> list[Queue]:
        queues = [*broker.queues, *broker.parked]
        broker.queues.clear()
        broker.ends.clear()
        broker.appended.clear()
        broker.parked.clear()
        broker.serving = broker.holding = False
        broker.asked_at = 0.0
        self._changed = True
        return queues

    def check(self, now: float) -> None:
        """Give up what was asked too long ago. A dispatcher that is far behind answers late, and
        what it has dispatched is there to be read."""
        for broker in list(self._brokers.values()):
            if 0 < broker.tail_stuck_until < now:
                broker.tail_stuck_until = 0.0
                self._changed = True
            if not broker.asked_at or now - broker.asked_at <= ASK_S:
                continue
            if not self._forced:
                self._refused(broker, NotConfirmed(f"no answer within {ASK_S:g} s"))
                broker.again_at = now + SLOW_S
            else:
                queues = self._take_queues(broker)
                self._forget(broker)
                for queue in queues:
                    self._owner.failed(queue, f"no answer within {ASK_S:g} s")

    # --- reading ---

    def read(self) -> bool:
        """Take what the next queue has that has something. Whether there may be more."""
        moved = False
        for broker in list(self._brokers.values()):
            for _ in range(len(broker.queues)):
                if not broker.serving:
                    break
                queue = broker.queues[0]
                broker.queues.rotate(-1)
                if self._has_news(broker, queue):
                    before = queue.next_offset
                    if self._read(broker, queue):
                        return True
                    moved = moved or queue.next_offset != before
        return moved

    def _has_news(self, broker: LocalBroker, queue: Queue) -> bool:
        end = broker.ends[queue] or self._find_end(broker, queue)
        if end is None:
            return queue.next_offset > 0
        reach = end.value
        if broker.reads_tail and (appended := broker.appended.get(queue)) is not None:
            reach = max(reach, appended.value)
        return reach != queue.next_offset and not queue.retry_at

    def _find_end(self, broker: LocalBroker, queue: Queue) -> ReadCell | None:
        """None as long as nothing was ever dispatched to it."""
        store = broker.store
        assert store is not None
        end = store.table.end_of(queue.topic, queue.queue_id)
        if end is not None:
            broker.ends[queue] = end
            self._changed = True
        return end

    def _find_appended(self, broker: LocalBroker, queue: Queue) -> None:
        """Once something has come: by then the writer tells of the queue, if it does at all."""
        store = broker.store
        assert store is not None
        if store.appended is None or queue in broker.appended:
            return
        cell = store.appended.told(store.table.slot_of(queue.topic, queue.queue_id))
        if cell is not None:
            broker.appended[queue] = cell
            self._changed = True

    def _read(self, broker: LocalBroker, queue: Queue) -> bool:
        """Whether messages came of it."""
        epoch = queue.epoch
        try:
            with broker.lock:
                assert broker.store is not None
                found = broker.store.reader.messages(
                    queue.topic,
                    queue.queue_id,
                    queue.next_offset,
                    self._max_count,
                    self._max_bytes,
                    queue.tags,
                )
        except (OSError, StoreError) as error:
            self._refused(broker, NotMapped(str(error)))
            return False
        self._owner.take_found(queue, epoch, found)
        self._find_appended(broker, queue)
        if not found.messages and broker.reads_tail and self._is_stuck(broker, queue):
            broker.tail_stuck_until = time.monotonic() + SLOW_S
            self._changed = True
        return bool(found.messages)

    @staticmethod
    def _is_stuck(broker: LocalBroker, queue: Queue) -> bool:
        assert broker.store is not None
        tail = broker.store.reader.tail
        return tail is not None and tail.of(queue.topic, queue.queue_id).is_stuck

    # --- sleeping ---

    def look(self) -> None:
        """What changes from now on ends the next sleep."""
        if self._changed:
            self._changed = False
            self._agree()
            self._sleeper = Sleeper(list(self._ends()), self.bell)
            self._owner.ring()  # what was rung for the sleeper before
        else:
            self._sleeper.look()

    def _agree(self) -> None:
        """Tell brokers which queues are slept on whose end only the dispatcher moves."""
        narrow = sum(len(broker.ends) for broker in self._serving()) <= TAIL_QUEUES_MAX
        for broker in self._serving():
            broker.reads_tail = bool(narrow and broker.appended and not broker.tail_stuck_until)
            keys = tuple(
                QueueKey(queue.topic, queue.queue_id)
                for queue in broker.ends
                if not broker.reads_tail or queue not in broker.appended
            )
            if self._is_wide:
                keys = (ANY_QUEUE,)
            if set(keys) != set(broker.keys):
                broker.keys = keys
                self._attend(broker, 0)

    @property
    def _is_wide(self) -> bool:
        return sum(len(broker.ends) for broker in self._serving()) > QUEUES_MAX

    def _serving(self) -> list[LocalBroker]:
        return [broker for broker in self._brokers.values() if broker.serving]

    def _ends(self) -> Iterator[ReadCell]:
        wide = self._is_wide
        for broker in self._serving():
            assert broker.store is not None
            control = broker.store.control
            if wide:
                yield control.read(Counter.DISPATCHED)
                continue
            if None in broker.ends.values():
                yield control.read(Counter.QUEUES)
            told = broker.appended if broker.reads_tail else {}
            for queue, end in broker.ends.items():
                if end is not None:
                    yield told.get(queue, end)

    def sleep(self, timeout_s: float) -> None:
        if not self._changed:  # else it would sleep on less than there is
            self._sleeper.sleep(timeout_s, self._spin_s)

    def watch(self) -> None:
        """Have a thread sleep instead, which rings the owner: for who sleeps on descriptors.

        To be called after `look` and before `read`.
        """
        if self._watcher is None:
            self._watcher = Watcher(self._owner.ring)
        self._watcher.watch(self._sleeper, list(self._ends()))

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        for broker in list(self._brokers.values()):
            self._forget(broker)


class Watcher:
    """A thread that sleeps on counters for whoever sleeps on descriptors."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._bell = Bell()
        self._order = threading.Condition()
        self._sleeper: Sleeper | None = None
        self._for: Sleeper | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cometmq watcher", daemon=True)
        self._thread.start()

    def watch(self, like: Sleeper, ends: list[ReadCell]) -> None:
        """Ring once when one of these moves from now on, or since the same was last asked for."""
        with self._order:
            if self._sleeper is not None and self._for is like:
                return
            self._sleeper, self._for = Sleeper(ends, self._bell), like
            self._bell.ring()
            self._order.notify()

    def _run(self) -> None:
        while True:
            with self._order:
                while self._sleeper is None and not self._closed:
                    self._order.wait()
                if self._closed:
                    return
                sleeper = self._sleeper
                assert sleeper is not None
                sleeper.hear()
            if not sleeper.sleep(3600):
                continue
            with self._order:
                if self._closed:
                    return
                if self._sleeper is sleeper:
                    self._sleeper = None
                    self._ring()

    def close(self) -> None:
        with self._order:
            self._closed = True
            self._bell.ring()
            self._order.notify()
        self._thread.join()


def _outcome(pending: Pending, kind: type[Answer]) -> Answer | CometError:
    try:
        answer, _ = pending.result()
    except CometError as error:
        return error
    if isinstance(answer, kind):
        return answer
    return NotMapped(f"answered by {type(answer).__name__}")
