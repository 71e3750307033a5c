"""Queries for queue offsets: what a client asks readers, one question for many queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from cometmq.client.routes import ASK_S, Routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    DescribeQueues,
    FoundOffsets,
    QueueKey,
    QueueRanges,
    QueueReach,
    SearchOffsets,
)
from cometmq.protocol.errors import ArgumentIllegal, OffsetIllegal
from cometmq.protocol.positions import EARLIEST, LATEST, named

Position = str | int | datetime  # "earliest", "latest", an offset or a time; see the methods

RANGES_MAX: Final = 8_192  # queues in one question
SEARCHES_MAX: Final = 256  # each looks at a dozen records, and nobody else is answered meanwhile


def ranges(
    routes: Routes, endpoints: BrokerEndpoints, keys: Sequence[QueueKey], timeout_s: float = ASK_S
) -> list[QueueReach]:
    """From where to where these queues reach; (0, 0) for one that never held anything.

    Args:
        timeout_s: for each of the questions that it takes.
    """
    found: list[QueueReach] = []
    for reader, part in _parts(endpoints, keys, RANGES_MAX):
        found += routes.ask(reader, DescribeQueues(part), QueueRanges, timeout_s).ranges
    return found


def offsets_at(
    routes: Routes,
    endpoints: BrokerEndpoints,
    keys: Sequence[QueueKey],
    timestamp_ms: int,
    timeout_s: float = ASK_S,
) -> list[int]:
    """The queue offsets of the first messages stored at a time or later; see `ranges`."""
    found: list[int] = []
    for reader, part in _parts(endpoints, keys, SEARCHES_MAX):
        command = SearchOffsets(part, timestamp_ms)
        found += routes.ask(reader, command, FoundOffsets, timeout_s).queue_offsets
    return found


def resolve(
    routes: Routes,
    endpoints: BrokerEndpoints,
    keys: Sequence[QueueKey],
    position: Position,
    timeout_s: float = ASK_S,
) -> list[int]:
    """Where in each of these queues "earliest", "latest", a queue offset or a time is.

    Raises OffsetIllegal for an offset that is neither that of a message nor the end;
    ArgumentIllegal for what is no position.
    """
    if isinstance(position, datetime):
        at_ms = int(position.timestamp() * 1000)
        return offsets_at(routes, endpoints, keys, at_ms, timeout_s)
    word = None if isinstance(position, int) else named(position)
    if word is None and not isinstance(position, int):
        raise ArgumentIllegal(
            f"position {position!r}: 'earliest', 'latest', an offset or a datetime"
        )
    reaches = ranges(routes, endpoints, keys, timeout_s)
    if word == EARLIEST:
        return [reach.min_queue_offset for reach in reaches]
    if word == LATEST:
        return [reach.max_queue_offset for reach in reaches]
    assert isinstance(position, int)
    for key, reach in zip(keys, reaches, strict=True):
        low, high = reach.min_queue_offset, reach.max_queue_offset
        if not low <= position <= high:
            raise OffsetIllegal(
                f"queue offset {position}: queue {key.queue_id} of {key.topic} on broker "
                f"{endpoints.broker} has {low} to {high}"
            )
    return [position] * len(keys)


def _parts(
    endpoints: BrokerEndpoints, keys: Sequence[QueueKey], count_max: int
) -> Iterator[tuple[str, list[QueueKey]]]:
    """Any reader knows all queues; several questions go to several readers."""
    for number, first in enumerate(range(0, len(keys), count_max)):
        reader = endpoints.readers[number % len(endpoints.readers)]
        yield reader, list(keys[first : first + count_max])
