"""One run of a consumer: a handler is called for what comes, until somebody ends it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from cometmq.client.handling.dispatcher import TAKE_COUNT, Dispatcher
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.pool import Pool
from cometmq.client.handling.work import Seat, describe
from cometmq.client.receiving.receiver import Receiver

log = logging.getLogger(__name__)

HURRY_S: Final = 0.05  # that work may wait although threads are idle


class Run:
    """In the thread that calls `work`; `end` may be called from any."""

    def __init__(self, receiver: Receiver, handling: Handling) -> None:
        self._receiver = receiver
        self._stream = receiver.stream
        self._handling = handling
        self._seats = [Seat() for _ in range(handling.concurrency)]
        self._pool = Pool(f"cometmq handler {receiver.member.group}", self._seats)
        self._dispatcher = Dispatcher(receiver, handling, self._seats, self._pool.put, self._wake)
        self._woken = threading.Event()
        self._pump = threading.get_ident()
        self._hurry_at = 0.0
        self._ends = False
        self._ended = threading.Event()
        self._raised: BaseException | None = None
        self._at_end: Callable[[], None] | None = None

    def work(self, handler: Handler) -> None:
        """Until the end; raises what ended it, if that was no `end`."""
        try:
            self._pool.start(handler, self._dispatcher, self._fatal)
            while not self._ends and not self._stream.closed:
                self._turn()
        finally:
            try:
                self._finish()
            finally:
                self._ended.set()
                if self._at_end is not None:
                    self._at_end()
        if self._raised is not None:
            raise self._raised

    def _turn(self) -> None:
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

    def _finish(self) -> None:
        """Wait for what runs, and acknowledge it; what is not done is not acknowledged."""
        deadline = time.monotonic() + self._handling.end_timeout_s
        self._pool.end()
        if not self._pool.join(deadline - time.monotonic()):
            for seat in self._seats:
                if seat.unit is not None:
                    text = "%s is left: its handler does not end"
                    log.warning(text, describe(seat.unit))
        self._dispatcher.returns.wait(deadline - time.monotonic())
        self._dispatcher.end()

    # --- from any thread ---

    def end(self, at_end: Callable[[], None]) -> bool:
        """Have it end, and wait for that. False in one of its own threads: then `at_end` is called
        when it has."""
        self._cease()
        inside = threading.get_ident()
        if inside == self._pump or self._pool.has(inside):
            if self._ended.is_set():
                return True
            self._at_end = at_end
            self._wake()
            return False
        self._wake()
        self._ended.wait()
        return True

    def interrupt(self) -> None:
        """End the run without waiting; the caller of `work` waits for its end."""
        self._cease()
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._stream.ring()

    def _fatal(self, error: BaseException) -> None:
        """A handler wants the process to end."""
        if self._raised is None:
            self._raised = error
        self._cease()
        self._wake()

    def _cease(self) -> None:
        """Nothing more is begun."""
        self._ends = self._pool.is_over = True
