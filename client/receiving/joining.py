"""When a member sends a JoinGroup, and when it gives one up."""

from __future__ import annotations

import math
import time
from typing import Final

from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Pending

LATE_S: Final = 5.0  # a heartbeat that is answered so late is given up
CONNECT_S: Final = 1.0  # likewise one that waits for a connection; who is not there by then is away


class News:
    """Something has changed that the coordinator has to hear of, by a JoinGroup.

    Each is work for it: a thousand topics that are subscribed to in a row share some. One that
    overtakes another which is not answered yet waits a little, and longer each time.
    """

    __slots__ = ("_overtaken", "waits")

    def __init__(self) -> None:
        self.waits = False
        self._overtaken = 0  # in a row

    def due_at(self, sent_at: float) -> float:
        """When it may be told, if the JoinGroup that was sent at that time is under way; never
        where nothing waits. time.monotonic()"""
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
    """The JoinGroup that is not answered yet."""

    __slots__ = ("_until", "pending", "sent_at")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.sent_at = 0.0  # time.monotonic()
        self._until = 0.0

    def begin(self, wait_ms: int) -> None:
        """One is sent now, which may be answered after that time; an earlier one is not heard."""
        if self.pending is not None:
            self.pending.channel.forget(self.pending)
        self.pending = None
        self.sent_at = time.monotonic()
        self._until = self.sent_at + wait_ms / 1000 + LATE_S

    @property
    def given_up_at(self) -> float:
        """When it is tried again: time.monotonic()."""
        if self.pending is None:
            return self.sent_at  # it could not be sent
        if not self.pending.handed_over:
            # It never fails where nobody listens any more: it waits for a connection.
            return self.sent_at + CONNECT_S
        return self._until

    def why_late(self) -> str:
        """Why it is given up; "": it is not."""
        pending = self.pending
        if pending is None or pending.done or time.monotonic() <= self.given_up_at:
            return ""
        return "it does not answer" if pending.handed_over else "there is no connection"
