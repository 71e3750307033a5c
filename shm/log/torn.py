"""The end of a log: what a power cut has torn there, and no CRC tells.

Of records that were published together some are missing; or the last record has a page with its
topic or its properties that was never written, for the CRC is the body's alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from cometmq.protocol.derived import DERIVED_TOPIC, Mark, read_mark
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import FileMap, RecordDamaged
from cometmq.shm.log.recovery import (
    FLUSH_SLACK_MS,
    PAGE,
    PAGE_END_BYTES,
    PAGES_LOST,
    LogEnd,
    find_whole,
)
from cometmq.shm.os.files import COMMITLOG_DIR, Checkpoint, map_segment, segment_name

log = logging.getLogger(__name__)

TORN_WRITE: Final = "the derived write that begins there was not whole"


def without_torn_end(store: Path, segment_bytes: int, end: LogEnd) -> LogEnd:
    """The log's end after a bad end, where nobody else has it: a record that was surely flushed is
    as its sender made it, and stays. Reads only."""
    flushed_ms = Checkpoint(store).words["physic_msg_timestamp"]
    if end.last_store_timestamp >= flushed_ms - FLUSH_SLACK_MS:
        end = without_torn_record(store, segment_bytes, end)
    return without_torn_write(store, segment_bytes, end)


def without_torn_record(store: Path, segment_bytes: int, end: LogEnd) -> LogEnd:
    """The log's end, or where its last record begins, if a page of that record was never written to
    the disk. Alone for a copy: half of a derived write stays there, since the copy has acknowledged
    it, and the rest comes. Reads only."""
    start = end.physical_offset // segment_bytes * segment_bytes
    path = store / COMMITLOG_DIR / segment_name(start)
    if end.physical_offset == start or not path.exists():
        return end
    begin = max([start, *(each.physical_offset + each.size_bytes for each in end.damages)])
    with map_segment(path, segment_bytes, writable=False) as memory:
        reached, _, count, last, _ = codec.scan(memory, start, begin, end.physical_offset, False)
        if not count or reached != end.physical_offset:
            return end
        record = bytes(memory[last - start : reached - start])
    (message,) = codec.decode(record)
    content, behind = message.raw_properties, 0
    if not content:
        content, behind = message.topic.encode(), 2  # the size of no properties: zeros anyway
    if not _has_lost_page(content, reached - start - behind):
        return end
    log.warning("the end of the record at %d never came to the disk: the log ends before it", last)
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


def without_torn_write(store: Path, segment_bytes: int, end: LogEnd) -> LogEnd:
    """The log's end, or where its last derived write begins, if not all of that is there.

    A mark says how many records follow on it (protocol/derived.py). They lie in one segment, and
    were published together: a power cut may have left some of them. Reads only; records which were
    damaged later, with whole ones behind them, count as there.
    """
    start = (end.physical_offset - 1) // segment_bytes * segment_bytes
    path = store / COMMITLOG_DIR / segment_name(max(0, start))
    if start < 0 or not path.exists():
        return end
    with map_segment(path, segment_bytes, writable=False) as memory:
        found = _last_mark(memory, path, start, end.physical_offset)
        if found is None or any(each.physical_offset >= found.at for each in end.damages):
            return end
        record = bytes(memory[found.at - start : found.at - start + found.size])
    try:
        mark = read_mark(codec.decode(record)[0].body)
    except (StoreDamaged, RecordDamaged) as error:
        log.error("%s: at physical offset %d: %s", path, found.at, error)
        return end
    if not isinstance(mark, Mark) or mark.count <= found.behind:
        return end
    log.warning(
        "a write of deriver %s at %d has %d of its %d records: it is cut, to be made again",
        mark.deriver, found.at, found.behind, mark.count,
    )  # fmt: skip
    return msgspec.structs.replace(
        end,
        physical_offset=found.at,
        reason=TORN_WRITE,
        last_store_timestamp=found.timestamp_before or end.last_store_timestamp,
        records=end.records - found.behind - 1,
    )


class _LastMark(msgspec.Struct, frozen=True):
    at: int  # physical offset
    size: int
    behind: int  # records
    timestamp_before: int  # store time of the record before it, 0 if that is not in the segment


def _last_mark(memory: FileMap, path: Path, start: int, end: int) -> _LastMark | None:
    """The last record of DERIVED_TOPIC in a segment, from `start` to the log's end."""
    topic, last, at = DERIVED_TOPIC.encode(), None, start
    with path.open("rb") as file:
        while 0 <= at < end:
            reached, found, size, behind, before = codec.find_last(memory, start, at, end, topic)
            if found >= 0:
                last = _LastMark(found, size, behind, before)
            if reached >= end:
                break
            at = find_whole(memory, file.fileno(), start, reached + 1, end, 0)
    return last
