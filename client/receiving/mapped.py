"""Queues of brokers on this machine, read where they lie.

The store is mapped read-only; what is in a queue is seen from words in shared memory, and no
command is needed to get it. A consumer with nothing to read sleeps on those words (futex), and the
process that appends wakes it. One request is held by the broker's first reader all the time: it is
answered when segments are deleted, and breaks when the broker ends.

What cannot be mapped goes through ZeroMQ, unless `transport="mapped"` forbids that.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Final, Protocol

from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.local_broker import HOLD_MS, LocalBroker, MappedShare, Outcome
from cometmq.client.receiving.watcher import Watcher
from cometmq.protocol.commands import (
    Attended,
    BrokerEndpoints,
    GetLocal,
    LocalStore,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    NotConfirmed,
    NotMapped,
    NotReachable,
    StoreError,
)
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.live import SLEEP_CELLS_MAX, Bell, ReadCell, Sleeper
from cometmq.shm.os.processes import boot_id
from cometmq.shm.reading.local import MappedStore
from cometmq.shm.reading.mapped_reader import Found

log = logging.getLogger(__name__)

TRANSPORTS: Final = ("auto", "mapped", "zmq")
ASK_S: Final = 3.0  # for the broker to say where its store is
GATHER_MESSAGES: Final = 64  # with fewer, the next queues are looked at as well
GATHER_QUEUES: Final = 64  # so many
SLOW_S: Final = 30.0  # who does not answer in time is read by ZeroMQ for so long


def check_transport(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise ArgumentIllegal(f"transport={transport!r}: {', '.join(map(repr, TRANSPORTS))}")


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
    def take_found(self, queue: Queue, epoch: int, found: Found, run: int) -> None: ...


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
        self._brokers: dict[str, LocalBroker] = {}
        self._arrived: deque[tuple[LocalBroker, Outcome]] = deque()
        self._cells: list[ReadCell] = []
        self._sleeper = Sleeper((), self.bell)
        self._changed = False  # other brokers than the sleeper knows
        self._watcher: Watcher | None = None

    # --- queues ---

    def takes(self, queue: Queue) -> bool:
        """Whether the queue is read here; False sends it through ZeroMQ."""
        endpoint = queue.reads_from().readers[0]
        for other in [each for each in self._brokers.values() if each.endpoint != endpoint]:
            self._leave(other, queue)  # the broker has moved
        broker = self._brokers.get(endpoint)
        if broker is not None and time.monotonic() > broker.again_at:
            self._forget(broker)
            broker = None
        if broker is None:
            broker = self._brokers[endpoint] = LocalBroker(endpoint, self._post)
        if broker.refusal is not None:
            return self._forced  # then it is read by nobody, and who polls has been told
        if broker.serving:
            assert broker.queues is not None
            broker.queues.add(queue)
        else:
            broker.parked[queue] = None
            if not broker.asked_at:
                broker.ask()
        return True

    def drop(self, queue: Queue) -> None:
        """It is read no longer."""
        for broker in list(self._brokers.values()):
            self._leave(broker, queue)

    def _leave(self, broker: LocalBroker, queue: Queue) -> None:
        broker.parked.pop(queue, None)
        if broker.queues is not None:
            broker.queues.discard(queue)
        if broker.is_idle and broker.refusal is None:
            self._forget(broker)

    def doubt(self, queue: Queue) -> None:
        """It goes through ZeroMQ, and that has failed: ask again whether it has to."""
        broker = self._brokers.get(queue.reads_from().readers[0])
        if broker is not None and broker.refusal is not None:
            self._forget(broker)

    def _forget(self, broker: LocalBroker) -> None:
        self._brokers.pop(broker.endpoint, None)
        self._changed = True
        broker.close()

    # --- agreeing with a broker ---

    def _post(self, broker: LocalBroker, outcome: Outcome) -> None:
        """From the channel's thread to the polling one."""
        if not broker.closed:
            self._arrived.append((broker, outcome))
            self._owner.ring()

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
                case Attended():
                    self._confirmed(broker)

    def _map(self, broker: LocalBroker, found: LocalStore) -> None:
        try:
            _check_kernel()
            broker.map(MappedStore(found, foreign=self._forced))
        except NotMapped as error:
            self._refused(broker, error)
        else:
            broker.attend(0)

    def _confirmed(self, broker: LocalBroker) -> None:
        broker.asked_at = 0.0
        broker.serving = self._changed = True
        parked, broker.parked = broker.parked, {}
        assert broker.queues is not None
        for queue in parked:
            broker.queues.add(queue)
        if not broker.holding:
            broker.holding = True
            broker.attend(HOLD_MS)

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
        self._changed = True
        return broker.take_queues()

    def check(self, now: float) -> None:
        """Give up what was asked too long ago."""
        for broker in list(self._brokers.values()):
            if broker.queues is not None:
                broker.queues.unblock()
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
        """Take what the next queue has that has something; where that is little, what those behind
        it have as well. Whether there may be more."""
        moved = False
        taken = gathered = 0
        for broker in list(self._brokers.values()):
            while broker.serving and (queue := broker.next_ready()) is not None:
                if queue.retry_at or queue.held:
                    continue  # it is added again then
                before = queue.next_offset
                count = self._read(broker, queue)
                has_moved = queue.next_offset != before
                if broker.queues is not None:
                    is_stuck = partial(broker.is_stuck, queue)
                    broker.queues.looked(queue, moved=has_moved, stuck=is_stuck)
                taken += count
                gathered += count > 0
                if taken >= GATHER_MESSAGES or gathered >= GATHER_QUEUES:
                    return True
                moved = moved or has_moved
        return moved

    def _read(self, broker: LocalBroker, queue: Queue) -> int:
        """How many messages came of it."""
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
                    queue.selection,
                )
                is_over = broker.store.control.is_over
                run = broker.store.run
        except (OSError, StoreError) as error:
            self._refused(broker, NotMapped(str(error)))
            return 0
        if is_over:  # the next start may have been at it already
            self._lost(broker, NotReachable(f"the broker at {broker.endpoint} has ended"))
            return 0
        self._owner.take_found(queue, epoch, found, run)
        return len(found.messages)

    # --- sleeping ---

    def look(self) -> None:
        """What changes from now on ends the next sleep."""
        shares = self._shares()
        if self._has_changed(shares):
            self._changed = False
            for share in shares:
                share.changed = False
            self._cells = [cell for share in shares for cell in share.cells()]
            if len(self._cells) > SLEEP_CELLS_MAX:  # of four brokers or more
                self._cells = [cell for share in shares for cell in share.coarse_cells()]
            self._sleeper = Sleeper(self._cells, self.bell)
            self._owner.ring()  # what was rung for the sleeper before
        else:
            self._sleeper.look()

    def _shares(self) -> list[MappedShare]:
        return [
            broker.queues
            for broker in self._brokers.values()
            if broker.serving and broker.queues is not None
        ]

    def _has_changed(self, shares: list[MappedShare]) -> bool:
        return self._changed or any(share.changed for share in shares)

    def sleep(self, timeout_s: float) -> None:
        if not self._has_changed(self._shares()):  # else it would sleep on less than there is
            self._sleeper.sleep(timeout_s, self._spin_s)

    def watch(self) -> None:
        """Have a thread sleep instead, which rings the owner: for who sleeps on descriptors.

        To be called after `look` and before `read`.
        """
        if self._watcher is None:
            self._watcher = Watcher(self._owner.ring)
        self._watcher.watch(self._sleeper, self._cells)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        for broker in list(self._brokers.values()):
            self._forget(broker)
