"""The log of transactions: which half messages have ended, as the ops say, and new ops."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from cometmq.actors.books.transactions import Ended, Halves, OpQueue, first_of, op_of, read_op
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.protocol.commands import (
    CommitOffsets,
    Cover,
    Derivation,
    DerivedPosition,
    FetchOffsets,
    GetDerived,
    GroupOffsets,
    Position,
    QueueKey,
    QueueOffset,
    RecordsAppended,
)
from cometmq.protocol.errors import CometError, NotConfirmed, OffsetIllegal, Refused
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel._kernel import Message, decode
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

NAME: Final = "transactions"  # of the deriver
GROUP: Final = "CID_RMQ_SYS_TRANS"  # RocketMQ's, by whose offsets it goes on
READ_COUNT: Final = 512  # records at once
READ_BYTES_MAX: Final = 1_048_576
OPS_BACK: Final = 4_096  # ops that are read again at a start, so that repeated ends are known
ASK_S: Final = 1.0  # then it is asked anew
_QUEUES: Final = [QueueKey(HALF_TOPIC, 0), QueueKey(OP_TOPIC, 0)]


class Unsure(Exception):
    """Nobody knows what has become of a write: the log has to be read again."""


class TransactionLog:
    """Has records written together with the op that says why, once.

    A write is a derived write whose position is (life, number): whoever begins takes a life of its
    own first. So no write of an earlier life, or one that was given up, comes afterwards.
    """

    def __init__(self, family: Family, commitlog: Channel, store: StoreReader) -> None:
        self.halves = Halves()
        self.is_ready = False
        self._ops = OpQueue()
        self._commitlog = commitlog
        self._coordinator_address = family.addresses["coordinator"]
        self._coordinator: Channel | None = None
        self._store = store
        settings = family.settings
        self._write_s = ASK_S + max(settings.sync_flush_timeout_ms / 1000, settings.slave_wait_s)
        self._wrote = family.control.read(Counter.WROTE)
        self._position = Position()
        self._numbers = itertools.count(1)
        self._told = (0, 0)  # the offsets that RocketMQ would go on from

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()

    # --- the beginning ---

    def load(self) -> Iterator[int]:
        """Take a life, and read what there is. Yields the physical offset up to which the log has
        to be dispatched before it goes on; 0: at once, when others have been heard."""
        self.is_ready = False
        self._take_life()
        yield self._wrote.value
        half_begin, op_begin = self._offsets_of_group()
        half_begin = max(half_begin, self.range_of(HALF_TOPIC)[0])
        op_first, op_end = self.range_of(OP_TOPIC)
        op_begin = max(op_begin, op_first)
        halves_end = self.range_of(HALF_TOPIC)[1]
        halves = Halves(half_begin)
        ops = OpQueue(op_begin)
        back = max(op_first, op_begin - OPS_BACK)
        for message in self.read(OP_TOPIC, back, op_end):
            if message is None:
                yield 0
                continue
            ended = [each for each in read_op(message.body, message.properties)
                     if each[0] < halves_end]  # fmt: skip
            halves.take(ended)
            if message.queue_offset >= op_begin:
                ops.take(message.queue_offset, ended, halves)
        for message in self.read(HALF_TOPIC, halves.low, halves_end, halves):
            if message is None:
                yield 0
                continue
            first = first_of(message.properties, message.queue_offset)
            if first != message.queue_offset:
                halves.copies[first] = message.queue_offset
        self.halves, self._ops = halves, ops
        self._told = (half_begin, op_begin)
        self.is_ready = True

    def _take_life(self) -> None:
        answer, _ = self._commitlog.ask(GetDerived(NAME), timeout_s=ASK_S)
        assert isinstance(answer, DerivedPosition)
        before = answer.position if answer.is_known else Position()
        after = Position(before.epoch + 1, 0)
        command, payload = InnerRecords().take(Cover.WRITTEN, Derivation(NAME, before, after))
        written, _ = self._commitlog.ask(command, payload, timeout_s=ASK_S)
        assert isinstance(written, RecordsAppended)
        if written.already:
            raise NotConfirmed("another process has taken that life")
        self._position = after

    def _offsets_of_group(self) -> tuple[int, int]:
        """How far the group has come, by RocketMQ's word or ours: below that nothing is pending."""
        answer, _ = self._channel().ask(FetchOffsets(GROUP, _QUEUES), timeout_s=ASK_S)
        assert isinstance(answer, GroupOffsets)
        half, op = (max(each.queue_offset, 0) for each in answer.offsets)
        return half, op

    def _channel(self) -> Channel:
        if self._coordinator is None:
            self._coordinator = Channel(self._coordinator_address, "the coordinator")
        return self._coordinator

    # --- reading ---

    def range_of(self, topic: str) -> tuple[int, int]:
        """From which queue offset to which one there are messages in its only queue."""
        reach = self._store.positions.queue_range(topic, 0)
        return (reach.min_queue_offset, reach.max_queue_offset) if reach else (0, 0)

    def read(
        self, topic: str, begin: int, end: int, pending_in: Halves | None = None
    ) -> Iterator[Message | None]:
        """Messages of a queue, or those of them that are pending; None between two reads."""
        at = begin
        while at < end:
            if pending_in is not None:
                at = pending_in.pending(at, end)
                if at >= end:
                    return
            result = self._store.get_message(
                topic, 0, at, min(READ_COUNT, end - at), max_bytes=READ_BYTES_MAX
            )
            if result.payload is not None:
                for message in decode(result.payload):
                    if pending_in is None or not pending_in.find(message.queue_offset):
                        yield message
            if result.next_queue_offset <= at:
                log.error("%s cannot be read from queue offset %d on", topic, at)
                return
            at = result.next_queue_offset
            yield None

    # --- writing ---

    def write(
        self, records: InnerRecords, ended: Sequence[Ended]
    ) -> tuple[memoryview, NotConfirmed | None]:
        """Have records stored, and that these halves have ended so: both or neither.

        Returns queue offset and physical offset of each record; and an error, if they are not known
        to be as safe as they should. Raises Refused where nothing is stored; Unsure.
        """
        assert self.is_ready
        body, properties = op_of(ended)
        records.encoder.add(records.queue(OP_TOPIC, 0), body, properties)
        after = Position(self._position.epoch, next(self._numbers))
        derived = Derivation(NAME, self._position, after)
        try:
            answer, payload = self._commitlog.ask(
                *records.take(Cover.POLICY, derived), timeout_s=self._write_s
            )
        except OffsetIllegal as error:
            raise self._unsure(error) from None
        except Refused:
            raise
        except CometError as error:
            raise self._unsure(error) from None
        assert isinstance(answer, RecordsAppended)
        if answer.already:
            raise self._unsure(NotConfirmed("another write has its number"))
        self._position = after
        places = memoryview(bytes(payload[0].buffer)).cast("q")
        self.halves.take(ended)
        self._ops.take(places[-2], ended, self.halves)
        return places, None if answer.is_kept else NotConfirmed(answer.text)

    def _unsure(self, error: CometError) -> Unsure:
        self.is_ready = False
        return Unsure(str(error))

    # --- for RocketMQ ---

    def tell_offsets(self) -> None:
        """Have consumerOffset.json say from where on a RocketMQ broker has to read; so do we."""
        offsets = (self.halves.low, self._ops.low)
        if not self.is_ready or offsets == self._told:
            return
        self._told = offsets
        entries = [
            QueueOffset(key.topic, key.queue_id, offset)
            for key, offset in zip(_QUEUES, offsets, strict=True)
        ]
        channel = self._channel()
        channel.start_pump()  # what is answered has to be received
        channel.tell(CommitOffsets(GROUP, entries, force=True))
