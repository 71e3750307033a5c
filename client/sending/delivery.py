"""Carries a producer's batches to their queues: one a queue at a time, in order, until answered.

Everything here is guarded by one lock, the producer's; what goes to the network goes there after
the lock is released. Threads that meet: those that call `send`, the pump of a Channel, which
receives answers, the clock (`clock.py`), and the recovery (`recovery.py`), which has what failed
sent again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final

from cometmq.client.presence import Presences
from cometmq.client.routes import Routes
from cometmq.client.sending.accumulator import Accumulator, Batching
from cometmq.client.sending.attempts import (
    Expired,
    Flight,
    Outcome,
    RetryPolicy,
    may_leave_queue,
    outcomes_of,
    send_command,
    typed,
)
from cometmq.client.sending.choosing import leave
from cometmq.client.sending.clock import Clock
from cometmq.client.sending.identity import Identity
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.recovery import Recovery
from cometmq.client.sending.standing import Standing
from cometmq.client.sending.window import Window
from cometmq.protocol.commands import SendResult, TopicRoute
from cometmq.protocol.errors import (
    ClientClosed,
    ClosedUnconfirmed,
    CometError,
    NotConfirmed,
    NotReachable,
    again,
)
from cometmq.protocol.wire.pending import Pending

REQUEST_BYTES: Final = 262_144  # batches of several queues share a request up to this
REQUEST_SECTIONS: Final = 64


class Delivery:
    """See the module.

    Always: at most one batch of a lane is on its way; it is `lane.sent`, and `lane.flight` the
    request that it travels in. An answer to any other is too late.

    Args:
        timeout_s: how long a closed batch is tried before it fails; None: see RetryPolicy.
        attempts_max: how often it is sent at most; None: as often as the time allows.
        in_flight_bytes_max: closed and unanswered bytes; beyond that sending waits.
        batching: of the messages that `accumulator` takes.
        identity: of the producer; None: it has no name.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        timeout_s: float | None,
        attempts_max: int | None,
        in_flight_bytes_max: int,
        batching: Batching = Batching(),  # noqa: B008 - a tuple
        identity: Identity | None = None,
    ) -> None:
        self.lock: Any = threading.Lock()
        self.identity = identity or Identity(None)
        self.topics: dict[str, TopicLanes] = {}
        self.policy = RetryPolicy(timeout_s, attempts_max)
        self.presences = Presences("a producer")
        self.standing = Standing()
        self.window = Window(self.lock, in_flight_bytes_max, self.policy.timeout_most_s)
        self._clock = Clock(self, self.lock)
        self.accumulator = Accumulator(
            batching,
            self.topics,
            self.window,
            self.policy.timeout_s,
            self._line_up,
            self._clock.watch,
        )
        self._routes = routes
        self._closed = False
        self.recovery = Recovery(self, routes)

    # --- topics ---

    def lanes_of(self, topic: str) -> TopicLanes:
        """The topic's lanes. Asks for the route first if need be; not under the lock."""
        route = self._routes.topic(topic, self.policy.timeout_s)
        lanes = self.topics.get(topic)
        if lanes is None or lanes.route is not route:
            lanes = self.update(topic)
            if lanes.waits_for_master:
                self._wait_for_master(lanes)
            if self.accumulator.linger_s:
                self._connect(lanes)
        return lanes

    def _wait_for_master(self, lanes: TopicLanes) -> None:
        """Of the first message to a topic: for as long as any message is tried."""
        deadline, failures = monotonic() + self.policy.timeout_of(lanes), 0
        while lanes.waits_for_master and (left_s := deadline - monotonic()) > 0:
            failures += 1
            sleep(min(left_s, self.policy.pause_s(failures, None)))
            with suppress(NotReachable):
                self._routes.refresh(lanes.topic, left_s)
            self.update(lanes.topic)

    def look_again(self, topic: str) -> TopicLanes:
        """Fetch the route of a topic, if a name server answers, and return the topic's lanes. The
        caller does not hold the lock."""
        with suppress(NotReachable):
            self._routes.refresh(topic, self.policy.timeout_s)
        return self.update(topic)

    def _connect(self, lanes: TopicLanes) -> None:
        """Connect, and start what receives answers, before there is something to send.

        The first batch would do that as well, but it may leave no sooner than at the interpreter's
        end, where Python 3.12.0 to 3.12.2 start no thread any more (not for
        `threading._register_atexit` either); later ones do until all `atexit` calls are over.
        """
        for endpoint, broker in {lane.endpoint: lane.broker for lane in lanes.all()}.items():
            with suppress(CometError):  # whoever sends there is told
                self._routes.commitlog(endpoint, f"broker {broker}").start_pump()

    def update(self, topic: str) -> TopicLanes:
        """Update a topic's lanes to its newest known route. The caller does not hold the lock."""
        with self.lock:
            route = self._routes.known(topic)
            assert route is not None
            lanes = self.topics.get(topic)
            if lanes is None:
                lanes = self.topics[topic] = TopicLanes(route, self.standing)
            flights = self._take_over(lanes, route) if lanes.route is not route else []
        self.launch(flights)
        return lanes

    def _take_over(self, lanes: TopicLanes, route: TopicRoute) -> list[Flight]:
        """Apply a newer route. Open batches that were assigned to queues by the older one close."""
        before = lanes.lanes, lanes.generation
        had_replicas = lanes.has_replicas
        lanes.update(route)
        if lanes.has_replicas and not had_replicas:
            for batch in lanes.closed():
                self.policy.give_time(batch, lanes)
        if lanes.generation == before[1]:
            return []
        touched = []
        for lane in lanes.all():
            for batch in tuple(lane.open.values()):
                self.accumulator.close(batch, lane)
                batch.generation = before[1]
                touched.append(lane)
        return self.collect(touched)

    def open_again(self, topic: str) -> None:
        """Say to the brokers of the topic who this is: one does not know it any more."""
        with self.lock:
            endpoints = {lane.endpoint for lane in self.topics[topic].all()}
        self.identity.open_again(self._routes, endpoints)

    @property
    def connected(self) -> bool:
        """Whether every broker that it sends to has answered last time."""
        with self.lock:
            serving = {lane.broker for topic in self.topics.values() for lane in topic.lanes}
        return self.presences.all_connected(serving)

    # --- closed batches; under the lock ---

    def _line_up(self, batch: Batch, lane: Lane) -> None:
        batch.broker, batch.queue_id = lane.broker, lane.queue_id
        batch.since = monotonic()
        lanes = self.topics[batch.topic]
        batch.generation = lanes.generation
        self.policy.give_time(batch, lanes)
        lane.waiting.append(batch)
        self.window.sent_off(batch)
        self._clock.watch()

    def send_body(self, batch: Batch, lane: Lane) -> None:
        """Send a batch that was closed elsewhere; not under the lock. `flush` raises its error."""
        batch.remembered = True
        with self.lock:
            self.window.wait_for_room()
            self.window.opened(batch)
            self._line_up(batch, lane)
            flights = self.collect((lane,))
        self.launch(flights)

    def collect(self, lanes: Iterable[Lane]) -> list[Flight]:
        """What can leave now for these queues. The caller launches it after the lock."""
        flights: dict[str, Flight] = {}
        full: list[Flight] = []
        size = 0
        now = monotonic()
        for lane in lanes:
            if lane.sent is not None or lane.paused:
                continue
            if not lane.waiting:
                self.accumulator.close_overdue(lane, now)
            if not lane.waiting or self.topics[lane.topic].must_wait(lane.waiting[0]):
                continue
            batch = lane.waiting.popleft()
            flight = flights.get(lane.endpoint)
            if flight is not None and (
                size + len(batch.body) > REQUEST_BYTES or len(flight.batches) >= REQUEST_SECTIONS
            ):
                full.append(flight)
                flight = None
            if flight is None:
                flight = flights[lane.endpoint] = Flight(lane.endpoint, now)
                size = 0
            size += len(batch.body)
            lane.sent, lane.sent_at, lane.flight = batch, now, flight
            flight.add(lane, batch)
        return full + list(flights.values())

    # --- to the network and back; not under the lock ---

    def launch(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            try:
                channel = self._routes.commitlog(
                    flight.endpoint, f"broker {flight.batches[0].broker}"
                )
                flight.pending = channel.request(
                    send_command(flight.endpoint, self.identity, flight.batches),
                    [batch.body for batch in flight.batches],
                    on_done=functools.partial(self._answered, flight),
                )
            except Exception as error:
                self._land(flight, [(None, typed(error))] * len(flight.batches))

    def _answered(self, flight: Flight, pending: Pending) -> None:
        """In the channel's thread."""
        outcomes: list[Outcome]
        stamp, host = 0, ""
        try:
            answer, _ = pending.result()
            outcomes = outcomes_of(answer, len(flight.batches))
        except CometError as error:
            outcomes = [(None, error)] * len(flight.batches)
        else:
            assert isinstance(answer, SendResult)
            stamp, host = answer.store_timestamp_ms, answer.store_host
        self._land(flight, outcomes, stamp, host)

    def _land(
        self, flight: Flight, outcomes: list[Outcome], stamp: int = 0, host: str = ""
    ) -> None:
        """Give every batch its outcome, and the free lanes their next one.

        `stamp` is in every SendResult, and in no other answer.
        """
        settled: list[tuple[Batch, Outcome]] = []
        failed: list[Lane] = []
        with self.lock:
            broker, error = flight.lanes[0].broker, outcomes[0][1]
            self.presences.heard(broker, error)
            self.standing.heard(broker, monotonic() - flight.since, error)
            for lane, batch, (number, fence), outcome in zip(
                flight.lanes, flight.batches, flight.attempts, outcomes, strict=True
            ):
                if isinstance(outcome[1], NotConfirmed):
                    lane.is_unsure_of(number)
                elif fence and stamp:
                    lane.has_heard_fence(number)
                if lane.flight is not flight or lane.sent is not batch:
                    continue  # its time was up, or it was sent again elsewhere
                lane.sent = lane.flight = None
                if outcome[0] is not None:
                    lane.has_stored(batch, outcome[0])
                elif outcome[1] is not None and self._try_again(lane, batch, outcome[1]):
                    failed.append(lane)
                    continue
                if outcome[1] is not None:
                    outcome = (None, self.policy.last_error(batch, outcome[1]))
                self.window.settled(batch, outcome[1])
                settled.append((batch, outcome))
            flights = self.collect(self._let_go_on(flight.lanes))
        self.launch(flights)
        for batch, (result, error) in settled:
            batch.settle(result, error, stamp, host)
        if failed:
            self.recovery.schedule(failed)

    def _let_go_on(self, lanes: list[Lane]) -> list[Lane]:
        """Return these lanes and those whose batches may have waited for their batches."""
        topics = {lane.topic for lane in lanes if self.topics[lane.topic].is_changing}
        return lanes + [lane for topic in topics for lane in self.topics[topic].all()]

    def _try_again(self, lane: Lane, batch: Batch, error: CometError) -> bool:
        """Whether the batch goes back to the head of its lane, which then pauses."""
        lane.failures += 1
        lane.error = error
        batch.unconfirmed = batch.unconfirmed or isinstance(error, NotConfirmed)
        if may_leave_queue(batch, error):
            batch.queue_is_refused()
        if not self.may_try_again(batch, error):
            return False
        lane.paused = True
        other = None
        if batch.may_go_elsewhere:
            other = self.topics[batch.topic].elsewhere(lane.broker)
        if other is not None:
            batch.broker, batch.queue_id = other.broker, other.queue_id
            other.waiting.append(batch)
        else:
            lane.waiting.appendleft(batch)
        return True

    def may_try_again(self, batch: Batch, error: CometError) -> bool:
        return not self._closed and self.policy.allows(batch, error)

    def look_after(self, lanes: Iterable[Lane]) -> None:
        """The answers of these take long."""
        self.recovery.look_after(lanes)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """Resume lanes after a recovery: send again, or move their batches to the queues that their
        topics have now."""
        lanes = list(lanes)
        refused: Expired = []
        with self.lock:
            for lane in lanes:
                lane.paused = False
                refused += leave(self.topics[lane.topic], lane, self.window)
            topics = {lane.topic for lane in lanes}
            flights = self.collect(lane for topic in topics for lane in self.topics[topic].all())
        self.launch(flights)
        _settle_all(refused)

    # --- the end ---

    def flush(self) -> None:
        """Send everything that is open and wait for all answers. Raises the first error."""
        with self.lock:
            batches = [batch for batch in self.window.unsettled if not batch.done]
            lanes, refused = self.accumulator.close_all()
            flights = self.collect(lanes)
        self.launch(flights)
        _settle_all(refused)
        for batch in batches:
            batch.wait_settled()
        with self.lock:
            first = self.window.take_error()
        if first is not None:
            raise again(first)

    def close(self) -> None:
        """What is still unanswered fails. May be called twice."""
        with self.lock:
            self._closed = True
            left = self.window.close()
            for quick in self.accumulator.quick:
                quick.clear()
            for topic in self.topics.values():
                topic.clear()
            self._clock.stop()
        self.recovery.close()
        for batch in left:
            batch.encoder = None
            batch.settle(None, _closed_error(batch))
        self._clock.join()


def _settle_all(refused: Expired) -> None:
    for batch, error in refused:
        batch.settle(None, error)


def _closed_error(batch: Batch) -> CometError:
    if batch.attempts:
        text = "the producer was closed before the broker answered; the message may be stored"
        return ClosedUnconfirmed(text)
    return ClientClosed("the producer was closed before the message was sent")
