"""Where a group that is new begins in the queues of a topic, and that it does so at once.

A consumer that subscribes has each broker note it before `subscribe` returns: whatever is sent from
then on is delivered. From then on the group is there, and gets all that comes to queues which the
topic gets later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from cometmq.client.questions import Position, offsets_at, resolve
from cometmq.client.routes import Routes, broker_routes
from cometmq.protocol.commands import (
    BeginGroup,
    BrokerEndpoints,
    Done,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
    TopicRoute,
)
from cometmq.protocol.errors import BadRequest, CometError
from cometmq.protocol.positions import EARLIEST, LATEST

log = logging.getLogger(__name__)

ASK_S: Final = 3.0
OTHERS_S: Final = 1.0  # for another member of a new group, which begins at its brokers just now


def first_offsets(
    routes: Routes, ends: BrokerEndpoints, keys: Sequence[QueueKey], start: Position
) -> list[int]:
    """Where that is in each of these queues; a number is a time, in milliseconds since 1970."""
    if isinstance(start, datetime | int):
        at_ms = start if isinstance(start, int) else int(start.timestamp() * 1000)
        return offsets_at(routes, ends, keys, at_ms)
    return resolve(routes, ends, keys, start)


class Beginning:
    """Of a group. Threads may share it.

    Args:
        start: see Consumer; not "earliest", which needs none of this.
    """

    def __init__(self, routes: Routes, group: str, start: Position) -> None:
        self._routes = routes
        self._group = group
        self._start = start
        self._starts: dict[str, Position] = {}  # by topic: at brokers that are met later

    def begin(self, route: TopicRoute, topic: str) -> None:
        """At all brokers that answer; what is wrong with another one is seen when it is joined."""
        # By this machine's clock; a broker that is away now takes no message either.
        self._starts[topic] = _now_ms() if self._start == LATEST else self._start
        places = [(each.endpoints, _keys(topic, each.info.read_queues)) for each in
                  broker_routes(route)]  # fmt: skip
        is_known = self._look(places)
        if True in is_known.values() and False in is_known.values():
            threading.Event().wait(OTHERS_S)  # unless it is another new member that is at it
            is_known = self._look(places)
        start = self._start
        if True in is_known.values():  # a broker that came later, to a group that was there
            start = self._starts[topic] = EARLIEST
        for ends, keys in places:
            if is_known.get(ends.broker) is False:
                try:
                    self._begin_at(ends, keys, start)
                except CometError as error:
                    log.debug("group %s at broker %s: %s", self._group, ends.broker, error)

    def begin_late(self, ends: BrokerEndpoints, route: TopicRoute, topic: str) -> bool:
        """At a broker that may not have answered then; False: it is too old to be asked. Raises
        CometError."""
        counts = [each.info.read_queues for each in broker_routes(route)
                  if each.endpoints.broker == ends.broker]  # fmt: skip
        keys = _keys(topic, max(counts, default=0))
        try:
            self._begin_at(ends, keys, self._starts.get(topic, self._start))
        except BadRequest as error:
            log.debug("group %s at broker %s: %s", self._group, ends.broker, error)
            return False
        return True

    def _look(
        self, places: Sequence[tuple[BrokerEndpoints, Sequence[QueueKey]]]
    ) -> dict[str, bool]:
        """Whether the group has progress in the topic, by broker; not of those that are away."""
        found = {}
        for ends, keys in places:
            command = FetchOffsets(self._group, list(keys))
            try:
                answer = self._routes.ask(ends.coordinator, command, GroupOffsets, ASK_S)
            except CometError as error:
                log.debug("group %s at broker %s: %s", self._group, ends.broker, error)
            else:
                found[ends.broker] = any(each.queue_offset >= 0 for each in answer.offsets)
        return found

    def _begin_at(self, ends: BrokerEndpoints, keys: Sequence[QueueKey], start: Position) -> None:
        found = first_offsets(self._routes, ends, keys, start)
        offsets = [
            QueueOffset(key.topic, key.queue_id, offset)
            for key, offset in zip(keys, found, strict=True)
        ]
        self._routes.ask(ends.coordinator, BeginGroup(self._group, offsets), Done, ASK_S)


def _keys(topic: str, count: int) -> list[QueueKey]:
    return [QueueKey(topic, number) for number in range(count)]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
