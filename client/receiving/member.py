"""A member of a consumer group, at all brokers: where they are, which queues it gains, its offsets.

At each broker it has a `Membership`, with a thread of its own, which calls back here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from cometmq.client.presence import unique_name
from cometmq.client.questions import Position, resolve
from cometmq.client.receiving.beginning import Beginning, first_offsets
from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.doubts import places_of
from cometmq.client.receiving.kept import KeptByBroker
from cometmq.client.receiving.mapped import check_mapped
from cometmq.client.receiving.membership import Membership
from cometmq.client.receiving.owned import OwnedQueues
from cometmq.client.receiving.stream import Stream
from cometmq.client.routes import Routes, broker_routes, replicas_of
from cometmq.protocol.commands import GivenBack, QueueKey, QueueOffset, TopicRoute
from cometmq.protocol.errors import CometError, NotConfirmed, NotOwner, TopicNotExist
from cometmq.protocol.names import RETRY_PREFIX
from cometmq.protocol.positions import EARLIEST
from cometmq.protocol.tags import ALL_TAGS
from cometmq.shm.os.processes import own_process

log = logging.getLogger(__name__)

ASSIGNMENT_S: Final = 5.0


class Member:
    """Threads may share it.

    Args:
        name: in the group; "" = a unique one.
        start: initial offsets of a new group in the queues of a topic; see Consumer.
        transport: "mapped": each broker's store has to be mapped; "zmq": nothing goes past ZeroMQ.
    """

    def __init__(
        self,
        group: str,
        name: str,
        routes: Routes,
        owned: OwnedQueues,
        stream: Stream,
        *,
        start: Position,
        auto_commit_s: float,
        transport: str,
    ) -> None:
        self.group = group
        self.name = name or unique_name()
        self.process = own_process()
        self._routes = routes
        self._owned = owned
        self._stream = stream
        self._start = start
        self._auto_commit_s = auto_commit_s
        self._transport = transport
        self._beginning = Beginning(routes, group, start)
        self._places: dict[str, Membership] = {}  # by broker; guarded by the lock of `owned`
        self._closed = False

    # --- subscriptions ---

    def subscribe(self, topic: str, tags: str, sql: str) -> None:
        """Raises NotReachable, TopicNotExist, NotMapped."""
        route = self._routes.topic(topic)
        if self._transport == "mapped":
            for each in broker_routes(route):
                check_mapped(each.endpoints)
        if self._start != EARLIEST and topic not in self._owned.topics:
            self._beginning.begin(route, topic)
        self._owned.subscribe(topic, tags, sql)
        self._meet(self._routes.topic(topic))
        self._stir()

    def unsubscribe(self, topic: str) -> None:
        self._owned.unsubscribe(topic)
        self._stir()

    def _stir(self) -> None:
        for place in list(self._places.values()):
            place.stir()

    # --- brokers ---

    @property
    def connected(self) -> bool:
        """Whether every broker that it reads from has answered last time."""
        places = list(self._places.values())
        return bool(places) and all(place.presence.connected for place in places)

    def is_steady(self, broker: str) -> bool:
        """Whether that broker has been there for a while."""
        place = self._places.get(broker)
        return place is not None and place.presence.is_steady

    def reader_in_trouble(self) -> None:
        """A reader does not answer: its broker may have moved. Does not block."""
        for place in list(self._places.values()):
            place.look_up()

    def look_up_brokers(self) -> None:
        """Learn where the brokers are now."""
        for topic in self._owned.topics:
            try:
                self._meet(self._routes.find(topic, 0.5))
            except TopicNotExist:
                continue  # the retries of a group that has none yet
            except CometError as error:
                log.debug("route of %s: %s", topic, error)
                return

    def _meet(self, route: TopicRoute) -> None:
        """Join the group at brokers that are new, and follow those that have moved. A slave
        without a master is asked too, and refuses until it has one."""
        for broker, replicas in replicas_of(route).items():
            with self._owned.lock:
                place = self._places.get(broker)
                if place is None and not self._closed:
                    near = self._transport != "zmq"
                    place = Membership(self, self._owned, replicas, self._auto_commit_s, near=near)
                    self._places[broker] = place
                    place.start()
                    continue
            if place is not None:
                place.met(replicas)

    # --- what was not consumed ---

    def subscribe_retries(self) -> None:
        """Read the group's retries too, as soon as there are any."""
        self._owned.subscribe(RETRY_PREFIX + self.group, ALL_TAGS, "")
        self._stir()

    def give_back(
        self, broker: str, messages: list[GivenBack], max_reconsume_times: int, timeout_s: float
    ) -> list[int]:
        """See `Membership.give_back`."""
        return self._places[broker].give_back(messages, max_reconsume_times, timeout_s)

    # --- offsets ---

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises NotConfirmed, ServiceNotAvailable, ..."""
        for place in list(self._places.values()):
            place.commit()

    def seek(self, position: Position, topic: str | None, queue_id: int | None) -> None:
        """See `Consumer.seek`."""
        self._wait_for_assignment()
        queues = self._owned.find(topic, queue_id)
        if not queues and queue_id is not None:
            raise NotOwner(f"queue {queue_id} of {topic or 'any topic'} is not this member's")
        for place in list(self._places.values()):
            mine = [queue for queue in queues if queue.broker == place.broker]
            if mine:
                keys = [QueueKey(queue.topic, queue.queue_id) for queue in mine]
                self._seek(
                    place, mine, resolve(self._routes, place.replicas.master, keys, position)
                )

    def _seek(self, place: Membership, queues: list[Queue], queue_offsets: list[int]) -> None:
        with place.commit_lock:
            place.set_offsets(
                [
                    QueueOffset(queue.topic, queue.queue_id, queue_offset, queue.ownership)
                    for queue, queue_offset in zip(queues, queue_offsets, strict=True)
                ],
                seek=True,
            )
            self._owned.move(queues, queue_offsets)

    def settle(self, place: Membership) -> None:
        """See whether the broker still has what was read of doubtful queues; else they go on where
        the group stands, or at what took the places of lost messages. Raises CometError."""
        doubts = self._owned.doubts_of(place.broker)
        if not doubts:
            return
        queues = [each.queue for each in doubts]
        ends = place.replicas.master
        keys = [QueueKey(queue.topic, queue.queue_id) for queue in queues]
        kept = KeptByBroker(self._routes, self.group).load(ends, keys)
        places = places_of(self._routes, ends, queues, kept)
        for queue, queue_offset in places:
            try:
                self._seek(place, [queue], [queue_offset])
            except NotOwner as error:  # its next share removes the queue
                log.debug("group %s: %s", self.group, error)
        self._owned.trust(doubts, kept)

    def doubt(self, broker: str) -> None:
        """Schedule a check of a broker that may have lost messages. Does not block."""
        place = self._places.get(broker)
        if place is not None:
            place.doubts.doubt()

    def _wait_for_assignment(self) -> None:
        deadline = time.monotonic() + ASSIGNMENT_S
        for place in list(self._places.values()):
            if not place.joined.wait(max(0.0, deadline - time.monotonic())):
                self._stream.check_failure()
                raise NotConfirmed(
                    f"broker {place.broker} has not given group {self.group} its queues "
                    f"within {ASSIGNMENT_S:g} s"
                )

    # --- what a membership calls, in its thread ---

    def take_on(self, place: Membership, offsets: Sequence[QueueOffset]) -> None:
        """These queues are ours; -1 where the group has no progress.

        Raises NotOwner if they are not any more.
        """
        new = [each for each in offsets if each.queue_offset < 0]
        retries = [each for each in new if each.topic == RETRY_PREFIX + self.group]
        others = [each for each in new if each.topic != RETRY_PREFIX + self.group]
        begun: list[QueueOffset] = []
        if others and self._start != EARLIEST:
            others, begun = self._begin_late(place, others)
        begun += self._begin(
            place, others + retries, EARLIEST
        )  # from the first message, so none is missed
        known = [each for each in offsets if each.queue_offset >= 0]
        self._owned.take_on(place.broker, place.replicas, known + begun, place.lease)

    def _begin_late(
        self, place: Membership, new: Sequence[QueueOffset]
    ) -> tuple[list[QueueOffset], list[QueueOffset]]:
        """Set initial offsets at a broker that was unreachable or is new. Return the queues that
        got none, as the group has progress in their topics, and the offsets of the others."""
        ends = place.replicas.master
        for topic in sorted({each.topic for each in new}):
            route = self._routes.known(topic) or self._routes.topic(topic)
            if not self._beginning.begin_late(ends, route, topic):  # an older broker
                begun = self._begin(place, new, self._start)
                with place.commit_lock:
                    place.set_offsets(begun)
                return [], begun
        keys = [QueueKey(each.topic, each.queue_id) for each in new]
        known = KeptByBroker(self._routes, self.group).load(ends, keys)
        pairs = list(zip(new, known, strict=True))
        return (
            [each for each, offset in pairs if offset < 0],
            [
                QueueOffset(each.topic, each.queue_id, offset, each.epoch)
                for each, offset in pairs if offset >= 0
            ],
        )  # fmt: skip

    def _begin(
        self, place: Membership, new: Sequence[QueueOffset], start: Position
    ) -> list[QueueOffset]:
        """Where the group begins in these queues."""
        keys = [QueueKey(each.topic, each.queue_id) for each in new]
        found = first_offsets(self._routes, place.replicas.master, keys, start)
        return [
            QueueOffset(each.topic, each.queue_id, queue_offset, each.epoch)
            for each, queue_offset in zip(new, found, strict=True)
        ]

    def refused(self, error: CometError) -> None:
        """The coordinator will not have us: poll raises it."""
        self._stream.refuse(error)

    def accepted(self) -> None:
        """It has us after all."""
        self._stream.accept()

    # --- the end ---

    def close(self) -> None:
        """Commit what is acknowledged, and leave the group at every broker."""
        with self._owned.lock:
            self._closed = True
        for place in list(self._places.values()):
            place.close()
