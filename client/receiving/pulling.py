"""Keeps pulls going for the queues a consumer owns, and the messages that came until they go out.

One pull per queue is on its way; the next is sent when its answer arrives, before anything of it
is decoded, so that the reader works while the client does. Everything here runs in the thread that
polls, which also receives from the sockets itself; other threads only leave a note and ring.

Queues of a broker on this machine are read by `MappedQueues`, when nothing else is ready.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final

from cometmq.client.receiving.buffer import NO_RUN, Chunk, Queue
from cometmq.client.receiving.mapped import MappedQueues
from cometmq.client.receiving.troubles import Troubles
from cometmq.protocol.commands import PullMessages, PullResult, PullStatus
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel, Pending, wait_any
from cometmq.protocol.wire.long_poll import ask_held
from cometmq.shm.kernel.codec import Message, RecordDamaged, decode
from cometmq.shm.kernel.layout import MAGIC_V1, MAGIC_V2
from cometmq.shm.reading.mapped_reader import Found

log = logging.getLogger(__name__)

SUSPEND_MS: Final = 15_000  # RocketMQ brokerSuspendMaxTimeMillis
PULL_COUNT: Final = 8_192
CHECK_S: Final = 1.0
RECORD_BYTES_MIN: Final = 91  # RocketMQ: a record without topic, body and properties
MAGICS: Final = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2))
_NOTHING: Final = (PullStatus.NO_MATCHED_MESSAGE, PullStatus.NO_NEW_MESSAGE)


Arrival = tuple[Queue, int, Pending]


class Puller:
    """See the module.

    Args:
        lock: the consumer's; held while progress or ownership is looked at or changed.
        pull_bytes: asked for in one answer.
        prefetch_bytes: of all queues together; a queue goes on while it has less than its share.
        on_trouble: called when a reader does not answer; must not block.
        transport: "auto", "mapped" or "zmq"; see Consumer.
        spin_us: how long to look at mapped queues without sleeping.
        on_refused: what makes going on pointless.
        is_steady: whether a broker is there: what fails of one that is away is not worth a line.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        *,
        pull_bytes: int,
        prefetch_bytes: int,
        prefetch_count: int,
        on_trouble: Callable[[], None],
        on_doubt: Callable[[str], None] = lambda broker: None,
        transport: str = "zmq",
        spin_us: float = 0,
        on_refused: Callable[[CometError], None] = lambda error: None,
        is_steady: Callable[[str], bool] = lambda broker: True,
    ) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ready: deque[Chunk] = deque()
        self._lock = lock
        self._pull_bytes = pull_bytes
        self._prefetch_bytes = prefetch_bytes
        self._pull_count = min(PULL_COUNT, prefetch_count)
        self._on_trouble = on_trouble
        self._on_doubt = on_doubt
        self._doubted: set[str] = set()  # brokers that failed since one of their queues was read
        self._troubles = Troubles(is_steady)
        self._queues: set[Queue] = set()
        self._notes: deque[Queue] = deque()  # taken on, moved or dropped by another thread
        self._arrived: deque[Arrival] = deque()
        self._channels: dict[str, Channel] = {}
        self._check_at = 0.0
        self._rung = False
        self._closed = False
        self._mapped: MappedQueues | None = None
        if transport != "zmq":
            self._mapped = MappedQueues(
                self,
                max_count=self._pull_count,
                max_bytes=pull_bytes,
                forced=transport == "mapped",
                spin_s=spin_us / 1e6,
                on_refused=on_refused,
            )

    # --- from other threads ---

    def note(self, queues: Iterable[Queue]) -> None:
        """These were taken on, moved or dropped."""
        self._notes.extend(queues)
        self.ring()

    def ring(self) -> None:
        """Whoever waits looks again."""
        if not self._closed:
            os.eventfd_write(self.wake_fd, 1)
            self._rung = True  # not before it can be read
            if self._mapped is not None:
                self._mapped.bell.ring()

    # --- in the polling thread ---

    def pump(self, timeout_s: float) -> None:
        """Send pulls that are due, wait for something to happen, take in what came."""
        self.begin()
        if self._arrived:
            timeout_s = 0
        if self._mapped is not None:
            timeout_s = self._pump_mapped(self._mapped, timeout_s)
        if self._channels or (timeout_s > 0 and self._mapped is None):
            wait_any(self._channels.values(), min(timeout_s, self.due_s()), self.wake_fd)
        self.take_in()

    def _pump_mapped(self, mapped: MappedQueues, timeout_s: float) -> float:
        """Read where something is; else sleep, unless ZeroMQ may wake us too. The time left."""
        if self.ready:
            return timeout_s
        if timeout_s <= 0:
            mapped.read()
            return 0.0
        mapped.look()
        if self._channels:
            mapped.watch()
        if mapped.read():
            return 0.0
        if self._channels:
            return timeout_s
        mapped.sleep(min(timeout_s, self.due_s()))
        mapped.read()
        return 0.0

    def begin(self) -> None:
        """Send what is due."""
        while self._notes:
            queue = self._notes.popleft()
            if queue.dropped:
                self._queues.discard(queue)
                self._troubles.forget(queue)
                if self._mapped is not None:
                    self._mapped.drop(queue)
            elif queue.paused:
                self._queues.add(queue)
                if self._mapped is not None:
                    self._mapped.drop(queue)
            else:
                self._queues.add(queue)
                with self._lock:  # what came before a pause goes out first
                    self.ready.extendleft(reversed(queue.take_back()))
                if not queue.pulling:
                    self._pull_if_room(queue)
        now = time.monotonic()
        if now >= self._check_at:
            self._check(now)

    def take_in(self) -> None:
        if self._rung:
            self._rung = False
            with suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)
        if self._mapped is not None:
            self._mapped.take_in()
        while self._arrived:
            self._answered(*self._arrived.popleft())

    def due_s(self) -> float:
        """In how long something has to be done although nothing arrives."""
        return max(0.0, self._check_at - time.monotonic())

    def descriptors(self) -> list[int]:
        """What to sleep on until `pump` has something to do; empty: it has already."""
        if self._mapped is not None:
            self._mapped.look()
            self._mapped.watch()
            if self.ready or self._mapped.read():
                return []
        found = [self.wake_fd]
        for channel in self._channels.values():
            descriptors = channel.descriptors()
            if not descriptors:
                return []
            found += descriptors
        return found

    def _check(self, now: float) -> None:
        """Pull again where a pull failed a while ago."""
        if self._mapped is not None:
            self._mapped.check(now)
        for queue in self._troubles.take_due(now):
            self.pull(queue)
        self._check_at = self._troubles.next_at(now + CHECK_S)

    def pull(self, queue: Queue) -> None:
        """Go on with the queue."""
        queue.hungry = queue.paused
        if queue.paused:
            return
        if queue.doubtful and queue.reads_from() == queue.endpoints():
            self._on_doubt(queue.broker)
            return  # it is noted once that is settled
        self._doubted.discard(queue.broker)
        self._troubles.tried(queue)
        if self._mapped is not None and self._mapped.takes(queue):
            return
        readers = queue.reads_from().readers
        try:
            channel = self._channel(readers[queue.queue_id % len(readers)])
            queue.pulling = True
            queue.pull_sent_at = time.monotonic()
            ask_held(
                channel,
                PullMessages(
                    queue.topic,
                    queue.queue_id,
                    queue.next_offset,
                    self._pull_count,
                    self._pull_bytes,
                    SUSPEND_MS,
                    queue.tags,
                    sql=queue.sql,
                ),
                SUSPEND_MS / 1000,
                partial(_arrive, self._arrived, queue, queue.epoch),
                pump=False,
            )
        except CometError as error:
            self.failed(queue, str(error))

    def _channel(self, endpoint: str) -> Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            self._close_unused()
            channel = self._channels[endpoint] = Channel(endpoint, f"the reader at {endpoint}")
        return channel

    def _close_unused(self) -> None:
        used = {endpoint for queue in self._queues for endpoint in queue.reads_from().readers}
        for endpoint in [each for each in self._channels if each not in used]:
            self._channels.pop(endpoint).close()

    # --- answers ---

    def _answered(self, queue: Queue, epoch: int, pending: Pending) -> None:
        if queue.dropped or queue.epoch != epoch:
            return
        queue.pulling = False
        try:
            answer, payload = pending.result()
        except CometError as error:
            self.failed(queue, str(error))
            return
        if not isinstance(answer, PullResult):
            self.failed(queue, f"a pull was answered by {type(answer).__name__}")
            return
        if elsewhere := slave_is_elsewhere(queue, answer):
            self.failed(queue, elsewhere)
            return
        if self._is_of_another_run(queue, answer.run):
            self._doubt([queue])
            self.pull(queue)
            return
        queue.replica = queue.replicas.answered(queue.replica, is_far_behind=answer.far_behind)
        chunk = None
        if answer.status == PullStatus.FOUND and payload:
            end = answer.next_queue_offset
            chunk = Chunk(queue, queue.next_offset, end, payload[0], answer.count)
        if self._take(queue, epoch, answer, chunk):
            self._pull_if_room(queue)
        elif not queue.retry_at and queue.epoch == epoch:
            self._empty(queue)

    def _take(
        self, queue: Queue, epoch: int, answer: PullResult | Found, chunk: Chunk | None
    ) -> bool:
        """Whether the queue goes on; False also when there is nothing new."""
        if queue.failures:
            self._troubles.works_again(queue)
        start, end = queue.next_offset, answer.next_queue_offset
        if answer.status == PullStatus.OFFSET_MOVED:
            self._moved(queue, answer)
        elif chunk is not None and end > start:
            with self._lock:
                if queue.dropped or queue.epoch != epoch:
                    return False  # given up or moved in this moment
                queue.next_offset = end
                queue.chunks.add(chunk)
                queue.buffered_bytes += chunk.size
                if chunk.messages:
                    chunk.arrange()
                if queue.paused:
                    chunk.hold()
            self.ready.append(chunk)
        elif answer.status in _NOTHING and end > start:  # looked through: none of it is ours
            queue.next_offset = end
            with self._lock:
                queue.progress.arrived(start, end, ())
        elif answer.status != PullStatus.NO_NEW_MESSAGE:
            self.failed(queue, f"an answer that leads nowhere: {answer}")
            return False
        else:
            return False
        return True

    def take_found(self, queue: Queue, epoch: int, found: Found, run: int = NO_RUN) -> None:
        """What was read where it lies."""
        if elsewhere := slave_is_elsewhere(queue, found):
            self.failed(queue, elsewhere)
            return
        if self._is_of_another_run(queue, run):
            self._doubt([queue])
        else:
            chunk = None
            if found.messages:
                end, count = found.next_queue_offset, len(found.messages)
                chunk = Chunk(queue, queue.next_offset, end, None, count, found.messages)
            self._take(queue, epoch, found, chunk)
        if queue.doubtful:
            if self._mapped is not None:
                self._mapped.drop(queue)
            self.pull(queue)

    def _is_of_another_run(self, queue: Queue, run: int) -> bool:
        """Whether an answer is from another run of the master than what was read, or checked."""
        if run == NO_RUN or queue.reads_from() != queue.endpoints():
            return False
        return queue.is_of_another_run(run)

    def _empty(self, queue: Queue) -> None:
        if time.monotonic() - queue.pull_sent_at < SUSPEND_MS / 4000:
            queue.failures = 2  # a reader that does not hold pulls: do not storm it
            self._troubles.retry_later(queue)
            self._check_at = min(self._check_at, queue.retry_at)
        else:
            self._pull_if_room(queue)

    def _moved(self, queue: Queue, answer: PullResult | Found) -> None:
        """The queue does not have the offset we asked for: expired, or lost by the broker."""
        if answer.next_queue_offset < queue.next_offset:
            self._doubt([queue])
            return
        log.warning(
            "%s: offset %d is outside [%d, %d], going on at %d",
            queue,
            queue.next_offset,
            answer.min_queue_offset,
            answer.max_queue_offset,
            answer.next_queue_offset,
        )
        with self._lock:
            queue.progress.arrived(queue.next_offset, answer.next_queue_offset, ())
            queue.next_offset = answer.next_queue_offset

    def _doubt(self, queues: Iterable[Queue]) -> None:
        """Mark queues whose broker may have lost messages that were read."""
        for queue in queues:
            for chunk in list(queue.chunks):
                self.open(chunk)  # what it has was read, too
            with self._lock:
                queue.doubt()

    def failed(self, queue: Queue, text: str) -> None:
        """Try again later."""
        if queue.broker not in self._doubted:
            self._doubted.add(queue.broker)
            self._doubt([each for each in self._queues if each.broker == queue.broker])
        self._troubles.failed(queue, text)
        queue.replica = queue.replicas.missed(queue.replica)
        self._check_at = min(self._check_at, queue.retry_at)
        self._on_trouble()
        if self._mapped is not None:
            self._mapped.doubt(queue)

    def _pull_if_room(self, queue: Queue) -> None:
        share = self._prefetch_bytes // max(1, len(self._queues))
        if queue.buffered_bytes <= max(share, 1) and not queue.held:
            self.pull(queue)
        else:
            queue.hungry = True

    # --- messages on their way out ---

    def open(self, chunk: Chunk) -> None:
        """Decode it, if it has not been."""
        if chunk.frame is None or not chunk.stop:
            return
        frame, chunk.frame = chunk.frame, None
        queue = chunk.queue
        try:
            messages = decode(frame.buffer, queue.selection.tags, filter=queue.selection.filter)
        except RecordDamaged as damage:
            messages = salvage(frame.buffer, queue, damage)
        with self._lock:
            if not chunk.stop and not chunk.held:
                return  # lost meanwhile
            chunk.messages = messages
            chunk.stop, chunk.held = (0, len(messages)) if chunk.held else (len(messages), 0)
            chunk.arrange()

    def taken(self, chunk: Chunk) -> None:
        """Everything of it has gone out; or its queue is paused, and `begin` has it back later."""
        queue = chunk.queue
        with self._lock:
            if chunk.held:
                queue.parked.append(chunk)
            elif chunk in queue.chunks:
                queue.chunks.discard(chunk)
                queue.buffered_bytes -= chunk.size
                queue.progress.delivered = max(queue.progress.delivered, chunk.end)
        if queue.hungry and not queue.dropped and not queue.pulling:
            self._pull_if_room(queue)

    def close(self) -> None:
        self._closed = True
        if self._mapped is not None:
            self._mapped.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        for chunk in self.ready:
            chunk.stop = 0
        self.ready.clear()
        os.close(self.wake_fd)


def salvage(buffer: memoryview, queue: Queue, damage: Exception) -> list[Message]:
    """What can be read of an answer in which a record is damaged; the rest is reported.

    A damaged record is skipped by the size it states. When that cannot be right, everything behind
    it in this answer is skipped as well: nobody knows where the next record begins.
    """
    found: list[Message] = []
    tags, filter = queue.selection
    start = 0
    while True:
        reason, position = damage.args
        at = start + position
        found += decode(buffer[start:at], tags, filter=filter)
        after = found[-1].queue_offset if found else None
        size = int.from_bytes(buffer[at : at + 4], "big")
        end = at + size
        whole = size >= RECORD_BYTES_MIN and (
            end == len(buffer) or bytes(buffer[end + 4 : end + 8]) in MAGICS
        )
        log.error(
            "%s: a damaged record (%s) behind queue offset %s is skipped%s",
            queue,
            reason,
            after,
            "" if whole else f", and {len(buffer) - at} bytes behind it that it makes unreadable",
        )
        if not whole:
            return found
        start = end
        try:
            return found + decode(buffer[start:], tags, filter=filter)
        except RecordDamaged as another:
            damage = another


def slave_is_elsewhere(queue: Queue, answer: PullResult | Found) -> str:
    """What a slave has that does not have the wanted offset; "": it is not so. It may be behind, or
    begin later: the master alone says where a queue goes on."""
    if answer.status != PullStatus.OFFSET_MOVED or queue.reads_from() == queue.endpoints():
        return ""
    has = f"[{answer.min_queue_offset}, {answer.max_queue_offset}]"
    return f"slave {queue.replica} has {has}, not {queue.next_offset}"


def _arrive(arrived: deque[Arrival], queue: Queue, epoch: int, pending: Pending) -> None:
    arrived.append((queue, epoch, pending))
