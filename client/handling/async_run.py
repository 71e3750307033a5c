"""One run of an asyncio consumer: as `run`, with tasks instead of threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from cometmq.client.handling.dispatcher import TAKE_COUNT, Dispatcher
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.outcomes import failure_in
from cometmq.client.handling.work import Parcel, Seat, Work, describe
from cometmq.client.receiving.receiver import Receiver

log = logging.getLogger(__name__)

YIELD_COUNT: Final = 256  # units of a worker between two turns of the event loop


class AsyncRun:
    """To be made, and used, in the event loop.

    Args:
        readable: sleeps until something comes, or for so long.
    """

    def __init__(
        self, receiver: Receiver, handling: Handling, readable: Callable[[float], Awaitable[None]]
    ) -> None:
        self._stream = receiver.stream
        self._handling = handling
        self._readable = readable
        self._seats = [Seat() for _ in range(handling.concurrency)]
        self._dispatcher = Dispatcher(receiver, handling, self._seats, self._put, self._wake)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._woken = asyncio.Event()
        self._todo: deque[Work] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: list[asyncio.Task[None]] = []
        self._pump: asyncio.Task[object] | None = None
        self._ends = False
        self._is_cancelled = False  # and so are the handlers
        self._ended = asyncio.Event()
        self._raised: BaseException | None = None
        self._closes = False  # whoever ends it could not wait

    async def work(self, handler: Handler) -> bool:
        """Until the end; raises what ended it, if that was no `end`. Whether to close then."""
        self._pump = asyncio.current_task()
        try:
            self._workers = [
                asyncio.create_task(self._serve(seat, handler)) for seat in self._seats
            ]
            while not self._ends and not self._stream.closed:
                await self._turn()
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        finally:
            try:
                await self._finish()
            finally:
                self._ended.set()
        if self._raised is not None:
            raise self._raised
        return self._closes

    async def _turn(self) -> None:
        sleep_s = self._dispatcher.turn()
        if self._dispatcher.is_full:
            timer = self._loop.call_later(sleep_s, self._woken.set)
            await self._woken.wait()
            self._woken.clear()
            timer.cancel()
            return
        found = self._stream.take(TAKE_COUNT, 0)
        if found is None:
            await self._readable(sleep_s)
        else:
            self._dispatcher.take_in(*found)
            await asyncio.sleep(0)

    async def _finish(self) -> None:
        """Wait for what runs, and acknowledge it; what is not done is not acknowledged. A run that
        was cancelled has its handlers cancelled first."""
        self._ends = True
        deadline = self._loop.time() + self._handling.end_timeout_s
        while self._todo:
            self._todo.popleft().clear()
        while self._idle:
            self._rouse()
        current = asyncio.current_task()
        others = [worker for worker in self._workers if worker is not current]
        try:
            if self._is_cancelled:
                for worker in others:
                    worker.cancel()
            if others:
                await asyncio.wait(others, timeout=self._handling.end_timeout_s)
            left_s = deadline - self._loop.time()
            await asyncio.to_thread(self._dispatcher.returns.wait, left_s)
        finally:
            for seat in self._seats:
                if seat.unit is not None:
                    log.warning("%s is left: its handler is cancelled", describe(seat.unit))
            for worker in others:
                worker.cancel()
            self._dispatcher.end()

    # --- from other tasks ---

    async def end(self) -> bool:
        """Have it end, and wait for that. False in one of its own tasks: then it closes later."""
        self._ends = True
        self._wake()
        current = asyncio.current_task()
        if current is self._pump or current in self._workers:
            self._closes = True
            return False
        await self._ended.wait()
        return True

    # --- from any thread ---

    def _wake(self) -> None:
        self._stream.ring()
        if threading.get_ident() == self._thread:
            self._woken.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    def _put(self, work: Work) -> None:
        if threading.get_ident() == self._thread:
            self._add(work)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add, work)

    # --- workers ---

    def _add(self, work: Work) -> None:
        if self._ends:
            work.clear()
            return
        self._todo.append(work)
        for _ in range(min(len(work), len(self._idle)) or 1):
            self._rouse()

    def _rouse(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    async def _next(self) -> Work | None:
        while not self._ends:
            while self._todo:
                work = self._todo[0]
                left = len(work)
                if left <= 1 or not isinstance(work, Parcel):
                    self._todo.popleft()  # else others may take of it, too
                if left or not isinstance(work, Parcel):
                    return work
            idle = self._loop.create_future()
            self._idle.append(idle)
            await idle
        return None

    async def _serve(self, seat: Seat, handler: Handler) -> None:
        clock = self._loop.time
        count = 0
        while (work := await self._next()) is not None:
            rests = False  # it is not this worker's any more
            for unit in work:
                if self._ends:
                    break
                track = work.track
                queue = track.queue
                seat.track = track
                seat.since = now = clock()
                seat.unit = unit
                if now > queue.lease.until or queue.progress is not track.progress:
                    seat.unit = None
                    rests = self._dispatcher.keep_back(work, track, unit)
                    if rests:
                        break
                    continue
                failure: BaseException | None
                try:
                    returned = await handler(unit)
                except asyncio.CancelledError as error:
                    if self._ends:
                        seat.unit = None  # it has ended
                        raise
                    failure = error
                except BaseException as error:
                    failure = error
                else:
                    failure = None if returned is None else failure_in(returned)
                seat.unit = None
                if seat.expired is unit and seat.is_late():
                    pass
                elif failure is None:
                    track.finished.append(unit)
                else:
                    rests = self._failed(work, seat, failure, unit)
                    if rests:
                        break
                count += 1
                if count % YIELD_COUNT == 0:
                    await asyncio.sleep(0)
            if not rests:
                self._dispatcher.leave(work)

    def _failed(self, work: Work, seat: Seat, failure: BaseException, unit: object) -> bool:
        """See Dispatcher.failed."""
        assert seat.track is not None
        rests = self._dispatcher.failed(work, seat.track, unit, failure)
        if not isinstance(failure, Exception | asyncio.CancelledError):
            self._raised = self._raised or failure
            self._ends = True
            self._wake()
        return rests
