"""The producer's clock: sends batches that have lingered, and gives up those whose time is up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from cometmq.client.presence import Presences
from cometmq.client.sending.accumulator import Accumulator
from cometmq.client.sending.attempts import CHECK_S, Expired, Flight, RetryPolicy, look_s
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.standing import Standing
from cometmq.client.sending.window import Window
from cometmq.protocol.wire.steady import Steady

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0  # for the end of the thread


class Ticked(Protocol):
    """What the clock needs of the delivery."""

    topics: dict[str, TopicLanes]
    window: Window
    accumulator: Accumulator
    policy: RetryPolicy
    presences: Presences
    standing: Standing

    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    def collect(self, lanes: Iterable[Lane]) -> list[Flight]: ...
    def launch(self, flights: Iterable[Flight]) -> None: ...
    def look_after(self, lanes: Iterable[Lane]) -> None: ...


class Clock:
    """A thread that exists from the first batch on. It sleeps until something is due.

    While a batch is unsettled, all lanes are looked at every 0.5 s, and every 0.2 s while one waits
    for a connection.
    """

    def __init__(self, delivery: Ticked, lock: Any) -> None:
        self._delivery = delivery
        self._tick = threading.Condition(lock)
        self._check_at: float | None = None  # next look at lanes; None: there is nothing to look at
        self._thread = Steady("cometmq producer clock", self._turn)
        self._closed = False

    def watch(self, is_sooner: bool = False) -> None:
        """There is a batch to look after; under the lock. `is_sooner`: before the next look."""
        if self._check_at is None:
            self._check_at = time.monotonic() + CHECK_S
        elif not is_sooner:
            return
        self._thread.start()
        self._tick.notify()

    def stop(self) -> None:
        """Under the lock."""
        self._closed = True
        self._tick.notify_all()

    def join(self) -> None:
        if not self._thread.join(CLOSE_S):
            log.error("the clock of a producer does not end")

    # --- the thread ---

    def _turn(self) -> bool:
        """One look, and the sleep until the next. False at the end."""
        delivery = self._delivery
        with delivery.lock:
            if self._closed:
                return False
            now = time.monotonic()
            flights, expired = self._collect_due(now)
            more, late = self._collect_late(now, expired)
            if not (flights or more or expired or late):
                wake_at = self._next_alarm()
                self._tick.wait(None if wake_at is None else max(0.0, wake_at - now))
        delivery.launch(flights + more)
        for batch, error in expired:
            batch.settle(None, error)
        if late:
            delivery.look_after(late)
        return True

    def _next_alarm(self) -> float | None:
        alarms = (self._check_at, self._delivery.accumulator.next_due)
        return min((each for each in alarms if each is not None), default=None)

    def _collect_due(self, now: float) -> tuple[list[Flight], Expired]:
        lanes, refused = self._delivery.accumulator.close_due(now)
        return self._delivery.collect(lanes), refused

    def _collect_late(self, now: float, expired: Expired) -> tuple[list[Flight], list[Lane]]:
        """Adds batches whose time is up to `expired`; what may leave now, and lanes whose answer
        takes suspiciously long."""
        if self._check_at is None or now < self._check_at:
            return [], []
        pause_s = CHECK_S
        delivery = self._delivery
        late: list[Lane] = []
        touched: list[Lane] = []
        for topic in delivery.topics.values():
            closed, refused = delivery.accumulator.close_forgotten(topic, now)
            touched += closed
            expired += refused
            if topic.is_changing:
                touched += topic.all()
            for lane in topic.all():
                for batch in self._expire(lane, now, touched):
                    error = delivery.policy.timed_out(batch, lane)
                    delivery.presences.heard(lane.broker, error)
                    delivery.standing.heard(lane.broker, 0.0, error)
                    delivery.window.settled(batch, error)
                    expired.append((batch, error))
                if lane.sent is None:
                    continue
                patience_s = look_s(lane.flight.pending)
                pause_s = min(pause_s, patience_s)
                if now - lane.sent_at >= patience_s:
                    late.append(lane)
                    delivery.standing.heard(lane.broker, now - lane.sent_at, None)
                    self._go_elsewhere(lane, topic, touched)
        self._check_at = now + pause_s if delivery.window.unsettled else None
        return delivery.collect(touched), late

    def _expire(self, lane: Lane, now: float, touched: list[Lane]) -> list[Batch]:
        expired: list[Batch] = []
        sent, flight = lane.sent, lane.flight
        if sent is not None and sent.deadline <= now:
            if flight.was_never_sent():
                self._call_back(flight, touched)
                lane.waiting.popleft()
            else:
                sent.unconfirmed = True
                lane.is_unsure_of(sent.number)
                lane.sent = lane.flight = None
            touched.append(lane)
            expired.append(sent)
        while lane.waiting and lane.waiting[0].deadline <= now:
            expired.append(lane.waiting.popleft())
        return expired

    def _go_elsewhere(self, lane: Lane, topic: TopicLanes, touched: list[Lane]) -> None:
        """Nobody takes what was sent to this queue: what any queue will do for goes to another
        broker's, if there is one that takes something."""
        flight = lane.flight
        if not flight.waits_for_connection() or topic.elsewhere(lane.broker) is None:
            return
        if any(batch.may_go_elsewhere for batch in (lane.sent, *lane.waiting) if batch):
            if not flight.was_never_sent():
                return  # it has left in this moment
            self._call_back(flight, touched)
            waiting, lane.waiting = lane.waiting, deque()
            for batch in waiting:
                other = topic.elsewhere(lane.broker) if batch.may_go_elsewhere else None
                taker = other or lane  # whatever happens, one of them has it
                batch.broker, batch.queue_id = taker.broker, taker.queue_id
                taker.waiting.append(batch)
                touched.append(taker)

    def _call_back(self, flight: Flight, touched: list[Lane]) -> None:
        """It has not left: its batches stand at the head of their lanes again."""
        for lane, batch in zip(flight.lanes, flight.batches, strict=True):
            if lane.flight is flight and lane.sent is batch:
                lane.sent = lane.flight = None
                lane.waiting.appendleft(batch)
                touched.append(lane)
