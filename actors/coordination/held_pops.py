"""Pops that wait for messages, each until its time is over."""

from __future__ import annotations

import time
from typing import Final

from cometmq.actors.coordination.beginnings import HELD_MAX, stops
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import POP_WAIT_MS_MAX, PopMessages, PoppedMessages, StopPopping

STOPPED_MAX: Final = 16_384  # attempts; the oldest is forgotten

WaitKey = tuple[str, str]  # group, topic


class HeldPop(HeldRequest[WaitKey]):
    """A command that waits for messages. Its attempt is its name."""

    __slots__ = ("command",)

    def __init__(self, command: PopMessages, request: Request) -> None:
        wait_s = min(command.wait_ms, POP_WAIT_MS_MAX) / 1000
        key = command.group, command.topic
        super().__init__(key, request, time.monotonic() + wait_s, command.attempt)
        self.command = command


class HeldPops(TimedRequests[WaitKey, HeldPop]):
    """See the module."""

    def __init__(self, actor: ServiceActor) -> None:
        super().__init__(actor, "consumers", HELD_MAX, lambda _held: PoppedMessages([]))
        self._stopped: dict[tuple[str, str], None] = {}  # group, attempt: in the order of stops

    def hold(self, command: PopMessages, request: Request) -> None:
        """Raises SystemBusy."""
        held = HeldPop(command, request)
        before = self.named(held.key, held.name)
        if before is not None:  # a repeated pop replaces the one before
            self.release(before).reply(PoppedMessages([]))
        self.add(held)

    def is_stopped(self, command: PopMessages) -> bool:
        """Return whether that attempt was stopped: the stop came by another connection, before."""
        return (command.group, command.attempt) in self._stopped

    def stop(self, command: StopPopping) -> None:
        """This consumer waits no longer."""
        if command.attempt:
            self._stopped[command.group, command.attempt] = None
            if len(self._stopped) > STOPPED_MAX:
                del self._stopped[next(iter(self._stopped))]
        for key in [key for key in self.keys if key[0] == command.group]:
            for held in self.of(key):
                if stops(command, held.command):
                    self.release(held).reply(PoppedMessages([]))
