"""Partitioning: a topic's queues as a producer sees them, and which of them a message takes."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from cometmq.client.routes import MASTER
from cometmq.client.sending.outgoing import Target
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.standing import Standing
from cometmq.protocol.commands import SectionResult, TopicRoute
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageIllegal,
    NoPermission,
    NotMaster,
)
from cometmq.protocol.perm import WRITE
from cometmq.shm.kernel import codec


class Lane:
    """One queue of one broker, as a producer feeds it.

    At most one batch is on its way to it at a time, so that a batch that has to be sent again can
    never be overtaken by one that came after it. Guarded by the producer's lock.
    """

    __slots__ = (
        "broker",
        "end",
        "endpoint",
        "error",
        "failures",
        "flight",
        "gone",
        "numbers",
        "open",
        "paused",
        "queue_id",
        "sent",
        "sent_at",
        "topic",
        "unsure",
        "waiting",
    )

    def __init__(self, topic: str, broker: str, queue_id: int, endpoint: str) -> None:
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.endpoint = endpoint  # of the broker's commitlog process
        self.open: dict[int, Batch] = {}  # by delay level: still taking messages for this queue
        self.waiting: deque[Batch] = deque()  # closed, oldest first
        self.sent: Batch | None = None  # on its way
        self.sent_at = 0.0
        self.flight: Any = None  # the request that `sent` travels in
        self.failures = 0  # attempts since the last success
        self.error: CometError | None = None  # of the last attempt, if it failed
        self.paused = False  # until the recovery lets it go on
        self.gone = False  # the newest route does not have it
        # Attempts to send to it are numbered. Up to `unsure` there may be one that was given up and
        # that the broker has not seen yet: the next one fences it off (Section).
        self.numbers = itertools.count(1)
        self.unsure = 0
        self.end = -1  # one past the last message that the broker has told to be there

    @property
    def idle(self) -> bool:
        return self.sent is None and not self.waiting and not self.open and not self.paused

    def is_unsure_of(self, number: int) -> None:
        """What became of that attempt is not known."""
        self.unsure = max(self.unsure, number)

    def line_up_older(self, batch: Batch) -> None:
        """Insert a batch before those with queues of a newer route, and behind all others."""
        for index, each in enumerate(self.waiting):
            if each.targets is not None and each.generation > batch.generation:
                self.waiting.insert(index, batch)
                return
        self.waiting.append(batch)

    def has_stored(self, batch: Batch, result: SectionResult) -> None:
        """A batch of it was answered."""
        self.failures, self.error = 0, None
        if not batch.waits:
            first, count = result.queue_offset, batch.count - len(result.copies)
            if not count:
                return
            if result.head:
                first, count = result.rest_queue_offset, count - result.head
            self.end = first + count

    def has_heard_fence(self, number: int) -> None:
        """The broker has answered that attempt: it stores nothing earlier any more."""
        if self.unsure < number:
            self.unsure = 0


class TopicLanes:
    """All queues of a topic that may be written, broker by broker. Guarded by the lock as well.

    Each change of these queues begins a new generation. By another route, keys and ids may select
    other queues. So a batch whose messages name their queues (`Batch.targets`) waits until those of
    older generations are answered: they may still have to move to other queues, where the newer
    one would overtake them.

    Args:
        standing: brokers that it names are chosen when there are no others.
    """

    def __init__(self, route: TopicRoute, standing: Standing | None = None) -> None:
        self.topic = route.topic
        self._standing = Standing() if standing is None else standing
        self.route: TopicRoute | None = None
        self.lanes: list[Lane] = []
        # By delay level: open, for whichever queue's turn it is when they leave.
        self.free: dict[int, Batch] = {}
        self._by_key: dict[tuple[str, int], Lane] = {}
        # Whether there were ever slaves, one of which may become the master. A route may lack them:
        # brokers that have just begun, or a name server that has.
        self.has_replicas = False
        self.generation = 0
        self.is_changing = False  # whether there may be batches of older generations
        self._brokers: list[str] = []
        self._served: set[str] = set()  # brokers that have the topic, read-only ones included
        self.update(route)
        self._turn = random.randrange(len(self.lanes)) if self.lanes else 0

    def update(self, route: TopicRoute) -> None:
        """Take over a newer route; lanes that are still in it stay the same objects.

        So do those of a broker whose slaves alone are in it: another one of them becomes master,
        or the same, and until that is known whoever listens there says what is to be said.
        """
        self.route = route
        self.has_replicas |= any(each.endpoints.broker_id != MASTER for each in route.brokers)
        without_master = self._without_master()
        lanes = [
            lane
            for lane in self._by_key.values()
            if lane.broker in without_master and not lane.gone
        ]
        for each in sorted(route.brokers, key=lambda entry: entry.endpoints.broker):
            ends = each.endpoints
            if ends.broker_id != MASTER or not each.info.perm & WRITE:
                continue
            for queue_id in range(each.info.write_queues):
                key = (ends.broker, queue_id)
                lane = self._by_key.get(key)
                if lane is None:
                    lane = Lane(self.topic, ends.broker, queue_id, ends.commitlog)
                    self._by_key[key] = lane
                lane.endpoint = ends.commitlog
                lanes.append(lane)
        if lanes != self.lanes:
            self.is_changing = bool(self.lanes)
            self.generation += 1
        self.lanes = lanes
        self._served = {each.endpoints.broker for each in route.brokers}
        self._brokers = sorted({lane.broker for lane in lanes})
        for lane in self._by_key.values():
            lane.gone = lane not in lanes

    def _without_master(self) -> set[str]:
        """Brokers of which there are slaves."""
        found = [each.endpoints for each in self.route.brokers] if self.route else []
        names = {ends.broker for ends in found}
        return names - {ends.broker for ends in found if ends.broker_id == MASTER}

    def must_wait(self, batch: Batch) -> bool:
        """Return whether older batches have to be answered first. Batches for a broker that no
        longer has the topic do not count: they do not move to another queue."""
        if not self.is_changing or batch.targets is None:
            return False
        oldest = min(
            (
                each.generation
                for lane in self._by_key.values()
                if lane.broker in self._served
                for each in (*lane.waiting, lane.sent)
                if each is not None and each.targets is not None
            ),
            default=self.generation,
        )
        self.is_changing = oldest < self.generation
        return batch.generation > oldest

    @property
    def waits_for_master(self) -> bool:
        """Whether nothing can be sent before one is elected, or comes back."""
        return not self.lanes and bool(self._without_master())

    def clear(self) -> None:
        """Forget all batches: the producer is closed."""
        self.free.clear()
        for lane in self.all():
            lane.open.clear()
            lane.sent = lane.flight = None
            lane.waiting.clear()

    def all(self) -> list[Lane]:
        """Also those that the route does not have any more: they may hold batches."""
        return list(self._by_key.values())

    def closed(self) -> Iterator[Batch]:
        """The batches that are sent, or wait for that."""
        for lane in self.all():
            yield from lane.waiting
            if lane.sent is not None:
                yield lane.sent

    # --- choosing ---

    def serves(self, target: Target) -> bool:
        """Return whether there is a queue for a target, whatever its key."""
        if target.queue_id is None and target.broker is None:
            return bool(self.lanes)
        return any(
            target.queue_id in (None, lane.queue_id) and target.broker in (None, lane.broker)
            for lane in self.lanes
        )

    def next(self) -> Lane:
        """The queue whose turn it is; one that has nothing to do is preferred."""
        lanes = self._preferred()
        count = len(lanes)
        for step in range(count):
            lane = lanes[(self._turn + step) % count]
            if lane.idle:
                self._turn = (self._turn + step + 1) % count
                return lane
        lane = lanes[self._turn % count]
        self._turn = (self._turn + 1) % count
        return lane

    def next_of(self, broker: str) -> Lane | None:
        """The queue of that broker whose turn it is; None: the topic has none there."""
        lanes = [lane for lane in self.writable() if lane.broker == broker]
        if not lanes:
            return None
        self._turn += 1
        return next((lane for lane in lanes if lane.idle), lanes[self._turn % len(lanes)])

    def broker_for(self, key: str) -> str | None:
        """That of the brokers which has all messages of a key; None: there is only one."""
        brokers = self._brokers
        if len(brokers) < 2:
            return None
        return brokers[abs(codec.java_hash(key)) % len(brokers)]

    def next_idle(self) -> Lane | None:
        """The next queue in turn that has nothing to do; None also where none may be written."""
        if not self.lanes or not any(lane.idle for lane in self._preferred()):
            return None
        return self.next()

    def for_key(self, ordering_key: str) -> Lane:
        """RocketMQ SelectMessageQueueByHash: |hashCode % queues| over the queues of all brokers."""
        lanes = self.writable()
        try:
            return lanes[abs(codec.java_hash(ordering_key)) % len(lanes)]
        except UnicodeError as error:
            raise MessageIllegal(f"ordering_key is no text: {error}") from None

    def for_queue(self, queue_id: int) -> Lane:
        """That queue of the first broker, by name, that has it."""
        for lane in self.writable():
            if lane.queue_id == queue_id:
                return lane
        count = 1 + max(lane.queue_id for lane in self.lanes)
        raise ArgumentIllegal(f"queue {queue_id} of topic {self.topic}: it has 0 to {count - 1}")

    def elsewhere(self, broker: str) -> Lane | None:
        """A queue of another broker, for a batch that any queue will do for."""
        if not self.lanes:
            return None
        others = [lane for lane in self._preferred() if lane.broker != broker and not lane.failures]
        return random.choice(others) if others else None

    def _preferred(self) -> list[Lane]:
        """Those of brokers that answer soon; all, where none does. Raises NoPermission."""
        lanes, avoided = self.writable(), self._standing.avoided()
        if not avoided:
            return lanes
        return [lane for lane in lanes if lane.broker not in avoided] or lanes

    def writable(self) -> list[Lane]:
        """All of them. Raises NoPermission where there is none."""
        if not self.lanes:
            raise self.not_writable()
        return self.lanes

    def not_writable(self) -> NoPermission | NotMaster:
        if self.waits_for_master:
            names = ", ".join(sorted(self._without_master()))
            return NotMaster(f"topic {self.topic}: no master of broker {names} is known just now")
        return NoPermission(
            f"topic {self.topic} has no queue that may be written; see its perm and write_queues"
        )
