"""Finding the end of a CommitLog, and cutting what lies behind it.

Read first, then act: `find_end` only reads; `cut` may be repeated, so a kill between any two lines
of it leaves a store that the next start brings to the same end.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from cometmq.shm import _kernel
from cometmq.shm.files import (
    COMMITLOG_DIR,
    Checkpoint,
    count_dirty,
    list_segments,
    map_segment,
    segment_name,
    sync_folder,
    zero_tail,
)

log = logging.getLogger(__name__)

_BLANK = 1  # index into _kernel.REASONS


@dataclass(frozen=True)
class LogEnd:
    """Where a log ends, and why the scan stopped there."""

    scanned_from: int  # physical offset
    physical_offset: int  # end of the last whole record
    reason: str  # one of _kernel.REASONS, or "end of the last segment"
    last_store_timestamp: int  # of the last whole record, 0 without one
    records: int  # seen by the scan


def find_end(store: Path, segment_bytes: int, *, clean: bool, check_crc: bool = True) -> LogEnd:
    """Walk the records and stop at the first that does not hold. Reads only.

    After an orderly end the last written segment is enough; else the walk begins where the
    checkpoint says that everything older is safely on the disk (RocketMQ 7.4).
    """
    folder = store / COMMITLOG_DIR
    starts = list_segments(folder, segment_bytes)
    if not starts:
        return LogEnd(0, 0, "the log is empty", 0, 0)
    oldest_unsafe = None if clean else Checkpoint(store).min_timestamp
    first = _first_to_scan(folder, starts, segment_bytes, oldest_unsafe)
    at, records, timestamp = starts[first], 0, 0
    reason = "end of the last segment"
    for start in starts[first:]:
        if start != at:
            reason = f"segment {segment_name(at)} is missing"
            break
        with map_segment(folder / segment_name(start), segment_bytes, writable=False) as memory:
            at, why, count, last, last_timestamp = _kernel.scan(
                memory, start, start, start + segment_bytes, check_crc
            )
        records += count
        timestamp = last_timestamp if last >= 0 else timestamp
        if why != _BLANK:
            reason = _kernel.REASONS[why]
            break
        at = start + segment_bytes
    return LogEnd(starts[first], at, reason, timestamp, records)


def _first_to_scan(
    folder: Path, starts: list[int], segment_bytes: int, oldest_unsafe: int | None
) -> int:
    """The last segment whose first record is whole and, after a bad end, old enough."""
    for position in range(len(starts) - 1, 0, -1):
        start = starts[position]
        with map_segment(folder / segment_name(start), segment_bytes, writable=False) as memory:
            _, _, count, _, timestamp = _kernel.scan(
                memory, start, start, start + segment_bytes, True, True, 1
            )
        if count and timestamp and (oldest_unsafe is None or timestamp <= oldest_unsafe):
            return position
    return 0


def cut(store: Path, segment_bytes: int, physical_offset: int) -> int:
    """Remove everything from `physical_offset` on; how many bytes of it were not zero.

    Segments behind it go; what remains of its own is zeroed, so that it is never found again.
    """
    folder = store / COMMITLOG_DIR
    dirty = 0
    removed = False
    for start in reversed(list_segments(folder, segment_bytes)):
        path = folder / segment_name(start)
        if start >= physical_offset:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                dirty += count_dirty(descriptor, 0, segment_bytes)
            finally:
                os.close(descriptor)
            path.unlink()
            removed = True
        elif start + segment_bytes > physical_offset:
            dirty += zero_tail(path, physical_offset - start)
    if removed:
        sync_folder(folder)
    return dirty


def zero_behind(store: Path, segment_bytes: int, physical_offset: int) -> int:
    """Zero what a dead writer left unfinished; segments that are ready stay. Bytes not zero."""
    folder = store / COMMITLOG_DIR
    return sum(
        zero_tail(folder / segment_name(start), max(0, physical_offset - start))
        for start in list_segments(folder, segment_bytes)
        if start + segment_bytes > physical_offset
    )


def recover_log(store: Path, segment_bytes: int, *, clean: bool, check_crc: bool = True) -> LogEnd:
    """Bring the CommitLog to the end of its last whole record, and say so in one line."""
    began = time.monotonic()
    end = find_end(store, segment_bytes, clean=clean, check_crc=check_crc)
    dirty = cut(store, segment_bytes, end.physical_offset)
    log.info(
        "commitlog recovered after %s end: scanned %d..%d, %d records, stopped at: %s; "
        "cut %d bytes; %.0f ms",
        "an orderly" if clean else "a bad",
        end.scanned_from,
        end.physical_offset,
        end.records,
        end.reason,
        dirty,
        (time.monotonic() - began) * 1000,
    )
    return end
