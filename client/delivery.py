"""Carries a producer's batches to their queues: one a queue at a time, in order, until answered.

Everything here is guarded by one lock, the producer's; what goes to the network goes there after
the lock is released. Three threads meet: whoever calls `send`, the one that receives answers
(the pump of a Channel), and the clock, which sends what has lingered long enough and ends what
has waited too long. What failed is sent again by the recovery, a fourth.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cometmq.client.lanes import Lane, TopicLanes
from cometmq.client.receipt import STORED_CODES, Batch, again
from cometmq.client.recovery import Recovery
from cometmq.client.routes import Routes
from cometmq.protocol.channel import Pending
from cometmq.protocol.commands import Section, SectionResult, SendMessages, SendResult
from cometmq.protocol.errors import (
    CometError,
    NotConfirmed,
    NotReachable,
    Refused,
    from_code,
)
from cometmq.shm import _kernel

REQUEST_BYTES: Final = 262_144  # batches of several queues share a request up to this
REQUEST_SECTIONS: Final = 64
CHECK_S: Final = 0.5  # an answer that takes longer makes us look whether the broker has moved

Outcome = tuple[SectionResult | None, CometError | None]


class Flight:
    """One SendMessages on its way: its batches, by the lane they go to."""

    __slots__ = ("batches", "endpoint", "lanes")

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.lanes: list[Lane] = []
        self.batches: list[Batch] = []

    def command(self) -> SendMessages:
        return send_command(self.endpoint, self.batches)


def send_command(endpoint: str, batches: Sequence[Batch], *, oneway: bool = False) -> SendMessages:
    """What goes to the commitlog process at `endpoint` in front of the batch bodies."""
    return SendMessages(
        [Section(batch.topic, batch.queue_id, batch.count, 0, batch.wait) for batch in batches],
        int(time.time() * 1000),
        born_host(endpoint),
        oneway,
    )


@functools.lru_cache(maxsize=256)
def born_host(endpoint: str) -> str:
    """This machine's address as the broker at `endpoint` would see it; "" if there is none.

    The port is 0: ZeroMQ does not tell which one a connection has.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the way
            address = probe.getsockname()[0]
    except OSError:
        return ""
    return f"[{address}]:0" if family == socket.AF_INET6 else f"{address}:0"


class Delivery:
    """See the module.

    Args:
        timeout_s: how long a closed batch is tried before it fails.
        attempts_max: how often it is sent at most; None: as often as the time allows.
        in_flight_bytes_max: closed and unanswered bytes; beyond that `close_batch` callers wait.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        timeout_s: float,
        attempts_max: int | None,
        in_flight_bytes_max: int,
    ) -> None:
        self.lock = threading.Lock()
        self.in_flight_bytes = 0
        self.topics: dict[str, TopicLanes] = {}
        # By topic: the open batch for any queue, and its encoder. A batch is taken out before it
        # is closed: messages are added to it without the lock (QuickSend).
        self.quick: dict[str, tuple[Batch, _kernel.BatchEncoder]] = {}
        self._routes = routes
        self._timeout_s = timeout_s
        self._attempts_max = attempts_max
        self._in_flight_bytes_max = in_flight_bytes_max
        self._room = threading.Condition(self.lock)
        self._unsettled: dict[Batch, None] = {}  # in the order in which they were opened
        self._first_error: CometError | None = None
        self._encoders: list[_kernel.BatchEncoder] = []
        self._lingering: deque[Batch] = deque()  # open or closed meanwhile, by `due`
        self._tick = threading.Condition(self.lock)  # the clock's alarm
        self._check_at: float | None = None  # next look at lanes that wait too long
        self._clock: threading.Thread | None = None
        self._closed = False
        self.recovery = Recovery(self, routes)

    # --- topics ---

    def lanes_of(self, topic: str) -> TopicLanes:
        """The topic's lanes. Asks for the route first if need be; not under the lock."""
        route = self._routes.topic(topic, self._timeout_s)
        lanes = self.topics.get(topic)
        if lanes is None or lanes.route is not route:
            with self.lock:
                return self.update(topic)
        return lanes

    def update(self, topic: str) -> TopicLanes:
        """Bring the lanes up to the newest known route. Under the lock."""
        route = self._routes.known(topic)
        assert route is not None
        lanes = self.topics.get(topic)
        if lanes is None:
            lanes = self.topics[topic] = TopicLanes(route)
        elif lanes.route is not route:
            lanes.update(route)
        return lanes

    # --- batches; all under the lock ---

    def open_batch(
        self,
        topic: str,
        new: Callable[[], _kernel.BatchEncoder],
        *,
        wait: bool,
        linger_s: float = 0,
    ) -> Batch:
        """A new batch, which leaves when it is full or has lingered."""
        encoder = self._encoders.pop() if self._encoders else new()
        batch = Batch(topic, encoder, wait=wait)
        self._unsettled[batch] = None
        if linger_s:
            batch.due = time.monotonic() + linger_s
            self._lingering.append(batch)
            if len(self._lingering) == 1:
                self._ring()
        return batch

    def close_batch(self, batch: Batch, lane: Lane) -> None:
        """It takes no more messages and stands in line for the queue."""
        encoder = batch.encoder
        assert encoder is not None
        if lane.open is batch:
            lane.open = None
        topic = self.topics[batch.topic]
        if topic.free is batch:
            topic.free = None
            self.quick.pop(batch.topic, None)
        batch.count = encoder.count
        batch.body = encoder.take()
        batch.encoder = None
        self._encoders.append(encoder)
        self._line_up(batch, lane)

    def _line_up(self, batch: Batch, lane: Lane) -> None:
        batch.broker, batch.queue_id = lane.broker, lane.queue_id
        batch.deadline = time.monotonic() + self._timeout_s
        lane.waiting.append(batch)
        self.in_flight_bytes += len(batch.body)
        if self._check_at is None:
            self._check_at = time.monotonic() + CHECK_S
            self._ring()

    def send_body(self, batch: Batch, lane: Lane) -> None:
        """Send a batch that was closed elsewhere; not under the lock. `flush` raises its error."""
        batch.remembered = True
        with self.lock:
            self.wait_for_room()
            self._unsettled[batch] = None
            self._line_up(batch, lane)
            flights = self.collect((lane,))
        self.launch(flights)

    @property
    def failed(self) -> bool:
        """Whether `flush` has an error to raise."""
        return self._first_error is not None

    def drop_batch(self, batch: Batch) -> None:
        """Forget an open batch that got no message."""
        self._unsettled.pop(batch, None)
        if batch.encoder is not None:
            self._encoders.append(batch.encoder)
            batch.encoder = None

    def wait_for_room(self) -> None:
        """Sleep while more is on its way than allowed; under the lock, which it lets go."""
        while self.in_flight_bytes > self._in_flight_bytes_max and not self._closed:
            self._room.wait()

    @property
    def has_room(self) -> bool:
        return self.in_flight_bytes <= self._in_flight_bytes_max

    def collect(self, lanes: Iterable[Lane]) -> list[Flight]:
        """What can leave now for these queues. The caller launches it after the lock."""
        flights: dict[str, Flight] = {}
        full: list[Flight] = []
        size = 0
        now = time.monotonic()
        for lane in lanes:
            if lane.sent is not None or lane.paused:
                continue
            if not lane.waiting:
                self._close_overdue(lane, now)
            if not lane.waiting:
                continue
            batch = lane.waiting.popleft()
            flight = flights.get(lane.endpoint)
            if flight is not None and (
                size + len(batch.body) > REQUEST_BYTES or len(flight.batches) >= REQUEST_SECTIONS
            ):
                full.append(flight)
                flight = None
            if flight is None:
                flight = flights[lane.endpoint] = Flight(lane.endpoint)
                size = 0
            size += len(batch.body)
            batch.attempts += 1
            lane.sent, lane.sent_at, lane.flight = batch, now, flight
            flight.lanes.append(lane)
            flight.batches.append(batch)
        return full + list(flights.values())

    def _close_overdue(self, lane: Lane, now: float) -> None:
        """A queue has become free: close what has waited for that."""
        free = None if lane.gone else self.topics[lane.topic].free
        for batch in (lane.open, free):
            if batch is not None and batch.due <= now:
                self.close_batch(batch, lane)
                return

    # --- to the network and back; not under the lock ---

    def launch(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            try:
                channel = self._routes.commitlog(
                    flight.endpoint, f"broker {flight.batches[0].broker}"
                )
                channel.request(
                    flight.command(),
                    [batch.body for batch in flight.batches],
                    on_done=functools.partial(self._answered, flight),
                )
            except CometError as error:
                self._land(flight, [(None, error)] * len(flight.batches))

    def _answered(self, flight: Flight, pending: Pending) -> None:
        """In the channel's thread. Must not raise."""
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
        """Give every batch its outcome, and the free lanes their next one."""
        settled: list[tuple[Batch, Outcome]] = []
        failed: list[Lane] = []
        with self.lock:
            for lane, batch, outcome in zip(flight.lanes, flight.batches, outcomes, strict=True):
                if lane.flight is not flight or lane.sent is not batch:
                    continue  # its time was up, or it was sent again elsewhere
                lane.sent = lane.flight = None
                if outcome[1] is None:
                    lane.failures, lane.error = 0, None
                elif self._try_again(lane, batch, outcome[1]):
                    failed.append(lane)
                    continue
                if outcome[1] is not None:
                    outcome = (None, self.last_error(batch, outcome[1]))
                self._forget(batch, outcome[1])
                settled.append((batch, outcome))
            flights = self.collect(flight.lanes)
        self.launch(flights)
        for batch, (result, error) in settled:
            batch.settle(result, error, stamp, host)
        if failed:
            self.recovery.schedule(failed)

    def _try_again(self, lane: Lane, batch: Batch, error: CometError) -> bool:
        """Whether the batch goes back to the head of its lane, which then pauses."""
        lane.failures += 1
        lane.error = error
        batch.unconfirmed = batch.unconfirmed or isinstance(error, NotConfirmed)
        if not self.may_try_again(batch, error):
            return False
        other = self.topics[batch.topic].elsewhere(lane.broker) if batch.free else None
        if other is not None:
            batch.broker, batch.queue_id = other.broker, other.queue_id
            other.waiting.append(batch)
            lane.paused = True
            return True
        lane.waiting.appendleft(batch)
        lane.paused = True
        return True

    def may_try_again(self, batch: Batch, error: CometError) -> bool:
        return (
            error.retriable
            and not self._closed
            and time.monotonic() < batch.deadline
            and (self._attempts_max is None or batch.attempts < self._attempts_max)
        )

    def last_error(self, batch: Batch, error: CometError) -> CometError:
        """What to tell of a batch that is given up: a refusal only if it was surely not stored."""
        if batch.unconfirmed and isinstance(error, Refused):
            return NotConfirmed(
                f"an earlier attempt was not answered, the last was refused: {error}"
            )
        return again(error)

    def resume(self, lanes: Iterable[Lane]) -> None:
        """The recovery has done what it could: the lanes may be tried again."""
        lanes = list(lanes)
        with self.lock:
            for lane in lanes:
                lane.paused = False
            topics = {lane.topic for lane in lanes}
            flights = self.collect(lane for topic in topics for lane in self.topics[topic].all())
        self.launch(flights)

    def _forget(self, batch: Batch, error: CometError | None) -> None:
        self._unsettled.pop(batch, None)
        self.in_flight_bytes -= len(batch.body)
        self._room.notify_all()
        if error is not None and batch.remembered and self._first_error is None:
            self._first_error = error

    # --- the clock ---

    def _ring(self) -> None:
        """Have the clock look again; under the lock. It starts when first needed."""
        if self._clock is None and not self._closed:
            self._clock = threading.Thread(
                target=self._run_clock, name="cometmq producer clock", daemon=True
            )
            self._clock.start()
        self._tick.notify()

    def _run_clock(self) -> None:
        while True:
            with self.lock:
                while not self._closed:
                    now = time.monotonic()
                    flights = self._collect_due(now)
                    expired, late = self._collect_late(now)
                    if flights or expired or late:
                        break
                    wake_at = self._next_alarm()
                    self._tick.wait(None if wake_at is None else max(0.0, wake_at - now))
                if self._closed:
                    return
            self.launch(flights)
            for batch, error in expired:
                batch.settle(None, error)
            if late:
                self.recovery.look_after(late)

    def _next_alarm(self) -> float | None:
        alarms = [] if self._check_at is None else [self._check_at]
        if self._lingering:
            alarms.append(self._lingering[0].due)
        return min(alarms, default=None)

    def _collect_due(self, now: float) -> list[Flight]:
        lanes: list[Lane] = []
        while self._lingering and self._lingering[0].due <= now:
            batch = self._lingering.popleft()
            if batch.encoder is None:
                continue  # it was full before
            topic = self.topics[batch.topic]
            if batch is topic.free:
                lane = topic.next_idle()
                if lane is None:
                    continue  # it leaves with the next queue that becomes free
                self.close_batch(batch, lane)
                lanes.append(lane)
            elif batch.lane is not None:
                lanes.append(batch.lane)
        return self.collect(lanes)

    def _collect_late(self, now: float) -> tuple[list[tuple[Batch, CometError]], list[Lane]]:
        """Batches whose time is up, and lanes whose answer takes suspiciously long."""
        if self._check_at is None or now < self._check_at:
            return [], []
        expired: list[tuple[Batch, CometError]] = []
        late: list[Lane] = []
        busy = False
        for lane in [lane for topic in self.topics.values() for lane in topic.all()]:
            for batch in self._expire(lane, now):
                error = self.timeout_error(batch, lane)
                self._forget(batch, error)
                expired.append((batch, error))
            busy = busy or lane.oldest() is not None
            if lane.sent is not None and now - lane.sent_at >= CHECK_S:
                late.append(lane)
        self._check_at = now + CHECK_S if busy else None
        return expired, late

    def _expire(self, lane: Lane, now: float) -> list[Batch]:
        expired: list[Batch] = []
        if lane.sent is not None and lane.sent.deadline <= now:
            lane.sent.unconfirmed = True
            expired.append(lane.sent)
            lane.flight.batches[lane.flight.batches.index(lane.sent)] = _GONE
            lane.sent = lane.flight = None
        while lane.waiting and lane.waiting[0].deadline <= now:
            expired.append(lane.waiting.popleft())
        return expired

    def timeout_error(self, batch: Batch, lane: Lane) -> CometError:
        """What to tell when the time is up: a refusal only if it was surely not stored."""
        cause = lane.error
        if isinstance(cause, Refused):
            return self.last_error(batch, cause)
        text = (
            f"no answer from broker {batch.broker} at {lane.endpoint} within {self._timeout_s:g} s"
        )
        if cause is not None:
            text += f" (last: {cause})"
        if batch.unconfirmed:
            return NotConfirmed(text)
        return NotReachable(text)

    # --- the end ---

    def flush(self, timeout_s: float | None = None) -> None:
        """Send everything that is open and wait for all answers. Raises the first error."""
        with self.lock:
            batches = [batch for batch in self._unsettled if not batch.done]
            flights = self._close_all_open()
        self.launch(flights)
        for batch in batches:
            batch.wait_settled()
        with self.lock:
            error, self._first_error = self._first_error, None
        if error is not None:
            raise again(error)

    def _close_all_open(self) -> list[Flight]:
        lanes: list[Lane] = []
        for topic in self.topics.values():
            for lane in topic.all():
                if lane.open is not None:
                    self.close_batch(lane.open, lane)
                    lanes.append(lane)
            if topic.free is not None:
                lane = topic.next()
                self.close_batch(topic.free, lane)
                lanes.append(lane)
        return self.collect(lanes)

    def close(self) -> None:
        """What is still unanswered fails. May be called twice."""
        with self.lock:
            self._closed = True
            left = list(self._unsettled)
            self._unsettled.clear()
            self.quick.clear()
            for topic in self.topics.values():
                topic.clear()
            self._room.notify_all()
            self._tick.notify_all()
        self.recovery.close()
        for batch in left:
            batch.encoder = None
            batch.settle(None, NotConfirmed("the producer was closed before the broker answered"))
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join()

    @property
    def closed(self) -> bool:
        return self._closed


_GONE: Final = Batch("", _kernel.BatchEncoder(size_max=1), wait=False)  # in place of an expired one


def outcomes_of(answer: object, count: int) -> list[Outcome]:
    """Result or error of every section of an answer."""
    if not isinstance(answer, SendResult) or len(answer.results) != count:
        raise NotConfirmed(f"the broker answered {type(answer).__name__} to {count} batches")
    return [
        (result, None)
        if result.code in STORED_CODES
        else (None, from_code(result.code, result.text or f"code {result.code}"))
        for result in answer.results
    ]
