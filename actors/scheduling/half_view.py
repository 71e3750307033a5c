"""What a scheduler knows of half messages: as much as the log says of them, as far as it is
dispatched. The commitlog process knows better, and has the last word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.half_log import HalfLog
from cometmq.actors.tables.transactions import GROUP, QUEUES, Halves, OpQueue, Outcome
from cometmq.protocol.commands import BeginTransactions, CommitOffsets, GroupOffsets, QueueOffset
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.reading.store_reader import StoreReader

ASK_S: Final = 1.0  # then it is asked anew


class HalfView:
    """Follows the ops from round to round."""

    def __init__(self, family: Family, store: StoreReader) -> None:
        self.halves = Halves()
        self._ops = OpQueue()
        self._log = HalfLog(store)
        self._address = family.addresses["coordinator"]
        self._coordinator: Channel | None = None
        self._next_op = -1  # that was not read yet; -1: it has not begun
        self._told = (0, 0)  # the offsets that RocketMQ would go on from

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()

    @property
    def is_needed(self) -> bool:
        """A store that has no half message is not written to."""
        return self._log.range_of(HALF_TOPIC)[1] > 0

    def pending(self) -> Iterator[Message | None]:
        """All half messages that are pending now; None: whoever else asks may be heard. Raises
        what asking the coordinator raises."""
        if self._next_op < 0:
            self._begin()
        for at in self._log.take_ops(self._next_op, 0, self.halves, self._ops):
            self._next_op = at
            yield None
        begin, end = self._log.range_of(HALF_TOPIC)
        gone = range(self.halves.low, min(begin, end))
        self.halves.take((each, Outcome.GIVEN_UP) for each in gone)
        yield from self._log.pending(self.halves)

    def _begin(self) -> None:
        answer, _ = self._channel().ask(BeginTransactions(), timeout_s=ASK_S)
        assert isinstance(answer, GroupOffsets)
        half, op = (max(each.queue_offset, 0) for each in answer.offsets)
        self._told = half, op
        self.halves = Halves(max(half, self._log.range_of(HALF_TOPIC)[0]))
        self._next_op = max(op, self._log.range_of(OP_TOPIC)[0])
        self._ops = OpQueue(self._next_op)

    def _channel(self) -> Channel:
        if self._coordinator is None:
            self._coordinator = Channel(self._address, "the coordinator")
        return self._coordinator

    def tell_offsets(self) -> None:
        """Have consumerOffset.json say from where on a RocketMQ broker has to read; so do we."""
        offsets = (self.halves.low, self._ops.low)
        if self._next_op < 0 or offsets == self._told:
            return
        self._told = offsets
        entries = [
            QueueOffset(key.topic, key.queue_id, offset)
            for key, offset in zip(QUEUES, offsets, strict=True)
        ]
        channel = self._channel()
        channel.start_pump()  # what is answered has to be received
        channel.tell(CommitOffsets(GROUP, entries, force=True))
