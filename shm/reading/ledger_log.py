"""The ledger as it lies in the log: the bodies of its records, from a queue offset on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cometmq.protocol.ledger import LEDGER_QUEUE, LEDGER_TOPIC
from cometmq.shm.derived.consume_queue import QueueFiles
from cometmq.shm.kernel.codec import decode
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.state.ledger_mark import read_mark

log = logging.getLogger(__name__)

BATCH: Final = 1_000  # records of one look
_EMPTY: Final = (0, 0)


class LedgerLog:
    """What a store holds of the ledger.

    Args:
        reader: of the store, whose positions say how far the ledger reaches.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        found = reader.positions.queue_range(LEDGER_TOPIC, LEDGER_QUEUE) or _EMPTY
        self.begin, self.end = found  # queue offsets; the end is that of the next record

    def entries(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Queue offsets and bodies from a queue offset on, which may lie before `begin`, up to
        `end`. What is damaged is passed over, with a line in the log: then changes are missing."""
        at = max(position, self.begin)
        while at < self.end:
            result = self._reader.get_message(LEDGER_TOPIC, LEDGER_QUEUE, at, BATCH)
            if result.payload is not None:
                for message in decode(result.payload):
                    yield message.queue_offset, message.body
            missing = result.next_queue_offset - at - result.count
            if missing:
                log.error(
                    "%d of the ledger's records %d to %d do not hold, and what they changed is "
                    "not known", missing, at, result.next_queue_offset - 1,
                )  # fmt: skip
            if result.next_queue_offset <= at:
                return
            at = result.next_queue_offset

    def close(self) -> None:
        self._reader.close()


def ledger_needed_from(store: Path, queue_segment_bytes: int) -> int | None:
    """The physical offset of the first record of the ledger that is in no snapshot; None: all are.
    0: some are in none, and the first of them is not where the snapshots look for it, as in a copy
    of a log that begins later; the next snapshot ends that.

    What is not dispatched yet is not looked at. Raises StoreDamaged, StoreNotOurs.
    """
    position = read_mark(store).needed_from()
    if position is None:
        return None
    files = QueueFiles(store, LEDGER_TOPIC, LEDGER_QUEUE, queue_segment_bytes)
    entry = files.entry(position)
    if entry is None:
        return 0 if position < files.find_end().next_index else None
    return entry["physical_offset"]
