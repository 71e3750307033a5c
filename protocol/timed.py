"""Timed messages: what a client says of the time, and the handle by which one is recalled."""

from __future__ import annotations

import base64
import binascii
import math
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from cometmq.protocol.errors import ArgumentIllegal

LATEST_MS: Final = 253_402_300_799_999  # the end of the year 9999
RECALL_TAG: Final = "_RECALL_TAG_"  # of RocketMQ's clients
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_VERSION: Final = "v1"


class Handle(NamedTuple):
    """A message that waits, for whoever recalls it. Its text is RocketMQ's recall handle."""

    topic: str
    broker: str
    due_ms: int
    msg_id: str

    def __str__(self) -> str:
        text = f"{_VERSION} {self.topic} {self.broker} {self.due_ms} {self.msg_id}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ArgumentIllegal."""
        try:
            parts = (
                base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode().split(" ")
            )
        except (ValueError, binascii.Error):
            parts = []
        if (
            len(parts) != 5
            or parts[0] != _VERSION
            or not (parts[3].isascii() and parts[3].isdigit() and len(parts[3]) <= 15)
        ):
            raise ArgumentIllegal(f"{text!r:.80} is no recall handle")
        return cls(parts[1], parts[2], int(parts[3]), parts[4])


def timing(deliver_at: datetime | None, deliver_after: timedelta | float | None) -> tuple[str, str]:
    """The property that says when a message is to be delivered. Raises ArgumentIllegal."""
    if deliver_at is not None and deliver_after is not None:
        raise ArgumentIllegal("deliver_at and deliver_after are both given")
    if deliver_at is not None:
        return "TIMER_DELIVER_MS", str(_due_ms(deliver_at))
    return "TIMER_DELAY_MS", str(_delay_ms(deliver_after))


def _due_ms(deliver_at: datetime) -> int:
    if not isinstance(deliver_at, datetime):
        raise ArgumentIllegal(f"deliver_at={deliver_at!r:.80}: a datetime is wanted")
    if deliver_at.utcoffset() is None:
        raise ArgumentIllegal(
            f"deliver_at={deliver_at.isoformat()} has no time zone: whose clock is meant?"
        )
    due_ms = -((_EPOCH - deliver_at) // timedelta(milliseconds=1))  # never early
    if due_ms > LATEST_MS:
        raise ArgumentIllegal(f"deliver_at={deliver_at.isoformat()} is beyond the year 9999")
    return max(due_ms, 0)


def _delay_ms(deliver_after: object) -> int:
    if isinstance(deliver_after, timedelta):
        delay_ms = -(-deliver_after // timedelta(milliseconds=1))
    elif isinstance(deliver_after, (int, float)) and not isinstance(deliver_after, bool):
        if not math.isfinite(deliver_after):
            raise ArgumentIllegal(f"deliver_after={deliver_after}: seconds are wanted")
        delay_ms = math.ceil(deliver_after * 1000)
    else:
        raise ArgumentIllegal(
            f"deliver_after={deliver_after!r:.80}: a timedelta or seconds are wanted"
        )
    if delay_ms > LATEST_MS:
        raise ArgumentIllegal(f"deliver_after={deliver_after}: that is beyond the year 9999")
    return max(delay_ms, 0)
