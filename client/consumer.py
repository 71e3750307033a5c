"""The consumer."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from cometmq.client.mapped import check_mapped, check_transport
from cometmq.client.membership import Membership
from cometmq.client.pulling import Chunk, Puller, Queue
from cometmq.client.receipt import Forked, again
from cometmq.client.routes import Routes, broker_routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    FoundOffset,
    GetQueueRange,
    QueueKey,
    QueueOffset,
    QueueRange,
    SearchOffset,
    Subscription,
)
from cometmq.protocol.errors import CometError, NotConfirmed, NotOwner
from cometmq.protocol.names import check_group, check_topic
from cometmq.protocol.tags import ALL_TAGS, parse_tags
from cometmq.shm._kernel import Message, runs

log = logging.getLogger(__name__)

Position = str | int | datetime  # "begin", "end", an offset or a time; see the methods
HAND_OVER_S: Final = 1.0  # what was handed out of a lost queue may be acknowledged for so long
ASSIGNMENT_S: Final = 5.0
POLL_S: Final = 1.0

_consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()


class Consumer:
    """Reads topics as a member of a group. One thread polls or iterates; the rest is for any.

        with Consumer("127.0.0.1:9876", "billing", "orders", tags="paid || refunded") as consumer:
            for message in consumer:
                work(message.body)
                consumer.ack(message)

    The members of a group share the queues of its topics; each group gets everything. All members
    of one group must subscribe to the same topics with the same tags.

    **Progress.** A queue's progress is its smallest offset that is not acknowledged. It is
    committed every `auto_commit_ms`, when a queue goes to another member, and on `close`. After a
    restart the group goes on there. Without `ack` nothing is committed: the next start begins where
    this one began.

    **What may come twice.** Messages that were not acknowledged, or whose acknowledgement was not
    committed yet, when the process died or the queue went to another member. A message that was
    stored twice comes twice; see `Producer`. Before a queue goes to another member, messages that
    were already handed out may be acknowledged for up to a second; later than that is too late, and
    the other member gets them as well.

    **What may be left out.** A record that is damaged on the broker's disk: it is reported in the
    log with its place. Messages that expired before they were read: likewise.

    **When it blocks.** Creating it and `subscribe` ask the name server; `poll` and iteration wait
    for messages; `seek`, `commit` and `close` wait for the coordinator. `ack` never waits.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        group: whose progress it is.
        topic: what to subscribe to; None: `subscribe` says it later.
        tags: "*" for all, or tags joined by "||".
        start: where the group begins in a queue in which it never committed: "earliest", "latest",
            a datetime, or milliseconds since 1970. "latest" and times are committed at once, so
            that what comes from then on is not missed.
        auto_commit_ms: how long an acknowledgement may stay uncommitted.
        pull_bytes: asked for in one answer of a reader.
        prefetch_bytes: records that wait here undecoded, all queues together. Each queue may
            exceed its share by one answer.
        prefetch_count: messages in one answer at most.
        member: this consumer's name in the group; the default is unique.
        transport: "auto": the store of a broker on this machine is mapped and read where it lies,
            if this process may; what cannot be mapped is asked for through ZeroMQ. "mapped" raises
            NotMapped instead, and also takes the store of another user, who could end this process
            by cutting his files. "zmq": never mapped. A disk that cannot be read ends a process
            that has it mapped (SIGBUS).
        spin_us: how long `poll` looks for messages of mapped queues before it sleeps. Takes a
            processor for that time, and saves the wake-up.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        group: str,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        *,
        start: Position = "earliest",
        auto_commit_ms: int = 1_000,
        pull_bytes: int = 1_048_576,
        prefetch_bytes: int = 16 * 1_048_576,
        prefetch_count: int = 8_192,
        member: str | None = None,
        transport: str = "auto",
        spin_us: float = 0,
    ) -> None:
        check_group(group)
        check_transport(transport)
        if isinstance(start, str) and start not in ("earliest", "latest"):
            raise ValueError(f"start={start!r}: 'earliest', 'latest' or a time")
        self.group = group
        self.member = member or f"{socket.gethostname()[:60]}@{os.getpid()}@{uuid.uuid4().hex[:12]}"
        self._start = start
        self._auto_commit_s = auto_commit_ms / 1000
        self._routes = Routes(name_server)
        self._lock: Any = threading.Lock()  # guards ownership and progress
        self._poll_lock = threading.Lock()  # one thread polls
        self._acknowledged = threading.Condition(self._lock)
        self._leaving = 0  # queues whose last acknowledgements are awaited
        self._ever_acknowledged = False
        self._tags: dict[str, str] = {}
        self._queues: dict[tuple[str, str, int], Queue] = {}
        self._by_key: dict[tuple[str, int], list[Queue]] = {}
        self._places: dict[str, Membership] = {}
        self._pump_due = True  # a chunk has gone out: see what has come
        self._failure: CometError | None = None
        self._closed = False
        self._transport = transport
        self._puller = Puller(
            self._lock,
            pull_bytes=pull_bytes,
            prefetch_bytes=prefetch_bytes,
            prefetch_count=prefetch_count,
            on_trouble=self._on_reader_trouble,
            transport=transport,
            spin_us=spin_us,
            on_refused=self._on_refused,
        )
        _consumers.add(self)
        if topic is not None:
            try:
                self.subscribe(topic, tags)
            except BaseException:
                self.close()
                raise

    # --- what is read ---

    def subscribe(self, topic: str, tags: str = ALL_TAGS) -> None:
        """Read this topic too, or with other tags than before. A new topic is created.

        Raises NameIllegal, SubscriptionIllegal, NotReachable, TopicNotExist, NotMapped.
        """
        check_topic(topic)
        parse_tags(tags)
        self._check_open()
        route = self._routes.topic(topic)
        if self._transport == "mapped":
            for each in broker_routes(route):
                check_mapped(each.endpoints)
        with self._lock:
            again_with_other_tags = self._tags.get(topic, tags) != tags
            self._tags[topic] = tags
            queues = [queue for queue in self._queues.values() if queue.topic == topic]
        if again_with_other_tags:
            self._change_tags(queues, tags)
        self._look_up(self._routes.topic(topic))
        for place in list(self._places.values()):
            place.stir()

    def unsubscribe(self, topic: str) -> None:
        """Read this topic no longer; its progress is committed."""
        with self._lock:
            self._tags.pop(topic, None)
        for place in list(self._places.values()):
            place.stir()

    def _change_tags(self, queues: Sequence[Queue], tags: str) -> None:
        with self._lock:
            for queue in queues:
                queue.expression, queue.tags = tags, parse_tags(tags)
                queue.move(max(queue.progress.done, queue.progress.delivered))
        self._puller.note(queues)

    @property
    def assignment(self) -> list[tuple[str, str, int]]:
        """The queues this member owns now: (broker, topic, queue id)."""
        with self._lock:
            return sorted(self._queues)

    # --- messages ---

    def poll(self, max_count: int = 1024, timeout_s: float | None = POLL_S) -> list[Message]:
        """The next messages, at most `max_count`; waits until there is one.

        Args:
            max_count: the list may be shorter although more is there.
            timeout_s: then it is empty; 0 = do not wait, None = for ever.

        Raises:
            SubscriptionIllegal, NoPermission, ...: what makes going on pointless. A broker that is
            away is no error: it is waited for.
        """
        self._check_open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._poll_lock:
            while not self._closed:
                if self._pump_due or not self._puller.ready:
                    self._pump_due = False
                    self._puller.pump(0)
                messages = self._take(max_count)
                if messages:
                    return messages
                if self._pump_due:
                    continue  # what there was had been handed out before
                left_s = 3600.0 if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._puller.pump(left_s)
        return []

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, for ever; ends after `close`.

        What a loop that is left early has not seen comes with the next poll or loop.
        """
        self._check_open()
        while not self._closed:
            yield from self._each(POLL_S)

    def _each(self, timeout_s: float) -> Iterator[Message]:
        """Messages one by one, until none came for so long.

        A chunk stays in `ready` while it is read: whoever goes on, goes on at its position.
        """
        while True:
            with self._poll_lock:
                if self._closed:
                    return
                self._puller.pump(0 if self._next_chunk() else timeout_s)
                chunk = self._next_chunk()
            if chunk is None:
                return
            messages = chunk.messages
            while chunk.position < chunk.stop:
                message = messages[chunk.position]
                chunk.position += 1
                yield message

    def _next_chunk(self) -> Chunk | None:
        """The chunk that messages come from now, decoded and not used up."""
        self._check_failure()
        ready = self._puller.ready
        while ready:
            chunk = ready[0]
            self._puller.open(chunk)
            if chunk.position < chunk.stop:
                return chunk
            ready.popleft()
            self._puller.taken(chunk)
            self._pump_due = True
        return None

    def _take(self, max_count: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < max_count:
            chunk = self._next_chunk()
            if chunk is None:
                break
            begin = chunk.position
            end = min(chunk.stop, begin + max_count - len(found))
            part = chunk.messages[begin:end]
            chunk.position = max(begin, end)
            found = found + part if found else part
        return found

    # --- for the asyncio twin ---

    @property
    def closed(self) -> bool:
        return self._closed

    def available(self) -> Iterator[Message]:
        """Messages one by one, as long as there are any; never waits."""
        return self._each(0)

    def descriptors(self) -> tuple[list[int], float]:
        """What to watch until `poll` has something to do (empty: it has), and at most how long."""
        with self._poll_lock:
            if self._closed:
                return [], 0.0
            self._puller.begin()
            return self._puller.descriptors(), self._puller.due_s()

    # --- progress ---

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """These are done with. In any order; never waits; committed in the background.

        A list as `poll` gave it costs next to nothing. Messages of queues that belong to another
        member by now are passed over: it will get them.
        """
        with self._lock:
            self._ever_acknowledged = True
            if isinstance(messages, Message):
                queue = self._queue_of(messages)
                if queue is not None:
                    queue.progress.acknowledge(messages.queue_offset)
            else:
                self._acknowledge_all(messages if isinstance(messages, list) else list(messages))
            if self._leaving:
                self._acknowledged.notify_all()

    def _acknowledge_all(self, messages: list[Message]) -> None:
        for topic, queue_id, first, last, count in runs(messages):
            queues = self._by_key.get((topic, queue_id), ())
            if len(queues) > 1 or (
                queues and not queues[0].progress.acknowledge_run(first, last, count)
            ):
                self._acknowledge_each(messages)
                return

    def _acknowledge_each(self, messages: list[Message]) -> None:
        for message in messages:
            queue = self._queue_of(message)
            if queue is not None:
                queue.progress.acknowledge(message.queue_offset)

    def _queue_of(self, message: Message) -> Queue | None:
        queues = self._by_key.get((message.topic, message.queue_id))
        if not queues:
            return None
        if len(queues) == 1:
            return queues[0]
        host = message.store_host  # several brokers have a queue of that name
        return next((queue for queue in queues if host in queue.store_hosts), None)

    def commit(self) -> None:
        """Commit what is acknowledged, now. Raises NotConfirmed, ServiceNotAvailable, ..."""
        self._check_open()
        for place in list(self._places.values()):
            place.commit()

    def seek(
        self, position: Position, topic: str | None = None, queue_id: int | None = None
    ) -> None:
        """Go on elsewhere, forwards or back, in the queues this member owns.

        The new place is committed at once. Waits for the first assignment if there is none yet.

        Args:
            position: "begin", "end", a queue offset, or a datetime: the first message stored then
                or later.
            topic, queue_id: only there; None = everywhere. An offset needs both.

        Raises:
            NotOwner: the queue that was named belongs to another member.
        """
        self._wait_for_assignment()
        with self._lock:
            queues = [
                queue
                for queue in self._queues.values()
                if topic in (None, queue.topic) and queue_id in (None, queue.queue_id)
            ]
        if not queues and queue_id is not None:
            raise NotOwner(f"queue {queue_id} of {topic or 'any topic'} is not this member's")
        for queue in queues:
            self._seek(queue, self._resolve(queue, position))

    def _seek(self, queue: Queue, queue_offset: int) -> None:
        place = self._places[queue.broker]
        with place.commit_lock:
            place.set_offsets([QueueOffset(queue.topic, queue.queue_id, queue_offset)])
            with self._lock:
                queue.move(queue_offset)
                queue.committed = queue_offset
        self._puller.note([queue])

    def _resolve(self, queue: Queue, position: Position) -> int:
        key = QueueKey(queue.topic, queue.queue_id)
        if isinstance(position, int):
            return position
        if isinstance(position, datetime):
            return self._offset_at(queue.endpoints(), key, int(position.timestamp() * 1000))
        if position not in ("begin", "end"):
            raise ValueError(f"position {position!r}: 'begin', 'end', an offset or a datetime")
        found = self._range_of(queue.endpoints(), key)
        return found.min_queue_offset if position == "begin" else found.max_queue_offset

    def _range_of(self, endpoints: BrokerEndpoints, key: QueueKey) -> QueueRange:
        reader = endpoints.readers[key.queue_id % len(endpoints.readers)]
        return self._routes.ask(reader, GetQueueRange(key.topic, key.queue_id), QueueRange)

    def _offset_at(self, endpoints: BrokerEndpoints, key: QueueKey, timestamp_ms: int) -> int:
        reader = endpoints.readers[key.queue_id % len(endpoints.readers)]
        command = SearchOffset(key.topic, key.queue_id, timestamp_ms)
        return self._routes.ask(reader, command, FoundOffset).queue_offset

    def _wait_for_assignment(self) -> None:
        self._check_open()
        deadline = time.monotonic() + ASSIGNMENT_S
        for place in list(self._places.values()):
            if not place.joined.wait(max(0.0, deadline - time.monotonic())):
                self._check_failure()
                raise NotConfirmed(
                    f"broker {place.broker} has not given group {self.group} its queues "
                    f"within {ASSIGNMENT_S:g} s"
                )

    # --- what the membership calls; in its thread ---

    def subscriptions(self) -> list[Subscription]:
        with self._lock:
            return [Subscription(topic, tags) for topic, tags in sorted(self._tags.items())]

    def take_on(self, place: Membership, offsets: Sequence[QueueOffset]) -> None:
        """These queues are ours; -1 where the group has no progress."""
        taken: list[Queue] = []
        begun: list[QueueOffset] = []
        for each in offsets:
            queue_offset = each.queue_offset
            if queue_offset < 0:
                queue_offset = self._first_offset(place, QueueKey(each.topic, each.queue_id))
                if self._start != "earliest":
                    begun.append(QueueOffset(each.topic, each.queue_id, queue_offset))
            tags = self._tags.get(each.topic)
            if tags is None:
                continue  # unsubscribed meanwhile
            taken.append(
                Queue(
                    lambda: place.endpoints,
                    place.broker,
                    each.topic,
                    each.queue_id,
                    tags,
                    queue_offset,
                )
            )
        if begun:
            with place.commit_lock:
                place.set_offsets(begun)
        with self._lock:
            for queue in taken:
                self._queues[queue.broker, queue.topic, queue.queue_id] = queue
                self._by_key.setdefault((queue.topic, queue.queue_id), []).append(queue)
        self._puller.note(taken)

    def _first_offset(self, place: Membership, key: QueueKey) -> int:
        if isinstance(self._start, datetime):
            return self._offset_at(place.endpoints, key, int(self._start.timestamp() * 1000))
        if isinstance(self._start, int):
            return self._offset_at(place.endpoints, key, self._start)
        found = self._range_of(place.endpoints, key)
        return found.min_queue_offset if self._start == "earliest" else found.max_queue_offset

    def give_up(self, place: Membership, keys: Sequence[QueueKey], *, wait: bool = True) -> None:
        """Hand out nothing more of these, and wait a moment for what is in the user's hands.

        They still count for `progress_of`, until `forget`.
        """
        deadline = time.monotonic() + (HAND_OVER_S if wait else 0.0)
        with self._lock:
            lost = [
                queue
                for key in keys
                if (queue := self._queues.get((place.broker, key.topic, key.queue_id))) is not None
            ]
            for queue in lost:
                queue.dropped = True
                queue.discard()
            self._leaving += 1
            while self._ever_acknowledged and any(queue.progress.outstanding for queue in lost):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closed:
                    break
                self._acknowledged.wait(left_s)
            self._leaving -= 1
        self._puller.note(lost)

    def progress_of(self, place: Membership) -> list[QueueOffset]:
        """What has to be committed at this broker."""
        with self._lock:
            mine = [queue for queue in self._queues.values() if queue.broker == place.broker]
            return [
                QueueOffset(queue.topic, queue.queue_id, queue.progress.done)
                for queue in mine
                if queue.progress.done != queue.committed
            ]

    def committed(self, place: Membership, offsets: Sequence[QueueOffset]) -> None:
        with self._lock:
            for each in offsets:
                queue = self._queues.get((place.broker, each.topic, each.queue_id))
                if queue is not None:
                    queue.committed = each.queue_offset

    def forget(self, place: Membership, keys: Sequence[QueueKey]) -> None:
        """These were given up and committed."""
        with self._lock:
            for key in keys:
                queue = self._queues.get((place.broker, key.topic, key.queue_id))
                if queue is not None and queue.dropped:
                    del self._queues[place.broker, key.topic, key.queue_id]
                    self._by_key[key.topic, key.queue_id].remove(queue)

    def refused(self, _place: Membership, error: CometError) -> None:
        """The coordinator will not have us: poll raises it."""
        self._on_refused(error)

    def _on_refused(self, error: CometError) -> None:
        self._failure = error
        self._puller.ring()

    def look_up_brokers(self) -> None:
        """Learn where the brokers are now."""
        for topic in list(self._tags):
            try:
                self._look_up(self._routes.find(topic, 0.5))
            except CometError as error:
                log.debug("route of %s: %s", topic, error)
                return

    def _look_up(self, route: Any) -> None:
        for each in broker_routes(route):
            ends = each.endpoints
            with self._lock:
                place = self._places.get(ends.broker)
                if place is None and not self._closed:
                    place = Membership(self, ends, self._auto_commit_s)
                    self._places[ends.broker] = place
                    place.start()
                    continue
            if place is not None and place.endpoints != ends:
                place.moved(ends)

    def _on_reader_trouble(self) -> None:
        for place in list(self._places.values()):
            place.look_up()

    # --- the end ---

    def close(self) -> None:
        """Commit what is acknowledged, leave the group, let go of all lines. May be called twice.

        Another thread that polls returns with what it has; a loop ends.
        """
        self._check_fork()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._acknowledged.notify_all()
        self._puller.ring()
        for place in list(self._places.values()):
            place.close()
        self._routes.close()
        with self._poll_lock:
            self._puller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._check_fork()
        if self._closed:
            raise RuntimeError("the consumer is closed")

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def _check_fork(self) -> None:
        if isinstance(self._lock, Forked):
            self._lock.acquire()

    def _forked(self) -> None:
        self._lock = Forked(type(self).__name__)


def _forked_all() -> None:
    for consumer in list(_consumers):
        consumer._forked()


os.register_at_fork(after_in_child=_forked_all)
