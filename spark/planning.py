"""Planning: from ranges of queues to tasks, and from limits to ranges. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cometmq.protocol.errors import CometError
from cometmq.spark.offsets import Queue

TASKS_MAX: Final = 65_536


class TooManyTasks(CometError, ValueError):
    """More tasks than Spark should be asked to run."""

    code = 9046


@dataclass(frozen=True)
class Span:
    """A stretch of one queue, small enough for one task."""

    queue: Queue
    begin: int
    end: int  # exclusive
    size_bytes: int


@dataclass(frozen=True)
class LogSpan:
    """A stretch of one store's log, at record boundaries."""

    broker: str
    begin: int  # physical offsets
    end: int


def split(queue: Queue, begin: int, end: int, marks: Sequence[int], size_bytes: int) -> list[Span]:
    """The parts of a range whose second, third ... part begin at the marks.

    Bytes are those of the whole, by messages: good enough to put small parts together.
    """
    edges = [begin, *marks, end]
    count = max(1, end - begin)
    return [
        Span(queue, low, high, size_bytes * (high - low) // count)
        for low, high in itertools.pairwise(edges)
        if high > low
    ]


def coalesce(spans: Iterable[Span], bytes_max: int, count_max: int) -> list[tuple[Span, ...]]:
    """Put neighbours of one broker together until a task holds so many bytes or messages."""
    tasks: list[list[Span]] = []
    size = count = 0
    for span in sorted(spans, key=lambda span: (span.queue, span.begin)):
        messages = span.end - span.begin
        fits = tasks and tasks[-1][0].queue.broker == span.queue.broker
        if fits and size + span.size_bytes <= bytes_max and count + messages <= count_max:
            tasks[-1].append(span)
        else:
            tasks.append([span])
            size = count = 0
        size += span.size_bytes
        count += messages
    if len(tasks) > TASKS_MAX:
        raise TooManyTasks(
            f"{len(tasks)} tasks, at most {TASKS_MAX}: raise maxBytesPerPartition or "
            "maxMessagesPerPartition"
        )
    return [tuple(task) for task in tasks]


def part_bytes(total_bytes: int, bytes_max: int, tasks_min: int) -> int:
    """How many bytes a task may read, so that there are at least so many tasks."""
    return max(1, min(bytes_max, -(-total_bytes // max(1, tasks_min))))


def shares(backlog: Mapping[Queue, int], limit: int) -> dict[Queue, int]:
    """A limit divided in proportion to what waits; at least 1 for everybody who has something."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    return {
        queue: max(1, limit * waiting // total) for queue, waiting in backlog.items() if waiting
    }
