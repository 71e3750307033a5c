"""Back-pressure on pulls: clients that were answered more than they receive have to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import PullMessages
from cometmq.protocol.errors import CometError, SystemBusy

WAIT_S: Final = 10  # a client that has not received its answers by then is not given more
LOOK_EVERY_S: Final = 0.01
WAITING_MAX: Final = 10_000


class Waiting(NamedTuple):
    request: Request
    command: PullMessages
    deadline: float  # time.monotonic()


class PullsWithoutRoom:
    """They wait until their client has received some of its answers: of 4 MiB each, these would
    pile up in memory for whoever asks and does not read.

    Args:
        pull: carries one out.
    """

    def __init__(self, actor: ServiceActor, pull: Callable[[PullMessages, Request], None]) -> None:
        self._actor = actor
        self._pull = pull
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, command: PullMessages, request: Request) -> bool:
        """Whether it has to wait, which is seen to then. Raises SystemBusy."""
        if request.has_room():
            return False
        if len(self._waiting) >= WAITING_MAX:
            raise SystemBusy(f"{WAITING_MAX} pulls wait for clients to receive their answers")
        self._waiting.append(Waiting(request, command, time.monotonic() + WAIT_S))
        if len(self._waiting) == 1:
            self._actor.after(LOOK_EVERY_S, self._look)
        return True

    def fail(self, error: CometError) -> None:
        for waiting in self._waiting:
            waiting.request.fail(error)
        self._waiting.clear()

    def _look(self) -> None:
        before, self._waiting = self._waiting, []
        now = time.monotonic()
        for waiting in before:
            request, command, deadline = waiting
            if request.has_room():
                self._actor.carry_out(request, partial(self._pull, command, request))
            elif now > deadline:
                text = f"the answers before are not received within {WAIT_S} s: receive them first"
                request.fail(SystemBusy(text))
            else:
                self._waiting.append(waiting)
        if self._waiting:
            self._actor.after(LOOK_EVERY_S, self._look)
