"""Times at which a member sends a JoinGroup and gives up an unanswered one."""

from __future__ import annotations

import math
import time
from typing import Final

from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Pending

LATE_S: Final = 5.0  # extra time for the answer to a heartbeat, then it is given up
CONNECT_S: Final = 1.0  # time limit of one that waits for a connection


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


class UnderWay:
    """The JoinGroup that is unanswered."""

    __slots__ = ("_until", "pending", "sent_at")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.sent_at = 0.0  # time.monotonic()
        self._until = 0.0

    def begin(self, wait_ms: int) -> None:
        """Note that one is sent now, which is held for up to `wait_ms`; forget an earlier one."""
        if self.pending is not None:
            self.pending.channel.forget(self.pending)
        self.pending = None
        self.sent_at = time.monotonic()
        self._until = self.sent_at + wait_ms / 1000 + LATE_S

    @property
    def given_up_at(self) -> float:
        """Time at which it is sent again, by time.monotonic()."""
        if self.pending is None:
            return self.sent_at  # it could not be sent
        if not self.pending.handed_over:
            # Without a listener it does not fail, but waits for a connection.
            return self.sent_at + CONNECT_S
        return self._until

    def why_late(self) -> str:
        """Return why it is given up; "" if it is not."""
        pending = self.pending
        if pending is None or pending.done or time.monotonic() <= self.given_up_at:
            return ""
        return "it does not answer" if pending.handed_over else "there is no connection"
