"""Timed messages: how far ahead they may be, and the handle by which one is recalled."""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple, Self

from cometmq.protocol.errors import ArgumentIllegal

LATEST_MS: Final = 253_402_300_799_999  # the end of the year 9999
RECALL_TAG: Final = "_RECALL_TAG_"  # of RocketMQ's clients
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
