"""What queue-less groups have out: until when, and what becomes of what nobody acknowledges."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.retries import Retries
from cometmq.actors.runtime.clock_steps import ClockSteps
from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.actors.tables.popped import Key, Out, PoppedQueue, Stretch
from cometmq.protocol.commands import GIVEN_BACK_MAX, UNKNOWN_PLACE, GiveBackMessages, GivenBack
from cometmq.protocol.errors import (
    CometError,
    HandleUnknown,
    MessageNotFound,
    MessageTooLarge,
    OffsetIllegal,
    from_code,
)
from cometmq.protocol.ledger import OffsetSet, PopExtended, PopsAcked, PopsReleased

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0  # until what could not be given back is tried again, at most
SOON_S: Final = 0.1  # at least
LOOK_S: Final = 60.0  # at what is due: a timer runs by another clock
RETURNED_MAX: Final = 65_536  # handles that are told from those which were acknowledged
DUE_MAX: Final = 256  # handles that are dealt with at once


class Ordered(Protocol):
    """What groups that take messages in order have out."""

    def due(self) -> list[tuple[int, Key, int]]:
        """When, whose, handle."""

    def is_due(self, free_ms: int, key: Key, handle: int, now_ms: int) -> None: ...
    def move(self, step_ms: int) -> int:
        """The clock was stepped; how many are out."""


class PoppedOut:
    """All handles, by the end of their time. What has come to it is given back: a copy in the
    group's retry topic, or among its dead letters, takes its place.

    The times in the book are the wall clock's, and move with it when that is stepped.

    Args:
        steps: of that clock.
    """

    def __init__(
        self,
        actor: ServiceActor,
        books: Books,
        retries: Retries,
        steps: ClockSteps | None = None,
    ) -> None:
        self._steps = steps or ClockSteps()
        self._actor = actor
        self._books = books
        self._book = books.popped
        self._retries = retries
        retries.claims = self
        self.ordered: Ordered | None = None
        self._due: list[tuple[int, Key, int]] = []  # when, whose, handle; a heap
        # By handle, queue offsets: on their way back; gone back, of the last handles.
        self._returning: dict[int, Sequence[Stretch]] = {}
        self._over: dict[int, list[Stretch]] = {}
        self._claimed: dict[int, set[int]] = {}  # by handle, queue offsets: their owner gives back
        self._alarm: Timer | None = None
        self.aside = 0  # messages of which no copy can be stored, by this process
        self._failing_since: float | None = None  # time.monotonic(): nothing could be given back

    def is_over(self, handle: int) -> bool:
        """Some of what came under it goes back, or has: it is too late for a word on all of it."""
        return handle in self._returning or handle in self._over

    def goes_back(self, handle: int, first: int, end: int) -> bool:
        """Whether one of these does, or has. What was acknowledged before does not."""
        back = (*self._returning.get(handle, ()), *self._over.get(handle, ()))
        return any(first < each[1] and each[0] < end for each in back)

    def claim(self, group: str, given: GivenBack) -> bool:
        """See Claims: neither its time nor a second word gives it back, too, meanwhile."""
        handle, offset = given.handle, given.queue_offset
        queue = self._book.get(group, given.topic, given.queue_id)
        out = None if queue is None else queue.out.get(handle)
        if (
            queue is None
            or out is None
            or not queue.left_under(handle, offset, offset + 1)
            or self.goes_back(handle, offset, offset + 1)
            or offset in self._claimed.get(handle, ())
        ):
            return False
        self._claimed.setdefault(handle, set()).add(offset)
        return True

    def release(self, key: Key, queue: PoppedQueue, handle: int, first: int, end: int) -> int:
        """Free messages that the consumer had not started to process. Return the code."""
        if handle <= 0:
            return HandleUnknown.code
        out = queue.out.get(handle)
        if out is None:  # all of its messages may be released already
            return 0 if queue.is_free(first, end) else HandleUnknown.code
        if not out.first <= first < end <= out.end:
            return OffsetIllegal.code
        is_claimed = any(first <= offset < end for offset in self._claimed.get(handle, ()))
        if is_claimed or self.goes_back(handle, first, end):
            return HandleUnknown.code
        if queue.left_under(handle, first, end):
            self._books.change(PopsReleased(*key, handle, first, end))
            return 0
        return 0 if queue.left_of(first, end) else HandleUnknown.code

    def settle(self, group: str, given: GivenBack, *, is_stored: bool) -> None:
        """See Claims."""
        handle, offset = given.handle, given.queue_offset
        claimed = self._claimed[handle]
        claimed.discard(offset)
        if not claimed:
            del self._claimed[handle]
        key = (group, given.topic, given.queue_id)
        queue = self._book.get(*key)
        out = None if queue is None else queue.out.get(handle)
        if queue is None or out is None:
            return
        if is_stored:
            self.done(key, queue, handle, offset, offset + 1)
        else:
            self.push(out.until_ms, key, handle)  # its time may have come meanwhile

    def done(self, key: Key, queue: PoppedQueue, handle: int, first: int, end: int) -> None:
        """The group is done with these."""
        self._books.change(PopsAcked(*key, handle, first, end))
        self.keep_floor(key, queue)

    def keep_floor(self, key: Key, queue: PoppedQueue) -> None:
        """It is the group's offset, too."""
        if self._books.offsets.get(*key) != queue.floor:
            self._books.change(OffsetSet(*key, queue.floor))

    def now_ms(self) -> int:
        """Milliseconds since 1970, to which the times in the book belong."""
        while True:
            now = now_ms()
            step_ms = self._steps.look()  # behind it: what was read is of the clock that is known
            if not step_ms:
                return now
            self._move(step_ms)

    def _move(self, step_ms: int) -> None:
        """The clock was stepped: whoever has messages has them for as long as before. Each time is
        a change of the ledger."""
        count = 0
        for key, queue in self._book.items():
            for handle, out in list(queue.out.items()):
                self._books.change(PopExtended(*key, handle, max(out.until_ms + step_ms, 0)))
                count += 1
        if self.ordered is not None:
            count += self.ordered.move(step_ms)
        log.warning(
            "the clock was stepped by %+.1f s: %d stretches that are popped stay invisible for as "
            "long as before", step_ms / 1000, count,
        )  # fmt: skip
        self._list()
        self._books.send()

    def find(self) -> None:
        """All that is out."""
        self._list()
        self._set_alarm()

    def _list(self) -> None:
        self._due = [
            (out.until_ms, key, handle)
            for key, queue in self._book.items()
            for handle, out in queue.out.items()
        ]
        if self.ordered is not None:
            self._due += self.ordered.due()
        heapq.heapify(self._due)

    def push(self, until_ms: int, key: Key, handle: int) -> None:
        heapq.heappush(self._due, (until_ms, key, handle))
        if self._due[0][2] == handle:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        now = self.now_ms()  # may list them anew
        if self._due:
            wait_s = min(LOOK_S, max(0.0, (self._due[0][0] - now) / 1000))
            self._alarm = self._actor.after(wait_s, self._return_due)

    def _return_due(self) -> None:
        """Nobody has said a word of these: they are given back."""
        self._alarm = None
        try:
            now = self.now_ms()
            for _ in range(DUE_MAX):
                if not self._due or self._due[0][0] > now:
                    break
                self._return_one(*heapq.heappop(self._due), now)
        finally:
            self._set_alarm()

    def _return_one(self, until_ms: int, key: Key, handle: int, now: int) -> None:
        queue = self._book.get(*key)
        out = None if queue is None else queue.out.get(handle)
        if queue is None and self.ordered is not None:
            self.ordered.is_due(until_ms, key, handle, now)
        if queue is None or out is None or out.until_ms != until_ms:
            return  # done with, or has another time, with an entry of its own
        left = self._left(queue, handle, out)
        if left and handle not in self._returning:
            self._return(key, handle, left)

    def _left(self, queue: PoppedQueue, handle: int, out: Out) -> list[Stretch]:
        """Nobody has said a word of these."""
        left = queue.left_under(handle, out.first, out.end)
        claimed = self._claimed.get(handle)
        if not claimed:
            return left
        offsets = (offset for first, end in left for offset in range(first, end))
        return _stretches(offset for offset in offsets if offset not in claimed)

    def _return(self, key: Key, handle: int, left: Sequence[Stretch]) -> None:
        group, topic, queue_id = key
        offsets = [offset for first, end in left for offset in range(first, end)][:GIVEN_BACK_MAX]
        messages = [GivenBack(topic, queue_id, offset, UNKNOWN_PLACE) for offset in offsets]
        self._returning[handle] = left
        try:
            self._retries.give_back(
                GiveBackMessages(group, messages), partial(self._returned, key, handle, offsets)
            )
        except CometError as error:
            log.warning("group %s: %d messages are not given back: %s", group, len(offsets), error)
            self._returned(key, handle, offsets, [])

    def _returned(
        self, key: Key, handle: int, offsets: Sequence[int], codes: Sequence[int]
    ) -> None:
        """A copy of these is kept; the rest is tried again."""
        self._returning.pop(handle, None)
        queue = self._book.get(*key)
        if queue is None:
            return
        told = zip(offsets, codes, strict=False)
        done = [offset for offset, code in told if self.is_done(key, offset, code)]
        if len(done) == len(offsets):
            self._failing_since = None
        if done:
            self._over.setdefault(handle, []).extend(_stretches(done))
            if len(self._over) > RETURNED_MAX:
                del self._over[next(iter(self._over))]
        for first, end in _stretches(done):
            self.done(key, queue, handle, first, end)
        out = queue.out.get(handle)
        if out is not None:
            pause_s = 0.0 if len(done) == len(offsets) else self.pause_s(codes)
            until_ms = self.now_ms() + round(pause_s * 1000)
            self._books.change(PopExtended(*key, handle, until_ms))
            self.push(until_ms, key, handle)
        self._books.send()

    def is_done(self, key: Key, offset: int, code: int) -> bool:
        """Whether what was to be given back is not to be tried again, by what came of it. What is
        too large for ever holds up nothing behind it, and can be read where it is."""
        if code == MessageTooLarge.code:
            self.aside += 1
            log.error("group %s: %s/%d offset %d comes to nobody any more: no copy of it can be "
                      "stored, and the scheduler has said why", *key, offset)  # fmt: skip
        return code in (0, MessageNotFound.code, MessageTooLarge.code)

    def pause_s(self, codes: Sequence[int]) -> float:
        """Until these are tried again: as long as it has failed by now, where the scheduler or the
        commitlog process is away; so they are not much later than it is back."""
        if any(code and not from_code(code, "").retriable for code in codes):
            return AGAIN_S
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return min(AGAIN_S, max(SOON_S, now - self._failing_since))


def _stretches(offsets: Iterable[int]) -> list[Stretch]:
    """Of ascending offsets."""
    found: list[Stretch] = []
    for offset in offsets:
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
