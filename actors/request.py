"""A command that came from outside the process, and the way back to its sender."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cometmq.protocol import frames
from cometmq.protocol.commands import Command, Done
from cometmq.protocol.errors import CometError

log = logging.getLogger(__name__)

Payload = Sequence[bytes | bytearray | memoryview]
Frames = Sequence[frames.Frame]


class Request:
    """What is common to all of them; they differ in the way back.

    Args:
        internal: it came to an address where only the family is let in.
    """

    __slots__ = ("command", "internal", "payload", "request_id")

    def __init__(self, request_id: int, command: Command, payload: Frames, internal: bool) -> None:
        self.request_id = request_id
        self.command = command
        self.payload = payload
        self.internal = internal

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        """Send the answer. A sender that is gone or does not read loses it; that is all."""
        self._send(frames.pack(self.request_id, answer), payload)

    def fail(self, error: CometError) -> None:
        self.reply(frames.failed(error))

    def _send(self, head: bytes, payload: Payload) -> None:
        raise NotImplementedError

    @property
    def sender(self) -> bytes:
        """Who asked, for as long as the connection lasts."""
        raise NotImplementedError


def request_from(
    make: Callable[[int, Command, Frames], Request], head: memoryview, payload: Frames
) -> Request | None:
    """The request in these frames; rubbish is answered and logged at once."""
    try:
        request_id, command = frames.unpack(head)
    except CometError as error:
        log.warning("refused a message of %d frames: %s", 1 + len(payload), error)
        make(frames.request_id_of(head), Done(), ()).fail(error)
        return None
    return make(request_id, command, payload)
