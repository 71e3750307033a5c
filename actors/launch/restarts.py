"""Starts of processes in the place of others that have ended: at once, or after a pause."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cometmq.actors.runtime.loop import Timer


class Restarts:
    """The supervisor's. A process whose predecessor has failed to start waits: what that needs,
    such as room on the disk, may come.

    Args:
        start: starts a role's process at once.
        after: has a call made after so many seconds, in the actor's thread.
    """

    def __init__(
        self,
        start: Callable[[str], None],
        after: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._start = start
        self._after = after
        self._waiting: dict[str, Timer] = {}

    def start(self, role: str, pause_s: float) -> None:
        if pause_s:
            self._waiting[role] = self._after(pause_s, partial(self._start_now, role))
        else:
            self._start(role)

    def _start_now(self, role: str) -> None:
        self._waiting.pop(role, None)
        self._start(role)

    def start_waiting(self) -> None:
        """At once: the actor's timers do not go off any more."""
        for role in self.forget():
            self._start(role)

    def forget(self) -> list[str]:
        """Start none of those that wait; which these are."""
        waiting, self._waiting = self._waiting, {}
        for timer in waiting.values():
            timer.cancel()
        return list(waiting)
