"""The asyncio tasks that await a handler. `pool.py` is the same with threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Final

from cometmq.client.handling.options import Handler
from cometmq.client.handling.outcomes import failure_in
from cometmq.client.handling.pool import MEAN_S, SMOOTHING
from cometmq.client.handling.settlement import Settlement
from cometmq.client.handling.work import Parcel, Seat, Work

YIELD_COUNT: Final = 256  # units of a worker between two turns of the event loop


class TaskPool:
    """Tasks of the event loop in which it is made.

    Args:
        seats: one for each task.
    """

    def __init__(self, seats: list[Seat]) -> None:
        self.mean_s = MEAN_S  # how long a unit took, over some works
        self.is_over = False  # no worker begins anything more
        self.tasks: list[asyncio.Task[None]] = []
        self._seats = seats
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._todo: deque[Work] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()

    def start(self, handler: Handler, settlement: Settlement, on_fatal: Handler) -> None:
        """Begin to work. `on_fatal` is called with what a handler raised that is no Exception."""
        for seat in self._seats:
            serve = self._serve(seat, handler, settlement, on_fatal)
            self.tasks.append(asyncio.create_task(serve))

    def put(self, work: Work) -> None:
        """Some task will do it. From any thread."""
        if threading.get_ident() == self._thread:
            self._add(work)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add, work)

    def end(self) -> None:
        """No worker begins anything more."""
        self.is_over = True
        self._todo.clear()
        self._wake(len(self._idle))

    def _add(self, work: Work) -> None:
        if not self.is_over:
            self._todo.append(work)
            self._wake(len(work) or 1)

    def _wake(self, count: int) -> None:
        while count and self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                count -= 1

    async def _next(self) -> Work | None:
        while not self.is_over:
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

    async def _serve(
        self, seat: Seat, handler: Handler, settlement: Settlement, on_fatal: Handler
    ) -> None:
        clock = self._loop.time
        count = 0
        while (work := await self._next()) is not None:
            rests = False  # it is not this worker's any more
            for unit in work:
                if self.is_over:
                    settlement.not_begun(unit)
                    break
                track = work.track
                queue = track.queue
                seat.track = track
                seat.since = now = clock()
                seat.unit = unit
                if now > queue.lease.until or queue.progress is not track.progress:
                    seat.unit = None
                    rests = settlement.keep_back(work, track, unit)
                    if rests:
                        break
                    continue
                failure: BaseException | None
                try:
                    returned = await handler(unit)
                except asyncio.CancelledError as error:
                    if self.is_over:
                        seat.unit = None  # it has ended
                        settlement.cancelled(unit)
                        raise
                    failure = error  # something of the handler's own was cancelled
                except BaseException as error:
                    failure = error
                else:
                    failure = None if returned is None else failure_in(returned)
                seat.unit = None
                self.mean_s += (clock() - now - self.mean_s) / SMOOTHING
                if seat.expired is unit and seat.is_late():
                    pass
                elif failure is None:
                    track.finished.append(unit)
                else:
                    rests = settlement.failed(work, track, unit, failure)
                    if not isinstance(failure, Exception | asyncio.CancelledError):
                        on_fatal(failure)
                    failure = None
                    if rests:
                        break
                count += 1
                if count % YIELD_COUNT == 0:
                    await asyncio.sleep(0)
            if not rests:
                settlement.leave(work)
