"""Initial offsets of a new group in the queues of a topic.

A consumer commits them at each broker before `subscribe` returns, so all later messages are
delivered. From then on the group has progress in the topic, and reads queues that are added to it
from their first message.
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
OTHERS_S: Final = 1.0  # for another new member of the group, which sets its initial offsets


def first_offsets(
    routes: Routes, ends: BrokerEndpoints, keys: Sequence[QueueKey], start: Position
) -> list[int]:
    """Return the offset of `start` in each queue; an int is a time in milliseconds since 1970."""
    if isinstance(start, datetime | int):
        at_ms = start if isinstance(start, int) else int(start.timestamp() * 1000)
        return offsets_at(routes, ends, keys, at_ms)
    return resolve(routes, ends, keys, start)


class Beginning:
    """Initial offsets of one group. Threads may share it.

    Args:
        start: as of Consumer, except "earliest", which needs no initial offsets.
    """

    def __init__(self, routes: Routes, group: str, start: Position) -> None:
        self._routes = routes
        self._group = group
        self._start = start
        self._starts: dict[str, Position] = {}  # by topic: start at brokers that are found later

    def begin(self, route: TopicRoute, topic: str) -> None:
        """Set initial offsets at all brokers that answer; joining the others shows their errors."""
        # By this machine's clock. An unreachable broker stores no messages meanwhile.
        self._starts[topic] = _now_ms() if self._start == LATEST else self._start
        places = [(each.endpoints, _keys(topic, each.info.read_queues)) for each in
                  broker_routes(route)]  # fmt: skip
        is_known = self._look(places)
        if True in is_known.values() and False in is_known.values():
            threading.Event().wait(OTHERS_S)  # another new member may be setting them now
            is_known = self._look(places)
        start = self._start
        if True in is_known.values():  # the group exists; the other brokers were added later
            start = self._starts[topic] = EARLIEST
        for ends, keys in places:
            if is_known.get(ends.broker) is False:
                try:
                    self._begin_at(ends, keys, start)
                except CometError as error:
                    log.debug("group %s at broker %s: %s", self._group, ends.broker, error)

    def begin_late(self, ends: BrokerEndpoints, route: TopicRoute, topic: str) -> bool:
        """Set initial offsets at a broker that may not have answered `begin`; return False if it is
        too old to know BeginGroup. Raises CometError."""
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
        """Return by broker whether the group has progress; omit brokers that do not answer."""
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
