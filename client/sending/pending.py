"""Pending transactions: what a checker is shown of one that nobody has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cometmq.shm.kernel.codec import Message


@dataclass(frozen=True)
class PendingTransaction:
    """A transaction that has no end yet, by its first message.

    Args:
        id: the transaction's, as `Transaction.id` was.
        topic: that the message is meant for.
        times: how often this was asked, this time included.
        message_count: messages of the transaction.
        message: as it lies in the broker.
    """

    id: str
    topic: str
    times: int
    message_count: int
    message: Message

    @property
    def body(self) -> bytes:
        """The message's, unfolded. Raises BodyIllegal for one that cannot be."""
        return self.message.body

    @property
    def keys(self) -> str | None:
        """The message's, joined by blanks."""
        return self.message.keys

    @property
    def properties(self) -> Mapping[str, str]:
        """The message's: your own, and the broker's."""
        return self.message.properties


# True: commit; False: roll back; None: it is not decided yet.
Checker = Callable[[PendingTransaction], Any]
