"""The producer."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from cometmq.client.callbacks import Callback, Callbacks, Sent
from cometmq.client.delivery import CHECK_S, Delivery, outcomes_of, send_command
from cometmq.client.lanes import Lane, TopicLanes
from cometmq.client.outgoing import (
    Body,
    Keys,
    Outgoing,
    Target,
    check_body,
    checked,
    illegal,
    no_body,
    one_text,
)
from cometmq.client.receipt import Batch, Forked, Receipt, Receipts, again
from cometmq.client.recovery import pause_s
from cometmq.client.routes import Routes
from cometmq.protocol.commands import SendResult
from cometmq.protocol.errors import CometError, NotConfirmed
from cometmq.protocol.names import check_writable_topic
from cometmq.shm import _kernel
from cometmq.shm._kernel import BatchFull

log = logging.getLogger(__name__)

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class Producer:
    """Sends messages to topics. Threads may share it; processes may not.

        with Producer("127.0.0.1:9876") as producer:
            receipt = producer.send("orders", b"paid", tags="eu", keys="o-42")

    With `linger_ms` 0, `send` returns when the broker has stored the message. With more, `send`
    returns at once, messages gather into batches, and a receipt waits for its batch's answer when
    it is looked at: some hundred thousand messages a second instead of some thousand.

    **Order.** Messages that one thread sends to one queue (same `sharding_key`, same `queue_id`)
    are stored in the order of the calls: a queue gets one batch at a time, and a batch that must be
    sent again is not overtaken. Without key or queue, messages are spread over the queues, in
    turn, and have no order among each other.

    **What may be stored twice.** When the line breaks or an answer is lost, nobody knows whether
    the batch was stored, and it is sent again: the whole batch then stands twice in the queue, one
    behind the other, with the same `msg_id` in both copies. So it is after a broker restart in
    mid-stream. A refusal (SystemBusy, DiskFull, ...) is tried again without that risk.

    **What may be lost.** Nothing that was acknowledged. A message whose `send` raised NotConfirmed
    may be stored or not. Messages in open batches are lost when the process dies.

    **When it blocks.** `send` for its answer (`linger_ms` 0), or while `max_in_flight_bytes` are
    unanswered; everywhere on the first message to a topic, to ask the name server.

    Errors (all are CometError): MessageTooLarge (size), NameIllegal (name), DiskFull (disk),
    NotConfirmed or NotReachable (time), ShuttingDown (shutdown), TopicNotExist, NoPermission,
    SystemBusy; TypeError for a body that is not bytes-like. Those with `retriable` were tried again
    until the time was up.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        linger_ms: how long a message may wait to share a batch. 0 = sends at once.
        batch_bytes: a batch leaves when the next message would take it over this.
        batch_count: a batch leaves when it has so many messages.
        timeout_s: from the moment a batch leaves, retries included, until its error.
        retry_max: further attempts for a batch; None = as many as fit into `timeout_s`.
        max_in_flight_bytes: sent and unanswered; with more, sending waits. Open batches come extra.
        max_message_bytes: a larger body is refused at once. The broker has a limit of its own.
        transport: "auto": what fits into 64 KiB goes to a broker on this machine by a Unix socket,
            if it runs as the same user, and all else through ZeroMQ. "local": a broker of which
            that cannot be had is an error, NotLocal. "zmq": ZeroMQ for all.
    """

    def __init__(
        self,
        name_server: str | Iterable[str] = "tcp://127.0.0.1:9876",
        *,
        linger_ms: float = 0,
        batch_bytes: int = 262_144,
        batch_count: int = 16_384,
        timeout_s: float = 3.0,
        retry_max: int | None = None,
        max_in_flight_bytes: int = 32 * 1_048_576,
        max_message_bytes: int = 4 * 1_048_576,
        transport: str = "auto",
    ) -> None:
        if timeout_s <= 0 or linger_ms < 0:
            raise ValueError(f"timeout_s={timeout_s}, linger_ms={linger_ms}: must be above 0")
        self._linger_s = linger_ms / 1000
        self._timeout_s = timeout_s
        self._retry_max = retry_max
        self._batch_bytes = batch_bytes
        self._batch_count = batch_count
        self._max_message_bytes = max_message_bytes
        self._routes = Routes(name_server, transport=transport)
        self._delivery = Delivery(
            self._routes,
            timeout_s=timeout_s,
            attempts_max=None if retry_max is None else retry_max + 1,
            in_flight_bytes_max=max_in_flight_bytes,
        )
        self._lock: Any = self._delivery.lock
        self._topics = self._delivery.topics
        # Into an open batch goes only what is smaller than a batch: then its size need not be seen.
        self._may_be_quick = linger_ms > 0 and batch_bytes <= max_message_bytes
        self._quick = self._delivery.quick
        if self._may_be_quick and type(self).send is Producer.send:
            # What most calls do, in one native one.
            self.send = _kernel.QuickSend(self._quick, Receipt, self.send).send  # type: ignore[method-assign]
        self._single: list[_kernel.BatchEncoder] = []  # encoders for messages that travel alone
        self._callbacks = Callbacks()
        self._closed = False
        _producers.add(self)

    # --- sending ---

    def send(
        self,
        topic: str,
        body: Body,
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        wait: bool = True,
    ) -> Receipt:
        """Send one message.

        Args:
            topic: created with the broker's defaults if it is new and the broker allows that.
            body: bytes-like, not empty.
            tags: the one tag that consumers may select by.
            keys: one or several words to find the message by later.
            properties: text by name.
            sharding_key: messages of one key go to one queue, by RocketMQ's hash of the key.
            queue_id: that queue; of several brokers the first by name that has it.
            flag: a number of 32 bits, carried through.
            wait: False = do not wait for disk or slaves, even if the broker is set to.

        Returns:
            The receipt: confirmed with `linger_ms` 0, else waiting to be.

        Raises:
            See the class. With `linger_ms` only what can be told without the broker.
        """
        if keys is not None and keys.__class__ is not str:
            keys = " ".join(keys)
        message = Outgoing(body, tags, keys, checked(properties), flag, wait)
        target = Target(topic, sharding_key, queue_id)
        if not self._linger_s:
            return self._send_now(target, message)
        return Receipt(*self.gather(target, message, remember=True))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[Body],
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        wait: bool = True,
    ) -> Receipts:
        """Send many messages alike and wait until all are stored.

        Without key or queue the batches, not the messages, are spread over the queues.

        Returns:
            The receipts, in the order of the bodies; each is made when you look at it.

        Raises:
            The first error, when all batches have been answered. A note in it says how many
            messages are stored; which ones they are is not told.
        """
        if isinstance(bodies, (bytes, bytearray, memoryview, str)):
            raise TypeError(f"bodies are a sequence of bytes-like objects, not {type(bodies)}")
        if not all(bodies):
            raise no_body(next(body for body in bodies if not body))
        if bodies and self._max_message_bytes < self._batch_bytes:
            check_body(max(bodies, key=len), self._max_message_bytes)
        message = Outgoing(b"", tags, one_text(keys), checked(properties), flag, wait)
        target = Target(topic, sharding_key, queue_id)
        lanes = self._lanes(topic)
        batches: list[Batch] = []
        start = 0
        try:
            while start < len(bodies):
                start, batch = self._send_batch(lanes, target, message, bodies, start)
                batches.append(batch)
        except CometError as error:
            raise _with_note(error, batches) from None
        return _all_stored(batches)

    def _send_batch(
        self,
        lanes: TopicLanes,
        target: Target,
        message: Outgoing,
        bodies: Sequence[Body],
        start: int,
    ) -> tuple[int, Batch]:
        """Send as many of the bodies as one batch holds; where the next one starts."""
        with self._lock:
            self._check_open()
            self._delivery.wait_for_room()
            batch = self._delivery.open_batch(target.topic, self._new_encoder, wait=message.wait)
        encoder = batch.encoder
        assert encoder is not None
        try:
            end = encoder.add_many(
                bodies, start, message.tags, message.keys, message.properties, message.flag
            )
            check_body(bodies[start], self._max_message_bytes)  # a large one is alone in its batch
        except BaseException as error:
            with self._lock:
                self._delivery.drop_batch(batch)
            if isinstance(error, ValueError):
                raise illegal(error, message, max(bodies[start:], key=len)) from None
            raise
        with self._lock:
            self._check_open()
            lane = self._lane_for(lanes, target)
            batch.free = lane is None
            if lane is None:
                lane = lanes.next()
            elif lane.open is not None:
                self._delivery.close_batch(lane.open, lane)  # it was there before
            self._delivery.close_batch(batch, lane)
            flights = self._delivery.collect((lane,))
        self._delivery.launch(flights)
        return end, batch

    def send_async(
        self,
        topic: str,
        body: Body,
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        wait: bool = True,
        callback: Callback | None = None,
    ) -> Future[Receipt]:
        """Send without waiting; the future gets the receipt, or the error.

        `callback(receipt, error)` is called as well, with one of them None. It, and what is added
        to the future, is called by one thread of the producer's: a slow callback delays the others,
        and nothing else. The future cannot be cancelled. It waits here only as `send` with
        `linger_ms` does.
        """
        future = Sent(self._callbacks, callback)

        def watch(batch: Batch, index: int) -> None:
            receipt = Receipt(batch, index)
            batch.on_settled.append(lambda _: future.settle(receipt))

        message = Outgoing(body, tags, one_text(keys), checked(properties), flag, wait)
        self.gather(Target(topic, sharding_key, queue_id), message, watch)
        return future

    def send_oneway(
        self,
        topic: str,
        body: Body,
        *,
        tags: str | None = None,
        keys: Keys = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        queue_id: int | None = None,
        flag: int = 0,
    ) -> None:
        """Send and forget: the broker does not answer, nothing is tried again.

        The message is lost without a word when the broker is away, busy or full. Sent at once, it
        may overtake messages that linger. Raises only what can be told without the broker.
        """
        target = Target(topic, sharding_key, queue_id)
        message = Outgoing(body, tags, one_text(keys), checked(properties), flag, wait=False)
        lanes = self._lanes(topic)
        batch = self._alone(topic, message)
        with self._lock:
            self._check_open()
            lane = self._lane_for(lanes, target) or lanes.next()
        batch.queue_id = lane.queue_id
        command = send_command(lane.endpoint, [batch], oneway=True)
        self._routes.commitlog(lane.endpoint, f"broker {lane.broker}").tell(command, [batch.body])

    # --- for the asyncio twin ---

    def knows(self, topic: str) -> bool:
        """Whether sending to it has to ask nobody first."""
        return topic in self._topics

    def learn(self, topic: str) -> None:
        """Ask for the topic's route. Raises as `send` does."""
        self._lanes(topic)

    @property
    def has_room(self) -> bool:
        """Whether less is on its way than `max_in_flight_bytes`."""
        return self._delivery.has_room

    def wait_for_room(self) -> None:
        with self._lock:
            self._delivery.wait_for_room()

    # --- messages that share batches ---

    def gather(
        self,
        target: Target,
        message: Outgoing,
        watch: Callable[[Batch, int], None] | None = None,
        *,
        remember: bool = False,
    ) -> tuple[Batch, int]:
        """Add a message to the open batch it belongs to; what became full or due leaves."""
        lanes = self._lanes(target.topic)
        check_body(message.body, self._max_message_bytes)
        failure: ValueError | TypeError | None = None
        with self._lock:
            self._check_open()
            self._delivery.wait_for_room()
            lane = self._lane_for(lanes, target)
            touched: list[Lane] = []
            try:
                batch, index = self._add(lanes, lane, message, touched)
            except (ValueError, TypeError) as error:
                failure = error
            else:
                if remember:
                    self._remember(batch)
                if watch is not None:
                    watch(batch, index)
                if not self._linger_s:
                    touched += self._close_if_idle(lanes, lane)
            flights = self._delivery.collect(touched)
        self._delivery.launch(flights)
        if isinstance(failure, ValueError):
            raise illegal(failure, message, message.body) from None
        if failure is not None:
            raise failure
        return batch, index

    def _add(
        self, lanes: TopicLanes, lane: Lane | None, message: Outgoing, touched: list[Lane]
    ) -> tuple[Batch, int]:
        """Under the lock. What had to be closed for it is added to `touched`."""
        batch = lanes.free if lane is None else lane.open
        if batch is not None:
            assert batch.encoder is not None
            if batch.wait == message.wait:
                with contextlib.suppress(BatchFull):
                    return batch, message.add_to(batch.encoder)
            target = lane or lanes.next()
            self._delivery.close_batch(batch, target)
            touched.append(target)
        batch = self._delivery.open_batch(
            lanes.topic, self._new_encoder, wait=message.wait, linger_s=self._linger_s
        )
        assert batch.encoder is not None
        try:
            index = message.add_to(batch.encoder)
        except BaseException:
            self._delivery.drop_batch(batch)
            raise
        if lane is None:
            batch.free = True
            lanes.free = batch
        else:
            batch.lane = lane
            lane.open = batch
        return batch, index

    def _remember(self, batch: Batch) -> None:
        """`flush` has to raise its error; more messages may come into it the quick way."""
        batch.remembered = True
        if batch.free and batch.wait and batch.encoder is not None and self._may_be_quick:
            self._quick[batch.topic] = (batch, batch.encoder)

    def _close_if_idle(self, lanes: TopicLanes, lane: Lane | None) -> list[Lane]:
        """Without linger a batch waits only while its queue is busy."""
        if lane is None:
            lane = lanes.next_idle()
            batch = lanes.free
        else:
            batch = lane.open
            if lane.sent is not None or lane.waiting or lane.paused:
                return []
        if lane is None or batch is None:
            return []
        self._delivery.close_batch(batch, lane)
        return [lane]

    # --- messages that travel alone ---

    def _send_now(self, target: Target, message: Outgoing) -> Receipt:
        """Send in this thread, and wait in it for the answer."""
        lanes = self._lanes(target.topic)
        with self._lock:
            self._check_open()
            lane = self._lane_for(lanes, target)
            free = lane is None
            lane = lane or lanes.next()
            busy = not lane.idle
        if busy:  # behind what is on its way already
            batch, index = self.gather(target, message)
            return Receipt(batch, index).wait()
        batch = self._alone(target.topic, message)
        batch.free = free
        self._deliver(lanes, lane, batch)
        return Receipt(batch, 0)

    def _alone(self, topic: str, message: Outgoing) -> Batch:
        """A closed batch of one message."""
        check_body(message.body, self._max_message_bytes)
        encoder = self._single.pop() if self._single else self._new_encoder()
        try:
            message.add_to(encoder)
        except ValueError as error:
            raise illegal(error, message, message.body) from None
        batch = Batch(topic, None, wait=message.wait)
        batch.count = 1
        batch.body = encoder.take()
        self._single.append(encoder)
        return batch

    def _deliver(self, lanes: TopicLanes, lane: Lane, batch: Batch) -> None:
        """Try until it is stored, or raise why not."""
        batch.deadline = time.monotonic() + self._timeout_s
        while True:
            batch.attempts += 1
            batch.broker, batch.queue_id = lane.broker, lane.queue_id
            endpoint = lane.endpoint
            try:
                return self._attempt(lane, endpoint, batch)
            except CometError as error:
                batch.unconfirmed = batch.unconfirmed or isinstance(error, NotConfirmed)
                if not self._delivery.may_try_again(batch, error):
                    raise self._delivery.last_error(batch, error) from None
                left_s = batch.deadline - time.monotonic()
                time.sleep(max(0.0, min(left_s, pause_s(batch.attempts))))
                self._delivery.recovery.look_up({batch.topic: error})
                if lane.endpoint != endpoint:
                    self._routes.retire(endpoint)
                if batch.free:
                    lane = lanes.elsewhere(lane.broker) or lane

    def _attempt(self, lane: Lane, endpoint: str, batch: Batch) -> None:
        channel = self._routes.commitlog(endpoint, f"broker {lane.broker}")
        command = send_command(endpoint, [batch])
        pending = channel.request(command, [batch.body])
        while not channel.wait(pending, CHECK_S, keep=True):
            if time.monotonic() >= batch.deadline:
                channel.wait(pending, 0)  # forget it
                raise NotConfirmed(
                    f"no answer from broker {lane.broker} at {endpoint} "
                    f"within {self._timeout_s:g} s"
                )
            self._delivery.recovery.look_up({batch.topic: None})
            if lane.endpoint != endpoint:
                self._routes.retire(endpoint)  # fails the pending
        answer, _ = pending.result()
        ((result, error),) = outcomes_of(answer, 1)
        if error is not None:
            raise error
        assert isinstance(answer, SendResult)
        batch.settle(result, None, answer.store_timestamp_ms, answer.store_host)

    # --- checks ---

    def _lanes(self, topic: str) -> TopicLanes:
        if topic not in self._topics:
            check_writable_topic(topic)
            self._check_fork()
        return self._delivery.lanes_of(topic)

    @staticmethod
    def _lane_for(lanes: TopicLanes, target: Target) -> Lane | None:
        """The queue that the message is meant for; None = any."""
        if target.sharding_key is not None:
            return lanes.for_key(target.sharding_key)
        if target.queue_id is not None:
            return lanes.for_queue(target.queue_id)
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the producer is closed")

    def _check_fork(self) -> None:
        if isinstance(self._lock, Forked):
            self._lock.acquire()

    def _new_encoder(self) -> _kernel.BatchEncoder:
        return _kernel.BatchEncoder(size_max=self._batch_bytes, count_max=self._batch_count)

    # --- the end ---

    def flush(self) -> None:
        """Send what lingers and wait for all answers.

        Raises the first error of a lingering `send` since the last flush. At most `timeout_s`.
        """
        self._check_fork()
        self._delivery.flush()

    def close(self) -> None:
        """Flush and let go of all lines; raises what `flush` raises. May be called twice."""
        self._check_fork()
        if self._closed:
            return
        self._closed = True
        try:
            self._delivery.flush()
        finally:
            self._delivery.close()
            self._callbacks.close()
            self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except CometError as late:  # the first exception is the one to be seen
            log.warning("messages were not confirmed when the producer closed: %s", late)

    def _forked(self) -> None:
        self._lock = Forked(type(self).__name__)
        self._quick.clear()  # the way that asks for no lock


def _with_note(error: CometError, batches: list[Batch]) -> CometError:
    for batch in batches:
        batch.wait_settled()
    stored = sum(batch.count for batch in batches if batch.error is None)
    error = again(error)
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
    for producer in list(_producers):
        producer._forked()


os.register_at_fork(after_in_child=_forked_all)
