"""Findings of an audit: what is wrong with a store, and when a hole in a queue's offsets is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cometmq.shm.derived.consume_queue import QueueFiles, is_filler
from cometmq.spark.jobs.running import LogBounds

LOOKED_AT_MAX: Final = 10_000  # entries of one hole in a queue's offsets
ERROR: Final = "error"
WARNING: Final = "warning"


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    severity: str
    broker: str
    segment: str  # its file's name; empty for what concerns a queue's end
    topic: str
    queue_id: int  # -1: in no queue
    queue_offset: int  # -1: of no message
    physical_offset: int
    expected: str
    actual: str


class QueueSummary(msgspec.Struct, frozen=True):
    """A queue as the log has it."""

    broker: str
    topic: str
    queue_id: int
    log_count: int
    cq_count: int
    min_offset: int
    max_offset: int
    size_bytes: int
    checksum_log: str
    checksum_cq: str
    gaps: int  # queue offsets that no record has


class Audited(msgspec.Struct, frozen=True):
    """What was looked at, and what was found."""

    store: str
    broker: str
    log_min: int
    log_max: int
    segments: int
    expired: int  # segments that the cleaner took away meanwhile
    records: int
    seconds: float
    findings: list[Finding]
    left_out: int  # findings that were only counted
    not_checked: list[str]  # queues for which there are no rules here
    queues: list[QueueSummary]


class Lane(msgspec.Struct):
    """A queue in one segment."""

    topic: str
    queue_id: int
    count: int
    size_bytes: int
    first_offset: int
    last_offset: int
    first_physical: int
    last_physical: int
    first_ms: int  # the earliest store time
    last_ms: int
    log_sum: int
    queue_sum: int
    missing: int


class SegmentAudit(msgspec.Struct):
    """What one task answers."""

    start: int
    records: int = 0
    expired: bool = False
    left_out: int = 0
    damages: list[tuple[int, int]] = msgspec.field(default_factory=list)  # physical offset, bytes
    findings: list[Finding] = msgspec.field(default_factory=list)
    lanes: list[Lane] = msgspec.field(default_factory=list)


def queue_files(bounds: LogBounds, topic: str, queue_id: int) -> QueueFiles:
    return QueueFiles(Path(bounds.store), topic, queue_id, bounds.queue_segment_bytes)


def holes_in(
    bounds: LogBounds,
    damages: Sequence[tuple[int, int]],
    topic: str,
    queue_id: int,
    offsets: tuple[int, int],
    places: tuple[int, int],
) -> Iterator[Finding]:
    """What is to be said of queue offsets [begin, end) that no record has.

    Damage between the two `places`, the physical offsets of their neighbours, has been said and
    explains the hole, and entries that point into damage. Other entries are too many.
    """
    begin, end = offsets
    explained = any(places[0] < at < places[1] for at, _ in damages)
    extra = extra_entries(bounds, damages, topic, queue_id, begin, end)
    for index, physical_offset in extra:
        yield Finding(
            "CQ_EXTRA", ERROR, bounds.broker, "", topic, queue_id, index, physical_offset,
            "no entry: no record has this queue offset", f"physical offset {physical_offset}",
        )  # fmt: skip
    if not explained and not extra:
        yield Finding(
            "OFFSET_GAP", WARNING, bounds.broker, "", topic, queue_id, begin, places[1],
            f"queue offset {begin}", f"{end}: {end - begin} are in no record",
        )  # fmt: skip


def extra_entries(
    bounds: LogBounds,
    damages: Sequence[tuple[int, int]],
    topic: str,
    queue_id: int,
    begin: int,
    end: int,
) -> list[tuple[int, int]]:
    files = queue_files(bounds, topic, queue_id)
    found = []
    for index in range(begin, min(end, begin + LOOKED_AT_MAX)):
        unit = files.entry(index)
        if unit is None or is_filler(unit):
            continue
        at = unit["physical_offset"]
        in_damage = any(low <= at < low + size for low, size in damages)
        if bounds.begin <= at < bounds.end and not in_damage:
            found.append((index, at))
    return found


def texts_of(kind: str, at: int, numbers: Sequence[int]) -> tuple[str, str]:
    """(expected, actual) of what LogWalk noted."""
    a, b, c, d, e = numbers
    if kind == "BODY_CRC":
        return f"CRC {a:#010x}", f"CRC {b:#010x}"
    if kind == "TIME_BACKWARD":
        return f"stored at {a} ms or later", f"{b} ms"
    if kind == "OFFSET_DUP":
        return f"queue offset {a} or higher", f"{b}"
    if kind == "CQ_MISSING":
        return f"physical offset {at}, {a} bytes", "nothing" if d == 0 else "a filler"
    if kind == "CQ_TAGS":
        return f"tagsCode {b}", f"{e}"
    return f"physical offset {at}, {a} bytes", f"physical offset {c}, {d} bytes"
