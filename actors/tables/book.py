"""What all books have in common: changes of the ledger, one after the other. Pure: no I/O."""

from __future__ import annotations

from typing import Any, ClassVar

from cometmq.protocol.ledger import Change


class Book:
    """Small state in memory, which is what its changes come to."""

    kinds: ClassVar[tuple[type[Change], ...]]  # that it makes
    changes = 0  # made and taken back

    def apply(self, change: Change) -> Any:
        """Make a change; what `undo` wants to take it back. False: it was none of this book."""
        raise NotImplementedError

    def undo(self, undo: Any) -> None:
        """Take a change back; the last one first."""
        raise NotImplementedError
