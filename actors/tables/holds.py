"""Named holds: what somebody still needs of the log, as it stands in holds.json. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.actors.tables.book import Book
from cometmq.protocol.commands import Hold
from cometmq.protocol.ledger import Change, HoldDropped, HoldPut

Undo = tuple[str, Hold | None] | None  # what stood there


class HoldBook(Book):
    """The holds by name, also those whose lease has ended, until they are dropped.

    Args:
        holds: to begin with.
    """

    kinds = (HoldPut, HoldDropped)

    def __init__(self, holds: Mapping[str, Hold]) -> None:
        self._holds = dict(holds)

    def all(self) -> Mapping[str, Hold]:
        return self._holds

    def get(self, name: str) -> Hold | None:
        return self._holds.get(name)

    def live(self, now_ms: int) -> list[Hold]:
        """Those whose lease has not ended. Time is in milliseconds since 1970."""
        return [hold for hold in self._holds.values() if hold.is_live(now_ms)]

    def ended(self, now_ms: int) -> list[Hold]:
        """The others."""
        return [hold for hold in self._holds.values() if not hold.is_live(now_ms)]

    def apply(self, change: Change) -> Undo:
        """Make the change; what `undo` wants to take it back."""
        if isinstance(change, HoldPut):
            hold = Hold(change.name, change.physical_offset, change.expires_ms)
            return self._set(change.name, hold)
        if isinstance(change, HoldDropped):
            return self._set(change.name, None)
        return None

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        if undo is not None:
            self._set(*undo)

    def _set(self, name: str, hold: Hold | None) -> Undo:
        self.changes += 1
        before = self._holds.pop(name, None) if hold is None else self._holds.get(name)
        if hold is not None:
            self._holds[name] = hold
        return name, before
