"""The sender: what a producer and its asyncio twin have in common, behind their public methods.

A message shares a batch (`gather`), travels alone and is waited for (`send_now`), or is one of many
in a batch of its own (`send_batch`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from cometmq.client.forked import Forked
from cometmq.client.routes import Routes
from cometmq.client.sending.accumulator import Batching
from cometmq.client.sending.attempts import (
    batch_of_one,
    begin_attempt,
    look_s,
    may_leave_queue,
    oneway_command,
    outcomes_of,
    send_command,
)
from cometmq.client.sending.choosing import check_served, lane_after, lane_for
from cometmq.client.sending.compressing import Compression
from cometmq.client.sending.delivery import Delivery
from cometmq.client.sending.identity import Identity
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.outgoing import (
    Body,
    Outgoing,
    Target,
    check_body,
    check_key,
    illegal,
    no_body,
)
from cometmq.client.sending.receipt import Batch, Receipt, Receipts
from cometmq.protocol.commands import SendResult
from cometmq.protocol.errors import (
    ArgumentIllegal,
    ClientClosed,
    CometError,
    NotConfirmed,
    again,
)
from cometmq.protocol.names import check_writable_topic
from cometmq.protocol.wire.pending import Pending
from cometmq.shm.kernel import codec

_senders: weakref.WeakSet[Sender] = weakref.WeakSet()
Held = dict[Batch, tuple[TopicLanes, Lane | None]]  # open batches, and what they are meant for


class Sender:
    """Threads may share it; a fork may not use it.

    Args:
        max_message_bytes: a larger body is refused before it is encoded.
        compression: of bodies; None: they travel as they are.
        The others: see Routes and Delivery.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        *,
        transport: str,
        batching: Batching,
        timeout_s: float | None,
        attempts_max: int | None,
        max_in_flight_bytes: int,
        max_message_bytes: int,
        compression: Compression | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.routes = Routes(name_server, transport=transport)
        self.delivery = Delivery(
            self.routes,
            timeout_s=timeout_s,
            attempts_max=attempts_max,
            in_flight_bytes_max=max_in_flight_bytes,
            batching=batching,
            identity=identity,
        )
        self.lingers = batching.linger_s > 0
        # Into an open batch goes only what is smaller than a batch: then its size need not be seen.
        self.may_be_quick = (
            self.lingers
            and batching.bytes_max <= max_message_bytes
            and compression is None
            and not batching.window_ms
        )
        self._window_ms = batching.window_ms
        self._compression = compression
        self._lock = self.delivery.lock
        self._topics = self.delivery.topics
        self._accumulator = self.delivery.accumulator
        self._window = self.delivery.window
        self.timeout_s = self.delivery.policy.timeout_s
        self._max_message_bytes = max_message_bytes
        self._batch_bytes = batching.bytes_max
        self._single: list[codec.BatchEncoder] = []  # encoders for messages that travel alone
        self._closed = False
        _senders.add(self)

    # --- what could block, asked before ---

    def begin(self) -> None:
        """Tell the brokers that this producer has its name now, if any. Raises NotReachable."""
        if not self.delivery.identity.producer_id:
            return
        self.delivery.identity.begin(self.routes, self.timeout_s)

    def known(self, target: Target) -> TopicLanes | None:
        """Return the lanes of a target's topic, if nobody has to be asked first."""
        lanes = self._topics.get(target.topic)
        if lanes is None or lanes.route is not self.routes.known(target.topic):
            return None
        return lanes if lanes.serves(target) else None

    def learn(self, target: Target) -> TopicLanes:
        """Return the lanes of a target's topic. Fetch the route if it is unknown or has no queue
        for the target. Raises the errors of `Producer.send`."""
        known = self.known(target)
        if known is not None:
            return known
        if target.topic not in self._topics:
            check_writable_topic(target.topic)
            self._check_fork()
        lanes = self.delivery.lanes_of(target.topic)
        if not lanes.serves(target):
            lanes = self.delivery.look_again(target.topic)
            with self._lock:
                check_served(lanes, target)
        return lanes

    @property
    def has_room(self) -> bool:
        """Whether less is on its way than `max_in_flight_bytes`."""
        return self._window.has_room

    def wait_for_room(self) -> None:
        with self._lock:
            self._window.wait_for_room()

    # --- bodies ---

    def prepare(self, message: Outgoing) -> None:
        """See whether its body may be sent, and compress it; once. Raises MessageTooLarge, ..."""
        if message.sys_flag is None:
            if self._window_ms:
                check_key(message)
            check_body(message.body, self._max_message_bytes)
            message.sys_flag = 0
            if self._compression is not None:
                message.body, message.sys_flag = self._compression.fold(message.body)

    @property
    def compresses(self) -> bool:
        return self._compression is not None

    # --- messages that share batches ---

    def gather(
        self,
        target: Target,
        message: Outgoing,
        watch: Callable[[Batch, int], None] | None = None,
        *,
        remember: bool = False,
        held: Held | None = None,
        lanes: TopicLanes | None = None,
    ) -> tuple[Batch, int]:
        """Add a message to the open batch it belongs to; what became full or due leaves.

        Args:
            watch: called under the lock with the batch and the message's index in it.
            remember: `flush` raises the batch's error.
            held: gets the open batch, without linger as well; the caller lets it go soon. None:
                without linger it leaves at once if its queue is idle.
            lanes: of the target, if they are `known`.
        """
        lanes = lanes or self.learn(target)
        self.prepare(message)
        failure: ValueError | TypeError | None = None
        accumulator = self._accumulator
        with self._lock:
            self._window.wait_for_room()
            self.check_open()
            lanes.writable()
            lane = lane_for(lanes, target, message.keys if self._window_ms else None)
            touched: list[Lane] = []
            try:
                batch, index = accumulator.add(lanes, lane, target, message, touched)
            except (ValueError, TypeError) as error:
                failure = error
            else:
                if remember:
                    accumulator.remember(batch, may_be_quick=self.may_be_quick)
                if watch is not None:
                    watch(batch, index)
                if held is not None:
                    held[batch] = lanes, lane
                elif not self.lingers:
                    touched += accumulator.close_if_idle(batch, lanes, lane)
            flights = self.delivery.collect(touched) if touched else ()
        self.delivery.launch(flights)
        if failure is not None:
            raise illegal(failure, message, message.body) from None
        return batch, index

    # --- messages that travel alone ---

    def send_now(self, target: Target, message: Outgoing) -> Receipt:
        """Send in this thread, and wait in it for the answer."""
        lanes = self.learn(target)
        if self._window_ms:
            self.prepare(message)
        with self._lock:
            self.check_open()
            lane = lane_for(lanes, target, message.keys if self._window_ms else None)
            free = lane is None
            lane = lane or lanes.next()
            busy = not lane.idle or (lanes.is_changing and not free)
        if busy:  # behind what is on its way already
            batch, index = self.gather(target, message)
            return Receipt(batch, index).wait()
        body = self._encoded(message)
        batch = batch_of_one(target.topic, message, body, self._window_ms)
        batch.free = free
        batch.targets = None if free else [target]
        self._deliver(lanes, lane, batch)
        return Receipt(batch, 0)

    def send_oneway(self, target: Target, message: Outgoing) -> None:
        """Hand it to the connection, and hear no more of it."""
        lanes = self.learn(target)
        body = self._encoded(message)
        with self._lock:
            self.check_open()
            lane = (
                lane_for(lanes, target, message.keys if self._window_ms else None) or lanes.next()
            )
        command = oneway_command(lane, self.delivery.identity, message, self._window_ms)
        self.routes.commitlog(lane.endpoint, f"broker {lane.broker}").tell(command, [body])

    def _encoded(self, message: Outgoing) -> bytes:
        """The body of a batch of one message."""
        self.prepare(message)
        try:
            encoder = self._single.pop()
        except IndexError:  # another thread may have taken the last one
            encoder = self._accumulator.new_encoder()
        try:
            message.add_to(encoder)
        except (ValueError, TypeError) as error:
            raise illegal(error, message, message.body) from None
        body = encoder.take()
        self._single.append(encoder)
        return body

    def _deliver(self, lanes: TopicLanes, lane: Lane, batch: Batch) -> None:
        """Try until it is stored, or raise why not."""
        delivery = self.delivery
        batch.since = time.monotonic()
        delivery.policy.give_time(batch, lanes)
        failures = 0
        while True:
            begin_attempt(lane, batch)
            batch.broker, batch.queue_id = lane.broker, lane.queue_id
            endpoint = lane.endpoint
            try:
                return self._attempt(lane, endpoint, batch)
            except CometError as error:
                with self._lock:
                    delivery.presences.heard(lane.broker, error)
                    delivery.standing.heard(lane.broker, 0.0, error)
                    if isinstance(error, NotConfirmed):
                        batch.unconfirmed = True
                        lane.is_unsure_of(batch.number)
                if may_leave_queue(batch, error):
                    batch.queue_is_refused()
                failures += 1
                if not delivery.may_try_again(batch, error):
                    raise delivery.policy.last_error(batch, error) from None
                left_s = batch.deadline - time.monotonic()
                time.sleep(max(0.0, min(left_s, delivery.policy.pause_s(failures, error))))
                delivery.recovery.look_up({batch.topic: error})
                delivery.policy.give_time(batch, lanes)
                if lane.endpoint != endpoint:
                    self.routes.retire(endpoint)
                with self._lock:
                    lane = lane_after(lanes, lane, batch, error)

    def _attempt(self, lane: Lane, endpoint: str, batch: Batch) -> None:
        delivery = self.delivery
        channel = self.routes.commitlog(endpoint, f"broker {lane.broker}")
        command = send_command(endpoint, delivery.identity, [batch])
        pending = channel.request(command, [batch.body])
        while not channel.wait(pending, look_s(pending), keep=True):
            if time.monotonic() >= batch.deadline:
                if channel.forget(pending):
                    raise delivery.policy.timed_out(batch, lane)
                raise delivery.policy.not_confirmed(batch, lane)
            with self._lock:
                delivery.standing.heard(lane.broker, time.monotonic() - batch.since, None)
            self._go_elsewhere(lane, batch, pending)
            delivery.recovery.look_up({batch.topic: None})
            delivery.policy.give_time(batch, delivery.topics[batch.topic])
            if lane.endpoint != endpoint:
                self.routes.retire(endpoint)  # fails the pending
        answer, _ = pending.result()
        ((result, error),) = outcomes_of(answer, 1)
        with self._lock:
            delivery.presences.heard(lane.broker, error)
            if batch.fence:
                lane.has_heard_fence(batch.number)
            if result is not None:
                lane.has_stored(batch, result)
        if result is None:
            assert error is not None
            raise error
        assert isinstance(answer, SendResult)
        batch.settle(result, None, answer.store_timestamp_ms, answer.store_host)

    def _go_elsewhere(self, lane: Lane, batch: Batch, pending: Pending) -> None:
        """Raise if the broker is not connected, and another one could have the message."""
        policy = self.delivery.policy
        with self._lock:
            other = self.delivery.topics[batch.topic].elsewhere(lane.broker)
        if other is None or not batch.may_go_elsewhere or pending.handed_over:
            return
        error = policy.timed_out(batch, lane)
        if self.delivery.may_try_again(batch, error):
            raise error if pending.channel.forget(pending) else policy.not_confirmed(batch, lane)

    # --- many at once ---

    def send_all(self, target: Target, message: Outgoing, bodies: Sequence[Body]) -> Receipts:
        """Messages that differ in their bodies alone; see `Producer.send_many`."""
        if self._window_ms:
            raise ArgumentIllegal(
                "send_many gives all its messages the same keys, of which dedup would store one: "
                "send them one by one, with linger_ms if there are many"
            )
        self._check_bodies(bodies)
        lanes = self.learn(target)
        batches: list[Batch] = []
        try:
            for run, message.sys_flag in self._runs(bodies):
                start = 0
                while start < len(run):
                    start, batch = self._send_batch(lanes, target, message, run, start)
                    batches.append(batch)
        except CometError as error:
            raise _with_note(error, batches) from None
        return _all_stored(batches)

    def _check_bodies(self, bodies: object) -> None:
        if isinstance(bodies, (bytes, bytearray, memoryview, str, Mapping)) or not (
            hasattr(bodies, "__len__") and hasattr(bodies, "__getitem__")
        ):
            raise ArgumentIllegal(
                f"bodies are a sequence of bytes-like objects, not {type(bodies).__name__}: "
                "make it a list"
            )
        several: Sequence[Body] = bodies  # type: ignore[assignment]
        if not all(several):
            raise no_body(next(body for body in several if not body))
        if several and (self._max_message_bytes < self._batch_bytes or self.compresses):
            check_body(max(several, key=len), self._max_message_bytes)

    def _runs(self, bodies: Sequence[Body]) -> Iterable[tuple[Sequence[Body], int]]:
        return [(bodies, 0)] if self._compression is None else self._compression.runs(bodies)

    def _send_batch(
        self,
        lanes: TopicLanes,
        target: Target,
        message: Outgoing,
        bodies: Sequence[Body],
        start: int,
    ) -> tuple[int, Batch]:
        """Send as many of the bodies as one batch holds; where the next one starts."""
        accumulator = self._accumulator
        with self._lock:
            self.check_open()
            self._window.wait_for_room()
            batch = accumulator.open(
                target.topic,
                wait=message.wait,
                delay_level=message.delay_level,
                sys_flag=message.sys_flag,
            )
        encoder = batch.encoder
        assert encoder is not None
        try:
            end = encoder.add_many(
                bodies, start, message.tags, message.keys, message.properties, message.flag
            )
            check_body(bodies[start], self._max_message_bytes)  # a large one is alone in its batch
        except BaseException as error:
            with self._lock:
                accumulator.drop(batch)
            if isinstance(error, BufferError):
                raise ArgumentIllegal(f"a body is bytes-like, in one piece: {error}") from None
            if isinstance(error, TypeError):
                raise illegal(error, message, b"") from None
            if isinstance(error, ValueError):
                raise illegal(error, message, max(bodies[start:], key=len)) from None
            raise
        with self._lock:
            self.check_open()
            try:
                lane = lane_for(lanes, target)
                batch.free = lane is None
                batch.targets = None if batch.free else [target] * encoder.count
                lane = lane or lanes.next()
            except BaseException:
                accumulator.drop(batch)
                raise
            before = None if batch.free else lane.open.get(batch.delay_level)
            if before is not None:
                accumulator.close(before, lane)
            accumulator.close(batch, lane)
            flights = self.delivery.collect((lane,))
        self.delivery.launch(flights)
        return end, batch

    # --- the end ---

    def flush(self) -> None:
        """Send what lingers and wait for all answers. Raises the first error."""
        self._check_fork()
        self.check_open()
        self.delivery.flush()

    def close(self, before_routes: Callable[[], None]) -> None:
        """Flush and close all connections; raises what `flush` raises. May be called twice.

        `before_routes` is called when everything is settled and the connections are still there.
        """
        self._check_fork()
        if self._closed:
            return
        self._closed = True
        try:
            self.delivery.flush()
        finally:
            self.delivery.close()
            before_routes()
            self.routes.close()

    def check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the producer is closed: open another one")

    def _check_fork(self) -> None:
        if isinstance(self._lock, Forked):
            self._lock.acquire()

    def _forked(self) -> None:
        self._lock = Forked("Producer")
        for quick in self._accumulator.quick:  # the way that asks for no lock
            quick.clear()


def _with_note(error: CometError, batches: list[Batch]) -> CometError:
    for batch in batches:
        batch.wait_settled()
    stored = sum(batch.count for batch in batches if batch.error is None)
    error = again(error)
    error.stored = stored
    error.add_note(f"{stored} messages of this send_many are stored")
    return error


def _all_stored(batches: list[Batch]) -> Receipts:
    for batch in batches:
        batch.wait_settled()
    for batch in batches:
        if batch.error is not None:
            raise _with_note(batch.error, batches)
    return Receipts(batches)


def _forked_all() -> None:
    for sender in list(_senders):
        sender._forked()


os.register_at_fork(after_in_child=_forked_all)
