"""One `poll` of a pop consumer, which another thread may cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final

AGAIN_S: Final = 0.5  # StopPopping may reach the broker before the pop that it ends


class PopCall:
    """One `poll`, and how to end it from another thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._stop: Callable[[], None] | None = None  # makes the broker answer

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def pause(self, timeout_s: float) -> None:
        """Sleep until the time is over or the call is cancelled."""
        self._cancelled.wait(max(0.0, timeout_s))

    @contextmanager
    def waits(self, stop: Callable[[], None]) -> Iterator[bool]:
        """Register `stop`, which makes the broker answer; yield False if the call is cancelled."""
        self._stop = stop
        try:
            yield not self.is_cancelled
        finally:
            self._stop = None

    def stop(self) -> None:
        """End the call soon; its caller releases the messages that it has popped."""
        self._cancelled.set()
        stop = self._stop
        if stop is not None:
            stop()

    def cancel(self, over: Future[Any]) -> None:
        """End the call and wait for its end.

        Args:
            over: future of the call.
        """
        self._cancelled.set()
        while not over.done():
            stop = self._stop
            if stop is not None:
                stop()
            wait([over], AGAIN_S)
