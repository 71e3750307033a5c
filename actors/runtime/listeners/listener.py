"""What all listeners of an actor have in common.

A listener receives requests, each with its own principal, and encodes their answers. It hands on
only requests that the doorman (access.py) admits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.access import Doorman, Principal
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.request import Frames, Payload, Request
from cometmq.protocol import frames
from cometmq.protocol.commands import Command, Done
from cometmq.protocol.errors import BadRequest

log = logging.getLogger(__name__)

DRAIN_COUNT: Final = 256  # requests received before they are worked on


class Listener:
    """An inbox waits until `source` can be read, and drains it then."""

    is_internal = False  # for the broker's own processes alone
    left_some = False  # the last `drain` may have left requests

    @property
    def source(self) -> Any:
        """A descriptor, or a socket of ZeroMQ."""
        raise NotImplementedError

    @property
    def drain_at(self) -> float | None:
        """Time.monotonic() at which to `drain` although `source` cannot be read; None: never."""
        return None

    def drain(self, count_max: int = DRAIN_COUNT) -> list[Request]:
        """Return received requests. Never waits."""
        raise NotImplementedError

    def put_off(self) -> None:
        """`source` can be read, and is drained later."""

    def statistics(self) -> meters.Figures:
        return {}

    def close(self) -> None:
        raise NotImplementedError


class FramedRequest(Request):
    """A request in frames (protocol/frames.py), which is answered in frames."""

    __slots__ = ("request_id",)

    def __init__(
        self, request_id: int, command: Command, payload: Frames, principal: Principal
    ) -> None:
        super().__init__(command, payload, principal)
        self.request_id = request_id

    def reply(self, answer: Command, payload: Payload = ()) -> None:
        """Send the answer. One that is too large to be read over there becomes an error that says
        so."""
        head = frames.pack(self.request_id, answer)
        if len(head) > frames.HEAD_MAX:
            kind = type(self.command).__name__
            text = f"the answer to {kind} has {len(head)} bytes, at most {frames.HEAD_MAX}"
            log.warning("%s", text)
            self.fail(BadRequest(f"{text}: ask for less"))
            return
        self._send(head, payload)

    def _send(self, head: bytes, payload: Payload) -> None:
        raise NotImplementedError


MakeRequest = Callable[[int, Command, Frames], Request]


def request_from(
    make: MakeRequest,
    head: bytes | memoryview,
    payload: Frames,
    doorman: Doorman,
    principal: Principal,
) -> Request | None:
    """Return the request in these frames. What is no command, and what the principal may not say to
    this process, is answered and logged at once; then None."""
    try:
        request_id, command = frames.unpack(head)
        doorman.admit(command, principal)
    except Exception as caught:
        error = explained(caught, "a message cannot be taken")
        log.warning("refused a message of %d frames: %s", 1 + len(payload), error)
        make(frames.request_id_of(head), Done(), ()).fail(error)
        return None
    return make(request_id, command, payload)
