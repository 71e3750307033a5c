"""Times at which a member sends a JoinGroup beside an unanswered one."""

from __future__ import annotations

import math
import time

from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Pending


class News:
    """Changes that the coordinator has to learn by a JoinGroup.

    Each JoinGroup is work for the coordinator, so a thousand subscriptions in a row share a few of
    them. One that supersedes an unanswered one is delayed, for longer each time.
    """

    __slots__ = ("_overtaken", "waits")

    def __init__(self) -> None:
        self.waits = False
        self._overtaken = 0  # superseded requests in a row

    def due_at(self, sent_at: float) -> float:
        """Earliest time.monotonic() of the next JoinGroup while the one that was sent at `sent_at`
        is unanswered; infinite if there are no changes."""
        return sent_at + pause_s(self._overtaken) if self.waits else math.inf

    def is_due(self, join: Pending | None, sent_at: float) -> bool:
        is_under_way = join is not None and not join.done
        return self.waits and (not is_under_way or time.monotonic() >= self.due_at(sent_at))

    def tell(self, overtaken: Pending | None) -> None:
        self._overtaken += self.waits and overtaken is not None
        self.waits = False

    def answered(self) -> None:
        self._overtaken = 0
