"""Marks of derived writes as they lie in the log: the last snapshot of positions, and what follows.

See protocol/derived.py.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from cometmq.protocol.derived import (
    DERIVED_QUEUE,
    DERIVED_TOPIC,
    Forgotten,
    Mark,
    Snapshot,
    read_mark,
)
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.kernel.codec import decode
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

BATCH: Final = 1_100  # records of one look: a little more than lie between two snapshots


class StoredMark(NamedTuple):
    mark: Mark | Snapshot | Forgotten
    at_ms: int  # its store time
    physical_offset: int


def last_marks(reader: StoreReader) -> list[StoredMark]:
    """All marks from the last snapshot on, oldest first; without one all that there are.

    What does not hold is passed over, with a line in the log: then a deriver may make its last
    writes again. However long the queue is, what is read of it is bounded.

    Args:
        reader: of the store, whose positions say how far the queue of the marks reaches.
    """
    begin, end = reader.positions.queue_range(DERIVED_TOPIC, DERIVED_QUEUE) or (0, 0)
    found: list[StoredMark] = []
    while end > begin:
        at = max(begin, end - BATCH)
        found = _marks(reader, at, end) + found
        snapshots = [at for at, each in enumerate(found) if isinstance(each.mark, Snapshot)]
        if snapshots:
            return found[snapshots[-1] :]
        end = at
    return found


def _marks(reader: StoreReader, at: int, end: int) -> list[StoredMark]:
    """Those with queue offsets [at, end)."""
    found: list[StoredMark] = []
    while at < end:
        result = reader.get_message(DERIVED_TOPIC, DERIVED_QUEUE, at, end - at)
        for message in decode(result.payload) if result.payload is not None else ():
            if message.queue_offset >= end:
                break
            try:
                mark = read_mark(message.body)
            except StoreDamaged as error:
                log.error("record %d: %s", message.queue_offset, error)
                continue
            found.append(StoredMark(mark, message.store_timestamp_ms, message.physical_offset))
        next_at = min(result.next_queue_offset, end)
        missing = next_at - at - result.count
        if missing > 0:
            log.error("%d of the marks %d to %d do not hold", missing, at, next_at - 1)
        if next_at <= at:
            break
        at = next_at
    return found
