"""Half messages and ops as they stand in the log, for whoever has to know what is pending."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from cometmq.actors.tables.transactions import Ended, Halves, OpQueue, last_of, read_op
from cometmq.protocol.names import HALF_TOPIC, OP_TOPIC
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

HALVES_COUNT: Final = 512  # read at once
OPS_COUNT: Final = 16  # of which each may be about 2,048 halves
READ_BYTES_MAX: Final = 1_048_576


class HalfLog:
    """Reads them as far as they are dispatched. One thread uses it.

    Args:
        store: its limits are not below those of this module.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store

    def range_of(self, topic: str) -> tuple[int, int]:
        """From which queue offset to which one there are messages in its only queue."""
        reach = self._store.positions.queue_range(topic, 0)
        return (reach.min_queue_offset, reach.max_queue_offset) if reach else (0, 0)

    def take_ops(self, begin: int, needed: int, halves: Halves, ops: OpQueue) -> Iterator[int]:
        """Note what the ops say from a queue offset on; steps yield from where it goes on.

        Args:
            needed: ops from there on count for `ops`.
        """
        end = self.range_of(OP_TOPIC)[1]
        halves_end = self.range_of(HALF_TOPIC)[1]
        yield begin
        for message in self._read(OP_TOPIC, begin, end, OPS_COUNT):
            if isinstance(message, int):
                yield message
                continue
            ended: list[Ended] = [
                each for each in read_op(message.body, message.properties) if each[0] < halves_end
            ]
            halves.take(ended)
            if message.queue_offset >= needed:
                ops.take(message.queue_offset, last_of(ended), halves)

    def pending(self, halves: Halves) -> Iterator[Message | None]:
        """Half messages that are pending; None between two reads."""
        end = self.range_of(HALF_TOPIC)[1]
        for message in self._read(HALF_TOPIC, halves.low, end, HALVES_COUNT, halves):
            yield None if isinstance(message, int) else message

    def _read(
        self, topic: str, begin: int, end: int, count: int, pending_in: Halves | None = None
    ) -> Iterator[Message | int]:
        """Messages of a queue, or those of them that are pending; between two reads from where it
        goes on."""
        at = begin
        while at < end:
            if pending_in is not None:
                at = pending_in.pending(at, end)
                if at >= end:
                    return
            result = self._store.get_message(
                topic, 0, at, min(count, end - at), max_bytes=READ_BYTES_MAX
            )
            if result.payload is not None:
                for message in decode(result.payload):
                    if pending_in is None or pending_in.is_pending(message.queue_offset):
                        yield message
            if result.next_queue_offset <= at:
                log.error("%s cannot be read from queue offset %d on", topic, at)
                return
            at = result.next_queue_offset
            yield at
