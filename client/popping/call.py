"""One `poll` of a pop consumer, which another thread may cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final

AGAIN_S: Final = 0.5  # the broker may hear of the end of a question before the question


class PopCall:
    """See the module."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._stop: Callable[[], None] | None = None  # has a broker answer

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def pause(self, timeout_s: float) -> None:
        """Sleep, unless it is cancelled."""
        self._cancelled.wait(max(0.0, timeout_s))

    @contextmanager
    def waits(self, stop: Callable[[], None]) -> Iterator[bool]:
        """A broker is asked now, which `stop` has answer; False: it is not to be asked."""
        self._stop = stop
        try:
            yield not self.is_cancelled
        finally:
            self._stop = None

    def stop(self) -> None:
        """Have the call end soon; what it has popped is to be released."""
        self._cancelled.set()
        stop = self._stop
        if stop is not None:
            stop()

    def cancel(self, over: Future[Any]) -> None:
        """Have the call end, and wait for that.

        Args:
            over: what the call comes to.
        """
        self._cancelled.set()
        while not over.done():
            stop = self._stop
            if stop is not None:
                stop()
            wait([over], AGAIN_S)
