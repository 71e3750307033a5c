"""A request: a command that came from outside the process, and the way back to its sender."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from cometmq.actors.runtime.access import Doorman, Principal
from cometmq.actors.runtime.guard import explained
from cometmq.protocol import frames
from cometmq.protocol.commands import Command, Done
from cometmq.protocol.errors import BadRequest, CometError

log = logging.getLogger(__name__)

Payload = Sequence[bytes | bytearray | memoryview]
Frames = Sequence[frames.Frame]


class Request:
    """What is common to all of them; they differ in the way back.

    Args:
        principal: who said it.
    """

    __slots__ = ("command", "payload", "principal", "request_id")

    def __init__(
        self, request_id: int, command: Command, payload: Frames, principal: Principal
    ) -> None:
        self.request_id = request_id
        self.command = command
        self.payload = payload
        self.principal = principal

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        """Send the answer. A sender that is gone or does not read loses it; that is all.

        One that is too large to be read over there becomes an error that says so.
        """
        head = frames.pack(self.request_id, answer)
        if len(head) > frames.HEAD_MAX:
            kind = type(self.command).__name__
            text = f"the answer to {kind} has {len(head)} bytes, at most {frames.HEAD_MAX}"
            log.warning("%s", text)
            self.fail(BadRequest(f"{text}: ask for less"))
            return
        self._send(head, payload)

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
        self.reply(frames.failed(error))

    def _send(self, head: bytes, payload: Payload) -> None:
        raise NotImplementedError

    @property
    def sender(self) -> bytes:
        """Who asked, for as long as the connection lasts."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Whether a large answer may be given now; or too much is on its way to there already."""
        return True


MakeRequest = Callable[[int, Command, Frames], Request]


def request_from(
    make: MakeRequest,
    head: bytes | memoryview,
    payload: Frames,
    doorman: Doorman,
    principal: Principal,
) -> Request | None:
    """The request in these frames. Rubbish, and what the principal may not say to this process, is
    answered and logged at once."""
    try:
        request_id, command = frames.unpack(head)
        doorman.admit(command, principal)
    except Exception as caught:
        error = explained(caught, "a message cannot be taken")
        log.warning("refused a message of %d frames: %s", 1 + len(payload), error)
        make(frames.request_id_of(head), Done(), ()).fail(error)
        return None
    return make(request_id, command, payload)


def conclude_all(requests: Sequence[Request], error: CometError | None) -> None:
    """Answer all of them, in their order, with Done or with the error."""
    if error is not None:
        for request in requests:
            request.fail(error)
        return
    for _, of_one in groupby(requests, attrgetter("sender")):
        first, *others = of_one
        first.done_with(others)
