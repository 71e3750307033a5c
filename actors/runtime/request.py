"""A request: a command that came from outside the process, and the way back to its sender."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from cometmq.actors.runtime.access import Principal
from cometmq.protocol import frames
from cometmq.protocol.commands import Command, Done, Failed
from cometmq.protocol.errors import CometError

Payload = Sequence[bytes | bytearray | memoryview]
Frames = Sequence[frames.Frame]


class Request:
    """What is common to all of them. The listener that received it knows the way back, and how an
    answer is encoded there.

    Args:
        principal: its sender.
    """

    __slots__ = ("command", "payload", "principal")

    def __init__(self, command: Command, payload: Frames, principal: Principal) -> None:
        self.command = command
        self.payload = payload
        self.principal = principal

    def drop_payload(self) -> None:
        """Free the memory of the payload, which is copied: the answer may take long."""
        self.payload = ()

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        """Send the answer. A sender that is gone or does not read loses it; that is all."""
        raise NotImplementedError

    def done(self) -> None:
        """Answer Done."""
        self.reply(Done())

    def done_with(self, others: Sequence[Request]) -> None:
        """Answer Done to this request, and to later ones of the same sender."""
        self.done()
        for request in others:
            request.done()

    def conclude(self, error: CometError | None) -> None:
        """Answer Done, or the error that there was."""
        if error is None:
            self.done()
        else:
            self.fail(error)

    def fail(self, error: CometError) -> None:
        self.reply(Failed(error.code, str(error)))

    @property
    def sender(self) -> bytes:
        """Who asked, for as long as the connection lasts."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Whether a large answer may be given now; or too much is on its way to there already."""
        return True


def conclude_all(requests: Sequence[Request], error: CometError | None) -> None:
    """Answer all of them, in their order, with Done or with the error."""
    if error is not None:
        for request in requests:
            request.fail(error)
        return
    for _, of_one in groupby(requests, attrgetter("sender")):
        first, *others = of_one
        first.done_with(others)
