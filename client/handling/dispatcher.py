"""What becomes of each message between the stream and its acknowledgement.

One thread (or task) is the *pump*: it takes what came, makes work of it, and acknowledges what is
done, many at a time. Workers take the work; they know a message's track and tell here what failed.
There is no I/O here but through the stream and what is acknowledged.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from operator import attrgetter
from typing import Final

from cometmq.client.handling.failures import FailureLog
from cometmq.client.handling.options import Handling
from cometmq.client.handling.outcomes import DEAD, LATE, verdict_of
from cometmq.client.handling.returns import Drops, Failure, Outcome, Returns
from cometmq.client.handling.stuck import tell_if_stuck
from cometmq.client.handling.work import (
    Parcel,
    Seat,
    Strand,
    Track,
    Unit,
    Work,
    describe,
    messages_of,
)
from cometmq.client.receiving.buffer import Queue
from cometmq.client.receiving.member import Member
from cometmq.client.receiving.receiver import Receiver
from cometmq.protocol.names import RETRY_PREFIX
from cometmq.shm.kernel.codec import Message, count_attempts, restore_topics

log = logging.getLogger(__name__)

IN_HAND: Final = 8_192  # messages that are handed out at most, before more is taken
TAKE_COUNT: Final = 2_048  # at once
TICK_S: Final = 0.1  # between two looks at what is under way
AGAIN_S: Final = 5.0  # RocketMQ: until what could not be given back is tried again here
SUSPEND_S: Final = (0.01, 30.0)  # RocketMQ: the bounds of suspendCurrentQueueTimeMillis

_queue_offset = attrgetter("queue_offset")


class Dispatcher:
    """See the module.

    Args:
        put: gives work to the workers; called in any thread.
        wake: has the pump look again; called in any thread.
    """

    def __init__(
        self,
        receiver: Receiver,
        handling: Handling,
        seats: list[Seat],
        put: Callable[[Work], None],
        wake: Callable[[], None],
    ) -> None:
        self.in_hand = 0
        self._stream = receiver.stream
        self._owned = receiver.owned
        self._handling = handling
        self._max_reconsume_times = receiver.max_reconsume_times
        self._seats = seats
        self._put = put
        self._wake = wake
        self.returns: Returns | Drops
        if isinstance(receiver.member, Member):
            self.returns = Returns(receiver.member, receiver.max_reconsume_times, self._settled)
        else:
            self.returns = Drops(self._settled)  # broadcasting, see Consumer.run
        self._drops = isinstance(self.returns, Drops)
        self._failures = FailureLog(log, drops=self._drops)
        self._tracks: dict[Queue, Track] = {}
        self._busy: set[Track] = set()  # of which something is in hand
        self._lock = threading.Lock()  # guards who has a strand, and which there are
        self._strands: dict[Hashable, Strand] = {}
        self._parked: deque[tuple[Track, Unit, Strand | None]] = deque()
        self._posted: deque[tuple[float, Callable[[], None]]] = deque()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._tick_at = 0.0

    # --- the pump ---

    def turn(self) -> float:
        """Do what is due. How long the pump may sleep; it takes nothing while that is negative."""
        now = time.monotonic()
        self._settle()
        while self._posted:
            at, call = self._posted.popleft()
            heapq.heappush(self._due, (at, next(self._numbers), call))
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._watch(now)
            self._sweep()
            self._unpark(now)
        sleep_s = TICK_S if self.in_hand or self._parked else 1.0
        if self._due:
            sleep_s = min(sleep_s, max(0.0, self._due[0][0] - now))
        return sleep_s

    @property
    def is_full(self) -> bool:
        return self.in_hand >= IN_HAND

    def take_in(self, queue: Queue, messages: list[Message]) -> None:
        """What came of a queue."""
        track = self._tracks.get(queue)
        if track is None or track.is_lost:
            if track is not None:
                self._forget(track)
            track = self._tracks[queue] = Track(queue)
        if queue.topic.startswith(RETRY_PREFIX):
            restore_topics(messages)
        track.held.append(messages)
        self._release(track)

    def _release(self, track: Track) -> None:
        """Hand out what is not too far ahead of the first message that is not done."""
        held, span = track.held, self._handling.span
        while held:
            messages = held.popleft()
            begin = track.progress.done if track.in_hand else messages[0].queue_offset
            if messages[-1].queue_offset < begin + span:
                self._hand_out(track, messages)
                continue
            count = bisect_left(messages, begin + span, key=_queue_offset)
            held.appendleft(messages[count:])
            if count:
                self._hand_out(track, messages[:count])
            break
        if held:
            track.queue.held = True
        elif track.queue.held:
            self._stream.release(track.queue)

    def _hand_out(self, track: Track, messages: list[Message]) -> None:
        track.in_hand += len(messages)
        self.in_hand += len(messages)
        self._busy.add(track)
        self._offer(track, messages)

    def _offer(self, track: Track, messages: list[Message]) -> None:
        """Make work of it."""
        handling = self._handling
        if handling.orderly:
            with self._lock:
                if track.strand is None:
                    track.strand = Strand(track, None, handling.batch)
                begun = self._extend(track.strand, track, messages)
            if begun:
                self._put(track.strand)
        elif handling.ordered_by is not None:
            for strand in self._by_key(track, messages, handling.ordered_by):
                self._put(strand)
        elif handling.batch == 1:
            self._put(Parcel(track, messages))
        else:
            size = handling.batch
            self._put(
                Parcel(track, [messages[at : at + size] for at in range(0, len(messages), size)])
            )

    def _by_key(
        self, track: Track, messages: list[Message], key_of: Callable[[Message], Hashable]
    ) -> list[Strand]:
        """Behind what is there of their keys; which strands nobody has yet."""
        begun: list[Strand] = []
        keyed: list[tuple[Hashable, Message]] = []
        for message in messages:
            try:
                key = key_of(message)
                hash(key)
            except Exception as error:
                self.failed(None, track, message, error)
            else:
                keyed.append((object() if key is None else key, message))
        with self._lock:
            for key, message in keyed:
                strand = self._strands.get(key)
                if strand is None:
                    strand = self._strands[key] = Strand(track, key, self._handling.batch)
                if self._extend(strand, track, [message]):
                    begun.append(strand)
        return begun

    def _extend(self, strand: Strand, track: Track, messages: list[Message]) -> bool:
        """Whether it has to be put. Under the lock."""
        strand.waiting.extend((track, message) for message in messages)
        was_in_use, strand.in_use = strand.in_use, True
        return not was_in_use

    def _settle(self) -> None:
        """Acknowledge what is done."""
        for track in list(self._busy):
            count = len(track.finished)
            if not count:
                continue
            take = track.finished.popleft
            units = [take() for _ in range(count)]
            if self._handling.batch > 1:
                units = [message for unit in units for message in messages_of(unit)]
            self._owned.acknowledge_of(track.queue, track.progress, units)
            track.in_hand -= len(units)
            self.in_hand -= len(units)
            if not track.in_hand:
                self._busy.discard(track)
            if track.held:
                self._release(track)

    def _sweep(self) -> None:
        """Let go of queues that were lost, once no handler has anything of them."""
        for track in [track for track in self._tracks.values() if track.is_lost]:
            if not any(seat.track is track and seat.unit is not None for seat in self._seats):
                self._settle()
                self._forget(track)
                if track.queue.dropped:
                    self._owned.let_go(track.queue)

    def _forget(self, track: Track) -> None:
        self.in_hand -= track.in_hand
        track.in_hand = 0
        track.held.clear()
        self._busy.discard(track)
        if self._tracks.get(track.queue) is track:
            del self._tracks[track.queue]
        if track.queue.held:
            self._stream.release(track.queue)

    def _unpark(self, now: float) -> None:
        """What was not handed out when its lease had run out, and may be now."""
        for _ in range(len(self._parked)):
            track, unit, strand = self._parked.popleft()
            if not track.is_lost and now > track.queue.lease.until:
                self._parked.append((track, unit, strand))
            else:
                self._go_on(track, unit, strand)

    def _go_on(self, track: Track, unit: Unit, strand: Strand | None) -> None:
        """Hand this out again, if its queue is still ours; a strand goes on in any case."""
        if strand is not None:
            strand.resting = False
            strand.again = None if track.is_lost else (track, unit)
            self._put(strand)
        elif not track.is_lost:
            self._offer(track, messages_of(unit))

    # --- time ---

    def _post(self, after_s: float, call: Callable[[], None]) -> None:
        """Have the pump call it, from any thread."""
        self._posted.append((time.monotonic() + after_s, call))
        self._wake()

    def _watch(self, now: float) -> None:
        """Report who takes long, and give back what takes too long."""
        handling = self._handling
        for seat in self._seats:
            unit, track = seat.unit, seat.track
            age_s = now - seat.since
            if unit is None or track is None or unit is not seat.unit:
                continue
            tell_if_stuck(seat, age_s, handling.stuck_s)
            is_late = age_s >= handling.consume_timeout_s and not handling.orderly
            if is_late and seat.expire(unit):
                log.warning(
                    "%s is %s: not done within consume_timeout_s=%g",
                    describe(unit),
                    "dropped" if self._drops else "given back",
                    handling.consume_timeout_s,
                )
                self.returns.put(Failure(track, messages_of(unit), LATE))

    # --- workers ---

    def keep_back(self, work: Work, track: Track, unit: Unit) -> bool:
        """Its queue is not ours any more, or whether it is cannot be known now. True: the work is
        not the worker's any more, see `failed`."""
        if track.is_lost:
            return False
        strand = work if isinstance(work, Strand) else None
        if strand is not None:
            strand.resting = True
        self._parked.append((track, unit, strand))
        self._wake()
        return strand is not None

    def leave(self, work: Work) -> None:
        """A worker finds nothing more in it. The pump acknowledges that soon in any case: it is
        woken if it can take no more before."""
        if isinstance(work, Strand):
            with self._lock:
                goes_on = len(work) > 0
                if not goes_on:
                    work.in_use = False
                    if self._strands.get(work.key) is work:
                        del self._strands[work.key]
            if goes_on:
                self._put(work)
                return
        if self.is_full or work.track.held or isinstance(work, Strand):
            self._wake()

    def not_begun(self, unit: Unit) -> None:
        """It is handed out again by whoever polls next, see `end`."""

    def cancelled(self, unit: Unit) -> None:
        """As `not_begun`."""

    def failed(self, work: Work | None, track: Track, unit: Unit, error: BaseException) -> bool:
        """The handler raised it. True: the work rests, and whoever ends that puts it again. It may
        be another worker's already when this returns, and is to be touched no more."""
        messages = messages_of(unit)
        verdict = verdict_of(error)
        if not (self._handling.orderly and isinstance(work, Strand)):
            self._failures.failed(unit, error, is_last=self._drops)
            self.returns.put(Failure(track, messages, verdict))
            return False
        most = self._max_reconsume_times
        attempts = max(message.reconsume_times for message in messages)
        is_last = verdict == DEAD or (most is not None and attempts >= most)
        self._failures.failed(unit, error, is_last=is_last)
        work.resting = True
        if is_last:
            self.returns.put(Failure(track, messages, DEAD, work))
            return True
        after_s = self._handling.suspend_s if verdict.after_s is None else verdict.after_s
        least_s, most_s = SUSPEND_S
        self._again(min(most_s, max(least_s, after_s)), track, messages, work)
        return True

    def _again(
        self, after_s: float, track: Track, messages: list[Message], strand: Strand | None
    ) -> None:
        """Hand these out again here, after that time."""
        count_attempts(messages)
        unit = messages[0] if self._handling.batch == 1 else messages
        self._post(after_s, partial(self._go_on, track, unit, strand))

    def _settled(self, outcomes: list[Outcome]) -> None:
        """What the broker has taken back is done here; the rest is tried again."""
        for failure, kept, left in outcomes:
            track, strand = failure.track, failure.strand
            track.finished.extend(kept)
            if left:
                self._again(AGAIN_S, track, left, strand)
            elif strand is not None:
                strand.resting = False
                self.leave(strand)
        self._wake()

    # --- the end ---

    def end(self, left_s: float) -> None:
        """Acknowledge what is done. What is not is handed out again by whoever polls next.

        Args:
            left_s: how long to wait for brokers that are asked to take messages back.
        """
        self._settle()  # first: a cancelled end does not wait for what follows
        self.returns.wait(left_s)
        self.returns.close()
        self._failures.end()
        self._settle()
        queues = []
        for track in self._tracks.values():
            if track.is_lost:
                continue
            if track.in_hand or track.held:
                queues.append(track.queue)
            track.queue.held = False
        self._owned.go_back(queues)
