"""The accumulator: open batches, which fill until they are full, due, or their queue is free."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from cometmq.client.sending.attempts import CHECK_S, GRACE_S, Expired
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.outgoing import Outgoing, Target
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.window import Window
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import BatchFull

Quick = dict[str, tuple[Batch, codec.BatchEncoder, int]]  # by topic; with the delay level

OPEN_MAX: Final = 24  # delay levels that a queue has open batches of at once


class Batching(NamedTuple):
    """How large a batch may become, and how long it may wait for that."""

    bytes_max: int = 262_144
    count_max: int = 16_384
    linger_s: float = 0.0
    window_ms: int = 0  # messages whose keys are there are not stored; 0: all are


class Accumulator:
    """Guarded by the producer's lock.

    Always: a batch has an encoder exactly as long as it is open. An open batch is one lane's
    (`lane.open`), a topic's for whichever queue's turn it is (`lanes.free`), or still in the hands
    of its maker. Of either there is one a delay level, 0 and TIMED among them: what has different
    ones is stored in different places, and has no order among each other.
    `quick` has free batches alone, and a batch is taken out of it before it is closed: messages are
    added to those without the lock (`QuickSend`).

    Args:
        timeout_s: how long a batch is tried once it is closed.
        line_up: takes a closed batch, for its lane.
        watch: called for each new batch: somebody has to look after it. True: it is the first that
            lingers, and so may be due before anything else is.
    """

    def __init__(
        self,
        batching: Batching,
        topics: dict[str, TopicLanes],
        window: Window,
        timeout_s: float,
        line_up: Callable[[Batch, Lane], None],
        watch: Callable[[bool], None],
    ) -> None:
        self.linger_s = batching.linger_s
        self.quick: tuple[Quick, Quick] = ({}, {})  # plain batches; those for later
        self._batching = batching
        self._topics = topics
        self._window = window
        self._timeout_s = timeout_s
        self._line_up = line_up
        self._watch = watch
        self._encoders: list[codec.BatchEncoder] = []
        self._lingering: deque[Batch] = deque()  # open or closed meanwhile, by `due`

    # --- one batch ---

    def open(
        self,
        topic: str,
        *,
        wait: bool,
        delay_level: int = 0,
        sys_flag: int | None = 0,
        producer_group: str = "",
        linger_s: float = 0.0,
    ) -> Batch:
        """A new batch, which leaves when it is full or has lingered."""
        encoder = self._encoders.pop() if self._encoders else self.new_encoder()
        batch = Batch(
            topic,
            encoder,
            wait=wait,
            delay_level=delay_level,
            sys_flag=sys_flag,
            producer_group=producer_group,
            window_ms=self._batching.window_ms,
        )
        self._window.opened(batch)
        now = time.monotonic()
        batch.limit = now + linger_s + self._timeout_s + GRACE_S
        if linger_s:
            batch.due = now + linger_s
            self._lingering.append(batch)
        self._watch(bool(linger_s) and len(self._lingering) == 1)
        return batch

    def new_encoder(self) -> codec.BatchEncoder:
        return codec.BatchEncoder(
            size_max=self._batching.bytes_max, count_max=self._batching.count_max
        )

    def drop(self, batch: Batch) -> None:
        """Forget an open batch, and what may be in it."""
        self._window.dropped(batch)
        if batch.encoder is not None:
            batch.encoder.take()
            self._encoders.append(batch.encoder)
            batch.encoder = None

    def close(self, batch: Batch, lane: Lane) -> None:
        """It takes no more messages and stands in line for the queue."""
        if lane.open.get(batch.delay_level) is batch:
            del lane.open[batch.delay_level]
        self._seal(batch)
        self._line_up(batch, lane)

    def _seal(self, batch: Batch) -> None:
        encoder = batch.encoder
        assert encoder is not None
        topic = self._topics[batch.topic]
        if topic.free.get(batch.delay_level) is batch:
            del topic.free[batch.delay_level]
            self.quick[batch.delay_level != 0].pop(batch.topic, None)
        batch.count = encoder.count
        batch.body = encoder.take()
        batch.encoder = None
        self._encoders.append(encoder)

    # --- messages ---

    def add(
        self,
        lanes: TopicLanes,
        lane: Lane | None,
        target: Target,
        message: Outgoing,
        touched: list[Lane],
    ) -> tuple[Batch, int]:
        """Add a message to the open batch it belongs to, and its index there.

        Args:
            lane: the queue that its target names; None: any.
            touched: gets the lane of a batch that had to be closed for it.
        """
        taking = lanes.free if lane is None else lane.open
        batch = taking.get(message.delay_level)
        if batch is None and len(taking) >= OPEN_MAX:
            batch = next(iter(taking.values()))  # the oldest makes room
        if batch is not None:
            if batch.takes(message):
                index = _put(batch, target, message)
                if index >= 0:
                    return batch, index
            taker = lane or lanes.next()
            self.close(batch, taker)
            touched.append(taker)
        batch = self.open(
            lanes.topic,
            wait=message.wait,
            delay_level=message.delay_level,
            sys_flag=message.sys_flag,
            producer_group=message.producer_group,
            linger_s=self.linger_s,
        )
        batch.free, batch.lane = lane is None, lane
        batch.targets = None if lane is None else []
        try:
            index = _put(batch, target, message)
        except BaseException:
            self.drop(batch)
            raise
        taking[message.delay_level] = batch
        return batch, index

    def remember(self, batch: Batch, *, may_be_quick: bool) -> None:
        """`flush` has to raise its error; more messages may come into it the quick way."""
        batch.remembered = True
        quick = may_be_quick and batch.free and batch.wait and not batch.producer_group
        if quick and batch.encoder is not None:
            self.quick[batch.delay_level != 0][batch.topic] = (
                batch,
                batch.encoder,
                batch.delay_level,
            )

    # --- batches that leave ---

    def close_if_idle(self, batch: Batch, lanes: TopicLanes, lane: Lane | None) -> list[Lane]:
        """Without linger an open batch waits only while its queue is busy."""
        if lane is None:
            lane = lanes.next_idle()
        elif lane.sent is not None or lane.waiting or lane.paused:
            return []
        if lane is None:
            return []
        self.close(batch, lane)
        return [lane]

    def close_overdue(self, lane: Lane, now: float) -> None:
        """A queue has become free: close what has waited for that."""
        free = {} if lane.gone else self._topics[lane.topic].free
        for batch in (*lane.open.values(), *free.values()):
            if batch.due <= now:
                self.close(batch, lane)
                return

    def close_due(self, now: float) -> tuple[list[Lane], Expired]:
        """What has lingered long enough; and what has for a topic that may not be written now."""
        lanes: list[Lane] = []
        refused: Expired = []
        while self._lingering and self._lingering[0].due <= now:
            batch = self._lingering.popleft()
            if batch.encoder is None:
                continue  # it was full before
            topic = self._topics[batch.topic]
            if batch is topic.free.get(batch.delay_level):
                lane = topic.next_idle()
                if lane is not None:
                    self.close(batch, lane)
                    lanes.append(lane)
                elif not topic.lanes:
                    refused.append(self._refuse(batch, topic))
                # Else it leaves with the next queue that becomes free.
            elif batch.lane is not None:
                lanes.append(batch.lane)
        return lanes, refused

    def close_forgotten(self, topic: TopicLanes, now: float) -> tuple[list[Lane], Expired]:
        """Open batches that should have left long ago: queues that are always busy take them too,
        and their time begins to run."""
        lanes: list[Lane] = []
        refused: Expired = []
        for lane in topic.all():
            for batch in tuple(lane.open.values()):
                if batch.due + CHECK_S <= now:
                    self.close(batch, lane)
                    lanes.append(lane)
        for batch in tuple(topic.free.values()):
            if batch.due + CHECK_S > now:
                continue
            if not topic.lanes:
                refused.append(self._refuse(batch, topic))
                continue
            lane = topic.next()
            self.close(batch, lane)
            lanes.append(lane)
        return lanes, refused

    def close_all(self) -> tuple[list[Lane], Expired]:
        lanes: list[Lane] = []
        refused: Expired = []
        for topic in self._topics.values():
            closed, expired = self.close_forgotten(topic, math.inf)
            lanes += closed
            refused += expired
        return lanes, refused

    def _refuse(self, batch: Batch, topic: TopicLanes) -> tuple[Batch, CometError]:
        """What waits for any queue of a topic that has none to be written any more."""
        self._seal(batch)
        error = topic.not_writable()
        self._window.sent_off(batch)
        self._window.settled(batch, error)
        return batch, error

    @property
    def next_due(self) -> float | None:
        """When `close_due` will have something; time.monotonic()."""
        return self._lingering[0].due if self._lingering else None


def _put(batch: Batch, target: Target, message: Outgoing) -> int:
    """Add a message to an open batch; return its index there, -1 if the batch is full."""
    assert batch.encoder is not None
    try:
        index = message.add_to(batch.encoder)
    except BatchFull:
        return -1
    if batch.targets is not None:
        batch.targets.append(target)
    return index
