"""Writes of copies that may be requested twice: a requester that received no answer repeats the
request under the same number, and receives the outcome of the first one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.protocol.commands import Cover, Position, RecordsAppended
from cometmq.protocol.errors import CometError, NotConfirmed, OffsetIllegal, SystemBusy
from cometmq.protocol.wire.channel import Channel

NUMBERS_MAX: Final = 65_536


class StoredOnce:
    """Idempotent writes of one process; calls block until they are answered.

    Each write has a position above all earlier ones, in an epoch of this process. A late write is
    not stored if a later one was stored first. So the last stored position tells of each write
    whether it is stored.

    Args:
        name: of the deriver to which the writes belong.
        timeout_s: limit for an answer, in seconds.
    """

    def __init__(self, commitlog: Channel, name: str, timeout_s: float) -> None:
        self._commitlog = commitlog
        self._timeout_s = timeout_s
        self._deriver = Deriver(commitlog, name, timeout_s=timeout_s)
        self._last = Position()  # of the last requested write
        # By number, the oldest first: the position of a write that may not be stored or lacks acks;
        # None: the copy is stored with all acks.
        self._writes: dict[int, Position | None] = {}

    def write(self, records: InnerRecords, numbers: Iterable[int]) -> CometError | None:
        """Store the records of these numbers, all or none.

        Return None, or the reason why they are not stored; NotConfirmed: they may be stored, or
        lack the required acks.
        """
        after = None
        try:
            after = self._next(self._deriver.position())
            self._deriver.write(records, after)
        except OffsetIllegal as error:  # a write of the previous process was still in progress
            return SystemBusy(f"no copy is stored: {error}")
        except NotConfirmed as error:
            if after is not None:
                self._note(numbers, after)
            return error
        except CometError as error:
            return error
        self._note(numbers, None)
        return None

    def _next(self, position: Position) -> Position:
        """Return a position above that one and above all that this process has requested."""
        if self._last <= position:
            epoch = max(time.time_ns() // 1_000_000, position.epoch + 1)
            self._last = Position(epoch, 0)
        self._last = Position(self._last.epoch, self._last.number + 1)
        return self._last

    def _note(self, numbers: Iterable[int], position: Position | None) -> None:
        for number in numbers:
            if number:
                self._writes.pop(number, None)
                self._writes[number] = position
        while len(self._writes) > NUMBERS_MAX:
            del self._writes[next(iter(self._writes))]

    def stored(self, numbers: Sequence[int]) -> list[bool]:
        """Return for each number whether its copy is in the log; `confirm` says whether it has the
        required acks. Those that are not in the log can be written now. Raises NotConfirmed,
        NotReachable."""
        unsure = [each for each in numbers if self._writes.get(each) is not None]
        if unsure:
            position = self._deriver.position()
            for number in unsure:
                asked = self._writes[number]
                if asked is not None and asked > position:
                    del self._writes[number]  # nor can it be stored later
        return [number in self._writes for number in numbers]

    def confirm(self, numbers: Sequence[int]) -> CometError | None:
        """Return why these copies, which are in the log, lack the required acks; None: they have
        them."""
        if all(self._writes[number] is None for number in numbers):
            return None
        try:
            answer, _ = self._commitlog.ask(
                *InnerRecords().take(Cover.POLICY), timeout_s=self._timeout_s
            )
        except CometError as error:
            return NotConfirmed(str(error))
        assert isinstance(answer, RecordsAppended)
        if not answer.is_kept:
            return NotConfirmed(answer.text)
        self._note(numbers, None)
        return None
