"""The queues that a group member owns, and its progress in them: acknowledged, and committed.

No I/O: the membership (`membership.py`) says what is gained, lost and committed, the stream
(`stream.py`) hands messages out, and the user acknowledges them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from cometmq.client.receiving.buffer import OVER, Lease, Queue
from cometmq.client.receiving.progress import Progress
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import QueueKey, QueueOffset, Subscription
from cometmq.protocol.errors import NotOwner
from cometmq.protocol.tags import joined, split
from cometmq.shm.kernel.codec import Message, runs, stretches

QueueId = tuple[str, str, int]  # broker, topic, number


class Doubt(NamedTuple):
    """A queue that may have lost what was read of it, and which of its doubts that was."""

    queue: Queue
    number: int


HAND_OVER_S: Final = 1.0  # what was handed out of a lost queue may be acknowledged for so long


class OwnedQueues:
    """Threads may share it; everything is looked at and changed under `lock`.

    A queue is owned from `take_on` on. `give_up` stops handing out of it, but it still counts for
    `progress_of`, so that its last acknowledgements are committed, until `forget`. What is
    committed names the epoch of the ownership that it was acknowledged under.

    Args:
        on_change: told of queues that were taken on, moved or dropped; outside of the lock.
    """

    def __init__(self, lock: Any, on_change: Callable[[Sequence[Queue]], None]) -> None:
        self.lock = lock
        self._on_change = on_change
        self._acknowledged = threading.Condition(lock)
        self._leaving = 0  # calls that await the last acknowledgements of lost queues
        self._ever_acknowledged = False
        self._tags: dict[str, str] = {}  # by subscribed topic, with the SQL92 joined to them
        self._queues: dict[QueueId, Queue] = {}
        self._by_key: dict[tuple[str, int], list[Queue]] = {}
        self._closed = False

    # --- subscriptions ---

    @property
    def topics(self) -> list[str]:
        with self.lock:
            return list(self._tags)

    def subscriptions(self) -> list[Subscription]:
        with self.lock:
            return [Subscription(topic, *split(tags)) for topic, tags in sorted(self._tags.items())]

    def subscribe(self, topic: str, tags: str, sql: str) -> None:
        """With others than before, its queues go on behind what was handed out."""
        changed: list[Queue] = []
        tags = joined(tags, sql)
        with self.lock:
            if self._tags.get(topic, tags) != tags:
                changed = [queue for queue in self._queues.values() if queue.topic == topic]
            self._tags[topic] = tags
            for queue in changed:
                queue.subscribe(tags)
                queue.read_anew()
        if changed:
            self._on_change(changed)

    def unsubscribe(self, topic: str) -> None:
        with self.lock:
            self._tags.pop(topic, None)

    # --- ownership ---

    def assignment(self) -> list[QueueId]:
        """(broker, topic, queue id) of each."""
        with self.lock:
            return sorted(self._queues)

    def find(self, topic: str | None, queue_id: int | None) -> list[Queue]:
        """Those of a topic, of a number, or all: None."""
        with self.lock:
            return [
                queue
                for queue in self._queues.values()
                if topic in (None, queue.topic) and queue_id in (None, queue.queue_id)
            ]

    def take_on(
        self,
        broker: str,
        replicas: Replicas,
        offsets: Sequence[QueueOffset],
        lease: Lease | None = None,
    ) -> None:
        """These are ours now, from those offsets on; but for topics unsubscribed meanwhile."""
        with self.lock:
            taken = [
                Queue(
                    replicas,
                    broker,
                    each.topic,
                    each.queue_id,
                    tags,
                    each.queue_offset,
                    each.epoch,
                    lease,
                )
                for each in offsets
                if (tags := self._tags.get(each.topic)) is not None
            ]
            for queue in taken:
                self._queues[queue.broker, queue.topic, queue.queue_id] = queue
                self._by_key.setdefault((queue.topic, queue.queue_id), []).append(queue)
        self._on_change(taken)

    def give_up(self, broker: str, keys: Sequence[QueueKey], *, wait: bool) -> None:
        """Hand out nothing more of these, and wait a moment for what is in the user's hands."""
        deadline = time.monotonic() + (HAND_OVER_S if wait else 0.0)
        with self.lock:
            lost = [
                queue
                for key in keys
                if (queue := self._queues.get((broker, key.topic, key.queue_id))) is not None
            ]
            for queue in lost:
                queue.dropped = True
                queue.lease = OVER
                queue.discard()
            self._leaving += 1
            while self._ever_acknowledged and any(queue.progress.outstanding for queue in lost):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._closed:
                    break
                self._acknowledged.wait(left_s)
            self._leaving -= 1
        self._on_change(lost)

    def forget(self, broker: str, keys: Sequence[QueueKey]) -> None:
        """These were given up and committed."""
        with self.lock:
            for key in keys:
                queue = self._queues.get((broker, key.topic, key.queue_id))
                if queue is not None and queue.dropped:
                    del self._queues[broker, key.topic, key.queue_id]
                    self._by_key[key.topic, key.queue_id].remove(queue)

    def move(self, queues: Sequence[Queue], queue_offsets: Sequence[int]) -> None:
        """They go on there, and that is committed."""
        with self.lock:
            for queue, queue_offset in zip(queues, queue_offsets, strict=True):
                queue.move(queue_offset)
                queue.committed = queue_offset
        self._on_change(queues)

    def trust(self, doubts: Sequence[Doubt], kept: Sequence[int]) -> None:
        """The broker has what was read of these, or they were moved to where it is read again.
        A queue that became doubtful once more after these doubts stays so.

        Args:
            kept: committed offset of each queue now; -1: not known.
        """
        with self.lock:
            for (queue, number), offset in zip(doubts, kept, strict=True):
                queue.doubtful = queue.doubtful and queue.doubts != number
                if offset >= 0:  # less than before, if the broker has lost the last commits
                    queue.committed = min(queue.committed, offset)
        self._on_change([queue for queue, _ in doubts])

    def doubts_of(self, broker: str) -> list[Doubt]:
        """Those of this broker that may have lost what was read."""
        with self.lock:
            return [
                Doubt(queue, queue.doubts)
                for queue in self._queues.values()
                if queue.broker == broker and queue.doubtful and not queue.dropped
            ]

    def set_paused(self, keys: Iterable[QueueId], paused: bool) -> None:
        """Hand out nothing more of these, or go on with them. Raises NotOwner, and changes none."""
        with self.lock:
            queues = [self._owned_queue(key) for key in keys]
            for queue in queues:
                if paused:
                    queue.pause()
                else:
                    queue.unpause()
        self._on_change(queues)

    def position_of(self, key: QueueId) -> int:
        """The queue offset of the message that is handed out next. Raises NotOwner."""
        with self.lock:
            return self._owned_queue(key).position

    def _owned_queue(self, key: QueueId) -> Queue:
        queue = self._queues.get(key)
        if queue is None or queue.dropped:
            broker, topic, queue_id = key
            raise NotOwner(f"queue {queue_id} of {topic} on broker {broker} is not this consumer's")
        return queue

    def close(self) -> None:
        """Nothing more will be acknowledged that anybody waits for."""
        with self.lock:
            self._closed = True
            self._acknowledged.notify_all()

    # --- progress ---

    def acknowledge(self, messages: Message | list[Message]) -> None:
        """What belongs to another member by now is passed over, and so is what was not handed out
        here, or before its queue was moved."""
        with self.lock:
            self._ever_acknowledged = True
            if isinstance(messages, Message):
                self._acknowledge_one(messages)
            else:
                self._acknowledge_all(messages)
            if self._leaving:
                self._acknowledged.notify_all()

    def _acknowledge_all(self, messages: list[Message]) -> None:
        for topic, queue_id, first, last, count in runs(messages):
            queues = self._by_key.get((topic, queue_id), ())
            if len(queues) > 1 or (queues and not _acknowledge_run(queues[0], first, last, count)):
                for message in messages:
                    self._acknowledge_one(message)
                return

    def _acknowledge_one(self, message: Message) -> None:
        queues = self._by_key.get((message.stored_topic, message.queue_id), [])
        if len(queues) > 1:  # several brokers have a queue of that name
            host = message.store_host
            queues = [queue for queue in queues if host in queue.store_hosts]
        for queue in queues[:1]:
            if queue.was_handed_out(message.queue_offset):
                queue.progress.acknowledge(message.queue_offset)

    def acknowledge_of(self, queue: Queue, progress: Progress, messages: list[Message]) -> None:
        """These of one queue, in any order, that were handed out while that was its progress."""
        with self.lock:
            if queue.progress is not progress:
                return  # it was moved
            self._ever_acknowledged = True
            for first, count in stretches(messages):
                if not progress.acknowledge_run(first, first + count - 1, count):
                    for queue_offset in range(first, first + count):
                        progress.acknowledge(queue_offset)
            if self._leaving:
                self._acknowledged.notify_all()

    def let_go(self, queue: Queue) -> None:
        """Of a queue that was lost nothing is in the user's hands any more."""
        with self.lock:
            queue.progress.delivered = queue.progress.done
            self._acknowledged.notify_all()

    def go_back(self, queues: Sequence[Queue]) -> None:
        """What was handed out of these and is not acknowledged is handed out again."""
        with self.lock:
            kept = [queue for queue in queues if not queue.dropped]
            for queue in kept:
                queue.move(queue.progress.done)
        self._on_change(kept)

    def progress_of(self, broker: str) -> list[QueueOffset]:
        """What has to be committed at this broker."""
        with self.lock:
            mine = [queue for queue in self._queues.values() if queue.broker == broker]
            return [
                QueueOffset(queue.topic, queue.queue_id, queue.progress.done, queue.ownership)
                for queue in mine
                if queue.progress.done != queue.committed
            ]

    def committed(self, broker: str, offsets: Sequence[QueueOffset]) -> None:
        with self.lock:
            for each in offsets:
                queue = self._queues.get((broker, each.topic, each.queue_id))
                if queue is not None and queue.ownership == each.epoch:
                    queue.committed = each.queue_offset


def _acknowledge_run(queue: Queue, first: int, last: int, count: int) -> bool:
    """See Progress.acknowledge_run."""
    handed_out = queue.was_handed_out(last)
    return handed_out and queue.progress.acknowledge_run(first, last, count)
