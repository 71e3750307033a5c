"""A run of handlers in threads: a pump hands out work, a pool of threads does it, until an end.

`QueueRun` is the run of a consumer with queues; `cometmq.client.popping.run` has that of a pop
consumer. `async_run.py` is the same for asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from cometmq.client.handling.dispatcher import TAKE_COUNT, Dispatcher
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.pool import Pool
from cometmq.client.handling.settlement import Settlement
from cometmq.client.handling.work import Seat, describe
from cometmq.client.receiving.receiver import Receiver

log = logging.getLogger(__name__)

HURRY_S: Final = 0.05  # that work may wait although threads are idle


class Run(ABC):
    """The thread that calls `work` is the pump; `end` and `interrupt` may be called from any.

    Args:
        name: of its threads.
    """

    def __init__(self, name: str, handling: Handling) -> None:
        self._end_timeout_s = handling.end_timeout_s
        self._seats = [Seat() for _ in range(handling.concurrency)]
        self._pool = Pool(name, self._seats)
        self._woken = threading.Event()
        self._pump = threading.get_ident()
        self._ends = False
        self._ended = threading.Event()
        self._raised: BaseException | None = None
        self._at_end: Callable[[], None] | None = None

    @property
    @abstractmethod
    def _settlement(self) -> Settlement: ...

    @abstractmethod
    def _turn(self) -> None:
        """Hand out what came, after a wait for it; `_wake` ends the wait."""

    @abstractmethod
    def _finish(self, left_s: float) -> None:
        """Settle what is done, once no handler begins. `left_s` of `end_timeout_s` are left."""

    def work(self, handler: Handler) -> None:
        """Until the end; raises what ended it, if that was no `end`."""
        try:
            self._pool.start(handler, self._settlement, self._fatal)
            while not self._ends:
                self._turn()
        finally:
            try:
                self._finish(self._join())
            finally:
                self._ended.set()
                if self._at_end is not None:
                    self._at_end()
        if self._raised is not None:
            raise self._raised

    def _join(self) -> float:
        """Wait for active handlers. Return how much of `end_timeout_s` is left."""
        deadline = time.monotonic() + self._end_timeout_s
        self._ends = True
        self._pool.end()
        if not self._pool.join(deadline - time.monotonic()):
            for seat in self._seats:
                if (unit := seat.unit) is not None:
                    log.warning("%s is left: its handler does not end", describe(unit))
        return deadline - time.monotonic()

    # --- from any thread ---

    def end(self, at_end: Callable[[], None]) -> bool:
        """Have it end, and wait for that. False in one of its own threads: then `at_end` is called
        when it has."""
        self.interrupt()
        inside = threading.get_ident()
        if inside == self._pump or self._pool.has(inside):
            if self._ended.is_set():
                return True
            self._at_end = at_end
            self._wake()
            return False
        self._ended.wait()
        return True

    def interrupt(self) -> None:
        """End the run without waiting; the caller of `work` waits for its end."""
        self._ends = self._pool.is_over = True
        self._wake()

    def _wake(self) -> None:
        self._woken.set()

    def _fatal(self, error: BaseException) -> None:
        """A handler wants the process to end."""
        if self._raised is None:
            self._raised = error
        self.interrupt()


class QueueRun(Run):
    """Run of a consumer with queues."""

    def __init__(self, receiver: Receiver, handling: Handling) -> None:
        super().__init__(f"cometmq handler {receiver.member.group}", handling)
        self._stream = receiver.stream
        self._dispatcher = Dispatcher(receiver, handling, self._seats, self._pool.put, self._wake)
        self._hurry_at = 0.0

    @property
    def _settlement(self) -> Settlement:
        return self._dispatcher

    def _turn(self) -> None:
        if self._stream.closed:
            self._ends = True
            return
        sleep_s = self._dispatcher.turn()
        now = time.monotonic()
        if now >= self._hurry_at:
            self._hurry_at = now + HURRY_S
            self._pool.hurry()
        if self._dispatcher.is_full:
            self._woken.wait(sleep_s)
            self._woken.clear()
            return
        found = self._stream.take(TAKE_COUNT, sleep_s)
        if found is not None:
            self._dispatcher.take_in(*found)

    def _wake(self) -> None:
        super()._wake()
        self._stream.ring()

    def _finish(self, left_s: float) -> None:
        self._dispatcher.end(left_s)
