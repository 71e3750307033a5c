"""The threads that call a handler. `tasks.py` is the same for asyncio."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from cometmq.client.handling.options import Handler
from cometmq.client.handling.outcomes import failure_in
from cometmq.client.handling.settlement import Settlement
from cometmq.client.handling.work import Parcel, Seat, Work

QUICK_S: Final = 0.0001  # units that take less are worth no other thread's waking up
MEAN_S: Final = 0.01  # what a unit takes, as long as nothing is known
SMOOTHING: Final = 16  # works that the mean remembers


class Pool:
    """Daemon threads: a handler that never returns does not keep the process.

    Args:
        seats: one for each thread.
        on_fatal: told of what a handler raised that is no Exception; in a thread of the pool.
    """

    def __init__(self, name: str, seats: list[Seat]) -> None:
        self._seats = seats
        self._name = name
        self._lock = threading.Lock()  # guards the next two
        self._todo: deque[Work] = deque()
        # A bell of each thread that waits: a lock, which whoever rings it releases. A Condition has
        # such ones too, and a good deal of Python around them, between a message and its handler.
        self._idle: list[threading.Lock] = []
        self._unit_s = QUICK_S  # how long a unit took lately
        self.mean_s = MEAN_S  # the same, over some works
        self.is_over = False  # nobody begins anything more
        self._threads: list[threading.Thread] = []

    def start(self, handler: Handler, settlement: Settlement, on_fatal: Handler) -> None:
        for number, seat in enumerate(self._seats):
            thread = threading.Thread(
                target=self._serve,
                args=(seat, handler, settlement, on_fatal),
                name=f"{self._name} {number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def put(self, work: Work) -> None:
        """Somebody will do it. From any thread."""
        with self._lock:
            if self.is_over:
                return
            self._todo.append(work)
            bells = self._wake(1 if self._unit_s < QUICK_S else len(work))
        for bell in bells:
            bell.release()

    def hurry(self) -> None:
        """Work has waited for a moment: everybody is wanted."""
        with self._lock:
            bells = self._wake(len(self._idle)) if self._todo else []
        for bell in bells:
            bell.release()

    def has(self, thread: int) -> bool:
        """Whether it is one of the threads."""
        return any(each.ident == thread for each in self._threads)

    def end(self) -> None:
        """Nobody begins anything more."""
        with self._lock:
            self.is_over = True
            self._todo.clear()
            bells = self._wake(len(self._idle))
        for bell in bells:
            bell.release()

    def _wake(self, count: int) -> list[threading.Lock]:
        """So many bells to be rung, of those who fell idle last. Under the lock."""
        first = max(0, len(self._idle) - count)
        bells = self._idle[first:]
        del self._idle[first:]
        return bells

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads but the calling one; False if one has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                left_s = max(0.0, deadline - time.monotonic())
                thread.join(min(left_s, threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads ---

    def _next(self, bell: threading.Lock) -> Work | None:
        while True:
            with self._lock:
                if self.is_over:
                    return None
                work = self._take()
                if work is not None:
                    return work
                self._idle.append(bell)
            bell.acquire()

    def _take(self) -> Work | None:
        """Under the lock."""
        while self._todo:
            work = self._todo[0]
            left = len(work)
            if left <= 1 or not isinstance(work, Parcel):
                self._todo.popleft()  # else others may take of it, too
            if left:
                return work
            if not isinstance(work, Parcel):
                return work  # whoever leaves it sees that
        return None

    def _serve(
        self, seat: Seat, handler: Handler, settlement: Settlement, on_fatal: Handler
    ) -> None:
        clock = time.monotonic
        bell = threading.Lock()
        bell.acquire()
        while (work := self._next(bell)) is not None:
            began = clock()
            count = 1
            rests = False  # it is not this worker's any more
            for unit in work:
                if self.is_over:
                    settlement.not_begun(unit)
                    break
                count += 1
                track = work.track
                queue = track.queue
                seat.track = track
                seat.since = now = clock()
                seat.unit = unit
                if now > queue.lease.until or queue.progress is not track.progress:
                    seat.unit = None
                    if not (seat.expired is unit and seat.is_late()):
                        rests = settlement.keep_back(work, track, unit)
                    if rests:
                        break
                    continue
                try:
                    returned = handler(unit)
                except BaseException as error:
                    failure: BaseException | None = error
                else:
                    failure = None if returned is None else failure_in(returned)
                seat.unit = None
                if seat.expired is unit and seat.is_late():
                    continue
                if failure is None:
                    track.finished.append(unit)
                    continue
                rests = settlement.failed(work, track, unit, failure)
                if not isinstance(failure, Exception):
                    on_fatal(failure)
                failure = None
                if rests:
                    break
            took_s = clock() - began
            self._unit_s = took_s / count
            self.mean_s += (took_s / max(1, count - 1) - self.mean_s) / SMOOTHING
            if not rests:
                settlement.leave(work)
