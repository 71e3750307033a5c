"""The prefetch buffer: the queues that a consumer owns, and what has come and not gone out."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from cometmq.client.receiving.progress import Progress
from cometmq.client.receiving.replicas import Replicas
from cometmq.protocol.commands import BrokerEndpoints
from cometmq.protocol.frames import Frame
from cometmq.protocol.tags import split
from cometmq.shm.kernel.codec import Message, set_source
from cometmq.shm.reading.selection import selection_of


class Lease:
    """How long what a member owns at a broker is sure to be its own."""

    __slots__ = ("until",)

    def __init__(self, until: float = math.inf) -> None:
        self.until = until  # time.monotonic()


OVER: Final = Lease(0.0)


NO_RUN: Final = 0  # no answer has named the broker's run yet
UNCHECKED_RUN: Final = -1  # unknown, and read messages were in doubt: no broker's run


class Seen(NamedTuple):
    """Last message that was read from a queue."""

    queue_offset: int
    physical_offset: int
    store_ms: int


class Queue:
    """A queue that the consumer owns."""

    __slots__ = (
        "broker",
        "buffered_bytes",
        "chunks",
        "committed",
        "doubtful",
        "doubts",
        "dropped",
        "epoch",
        "failures",
        "held",
        "hungry",
        "lease",
        "next_offset",
        "ownership",
        "parked",
        "paused",
        "progress",
        "pull_sent_at",
        "pulling",
        "queue_id",
        "replica",
        "replicas",
        "retry_at",
        "run",
        "seen",
        "selection",
        "source",
        "sql",
        "store_hosts",
        "tags",
        "topic",
    )

    def __init__(
        self,
        replicas: Replicas,
        broker: str,
        topic: str,
        queue_id: int,
        expression: str,
        queue_offset: int,
        ownership: int = 0,
        lease: Lease | None = None,
    ) -> None:
        self.replicas = replicas  # where the broker is now
        self.replica = replicas.choose()  # the id of the one that it is read from
        self.broker = broker
        self.topic = topic
        self.queue_id = queue_id
        self.source: object = None  # where replies to its messages go
        self.subscribe(expression)
        self.progress = Progress(queue_offset)
        self.committed = queue_offset  # what the coordinator has
        self.ownership = ownership  # its epoch, which is named in every commit
        self.next_offset = queue_offset  # what is pulled next
        self.epoch = 0  # answers to pulls of an earlier one are not wanted
        self.pulling = False
        self.pull_sent_at = 0.0
        self.lease = lease or Lease()
        self.held = False  # enough of it is in the user's hands: nothing more is read
        self.hungry = False  # would pull if less was buffered
        self.retry_at = 0.0  # when a failed pull is tried again; 0: none has
        self.failures = 0
        self.buffered_bytes = 0
        self.chunks: set[Chunk] = set()
        self.store_hosts: set[str] = set()
        self.seen: Seen | None = None  # since it was taken on, or moved
        self.run = NO_RUN  # the broker's, in which the last answer came
        self.doubtful = False  # the broker may not have any more what was read: see doubts.py
        self.doubts = 0  # how often it became doubtful
        self.dropped = False
        self.paused = False  # by the user: nothing of it is read or handed out
        self.parked: list[Chunk] = []  # taken out of the line while it is; used by who polls

    def endpoints(self) -> BrokerEndpoints:
        """Of the master."""
        return self.replicas.master

    def reads_from(self) -> BrokerEndpoints:
        return self.replicas.at(self.replica)

    def pause(self) -> None:
        """Hand out nothing more of what is buffered until `unpause`; none of it is lost."""
        self.paused = True
        for chunk in self.chunks:
            chunk.hold()

    def unpause(self) -> None:
        """Who polls sees to the rest; see `take_back`."""
        self.paused = False

    def take_back(self) -> list[Chunk]:
        """What goes back into the line, in front; nothing while it is paused. Under the lock."""
        if self.paused:
            return []
        parked, self.parked = self.parked, []
        for chunk in self.chunks:
            chunk.let_go()
        return parked

    @property
    def position(self) -> int:
        """The queue offset behind what was handed out, and what was passed over behind that."""
        last = [chunk.last_out + 1 for chunk in self.chunks if chunk.position]
        return max(self.progress.done, self.progress.delivered, *last)

    def was_handed_out(self, queue_offset: int) -> bool:
        """Since it was taken on, or moved."""
        return queue_offset < self.progress.delivered or any(
            chunk.position and queue_offset <= chunk.last_out for chunk in self.chunks
        )

    def doubt(self) -> None:
        """Note that the broker may have lost read messages. Under the lock.

        The run is kept: which run a check asks is not known, and an answer of another one shows
        that the check may have asked an earlier one. A queue that no run is known of is checked
        again after its first answer.
        """
        self.doubtful = True
        self.doubts += 1
        if self.run == NO_RUN:
            self.run = UNCHECKED_RUN

    def is_of_another_run(self, run: int) -> bool:
        """Note the run that an answer came from; whether the broker has ended and started since
        the last answer, or since a check that may have asked an earlier run. NO_RUN: not known."""
        if run == NO_RUN:
            return False
        before, self.run = self.run, run
        return before not in (NO_RUN, run)

    def subscribe(self, expression: str) -> None:
        """`expression`: tags and SQL92, as protocol/tags.py joins them."""
        self.tags, self.sql = split(expression)
        self.selection = selection_of(self.tags, self.sql)

    def discard(self) -> None:
        """Forget what is buffered and what is on its way."""
        self.epoch += 1
        self.pulling = False
        self.retry_at = 0.0
        for chunk in self.chunks:
            if chunk.position and (chunk.stop or chunk.held):
                self.progress.delivered = max(self.progress.delivered, chunk.last_out + 1)
            chunk.stop = chunk.held = 0
        self.chunks.clear()
        self.parked.clear()
        self.buffered_bytes = 0

    def read_anew(self) -> None:
        """Whatever comes behind what was handed out: by another expression."""
        self.discard()
        self.next_offset = self.position
        self.progress.forget_from(self.next_offset)

    def move(self, queue_offset: int) -> None:
        """Go on from there."""
        self.discard()
        self.progress = Progress(queue_offset)
        self.next_offset = queue_offset
        self.seen = None

    def __repr__(self) -> str:
        return f"{self.topic}/{self.queue_id}@{self.broker}"


class Chunk:
    """The messages of one answer; bytes until they are needed."""

    __slots__ = ("end", "frame", "held", "messages", "position", "queue", "size", "start", "stop")

    def __init__(
        self,
        queue: Queue,
        start: int,
        end: int,
        frame: Frame | None,
        count: int,
        messages: list[Message] | None = None,
    ) -> None:
        self.queue = queue
        self.start = start  # queue offsets [start, end) were looked at for it
        self.end = end
        self.frame = frame
        self.size = 0 if frame is None else len(frame)
        self.messages = messages or []
        self.position = 0  # the next message to go out
        self.stop = count  # where they end; 0 once the queue is lost, and while it is paused
        self.held = 0  # what `stop` was before the pause

    @property
    def last_out(self) -> int:
        """The queue offset of the last message that has gone out."""
        return self.messages[self.position - 1].queue_offset

    def hold(self) -> None:
        if self.stop:
            self.held, self.stop = self.stop, 0

    def let_go(self) -> None:
        if self.held:
            self.stop, self.held = self.held, 0

    def arrange(self) -> None:
        """Its messages are known: which will be delivered, and from where. Under the lock."""
        queue, messages = self.queue, self.messages
        queue.progress.arrived(self.start, self.end, messages)
        if messages:
            set_source(messages, queue.source)
            last = messages[-1]
            if queue.seen is None or queue.seen.queue_offset < last.queue_offset:  # in any order
                queue.seen = Seen(last.queue_offset, last.physical_offset, last.store_timestamp_ms)
            queue.store_hosts.add(messages[0].store_host)
