"""Detection of lost messages: whether a broker still has those that were read from it.

A store that was restored from an older backup, or that a power cut took the end of, gives the queue
offsets of lost messages to new ones. So after a connection was lost, and where a queue ends below
the consumer's position, the last message that was read is compared with what lies there now.

A check may have asked the run of the broker that was about to end, and a pull that waits for a
connection is answered by the next run without any failure. So pull answers name their run, and the
first one of another run is dropped and followed by another check (`Queue.is_of_another_run`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cometmq.client.questions import offsets_at, ranges
from cometmq.client.receiving.buffer import Queue, Seen
from cometmq.client.routes import Routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    PullMessages,
    PullResult,
    PullStatus,
    QueueKey,
    QueueReach,
)
from cometmq.protocol.errors import CometError, NotConfirmed
from cometmq.protocol.frames import Frame
from cometmq.shm.kernel.codec import decode

log = logging.getLogger(__name__)

ASK_S: Final = 3.0
AGAIN_S: Final = 0.2  # between two checks of a broker
ONE_BYTES: Final = 1  # a reader returns one message, whatever its size


class Place(NamedTuple):
    """Offset at which a queue with lost messages resumes."""

    queue: Queue
    queue_offset: int


class Settling:
    """Schedule of the checks of one broker; one thread checks at a time.

    Args:
        wake: condition of the thread that calls `settle_due`.
        settle: checks the broker; raises CometError while the result is not known.
    """

    def __init__(self, wake: threading.Condition, settle: Callable[[], None]) -> None:
        self.due = math.inf  # time.monotonic()
        self._wake = wake
        self._settle = settle
        self._lock = threading.Lock()

    def doubt(self) -> None:
        """Schedule a check: a queue may have lost messages. Any thread may call it."""
        with self._wake:
            self.due = min(self.due, time.monotonic())
            self._wake.notify()

    def settle(self) -> None:
        """Check now. Any thread may call it. Raises CometError."""
        with self._lock:
            self._settle()

    def settle_due(self) -> None:
        """Check if it is due; schedule another check while the result is not known."""
        if time.monotonic() < self.due:
            return
        self.due = math.inf
        try:
            self.settle()
        except CometError as error:
            log.debug("cannot check yet whether messages that were read are lost: %s", error)
            self.due = time.monotonic() + AGAIN_S


def places_of(
    routes: Routes,
    ends: BrokerEndpoints,
    queues: Sequence[Queue],
    kept: Sequence[int],
    kept_ms: int = 0,
) -> list[Place]:
    """Return where queues that have lost messages which were read resume; omit the others.

    Args:
        ends: the master.
        kept: committed progress of each queue if a restored backup resets it too; else -1.
        kept_ms: time of the last commit to a store that a backup does not reset; 0: not known.

    Raises the broker's errors, and NotConfirmed while its last messages are not readable yet.
    """
    keys = [QueueKey(queue.topic, queue.queue_id) for queue in queues]
    found = []
    for queue, key, reach, offset in zip(
        queues, keys, ranges(routes, ends, keys, ASK_S), kept, strict=True
    ):
        if _is_lost(routes, ends, queue, reach, offset):
            since_ms = queue.seen.store_ms if queue.seen else kept_ms
            at = [reach.max_queue_offset, queue.next_offset]
            if since_ms:  # what took the places of lost messages is younger than these
                at += offsets_at(routes, ends, [key], since_ms + 1, ASK_S)
            if offset >= 0:
                at.append(offset)
            found.append(Place(queue, max(min(at), reach.min_queue_offset)))
            low, high = reach.min_queue_offset, reach.max_queue_offset
            is_beyond = queue.next_offset > high
            log.warning(
                "%s: offset %d is %s [%d, %d], resuming at %d", queue, queue.next_offset,
                "outside" if is_beyond else "of messages that the broker has lost; it now has",
                low, high, found[-1].queue_offset,
            )  # fmt: skip
    return found


def _is_lost(
    routes: Routes, ends: BrokerEndpoints, queue: Queue, reach: QueueReach, kept: int
) -> bool:
    seen = queue.seen
    if seen is not None and seen.queue_offset >= reach.min_queue_offset:
        if not _is_there(routes, ends, queue, seen):
            return True
    elif 0 <= kept < queue.committed:
        return True
    # What was passed over behind the last message, or before the first one, may be lost as well.
    position = queue.next_offset
    return position > reach.max_queue_offset and _is_beyond(routes, ends, queue, position)


def _is_there(routes: Routes, ends: BrokerEndpoints, queue: Queue, seen: Seen) -> bool:
    """Whether the last message that was read lies where it lay."""
    offset, physical_offset, store_ms = seen
    answer, payload = _pull_one(routes, ends, queue, offset)
    if answer.status == PullStatus.FOUND and payload:
        message = decode(payload[0].buffer)[0]
        return (message.physical_offset, message.store_timestamp_ms) == (physical_offset, store_ms)
    if answer.status == PullStatus.NO_NEW_MESSAGE:  # it is the end, or not shown yet
        return not _is_beyond(routes, ends, queue, offset + 1)
    return answer.next_queue_offset > offset  # it has expired meanwhile


def _is_beyond(routes: Routes, ends: BrokerEndpoints, queue: Queue, offset: int) -> bool:
    """Whether the queue ends below this offset, which was its end or below that.

    Raises NotConfirmed while a master that is to be cannot show that.
    """
    answer, _ = _pull_one(routes, ends, queue, offset)
    if answer.status == PullStatus.NO_NEW_MESSAGE:
        raise NotConfirmed(f"broker {ends.broker} does not show offset {offset - 1} of {queue} yet")
    return answer.next_queue_offset < offset


def _pull_one(
    routes: Routes, ends: BrokerEndpoints, queue: Queue, offset: int
) -> tuple[PullResult, Sequence[Frame]]:
    reader = ends.readers[queue.queue_id % len(ends.readers)]
    channel = routes.channel(reader, f"the reader at {reader}")
    pull = PullMessages(queue.topic, queue.queue_id, offset, 1, ONE_BYTES, check_crc=False)
    answer, payload = channel.ask(pull, timeout_s=ASK_S)
    if not isinstance(answer, PullResult):
        raise CometError(f"a pull was answered by {type(answer).__name__}")
    return answer, payload
