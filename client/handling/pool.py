"""The threads that call a handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from cometmq.client.handling.dispatcher import Dispatcher
from cometmq.client.handling.options import Handler
from cometmq.client.handling.outcomes import failure_in
from cometmq.client.handling.work import Parcel, Seat, Work

QUICK_S: Final = 0.0001  # units that take less are worth no other thread's waking up


class Pool:
    """Daemon threads: a handler that never returns does not keep the process.

    Args:
        seats: one for each thread.
        on_fatal: told of what a handler raised that is no Exception; in a thread of the pool.
    """

    def __init__(self, name: str, seats: list[Seat]) -> None:
        self._seats = seats
        self._name = name
        self._changed = threading.Condition()
        self._todo: deque[Work] = deque()
        self._idle = 0
        self._unit_s = QUICK_S  # how long a unit took lately
        self.is_over = False  # nobody begins anything more
        self._threads: list[threading.Thread] = []

    def start(self, handler: Handler, dispatcher: Dispatcher, on_fatal: Handler) -> None:
        for number, seat in enumerate(self._seats):
            thread = threading.Thread(
                target=self._serve,
                args=(seat, handler, dispatcher, on_fatal),
                name=f"{self._name} {number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def put(self, work: Work) -> None:
        """Somebody will do it. From any thread."""
        with self._changed:
            if self.is_over:
                return
            self._todo.append(work)
            if self._idle:
                self._changed.notify(1 if self._unit_s < QUICK_S else len(work))

    def hurry(self) -> None:
        """Work has waited for a moment: everybody is wanted."""
        with self._changed:
            if self._todo and self._idle:
                self._changed.notify_all()

    def has(self, thread: int) -> bool:
        """Whether it is one of the threads."""
        return any(each.ident == thread for each in self._threads)

    def end(self) -> None:
        """Nobody begins anything more."""
        with self._changed:
            self.is_over = True
            for work in self._todo:
                work.clear()
            self._todo.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads but the calling one; False if one has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads ---

    def _next(self) -> Work | None:
        with self._changed:
            while not self.is_over:
                while self._todo:
                    work = self._todo[0]
                    left = len(work)
                    if left <= 1 or not isinstance(work, Parcel):
                        self._todo.popleft()  # else others may take of it, too
                    if left:
                        return work
                    if not isinstance(work, Parcel):
                        return work  # whoever leaves it sees that
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
        return None

    def _serve(
        self, seat: Seat, handler: Handler, dispatcher: Dispatcher, on_fatal: Handler
    ) -> None:
        clock = time.monotonic
        while (work := self._next()) is not None:
            began = clock()
            count = 1
            rests = False  # it is not this worker's any more
            for unit in work:
                if self.is_over:
                    break
                count += 1
                track = work.track
                queue = track.queue
                seat.track = track
                seat.since = now = clock()
                seat.unit = unit
                if now > queue.lease.until or queue.progress is not track.progress:
                    seat.unit = None
                    rests = dispatcher.keep_back(work, track, unit)
                    if rests:
                        break
                    continue
                try:
                    returned = handler(unit)
                except BaseException as error:
                    failure: BaseException | None = error
                else:
                    if returned is None and seat.expired is not unit:
                        track.finished.append(unit)
                        seat.unit = None
                        continue
                    failure = failure_in(returned)
                seat.unit = None
                if seat.expired is unit:
                    continue
                if failure is None:
                    track.finished.append(unit)
                    continue
                rests = dispatcher.failed(work, track, unit, failure)
                if not isinstance(failure, Exception):
                    on_fatal(failure)
                failure = None
                if rests:
                    break
            self._unit_s = (clock() - began) / count
            if not rests:
                dispatcher.leave(work)
