"""What tasks of an event loop wait for, and what is done about it where nobody says anything."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Limited(Protocol):
    limit: float  # until when it is waited for; time.monotonic(). It may be put off


T = TypeVar("T", bound=Limited)


class Overdue(Generic[T]):
    """One timer for all of them: a timer for each would be among the costs of a send, and hardly
    one is ever due. Used in the loop alone, or what runs one after the other.

    Args:
        late: called in the loop with what is still there at its limit, and there no longer.
    """

    def __init__(self, late: Callable[[T], object]) -> None:
        self._late = late
        self._waited_for: dict[T, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # the timer's; time.monotonic()

    def add(self, loop: asyncio.AbstractEventLoop, waited_for: T) -> None:
        if self._loop is not loop:  # the last one was closed: nothing in it goes on
            self._waited_for.clear()
            self._loop, self._due = loop, math.inf
        self._waited_for[waited_for] = None
        if waited_for.limit < self._due:
            self._set(loop, waited_for.limit)

    def discard(self, waited_for: T) -> None:
        """Somebody has said something."""
        self._waited_for.pop(waited_for, None)

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_later(max(0.0, due - time.monotonic()), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        self._timer, self._due = None, math.inf
        now = time.monotonic()
        late = [each for each in self._waited_for if each.limit <= now]
        for each in late:
            del self._waited_for[each]
        if self._waited_for:
            self._set(loop, min([each.limit for each in self._waited_for]))
        for each in late:
            self._late(each)
