"""A run of handlers in asyncio tasks: as `run.py`, with tasks instead of threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

from cometmq.client.handling.dispatcher import TAKE_COUNT, Dispatcher
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.settlement import Settlement
from cometmq.client.handling.tasks import TaskPool
from cometmq.client.handling.work import Seat, describe
from cometmq.client.receiving.receiver import Receiver

log = logging.getLogger(__name__)

CANCELLED_S: Final = 5.0  # until cancelled handlers have ended


class AsyncRun(ABC):
    """To be made, and used, in the event loop. The task that awaits `work` is the pump."""

    def __init__(self, handling: Handling) -> None:
        self._end_timeout_s = handling.end_timeout_s
        self._seats = [Seat() for _ in range(handling.concurrency)]
        self._pool = TaskPool(self._seats)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._woken = asyncio.Event()
        self._pump: asyncio.Task[object] | None = None
        self._ends = False
        self._is_cancelled = False  # and so are the handlers
        self._ended = asyncio.Event()
        self._raised: BaseException | None = None
        self._closes = False  # whoever ends it could not wait

    @property
    @abstractmethod
    def _settlement(self) -> Settlement: ...

    @abstractmethod
    async def _turn(self) -> None:
        """Hand out what came, after a wait for it; `_wake` ends the wait."""

    @abstractmethod
    def _finish(self, left_s: float) -> None:
        """Settle what is done. Called in a thread of its own; `left_s` of `end_timeout_s` are
        left."""

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def work(self, handler: Handler) -> bool:
        """Until the end; raises what ended it, if that was no `end`. Whether to close then."""
        self._pump = asyncio.current_task()
        try:
            self._pool.start(handler, self._settlement, self._fatal)
            while not self._ends:
                await self._turn()
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        finally:
            try:
                await self._end_work()
            finally:
                self._ended.set()
        if self._raised is not None:
            raise self._raised
        return self._closes

    async def _sleep(self, timeout_s: float) -> None:
        """Until `_wake`, or so long."""
        timer = self._loop.call_later(timeout_s, self._woken.set)
        await self._woken.wait()
        self._woken.clear()
        timer.cancel()

    async def _end_work(self) -> None:
        """Wait for what runs, and settle it; what is not done is not acknowledged. A run that was
        cancelled has its handlers cancelled first."""
        self._ends = True
        deadline = self._loop.time() + self._end_timeout_s
        self._pool.end()
        current = asyncio.current_task()
        workers = [worker for worker in self._pool.tasks if worker is not current]
        try:
            if self._is_cancelled:
                _cancel(workers)
            if workers:
                await asyncio.wait(workers, timeout=self._end_timeout_s)
        finally:
            for seat in self._seats:
                if seat.unit is not None:
                    log.warning("%s is left: its handler is cancelled", describe(seat.unit))
            late = [worker for worker in workers if not worker.done()]
            _cancel(late)
            try:
                if late and not self._is_cancelled:
                    await asyncio.wait(late, timeout=CANCELLED_S)
            finally:
                left_s = deadline - self._loop.time()
                await asyncio.shield(self._in_thread(self._finish, left_s))

    # --- from other tasks ---

    async def end(self) -> bool:
        """Have it end, and wait for that. False in one of its own tasks: then it closes later."""
        self.cease()
        current = asyncio.current_task()
        if current is self._pump or current in self._pool.tasks:
            self._closes = True
            return False
        await self._ended.wait()
        return True

    def cease(self) -> None:
        """Begin nothing more."""
        self._ends = self._pool.is_over = True
        self._wake()

    def _fatal(self, error: BaseException) -> None:
        """A handler wants the process to end."""
        self._raised = self._raised or error
        self.cease()

    # --- from any thread ---

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._woken.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)


class AsyncQueueRun(AsyncRun):
    """Run of an asyncio consumer with queues.

    Args:
        readable: sleeps until something comes, or for so long.
    """

    def __init__(
        self, receiver: Receiver, handling: Handling, readable: Callable[[float], Awaitable[None]]
    ) -> None:
        super().__init__(handling)
        self._stream = receiver.stream
        self._readable = readable
        self._dispatcher = Dispatcher(receiver, handling, self._seats, self._pool.put, self._wake)

    @property
    def _settlement(self) -> Settlement:
        return self._dispatcher

    async def _turn(self) -> None:
        if self._stream.closed:
            self._ends = True
            return
        sleep_s = self._dispatcher.turn()
        if self._dispatcher.is_full:
            await self._sleep(sleep_s)
            return
        found = self._stream.take(TAKE_COUNT, 0)
        if found is None:
            await self._readable(sleep_s)
        else:
            self._dispatcher.take_in(*found)
            await asyncio.sleep(0)

    def _wake(self) -> None:
        self._stream.ring()
        super()._wake()

    def _finish(self, left_s: float) -> None:
        self._dispatcher.end(left_s)


def _cancel(workers: list[asyncio.Task[None]]) -> None:
    for worker in workers:
        worker.cancel()
