"""The end of a copy of a log: what a power cut has torn there, and no CRC tells."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from cometmq.shm.kernel import _kernel
from cometmq.shm.log.recovery import PAGE, PAGE_END_BYTES, PAGES_LOST, LogEnd
from cometmq.shm.os.files import COMMITLOG_DIR, map_segment, segment_name

log = logging.getLogger(__name__)


def without_torn_record(store: Path, segment_bytes: int, end: LogEnd) -> LogEnd:
    """The log's end, or where its last record begins, if a page of that record's properties was
    never written to the disk: no CRC covers them. For a copy, which gets the record again. Half of
    a derived write stays: the copy has acknowledged it, and the rest comes. Reads only."""
    start = end.physical_offset // segment_bytes * segment_bytes
    path = store / COMMITLOG_DIR / segment_name(start)
    if end.physical_offset == start or not path.exists():
        return end
    with map_segment(path, segment_bytes, writable=False) as memory:
        reached, _, count, last, _ = _kernel.scan(memory, start, start, end.physical_offset, False)
        if not count or reached != end.physical_offset:
            return end
        record = bytes(memory[last - start : reached - start])
    (message,) = _kernel.decode(record)
    if not _has_lost_page(message.raw_properties, reached - start):
        return end
    log.warning("the record at %d has properties that never came to the disk: it is cut", last)
    records = max(0, end.records - 1)
    return msgspec.structs.replace(end, physical_offset=last, reason=PAGES_LOST, records=records)


def _has_lost_page(content: bytes, end: int) -> bool:
    """Whether a page has nothing of it, or nothing but zeros at its own end; `end` is the
    content's, in its file."""
    at = end - len(content)
    while content:
        size = PAGE - at % PAGE
        piece, content = content[:size], content[size:]
        if not any(piece) or (content and not any(piece[-PAGE_END_BYTES:])):
            return True
        at += size
    return False
