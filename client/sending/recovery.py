"""Recovery of failed sends: a producer pauses, asks where the broker is, and goes on."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from cometmq.client.routes import Routes
from cometmq.client.sending.attempts import RetryPolicy
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.protocol.errors import (
    CometError,
    NotReachable,
    ProducerUnknown,
    SystemBusy,
    TopicNotExist,
)
from cometmq.protocol.wire.steady import Steady

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0  # for the end of the thread
ROUTE_S: Final = 0.5  # how long the name server may take while somebody waits for a retry


class Delivers(Protocol):
    """What the recovery needs of the delivery."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    @property
    def policy(self) -> RetryPolicy: ...
    def resume(self, lanes: Iterable[Lane]) -> None: ...
    def update(self, topic: str) -> TopicLanes:
        """Update a topic's lanes to its newest route. The caller does not hold the lock."""

    def open_again(self, topic: str) -> None: ...


class Recovery:
    """A thread that exists from the first failure on. It asks the name server."""

    def __init__(self, delivery: Delivers, routes: Routes) -> None:
        self._delivery = delivery
        self._routes = routes
        self._wake = threading.Condition()
        self._paused: list[tuple[float, int, Lane]] = []  # a heap: when it may go on
        self._order = itertools.count()
        self._late: set[str] = set()  # topics of which an answer takes long
        self._thread = Steady("cometmq producer recovery", self._turn)
        self._closed = False

    def schedule(self, lanes: Iterable[Lane]) -> None:
        """Let these go on after their pause."""
        now = time.monotonic()
        with self._wake:
            for lane in lanes:
                pause_s = self._delivery.policy.pause_s(lane.failures, lane.error)
                entry = (now + pause_s, next(self._order), lane)
                heapq.heappush(self._paused, entry)
            self._start()

    def look_after(self, lanes: Iterable[Lane]) -> None:
        """See whether the brokers of these have moved while we wait for their answer."""
        with self._wake:
            self._late.update(lane.topic for lane in lanes)
            self._start()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if not self._thread.join(CLOSE_S):
            log.error("the recovery of a producer does not end")

    def _start(self) -> None:
        if not self._closed:
            self._thread.start()
        self._wake.notify()

    def _turn(self) -> bool:
        with self._wake:
            while not self._closed and not self._late and not self._due():
                wait_s = self._paused[0][0] - time.monotonic() if self._paused else None
                self._wake.wait(None if wait_s is None else max(0.0, wait_s))
            if self._closed:
                return False
            late, self._late = self._late, set()
            lanes = []
            while self._due():
                lanes.append(heapq.heappop(self._paused)[2])
        try:
            self.look_up({lane.topic: lane.error for lane in lanes} | dict.fromkeys(late))
        finally:
            if lanes:
                self._delivery.resume(lanes)
        return True

    def _due(self) -> bool:
        return bool(self._paused) and self._paused[0][0] <= time.monotonic()

    def look_up(self, causes: dict[str, CometError | None]) -> None:
        """Learn the routes of these topics anew, as far as the failure calls for it."""
        moved: set[str] = set()
        for topic, cause in causes.items():
            if isinstance(cause, SystemBusy):
                continue
            if isinstance(cause, ProducerUnknown):
                self._delivery.open_again(topic)
                continue
            try:
                self._learn(topic, cause)
            except NotReachable as error:
                log.debug("still on the old route: %s", error)
                break  # the next topic would only wait as long
            except CometError as error:
                log.debug("route of %s: %s", topic, error)
                continue
            lanes = self._delivery.update(topic).all()
            with self._delivery.lock:
                moved |= {
                    lane.flight.endpoint
                    for lane in lanes
                    if lane.flight is not None and lane.flight.endpoint != lane.endpoint
                }
        for endpoint in moved:
            log.info(
                "nobody listens at %s any more: its requests are sent to the new address", endpoint
            )
            self._routes.retire(endpoint)

    def _learn(self, topic: str, cause: CometError | None) -> None:
        if isinstance(cause, TopicNotExist):
            self._routes.ensure(topic, ROUTE_S)
        else:
            self._routes.refresh(topic, ROUTE_S)
