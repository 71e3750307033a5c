"""Consumer offsets of one group in one topic: queue id -> offset of the next message."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Final

from cometmq.protocol.integers import INT64_MIN as ABSENT  # nothing was committed there

NEAR_MAX: Final = 1_024  # queues; ids from there on, which hardly any topic has, lie in a dict
_NEAR_IDS: Final = list(range(NEAR_MAX))


class QueueOffsets:
    """Offsets by queue id, in as little memory as there is.

    A million of them in dicts are 80 MB of small objects, and a commit waits for the memory of a
    dozen of those. Here they are 8 MB, which a processor's cache holds.
    """

    __slots__ = ("far", "near")

    def __init__(self, offsets: Mapping[int, int] | None = None) -> None:
        self.near = array("q")  # by queue id
        self.far: dict[int, int] = {}
        if not offsets:
            return
        if list(offsets) == _NEAR_IDS[: len(offsets)]:
            self.near = array("q", list(offsets.values()))  # as nearly all are; in one go
            return
        for queue_id, queue_offset in offsets.items():
            self.put(queue_id, queue_offset)

    def get(self, queue_id: int) -> int | None:
        """None: nothing was committed there."""
        if 0 <= queue_id < len(self.near):
            found = self.near[queue_id]
            return None if found == ABSENT else found
        return self.far.get(queue_id)

    def __getitem__(self, queue_id: int) -> int:
        found = self.get(queue_id)
        if found is None:
            raise KeyError(queue_id)
        return found

    def put(self, queue_id: int, queue_offset: int) -> int | None:
        """What stood there."""
        near = self.near
        if 0 <= queue_id < len(near):
            before = near[queue_id]
            near[queue_id] = queue_offset
            return None if before == ABSENT else before
        if not 0 <= queue_id < NEAR_MAX:
            found = self.far.get(queue_id)
            self.far[queue_id] = queue_offset
            return found
        near.extend([ABSENT] * (queue_id + 1 - len(near)))
        near[queue_id] = queue_offset
        return None

    def __delitem__(self, queue_id: int) -> None:
        if 0 <= queue_id < len(self.near):
            self.near[queue_id] = ABSENT
            while self.near and self.near[-1] == ABSENT:
                self.near.pop()
        else:
            del self.far[queue_id]

    def keys(self) -> Iterator[int]:
        for queue_id, queue_offset in enumerate(self.near):
            if queue_offset != ABSENT:
                yield queue_id
        yield from self.far

    def items(self) -> Iterator[tuple[int, int]]:
        for queue_id in self.keys():
            yield queue_id, self[queue_id]

    __iter__ = keys

    def __bool__(self) -> bool:
        return bool(self.near or self.far)  # the array never ends with one that is absent
