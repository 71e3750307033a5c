"""Restarts of processes that have ended: at once, or after a pause."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cometmq.actors.runtime.loop import Timer


class Restarts:
    """Restart processes for the supervisor. After a failed start it pauses: the missing resource,
    such as disk space, may become available.

    Args:
        start: starts a role's process at once.
        after: schedules a call in the actor's thread, after so many seconds.
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
        """Start all pending processes at once: the actor's timers do not fire any more."""
        for role in self.forget():
            self._start(role)

    def forget(self) -> list[str]:
        """Cancel all pending starts and return their roles."""
        waiting, self._waiting = self._waiting, {}
        for timer in waiting.values():
            timer.cancel()
        return list(waiting)
