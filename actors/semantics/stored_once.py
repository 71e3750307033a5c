"""Writes of copies that may be asked for twice: whoever was not told that a copy is kept asks for
it again, under the same number, and hears what became of the first one."""

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
    """Of one process; calls wait for their answer.

    Each write has a position above all others, in an epoch of this process. One that comes late,
    when another was stored before it, is stored no more: so who knows the position knows of each
    write whether it is stored.

    Args:
        name: of the deriver that its writes are.
        timeout_s: for an answer.
    """

    def __init__(self, commitlog: Channel, name: str, timeout_s: float) -> None:
        self._commitlog = commitlog
        self._timeout_s = timeout_s
        self._deriver = Deriver(commitlog, name, timeout_s=timeout_s)
        self._last = Position()  # of the last write that was asked for
        # By number: the position of a write that is not known to be stored, or to be as safe as it
        # should; None: it is kept. The oldest first.
        self._writes: dict[int, Position | None] = {}

    def write(self, records: InnerRecords, numbers: Iterable[int]) -> CometError | None:
        """Have the records stored that these numbers stand for, all or none.

        Why they are not, or not known to be as safe as they should: that is NotConfirmed.
        """
        after = None
        try:
            after = self._next(self._deriver.position())
            self._deriver.write(records, after)
        except (
            OffsetIllegal
        ) as error:  # of a process before this one, something was still under way
            return SystemBusy(f"nothing is stored of it: {error}")
        except NotConfirmed as error:
            if after is not None:
                self._note(numbers, after)
            return error
        except CometError as error:
            return error
        self._note(numbers, None)
        return None

    def _next(self, position: Position) -> Position:
        """Above that one, and above whatever this process has asked for."""
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
        """Of each, whether its copy is in the log; `confirm` says whether it stays there. What is
        not may be stored now. Raises NotConfirmed, NotReachable."""
        unsure = [each for each in numbers if self._writes.get(each) is not None]
        if unsure:
            position = self._deriver.position()
            for number in unsure:
                asked = self._writes[number]
                if asked is not None and asked > position:
                    del self._writes[number]  # and it will not be stored any more
        return [number in self._writes for number in numbers]

    def confirm(self, numbers: Sequence[int]) -> CometError | None:
        """Why these, which are in the log, are not as safe as they should be."""
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
