"""What followers lack that are behind: it goes to them piece by piece, and what is new goes first.

A master has some MiB on their way to such a follower, and it takes a millisecond or two to read,
check and encrypt each. Whoever sends a message meanwhile waits for one of them at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from cometmq.actors.replication.core.actions import Send, Ship
from cometmq.protocol.errors import StoreError

Outgoing = Send | Ship


class Backlog:
    """In order for each replica; one piece of one of them in a turn of the actor.

    For the core it has been sent: a frame may take its time, and may be lost.

    Args:
        say: does so, now.
        call_soon: has a call made in the actor's thread, once others were heard.
        on_fault: ends the process: the log does not hold, or cannot be read.
    """

    def __init__(
        self,
        say: Callable[[Outgoing], object],
        *,
        call_soon: Callable[[Callable[[], object]], object],
        on_fault: Callable[[str], NoReturn],
    ) -> None:
        self._say = say
        self._call_soon = call_soon
        self._on_fault = on_fault
        self._waiting: dict[str, deque[Outgoing]] = {}  # by replica; the first has the next turn
        self._is_due = False

    def has(self, to: str) -> bool:
        """Whether something waits: then all that follows has to wait behind it."""
        return to in self._waiting

    def put(self, action: Outgoing) -> None:
        self._waiting.setdefault(action.to, deque()).append(action)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._go_on)

    def drop_of(self, to: str) -> None:
        """What waits for one replica is lost."""
        self._waiting.pop(to, None)

    def drop(self) -> None:
        """It is lost: the log is about to be another one, or this replica is no master any more."""
        self._waiting.clear()

    def finish(self) -> None:
        """All of it goes now."""
        while self._waiting:
            self._step()

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting:
            self._step()
        if self._waiting:
            self._is_due = True
            self._call_soon(self._go_on)

    def _step(self) -> None:
        to = next(iter(self._waiting))
        actions = self._waiting.pop(to)
        action = actions.popleft()
        if actions:
            self._waiting[to] = actions  # behind the others
        try:
            # What was deleted since, because it is old, is lost to a follower that lacks it: the
            # core sees that when it asks again.
            with suppress(FileNotFoundError):
                self._say(action)
        except (StoreError, OSError) as error:
            self._on_fault(str(error))
