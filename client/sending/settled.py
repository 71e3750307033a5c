"""Receipts as values: the answer alone, without the batch that waited for it."""

from __future__ import annotations

from bisect import bisect_left
from typing import NoReturn

import msgspec

from cometmq.protocol.commands import Copy, SectionResult
from cometmq.protocol.errors import ArgumentIllegal, CometError, again


def copy_at(copies: list[Copy], index: int) -> Copy | None:
    """Return the place of the first message with the same key, if this one was not stored."""
    place = bisect_left(copies, index, key=index_of)
    return copies[place] if place < len(copies) and copies[place].index == index else None


def index_of(copy: Copy) -> int:
    return copy.index


class Settled(msgspec.Struct, frozen=True):
    """An answered batch, as copied and pickled receipts use it; see receipt.Batch.

    Raises ArgumentIllegal for values that no batch can have.
    """

    topic: str
    ids: tuple[str, ...]
    broker: str = ""
    queue_id: int = -1
    store_timestamp_ms: int = 0
    result: SectionResult | None = None
    error: CometError | None = None  # in place of the result
    due: tuple[int | None, ...] = ()  # delivery times, if the messages have any

    def __post_init__(self) -> None:
        texts = (self.topic, self.broker, *self.ids)
        if not all(type(each) is str for each in texts):
            raise ArgumentIllegal("a receipt has topic, broker and ids as text")
        if type(self.queue_id) is not int or type(self.store_timestamp_ms) is not int:
            raise ArgumentIllegal("a receipt has a queue id and a store time")
        if not isinstance(self.result, SectionResult | None) or not isinstance(
            self.error, CometError | None
        ):
            raise ArgumentIllegal("a receipt has a place in a queue, or an error of CometMQ's")
        if (self.result is None) == (self.error is None):
            raise ArgumentIllegal("a receipt has either a place in a queue or an error")
        if self.due and len(self.due) != len(self.ids):
            raise ArgumentIllegal(f"{len(self.due)} times for {len(self.ids)} messages")

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def done(self) -> bool:
        return True

    def wait_settled(self) -> None:
        """Return at once: the batch is settled."""

    def settled(self) -> list[Settled]:
        return [self]

    def where(self, index: int) -> tuple[Settled, int]:
        """Return the batch that has a message, and its index there."""
        return self, index

    def error_of(self, _index: int) -> CometError | None:
        return self.error

    def answer(self) -> SectionResult:
        if self.result is None:
            self._fail()
        return self.result

    def _fail(self) -> NoReturn:
        assert self.error is not None
        raise again(self.error)

    def id_of(self, index: int) -> str:
        return self.ids[index]

    def msg_id_of(self, index: int) -> str:
        return self.ids[index]

    def due_ms_of(self, index: int) -> int | None:
        self.answer()
        return self.due[index] if self.due else None

    def copy_of(self, index: int) -> Copy | None:
        return copy_at(self.answer().copies, index)
