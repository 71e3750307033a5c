"""Back-pressure on pulls: clients that were answered more than they receive have to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NoReturn

from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import PullMessages
from cometmq.protocol.errors import SystemBusy

WAIT_S: Final = 10  # a client that has not received its answers by then is not given more
LOOK_EVERY_S: Final = 0.01
WAITING_MAX: Final = 10_000

Waiting = HeldRequest[bytes]  # by connection


class PullsWithoutRoom(TimedRequests[bytes, Waiting]):
    """They wait until their client has received some of its answers: of 4 MiB each, these would
    pile up in memory for whoever asks and does not read.

    Args:
        pull: carries one out.
    """

    def __init__(self, actor: ServiceActor, pull: Callable[[PullMessages, Request], None]) -> None:
        super().__init__(actor, "pulls without space for an answer", WAITING_MAX, _refuse)
        self._pull = pull
        self._looks = False  # a timer is set

    def take(self, command: PullMessages, request: Request) -> bool:
        """Whether it has to wait, which is seen to then. Raises SystemBusy."""
        if request.has_room():
            return False
        self.add(HeldRequest(request.sender, request, time.monotonic() + WAIT_S))
        self._look_later()
        return True

    def _look_later(self) -> None:
        if self and not self._looks:
            self._looks = True
            self._actor.after(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._looks = False
        for sender in self.keys:
            for waiting in self.of(sender):
                if not waiting.request.has_room():
                    break
                request = self.release(waiting)
                self._actor.carry_out(request, self._pull, request.command, request)
        self._look_later()


def _refuse(_waiting: Waiting) -> NoReturn:
    raise SystemBusy(f"the answers before are not received within {WAIT_S} s: receive them first")
