"""What one write lays down of half messages: copies of those that end, and of those that go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.uptime import stored_now
from cometmq.actors.tables.delays import destination
from cometmq.actors.tables.lean import DELIVERED, WAITING
from cometmq.actors.tables.transactions import Outcome, copy_properties
from cometmq.protocol.commands import PassedHalf
from cometmq.protocol.errors import CometError, MessageTooLarge, StoreDamaged
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC
from cometmq.shm.kernel.codec import Message, RecordDamaged, RecordTooLarge

log = logging.getLogger(__name__)

WRITE_ENDS_MAX: Final = 2_048  # halves that end by one write
SYS_TRANSACTION: Final = 0xC  # bits of a record's flags
SYS_COMMIT: Final = 0x8


class Named(NamedTuple):
    """A half message that an end names."""

    message: Message
    first: int  # queue offsets: of the first of all, which it may be a copy of,
    current: int  # and of the copy that goes on in its stead
    outcome: Outcome


class Half(NamedTuple):
    """A half message that ends now."""

    message: Message
    queue: tuple[str, int]  # that it is meant for
    named: int  # queue offsets: of the one that its producer names,
    first: int  # of the first of all,
    current: int  # and of the one that is pending


class HalfWrite:
    """Transactions that end by one write.

    Args:
        bytes_max: of it; one transaction alone may have more.
        properties_max: of a record.
    """

    def __init__(self, bytes_max: int, properties_max: int) -> None:
        self._bytes_max = bytes_max
        self._properties_max = properties_max
        self.apart: list[int] = []  # ends that are tried alone, since one of them was refused
        self.clear()

    def clear(self) -> None:
        self.records = records_of(self._properties_max)
        self.ended: dict[int, Outcome] = {}  # by queue offset
        self.asked: list[int] = []  # which ends
        self.firsts: list[int] = []  # halves that may have a copy
        self.committed = 0
        self.rolled_back = 0

    def has_room(self, size: int) -> bool:
        filled = self.records.encoder.size
        return len(self.ended) < WRITE_ENDS_MAX and (not filled or filled + size < self._bytes_max)

    def add(self, halves: Sequence[Half], outcome: Outcome, index: int) -> None:
        """All of a transaction, or nothing. Raises StoreDamaged, MessageTooLarge."""
        if not halves:
            return
        encoder = self.records.encoder
        if outcome is Outcome.COMMITTED:
            before = encoder.size, encoder.count
            try:
                for half in halves:
                    self._add_copy(half)
            except CometError:
                encoder.cut(*before)
                raise
            self.committed += len(halves)
        else:
            self.rolled_back += len(halves)
        for half in halves:
            self.ended[half.first] = self.ended[half.named] = self.ended[half.current] = outcome
            self.firsts.append(half.first)
        self.asked.append(index)

    def _add_copy(self, half: Half) -> None:
        message = half.message
        what = f"the half message at physical offset {message.physical_offset}"
        try:
            self.records.add_copy(
                self.records.queue(*half.queue),
                message,
                DELIVERED,
                sys_flag=message.sys_flag & ~SYS_TRANSACTION | SYS_COMMIT,
                prepared_offset=message.physical_offset,
            )
        except RecordTooLarge as error:
            raise MessageTooLarge(f"{what}: {error}") from None
        except RecordDamaged as error:
            raise StoreDamaged(f"{what}: {error}") from None


def half_of(named: Named) -> Half:
    """Raises MessageIllegal, NameIllegal where it is meant for no queue."""
    message = named.message
    return Half(
        message,
        destination(message.properties),
        message.queue_offset,
        named.first,
        named.current,
    )


@lru_cache(maxsize=4096)
def queue_of(topic: str, queue_id: int) -> tuple[str, int]:
    """That a half message is meant for. Raises NameIllegal, MessageIllegal."""
    return destination({"REAL_TOPIC": topic, "REAL_QID": str(queue_id)})


def records_of(properties_max: int) -> InnerRecords:
    """Of a write, however large."""
    return InnerRecords(size_max=1 << 40, properties_max=properties_max)


def store_passed(records: InnerRecords, message: Message, half: PassedHalf, first: int) -> Outcome:
    """What becomes of it: a copy goes on, it is given up, or it goes on where it is, as there is no
    room for what a copy has to say."""
    if not half.give_up:
        properties = copy_properties(
            message.raw_properties, message.properties, first, half.times, stored_now()
        )
        try:
            records.add_copy(records.queue(HALF_TOPIC, 0), message, WAITING, properties)
        except RecordTooLarge:
            return Outcome.PENDING
        return Outcome.COPIED
    try:
        records.add_copy(records.queue(GIVEN_UP_TOPIC, 0), message, DELIVERED)
    except RecordTooLarge as error:
        log.error("half message %d is given up: %s", message.queue_offset, error)
    log.error("transaction of half message %d is given up after %d checks; see topic %s",
              first, half.times, GIVEN_UP_TOPIC)  # fmt: skip
    return Outcome.GIVEN_UP
