"""What becomes of popped messages: acknowledged together, given back or released one by one.

The pump of a run asks how many messages to pop, and makes work of them. Workers report here. One
thread of each run talks to the brokers, so that no handler waits for one.

A message that waits here is invisible to other consumers. If its invisibility timeout expired
before a handler began, that would count as an attempt, so it is released before.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol, cast

from cometmq.client.handling.failures import FailureLog
from cometmq.client.handling.options import Handling
from cometmq.client.handling.outcomes import Verdict, verdict_of
from cometmq.client.handling.pool import QUICK_S
from cometmq.client.handling.work import Parcel, Strand, Track, Unit, Work, describe
from cometmq.client.popping.broker import taken_of
from cometmq.protocol.errors import ClientClosed, CometError
from cometmq.protocol.retry import pause_s
from cometmq.protocol.takes import TAKE_MAX
from cometmq.shm.kernel.codec import Message

if TYPE_CHECKING:
    from cometmq.client.receiving.buffer import Queue

log = logging.getLogger(__name__)

TAKE_COUNT: Final = 2_048  # messages that are popped at once
AHEAD: Final = 2  # messages that wait here for each worker; they are invisible meanwhile
AHEAD_S: Final = 0.1  # or as many as the workers handle in this time
BRIEF_S: Final = 0.001  # handlers that take less always have some messages ahead
QUICK_COUNT: Final = 64  # messages in one piece of work, if they take less than QUICK_S
ACK_COUNT: Final = 4_096  # in one call
ACK_S: Final = 0.1  # that an acknowledgement waits for others of its take, in order
GATHER_S: Final = 0.005  # that an acknowledgement waits for others, without order
END_S: Final = 5.0  # for brokers at the end, if handlers took all of `end_timeout_s`
POLL_S: Final = 1.0
AT_ONCE: Final = Verdict(after_ms=0)  # redeliver without delay


class Popping(Protocol):
    """What a run needs of a consumer. Called in any thread."""

    @property
    def is_closed(self) -> bool: ...
    def poll(self, max_messages: int, timeout_s: float) -> list[Message]: ...
    def ack(self, *messages: Message) -> None: ...
    def give_back(
        self, given: Sequence[tuple[Message, Verdict]]
    ) -> list[tuple[Message, CometError]]: ...
    def release(self, messages: Iterable[Message]) -> None: ...
    def release_lost(self) -> None: ...


class Lease(Protocol):
    until: float  # time.monotonic()


class _Always:
    """Lease of messages that are handled however late it is."""

    until = math.inf


class _Origin:
    """In a `Track`, the place of a queue: what a worker looks at before it begins with a unit."""

    __slots__ = ("lease", "progress")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.progress = None


class PopSettlement:
    """Used by a pump, by workers (see `Settlement`) and by its own thread.

    Args:
        ahead: whether messages wait here for workers; without, only free workers have some popped,
            unless handlers are brief.
        orderly: takes are handled in order, each by one worker. A failed message ends its take:
            this consumer no longer has the messages behind it.
        wake: has the pump look again.
    """

    def __init__(
        self,
        consumer: Popping,
        handling: Handling,
        *,
        ahead: bool,
        orderly: bool,
        wake: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._concurrency = handling.concurrency
        self._ahead = ahead
        self._orderly = orderly
        self._wake = wake
        self._works: dict[Work, float] = {}  # not finished, and until when they may wait here
        self._finished: deque[Message] = deque()  # handled, not acknowledged
        self._track = self._track_of(_Always())
        self._given: deque[tuple[Message, Verdict]] = deque()
        self._unbegun: deque[Message] = deque()
        self._failures = FailureLog(log)
        self._changed = threading.Condition()  # guards the next two
        self._is_due = False
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="cometmq acks", daemon=True)
        self._thread.start()

    def _track_of(self, lease: Lease) -> Track:
        track = Track(cast("Queue", _Origin(lease)))  # workers look at no more of it
        track.finished = self._finished
        return track

    # --- the pump ---

    def wanted(self, mean_s: float, idle: int) -> int:
        """How many messages to pop now; 0: none.

        Args:
            mean_s: that a handler takes.
            idle: workers without a message.
        """
        if self._orderly:  # a take that waits here keeps its queue from other consumers
            return take_count(mean_s) if len(self._works) < self._concurrency else 0
        room = AHEAD * self._concurrency if self._ahead else idle
        if (waiting := self.waiting) >= room:
            return 0
        soon = 0
        if self._ahead or mean_s < BRIEF_S:
            soon = int(AHEAD_S / max(mean_s, 1e-6)) * self._concurrency
        return min(TAKE_COUNT, room + soon) - waiting

    @property
    def waiting(self) -> int:
        """Popped messages that no worker has taken."""
        return sum(map(len, list(self._works)))

    def works_of(self, messages: list[Message], mean_s: float) -> list[Work]:
        """Make work of popped messages."""
        works = list(self._takes(messages) if self._orderly else self._parcels(messages, mean_s))
        if self._orderly:
            self._notify()  # acknowledgements do not wait for the end of a take
        return works

    def _takes(self, messages: list[Message]) -> Iterator[Work]:
        for take in takes_of(messages):
            taken = taken_of(take[0])
            track = self._track_of(taken)
            strand = Strand(track, None, 1)
            strand.waiting.extend((track, message) for message in take)
            self._works[strand] = taken.late
            yield strand

    def _parcels(self, messages: list[Message], mean_s: float) -> Iterator[Work]:
        size = 1
        if mean_s < QUICK_S:
            size = min(QUICK_COUNT, max(1, len(messages) // self._concurrency))
        for at in range(0, len(messages), size):
            some = messages[at : at + size]
            parcel = Parcel(self._track, some)
            self._works[parcel] = min(taken_of(message).late for message in some)
            yield parcel

    def late_in_s(self) -> float:
        """Seconds until a message has waited too long for a worker, POLL_S at most."""
        late = min((at for work, at in list(self._works.items()) if len(work)), default=math.inf)
        return min(POLL_S, max(0.0, late - time.monotonic()))

    def release_late(self) -> None:
        """Release messages that have waited too long for a worker. Asks brokers: what is popped
        after that is not the same messages, if another consumer waits for some."""
        now = time.monotonic()
        late = [work for work, at in list(self._works.items()) if at <= now]
        self._release([message for work in late for message in work.take_rest()])
        if not self._orderly:  # a parcel without a rest comes to no worker; a strand does
            for work in late:
                self._works.pop(work, None)

    def give_up(self, unbegun: Iterable[Message]) -> None:
        """Release messages that no handler has begun."""
        self._unbegun.extend(unbegun)
        self._notify()

    # --- workers ---

    def keep_back(self, work: Work, track: Track, unit: Unit) -> bool:
        """Its invisibility timeout is over: another consumer may have the take by now."""
        self.give_up([unit, *work.take_rest()])
        return False

    def not_begun(self, unit: Unit) -> None:
        self._unbegun.append(unit)

    def cancelled(self, unit: Unit) -> None:
        self._given.append((unit, AT_ONCE))

    def failed(
        self,
        work: Work,
        track: Track,
        unit: Unit,
        error: BaseException,
    ) -> bool:
        self._failures.failed(unit, error)
        if self._orderly:
            work.take_rest()  # this consumer no longer has them
        self._given.append((unit, verdict_of(error)))
        self._notify()
        return False

    def leave(self, work: Work) -> None:
        if not len(work):
            self._works.pop(work, None)
        self._notify()
        self._wake()

    # --- the thread ---

    def _notify(self) -> None:
        if not self._is_due:  # else the thread has yet to look
            with self._changed:
                self._is_due = True
                self._changed.notify()

    def _serve(self) -> None:
        failures = 0
        while True:
            with self._changed:
                timeout_s = ACK_S if self._orderly and self._works else None
                self._changed.wait_for(lambda: self._is_due or self._is_over, timeout_s)
                if not self._orderly:  # in order, a queue waits for its acknowledgements
                    self._changed.wait_for(lambda: self._is_over, GATHER_S)
                is_over = self._is_over
                self._is_due = False
            try:
                failures = 0 if self._acknowledge() else failures + 1
                self._give_back()
                self._release([self._unbegun.popleft() for _ in range(len(self._unbegun))])
            except ClientClosed as closed:  # `finish` has waited long enough: they come again
                log.warning("some messages are not settled: %s", closed)
                return
            except Exception:
                failures += 1
                log.exception("some messages are not settled, and are redelivered")
            if is_over and not (self._finished or self._given or self._unbegun):
                return
            if failures:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, pause_s(failures))

    def _acknowledge(self) -> bool:
        """False: a broker could not be asked."""
        is_well = True
        left = len(self._finished)  # what finishes meanwhile does not keep others waiting
        while left:
            count = min(ACK_COUNT, left)
            left -= count
            done = [self._finished.popleft() for _ in range(count)]
            try:
                self._consumer.ack(*done)
            except CometError as error:
                is_well = False
                log.warning("some of %d messages are not acknowledged: %s", len(done), error)
        return is_well

    def _give_back(self) -> None:
        given = [self._given.popleft() for _ in range(len(self._given))]
        for message, error in self._consumer.give_back(given) if given else ():
            log.warning("%s is not given back, and comes by itself: %s", describe(message), error)

    def _release(self, unbegun: list[Message]) -> None:
        if unbegun:
            try:
                self._consumer.release(unbegun)
            except CometError as error:
                log.debug("some of %d messages are not released: %s", len(unbegun), error)

    # --- the end ---

    def finish(self, left_s: float) -> None:
        """Settle everything, once no worker begins any more.

        Args:
            left_s: how long to wait for brokers.
        """
        for work in list(self._works):
            self._unbegun.extend(work.take_rest())
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(min(max(END_S, left_s), threading.TIMEOUT_MAX))
        self._failures.end()
        self._consumer.release_lost()


def take_count(mean_s: float) -> int:
    """How many messages of a queue are taken at a time, if one takes so long."""
    return max(1, min(TAKE_MAX, int(AHEAD_S / max(mean_s, 1e-6))))


def takes_of(messages: Iterable[Message]) -> list[list[Message]]:
    """By take; those of a take are neighbours here."""
    takes = groupby(messages, key=lambda message: taken_of(message).popped.handle)
    return [list(take) for _, take in takes]
