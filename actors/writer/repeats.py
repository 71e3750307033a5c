"""Send once (idempotence): what a producer sends again, as no answer came, is looked for first.

Nothing is kept of what was sent: the log itself tells. The messages of a batch have ids that their
producer made (UNIQ_KEY), the same in each attempt, and they lie one after the other in their queue.
So a restart, a kill or a power cut changes nothing here.

    stored already        found here, and answered with where it lies
    still on its way      its fence is known before the search begins (Fences): it comes too late
    never came            stored now
    partly stored         by a broker that was killed meanwhile: the rest is stored now
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final

from cometmq.actors.runtime.clock_steps import StepsForward
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.writer.batches import Batches, Earlier, Found
from cometmq.protocol.commands import TIMED, Section, SendMessages
from cometmq.protocol.errors import CometError, NotConfirmed, ShuttingDown, SystemBusy
from cometmq.shm.kernel.codec import Message, decode, element_due_ms, unique_id
from cometmq.shm.reading.store_reader import ReadLimits

PAGE_COUNT: Final = 2_048  # messages looked at at a time
PAGE_BYTES: Final = 1 << 20
SLICE_S: Final = 0.005  # then whoever else sends is heard
LOOKED_AT_MAX: Final = 4_000_000  # messages, for one batch
LATE_MS: Final = 30_000  # what a clock may be wrong by, or a command late
TIMED_LOOKED_AT_MAX: Final = 1_024  # messages, to find one with a delay
WAIT_S: Final = 5.0  # for the dispatcher, then the producer comes again
HELD_MAX: Final = 1_024  # commands
HELD_BYTES_MAX: Final = 64 << 20
# Stored together, by one write and one sync: after a fail-over all producers retry at once.
GROUP_COUNT: Final = 256
GROUP_BYTES: Final = 4 << 20
_LIMITS: Final = ReadLimits(
    hot_bytes=PAGE_BYTES, hot_count=PAGE_COUNT, cold_bytes=PAGE_BYTES, cold_count=PAGE_COUNT
)


NOTHING: Final = Earlier(0)


class _Repeat(HeldRequest[None]):
    """A send that waits until the queues are dispatched up to `end`, a physical offset."""

    __slots__ = ("end", "size")

    def __init__(self, request: Request, size: int, end: int) -> None:
        super().__init__(None, request, time.monotonic() + WAIT_S)
        self.size = size
        self.end = end


def is_repeat(command: object) -> bool:
    """Whether any of it was sent before, and is to be looked for; not what is found by its keys."""
    if isinstance(command, SendMessages):
        for section in command.sections:
            if section.repeats_ms >= 0 and not section.window_ms:
                return True
    return False


class Repeats:
    """Hold repeated sends until it is known which of their messages are stored.

    The search begins once the queues are dispatched up to the end that the log had when the send
    arrived: the earlier attempt is below it. The put lock's holder searches in slices, and accepts
    other sends between them.

    Args:
        log_end: where the next record goes.
        store: stores commands as one group, each without the messages that were found.
    """

    def __init__(
        self,
        actor: ServiceActor,
        family: Family,
        batches: Batches,
        log_end: Callable[[], int],
        store: Callable[[list[Request], Sequence[Found]], None],
    ) -> None:
        self._actor = actor
        self._reader = family.store_reader(_LIMITS)
        self._dispatched = Dispatched(family)
        self._batches = batches
        self._log_end = log_end
        self._store = store
        self._waiting: TimedRequests[None, _Repeat] = TimedRequests(
            actor, "repeated sends", HELD_MAX, self._too_late, HELD_MAX
        )
        self._searches: deque[tuple[_Repeat, Generator[None, None, Found]]] = deque()
        self._bytes = 0
        self._goes_on = False  # a timer is set
        self._forward = StepsForward()
        self.found = 0  # batches that were there already

    def take(self, request: Request) -> None:
        """Store it once; the answer comes later. Raises SystemBusy."""
        command = request.command
        assert isinstance(command, SendMessages)
        size = sum(len(frame.buffer) for frame in request.payload)
        if len(self._searches) >= HELD_MAX or self._bytes + size > HELD_BYTES_MAX:
            raise SystemBusy(
                f"repeated sends of {self._bytes} bytes wait for the dispatcher, at most "
                f"{HELD_BYTES_MAX}: try again"
            )
        self._waiting.check_room(request)
        self._batches.fence_off(command)
        self._bytes += size
        self._waiting.add(_Repeat(request, size, self._log_end()))
        self.go_on()

    def close(self) -> None:
        """Nothing is stored any more: those that wait are told so."""
        error = ShuttingDown("the broker is shutting down")
        for held, _ in self._searches:
            held.request.fail(error)
        self._searches.clear()
        self._waiting.fail_all(error)
        self._reader.close()

    def go_on(self) -> None:
        """Search as far as the queues are dispatched, and for a slice of time."""
        while (first := self._waiting.first) is not None and not self._is_ahead(first.end):
            self._searches.append((first, self._look_for(self._waiting.release(first))))
        stop = time.monotonic() + SLICE_S
        requests: list[Request] = []
        founds: list[Found] = []
        size = 0
        while self._searches and len(requests) < GROUP_COUNT and size < GROUP_BYTES:
            held, search = self._searches[0]
            found = _as_far_as(search, stop)
            if found is None:
                break
            self._searches.popleft()
            self._bytes -= held.size
            size += held.size
            requests.append(held.request)
            founds.append(found)
        if self._searches and not self._goes_on:  # other sends are stored between two groups
            self._goes_on = True
            self._actor.after(0.0, self._go_on_later)
        if requests:
            self._store(requests, founds)

    def _go_on_later(self) -> None:
        self._goes_on = False
        self.go_on()

    def _is_ahead(self, end: int) -> bool:
        """Whether the dispatcher has yet to come there; then it rings."""
        if self._dispatched.value >= end:
            return False
        self._dispatched.arm()
        return self._dispatched.value < end

    def _too_late(self, held: _Repeat) -> None:
        self._bytes -= held.size
        command = held.request.command
        assert isinstance(command, SendMessages)
        error = SystemBusy(f"the dispatcher is behind, at {self._dispatched.value}: try again")
        self._store([held.request], [dict.fromkeys(range(len(command.sections)), error)])

    # --- the search ---

    def _look_for(self, request: Request) -> Generator[None, None, Found]:
        """What is stored of each section that comes again. Steps are short."""
        command = request.command
        assert isinstance(command, SendMessages)
        found: dict[int, Earlier | CometError] = {}
        for index, (section, frame) in enumerate(
            zip(command.sections, request.payload, strict=False)
        ):
            if section.repeats_ms < 0 or section.window_ms:
                continue
            try:
                found[index] = yield from self._find(section, frame.buffer)
            except Exception as caught:
                what = "a batch for queue %d of %s could not be looked for"
                found[index] = explained(caught, what, section.queue_id, section.topic)
        return found

    def _find(self, section: Section, batch: memoryview) -> Generator[None, None, Earlier]:
        try:
            first = unique_id(batch, 0)
            unique_id(batch, section.count - 1)
        except (IndexError, ValueError):
            return NOTHING  # whoever stores it says what is wrong
        if not first:  # as a replay of records that an application has appended
            return NOTHING
        place = self._batches.place_of(section)
        queue = place.topic, place.queue_id
        at = self._begin(queue, section)
        stop = at + LOOKED_AT_MAX
        while at < stop:
            page = self._reader.get_message(*queue, at, PAGE_COUNT, max_bytes=PAGE_BYTES)
            for message in decode(page.payload or b"", check_crc=False):
                if message.msg_id == first:
                    return self._extent(queue, message, section, batch)
            if page.next_queue_offset <= at:
                return NOTHING
            at = page.next_queue_offset
            yield
        raise NotConfirmed(
            f"{LOOKED_AT_MAX} messages of queue {place.queue_id} of {place.topic} were looked at, "
            "and the batch that comes again was not among them; it may be stored"
        )

    def _begin(self, queue: tuple[str, int], section: Section) -> int:
        """Where the batch may begin: behind what its producer knows to be there, which no clock
        has to do with; or, where that is nothing or long ago, among what is as old as it may be."""
        reach = self._reader.positions.queue_range(*queue)
        end = 0 if reach is None else reach.max_queue_offset
        if 0 <= section.after <= end and end - section.after < LOOKED_AT_MAX:
            return section.after
        age_ms = min(section.repeats_ms, 1 << 50) + LATE_MS
        age_ms += self._forward.within_ms(age_ms)
        return self._reader.offset_by_time(*queue, int(time.time() * 1000) - age_ms)

    def _extent(
        self, queue: tuple[str, int], first: Message, section: Section, batch: memoryview
    ) -> Earlier:
        """How much of the batch lies there: its messages stand one after the other."""
        low, high = 1, section.count  # it is between
        while low < high:
            count = high if low == 1 else (low + high + 1) // 2
            at = first.queue_offset + count - 1
            page = self._reader.get_message(*queue, at, 1)
            messages = decode(page.payload or b"", check_crc=False)
            if messages and messages[0].msg_id == unique_id(batch, count - 1):
                low = count
            else:
                high = count - 1
        self.found += 1
        timed_ms = self._timed_ms(queue, first, batch, low) if section.delay_level == TIMED else 0
        return Earlier(low, first.queue_offset, first.physical_offset, timed_ms)

    def _timed_ms(
        self, queue: tuple[str, int], first: Message, batch: memoryview, count: int
    ) -> int:
        """Return the time from which the delays of these messages count; 0: none has a delay. A
        stored message has its delay and its due time as properties."""
        for index in range(min(count, TIMED_LOOKED_AT_MAX)):
            if element_due_ms(batch, index, 0) == element_due_ms(batch, index, 1):
                continue  # this message has an absolute time
            page = self._reader.get_message(*queue, first.queue_offset + index, 1)
            for message in decode(page.payload or b"", check_crc=False):
                due = message.properties.get("TIMER_DELIVER_MS", "")
                delay = message.properties.get("TIMER_DELAY_MS", "")
                if due.isdecimal() and delay.isdecimal():
                    return max(0, int(due) - int(delay))
            return 0
        return 0


def _as_far_as(search: Generator[None, None, Found], stop: float) -> Found | None:
    """What it found; None when the time is up before its end."""
    try:
        while time.monotonic() < stop:
            next(search)
    except StopIteration as end:
        found: Found = end.value
        return found
    return None
