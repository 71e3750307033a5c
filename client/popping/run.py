"""One run of a pop consumer: threads call the handler; what is done is acknowledged together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from cometmq.client.handling.failures import FailureLog
from cometmq.client.handling.options import Handler, Handling
from cometmq.client.handling.outcomes import Verdict, failure_in, verdict_of
from cometmq.client.handling.stuck import Watch
from cometmq.client.handling.work import Seat, describe
from cometmq.client.popping.broker import may_help, taken_of
from cometmq.protocol.errors import CometError
from cometmq.protocol.retry import pause_s
from cometmq.shm.kernel._kernel import Message

log = logging.getLogger(__name__)

TAKE_COUNT: Final = 2_048  # messages that are popped at once
AHEAD: Final = 2  # for each thread so many wait here; they are invisible meanwhile
AHEAD_S: Final = 0.1  # or, of quick ones, what takes so long
ACK_COUNT: Final = 4_096
QUICK_S: Final = 0.0001  # of a message that is worth no lock of its own
QUICK_COUNT: Final = 64
POLL_S: Final = 1.0


class Popping(Protocol):
    """What it needs of a consumer."""

    @property
    def is_closed(self) -> bool: ...
    def poll(self, max_messages: int, timeout_s: float) -> list[Message]: ...
    def ack(self, *messages: Message) -> None: ...
    def give_back(self, message: Message, verdict: Verdict) -> None: ...
    def release(self, messages: Iterable[Message]) -> None: ...
    def release_lost(self) -> None: ...
    def stop_waiting(self) -> None: ...


class PopRun:
    """See the module. The thread that calls `work` pops; another one acknowledges."""

    def __init__(self, consumer: Popping, handler: Handler, handling: Handling) -> None:
        self._consumer = consumer
        self._handler = handler
        self._end_timeout_s = handling.end_timeout_s
        self._room = max(AHEAD * handling.concurrency, 1)
        self._seats = [Seat() for _ in range(handling.concurrency)]
        self._watch = Watch(handling.stuck_s)
        self._changed = threading.Condition()  # guards the fields below
        self._todo: deque[Message] = deque()
        self._working = 0
        self._done: deque[Message] = deque()
        self._batches: dict[Seat, deque[Message]] = {}  # assigned to threads, not begun
        self._unbegun: list[Message] = []  # those of them that were left at the end
        self._ends = self._is_over = False
        self._unit_s = 0.01  # that a message took lately
        self._failures = FailureLog(log)
        self._raised: BaseException | None = None
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, args=(seat,), name=f"cometmq pop {number}", daemon=True
            )
            for number, seat in enumerate(self._seats)
        ]
        self._acker = threading.Thread(target=self._acknowledge, name="cometmq acks", daemon=True)

    def work(self) -> None:
        for thread in (*self._threads, self._acker):
            thread.start()
        try:
            while not self._ends and not self._consumer.is_closed:
                self._watch.look(self._seats)
                self._turn()
        finally:
            self._finish()
            self._ended.set()
        if self._raised is not None:
            raise self._raised

    def _turn(self) -> None:
        """Pop as much as the threads will have done soon."""
        self._release_late()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or len(self._todo) < self._room, self._late_in_s()
            )
            soon = int(AHEAD_S / max(self._unit_s, 1e-6)) * len(self._threads)
            count = min(TAKE_COUNT, self._room + soon) - len(self._todo)
        if count <= 0 or self._ends:
            return
        try:
            found = self._consumer.poll(count, self._late_in_s())
        except CometError as error:
            if not may_help(error):
                raise
            return  # nobody has been there for long: a run waits until somebody is
        with self._changed:
            self._todo.extend(found)
            self._changed.notify_all()

    def _late_in_s(self) -> float:
        """Seconds until a message has waited too long for a thread and has to be released."""
        late = min((taken_of(message).late for message in list(self._todo)), default=None)
        return POLL_S if late is None else min(POLL_S, max(0.0, late - time.monotonic()))

    def _release_late(self) -> None:
        """Release messages that have waited too long for a thread: if their invisibility timeout
        expired unhandled, it would count as an attempt."""
        now = time.monotonic()
        with self._changed:
            late = [message for message in self._todo if taken_of(message).late <= now]
            if late:
                self._todo = deque(each for each in self._todo if taken_of(each).late > now)
        for batch in list(self._batches.values()):  # they wait for a slow handler
            if any(taken_of(message).late <= now for message in list(batch)):
                late += drained(batch)
        self._release(late)

    def interrupt(self) -> None:
        """End the run without waiting; the caller of `work` waits for its end."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def end(self) -> bool:
        """End the run and wait for its end; return False, without a wait, in a handler's thread."""
        self.interrupt()
        if threading.current_thread() in self._threads:
            return False
        self._ended.wait()
        return True

    def _finish(self) -> None:
        """Wait for active handlers and acknowledge their messages; release those not begun."""
        deadline = time.monotonic() + self._end_timeout_s
        with self._changed:
            self._ends = True
            waiting = list(self._todo)
            self._todo.clear()
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: not self._working, max(0.0, deadline - time.monotonic())
            ):
                for seat in self._seats:
                    if (unit := seat.unit) is not None:
                        log.warning("%s is left: its handler does not end", describe(unit))
            self._is_over = True
            self._changed.notify_all()
        for batch in list(self._batches.values()):
            waiting += drained(batch)
        self._failures.end()
        self._acker.join(max(0.1, deadline - time.monotonic()))
        self._release([*self._unbegun, *waiting])
        self._consumer.release_lost()

    def _release(self, unbegun: Sequence[Message]) -> None:
        if unbegun:
            try:
                self._consumer.release(unbegun)
            except CometError as error:
                log.debug("some of %d messages are not released: %s", len(unbegun), error)

    # --- the threads ---

    def _work(self, seat: Seat) -> None:
        while True:
            messages = self._take()
            if not messages:
                return
            count = len(messages)
            self._batches[seat] = messages
            began = time.monotonic()
            done: list[Message] = []
            try:
                self._work_through(seat, messages, done)
            except BaseException as error:
                self._raised = error
                self._ends = True
            finally:
                took_s = (time.monotonic() - began) / count
                del self._batches[seat]
                self._unbegun += drained(messages)
                with self._changed:
                    self._working -= 1
                    self._done.extend(done)
                    self._unit_s += (took_s - self._unit_s) / 16
                    self._changed.notify_all()

    def _work_through(self, seat: Seat, messages: deque[Message], done: list[Message]) -> None:
        """Move handled messages from `messages` to `done`; those that are not begun stay."""
        while not self._ends and (message := first_of(messages)) is not None:
            if self._handle(seat, message):
                done.append(message)

    def _take(self) -> deque[Message]:
        """One, or some at a time while they take next to nothing; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._todo or self._ends)
            if self._ends:
                return deque()
            count = 1
            if self._unit_s < QUICK_S:
                count = min(QUICK_COUNT, max(1, len(self._todo) // len(self._threads)))
            self._working += 1
            return deque(self._todo.popleft() for _ in range(count))

    def _handle(self, seat: Seat, message: Message) -> bool:
        """Whether it is done with. Raises what is no Exception, once it is given back."""
        seat.since = time.monotonic()
        seat.unit = message
        try:
            failure = failure_in(self._handler(message))
        except BaseException as error:
            failure = error
        seat.unit = None
        if failure is None:
            return True
        verdict = verdict_of(failure)
        self._failures.failed(message, failure)
        try:
            self._consumer.give_back(message, verdict)
        except CometError as error:
            log.warning("%s is not given back, and comes by itself: %s", describe(message), error)
        if not isinstance(failure, Exception):
            raise failure
        return False

    def _acknowledge(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done or self._is_over)
                if not self._done:
                    return
                done = [self._done.popleft() for _ in range(min(ACK_COUNT, len(self._done)))]
            try:
                self._consumer.ack(*done)
            except CometError as error:
                failures += 1
                log.warning("some of %d messages are not acknowledged: %s", len(done), error)
                time.sleep(pause_s(failures))
            except RuntimeError as closed:  # `_finish` has waited long enough: they come again
                log.warning("%d messages are not acknowledged: %s", len(done), closed)
                return
            else:
                failures = 0


def first_of(batch: deque[Message]) -> Message | None:
    """Remove and return the first message, or None. Another thread may remove some as well."""
    try:
        return batch.popleft()
    except IndexError:
        return None


def drained(batch: deque[Message]) -> list[Message]:
    """Remove and return all messages."""
    found = []
    while (message := first_of(batch)) is not None:
        found.append(message)
    return found
