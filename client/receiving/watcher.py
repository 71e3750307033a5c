"""A thread that sleeps on shared words for a consumer that sleeps on descriptors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from cometmq.protocol.wire.steady import Steady
from cometmq.shm.kernel.live import Bell, ReadCell, Sleeper

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0  # for the end of the thread


class Watcher:
    """See the module.

    Args:
        ring: wakes the consumer; called in the thread.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._bell = Bell()
        self._order = threading.Condition()
        self._sleeper: Sleeper | None = None
        self._for: Sleeper | None = None
        self._closed = False
        self._thread = Steady("cometmq watcher", self._turn)
        self._thread.start()

    def watch(self, like: Sleeper, cells: list[ReadCell]) -> None:
        """Ring once when one of these moves from now on, or since the same was last asked for."""
        with self._order:
            if self._sleeper is not None and self._for is like:
                return
            self._sleeper, self._for = Sleeper(cells, self._bell), like
            self._bell.ring()
            self._order.notify()

    def _turn(self) -> bool:
        with self._order:
            while self._sleeper is None and not self._closed:
                self._order.wait()
            if self._closed:
                return False
            sleeper = self._sleeper
            assert sleeper is not None
            sleeper.hear()
        if sleeper.sleep(3600):
            with self._order:
                if not self._closed and self._sleeper is sleeper:
                    self._sleeper = None
                    self._ring()
        return not self._closed

    def close(self) -> None:
        with self._order:
            self._closed = True
            self._bell.ring()
            self._order.notify()
        if not self._thread.join(CLOSE_S):
            log.error("the watcher of a consumer does not end")
