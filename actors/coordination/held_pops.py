"""Pops that wait for messages, each until its time is over."""

from __future__ import annotations

import heapq
import time
from typing import Final

from cometmq.actors.coordination.beginnings import HELD_MAX, stops
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import POP_WAIT_MS_MAX, PopMessages, PoppedMessages, StopPopping
from cometmq.protocol.errors import CometError, SystemBusy

STOPPED_MAX: Final = 16_384  # attempts; the oldest is forgotten

WaitKey = tuple[str, str]  # group, topic


class Held:
    """A command that waits for messages, until a time.monotonic()."""

    __slots__ = ("command", "key", "request", "until")

    def __init__(self, request: Request, command: PopMessages, until: float) -> None:
        self.request = request
        self.command = command
        self.until = until
        self.key = (command.group, command.topic)

    def __lt__(self, other: Held) -> bool:
        return self.until < other.until


class HeldPops:
    """See the module."""

    def __init__(self, actor: ServiceActor) -> None:
        self._actor = actor
        self._held: dict[WaitKey, dict[Held, None]] = {}  # in the order in which they came
        self._count = 0
        self._by_attempt: dict[tuple[WaitKey, str], Held] = {}
        self._stopped: dict[tuple[str, str], None] = {}  # group, attempt: in the order of stops
        self._until: list[Held] = []  # a heap, with some that are held no longer
        self._alarm: Timer | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def places(self) -> list[WaitKey]:
        """For which anybody waits."""
        return list(self._held)

    def of(self, key: WaitKey) -> list[Held]:
        """In the order in which they came."""
        return list(self._held.get(key, ()))

    def hold(self, command: PopMessages, request: Request) -> None:
        """Raises SystemBusy."""
        if self._count >= HELD_MAX:
            raise SystemBusy(f"{HELD_MAX} consumers wait for messages already")
        wait_s = min(command.wait_ms, POP_WAIT_MS_MAX) / 1000
        held = Held(request, command, time.monotonic() + wait_s)
        if command.attempt:  # whoever asks again does not hear the answer to the first question
            before = self._by_attempt.get((held.key, command.attempt))
            if before is not None:
                self._end_one(before)
            self._by_attempt[held.key, command.attempt] = held
        self._held.setdefault(held.key, {})[held] = None
        self._count += 1
        heapq.heappush(self._until, held)
        if self._until[0] is held:
            self._set_alarm()

    def take(self, held: Held) -> Request:
        """It waits no longer."""
        self._by_attempt.pop((held.key, held.command.attempt), None)
        of_key = self._held[held.key]
        del of_key[held]
        if not of_key:
            del self._held[held.key]
        self._count -= 1
        if not self._count:
            self._until.clear()
        return held.request

    def is_stopped(self, command: PopMessages) -> bool:
        """Return whether that attempt was stopped: the stop came by another connection, before."""
        return (command.group, command.attempt) in self._stopped

    def stop(self, command: StopPopping) -> None:
        """This consumer waits no longer."""
        if command.attempt:
            self._stopped[command.group, command.attempt] = None
            if len(self._stopped) > STOPPED_MAX:
                del self._stopped[next(iter(self._stopped))]
        for key in [key for key in self._held if key[0] == command.group]:
            for held in self.of(key):
                if stops(command, held.command):
                    self._end_one(held)

    def end(self, error: CometError) -> None:
        """Whoever waits hears that there will be none."""
        for held in self._held.values():
            for each in held:
                each.request.fail(error)
        self._held.clear()
        self._by_attempt.clear()
        self._until.clear()
        self._count = 0

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._until:
            wait_s = max(0.0, self._until[0].until - time.monotonic())
            self._alarm = self._actor.after(wait_s, self._end_waits)

    def _end_waits(self) -> None:
        now = time.monotonic()
        while self._until and self._until[0].until <= now:
            self._end_one(heapq.heappop(self._until))
        self._set_alarm()

    def _end_one(self, held: Held) -> None:
        if held in self._held.get(held.key, ()):
            self.take(held).reply(PoppedMessages([]))
