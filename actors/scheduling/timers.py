"""Timers: messages with a time of their own wait in RocketMQ's wheel, and are copied when due.

What is kept is the topic of timers: a record is stored there first, and put into the wheel when it
is dispatched. A derived write has the copies and how far the wheel is delivered, both or neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords, properties_max
from cometmq.actors.scheduling.beside import ALONE_MAX, Beside
from cometmq.actors.scheduling.delays import BYTES_MAX, WRITE_TIMEOUT_S, now_ms
from cometmq.actors.scheduling.portion import Portion, SetAside
from cometmq.actors.scheduling.timer_clock import TimerClock
from cometmq.actors.scheduling.timer_copies import TimerCopies
from cometmq.actors.scheduling.timer_start import believed_up_to, claimed_check, read_up_to
from cometmq.actors.tables.timers import (
    BACK_MS,
    PASSED_MAX,
    Recalls,
    TimersState,
    recalled_key,
    window_ms,
)
from cometmq.protocol.commands import Cover, Position
from cometmq.protocol.errors import MessageIllegal, MessageNotFound
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.derived.timer_files import TimerCheck, TimerFiles, read_check, write_check
from cometmq.shm.kernel.codec import BatchFull, RecordTooLarge, due_ms_of
from cometmq.shm.kernel.store import TIMERS_DONE, TIMERS_NO_ROOM, TIMERS_OCCUPIED, TimerWheel
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

READ_COUNT: Final = 2_048  # messages that are put into the wheel at once,
RECALLS_MAX: Final = 2_048  # that are read at once, as well
READS_MAX: Final = 16  # so often before anything else is heard
HORIZON_S: Final = 60  # how far the wheel is searched for what is due next
AGAIN_MAX: Final = 100_000  # messages that a start reads again, about


class Timers:
    """How far timers are delivered, and when it goes on.

    Args:
        dispatched: how far the dispatcher has come.
        aside: takes what no log takes.
    """

    topic = TIMER_TOPIC
    queue_id = 0
    name = "timers"

    def __init__(
        self,
        family: Family,
        commitlog: Channel,
        store: StoreReader,
        dispatched: Callable[[], int],
        aside: SetAside,
    ) -> None:
        self.seen = 0  # queue offset: what comes next from the topic of timers
        self.failures = 0  # in a row
        self.delivered = 0  # messages, by this process
        self.waits = False  # for the dispatcher
        self.rests = False  # while others are served, whatever comes
        self._family = family
        self._settings = family.settings
        self._store = store
        self._dispatched = dispatched
        self._wrote = family.control.read(Counter.WROTE)
        self._beside = Beside()
        self._own_end = 0  # of the log, behind what was delivered last
        self._flushed = family.control.read(Counter.FLUSHED)
        self._window_ms = window_ms(self._settings.file_reserved_time_hours)
        self._bytes_max = min(BYTES_MAX, self._settings.mapped_file_size_commit_log_bytes // 4)
        self._properties_max = properties_max(self._settings)
        self._aside = aside
        self._clock = TimerClock(TimersState(), store, self._records, aside)
        self._deriver = Deriver(commitlog, "timers", timeout_s=WRITE_TIMEOUT_S)
        self._number = 0  # of the last write
        self._portion = Portion(ALONE_MAX)
        self._unsure: Callable[[], None] | None = None  # what is to be done if that was stored
        self._files: TimerFiles | None = None
        self._wheel: TimerWheel | None = None
        self._frontier = 0
        self._late: list[int] = []  # physical offsets: overdue when they were read
        self._recalls = Recalls()
        self._copies = TimerCopies(store, self._clock, self._recalls.keys, aside)
        self._due_by: tuple[int, int] | None = None  # (time, end of the log by then)
        self._check: tuple[TimerCheck, int] | None = None  # once the log is flushed up to there

    @property
    def pending(self) -> int:
        return 0 if self._wheel is None else self._wheel.pending

    def step(self) -> float | None:
        """Put what is new into the wheel, deliver what is due, a write's worth; in how many seconds
        it goes on, None: when the dispatcher has come further. Raises what appending raises."""
        self.waits = self.rests = False
        if self._store.positions.queue_range(TIMER_TOPIC, 0) is None:
            return float(HORIZON_S)
        wheel = self._wheel or self._open()
        if self._unsure is not None:
            self._make_sure()
        if not self._clock.is_kept:
            state = self._clock.state(wheel, (wheel.at_due, wheel.at_place), self._frontier)
            self._write(InnerRecords(), state, self._clock.kept)
        self._clock.follow(wheel)
        now = now_ms()
        if now + BACK_MS < wheel.at_due and not self._turn_back(wheel, now):
            return float(HORIZON_S)
        if self._clock.position is not None:
            if self._take_recalls(wheel):
                self._move_on(wheel)
            return 0.0
        if self._late:
            return self._deliver_late(wheel, now) if self._take_recalls(wheel) else 0.0
        if self.seen - self._frontier > AGAIN_MAX:
            at = wheel.at_due, wheel.at_place
            self._write(InnerRecords(), self._clock.state(wheel, at, self.seen), lambda: None)
        dispatched = self._dispatched()
        if self._read(wheel):
            return 0.0
        return self._deliver_due(wheel, now, dispatched)

    # --- the start ---

    def _open(self) -> TimerWheel:
        position = self._deriver.position()
        self._number = position.number
        state = TimersState.unpack(self._deriver.note) if position.number else TimersState()
        # In a group it may tell of what was never confirmed, as delayOffset.json may.
        there = read_check(self._family.store)
        check = None if self._settings.is_in_group else there
        if check is not None:
            state = state.joined(check.read_ms, check.queue_offset)
        segment_bytes = self._settings.mapped_file_size_timer_log_bytes
        self._files = self._files or TimerFiles(self._family.store, segment_bytes)
        log_max = believed_up_to(self._store, state.frontier, self._bytes_max)
        wheel = self._files.wheel(state.at_due, state.at_place, state.passed, log_max)
        after = read_up_to(self._store, wheel, check, state.frontier)
        if after is None:
            log.warning("the timer log is made anew, of all of %s", TIMER_TOPIC)
            del wheel  # it looks at the files
            self._files.clear()
            wheel = self._files.wheel(state.at_due, state.at_place, state.passed, log_max)
            after = 0
        reach = self._store.positions.queue_range(TIMER_TOPIC, 0)
        low, high = reach if reach else (0, 0)
        self.seen, self._frontier = min(max(after, low), high), state.frontier
        claimed = claimed_check(there, wheel, self.seen)
        write_check(self._family.store, claimed, now_ms())  # before the first unit
        begun = self._clock.aheads[-1]
        self._clock = TimerClock(state, self._store, self._records, self._aside, begun=begun)
        self._clock.begin(wheel)
        self._recalls = Recalls()
        keys = self._recalls.keys
        self._copies = TimerCopies(self._store, self._clock, keys, self._aside)
        self._wheel = wheel
        return wheel

    # --- into the wheel ---

    def _read(self, wheel: TimerWheel) -> bool:
        """Whether there is more, or something to be delivered first."""
        assert self._files is not None
        for _ in range(READS_MAX):
            result = self._store.get_message(
                TIMER_TOPIC, 0, self.seen, READ_COUNT, max_bytes=self._bytes_max
            )
            if result.payload is None:
                if result.next_queue_offset <= self.seen:
                    return False
                log.warning("messages %d to %d of %s are gone: they are not delivered",
                            self.seen, result.next_queue_offset - 1, TIMER_TOPIC)  # fmt: skip
                self.seen = result.next_queue_offset
                continue
            reason, after, self._late, odd = wheel.put(
                result.payload, self._window_ms, self._frontier
            )
            if reason == TIMERS_DONE:
                after = max(after, result.next_queue_offset)
            self.seen = after
            for place in odd:
                self._aside.place(place, "TIMER_OUT_MS is no time")
            if reason == TIMERS_NO_ROOM:
                self._files.add(wheel.end)
            if self._late:
                return True
            if reason == TIMERS_OCCUPIED:
                return False
        return True

    # --- out of the wheel ---

    def _deliver_due(self, wheel: TimerWheel, now: int, dispatched: int) -> float | None:
        """
        Args:
            dispatched: all before that end of the log has been read.
        """
        if self._due_by is None:
            if not wheel.turn(now):
                self._drop_over(wheel)
                return max(wheel.next_due(HORIZON_S) - now_ms(), 1) / 1000
            self._due_by = now, self._wrote.value
        now, end = self._due_by
        if dispatched < end:  # what recalls one of them may be there
            self.waits = self._dispatched() < end
            return None if self.waits else 0.0
        if not wheel.turn(now):
            self._due_by = None
            return 0.0
        if not self._take_recalls(wheel):
            return 0.0
        began = time.monotonic()
        others_stored = self._wrote.value != self._own_end
        count_max = self._beside.count(now=began, others_stored=others_stored)
        records = self._records()
        most = min(self._portion.count, count_max)
        after, rolls = self._copies.fill(wheel, records, now, most)
        if after == wheel.next:  # by the clock that nobody sets it is some ms until then
            return max(wheel.left, 1) / 1000
        count = records.encoder.count
        if not count:
            wheel.advance(after)
            return 0.0
        state = self._clock.state(wheel, wheel.place_of(after), self.seen)
        delivered = partial(self._delivered_to, after)
        tried = min(most, count + 1)  # of the last one it is known which it is
        if not self._write_some(records, state, delivered, tried, wheel.place_of(after)[1], rolls):
            return 0.0
        if rolls:
            self._due_by = None  # they are read before anything that is due later
        self._own_end, self.rests = self._wrote.value, not self._beside.is_alone(began)
        return self._beside.rest_s(time.monotonic() - began, count) if self.rests else 0.0

    def _delivered_to(self, number: int) -> None:
        assert self._wheel is not None
        self._wheel.advance(number)

    def _take_recalls(self, wheel: TimerWheel) -> bool:
        """Learn what is not to be delivered; whether that is all."""
        self._recalls.forget(wheel.second)
        places = wheel.take_recalls(RECALLS_MAX)
        for place in places:
            try:
                message = self._store.record_at(place)
            except MessageNotFound:
                log.warning("the record at %d recalls another, and is gone", place)
                continue
            until = (due_ms_of(message.record) + self._clock.keep_ms) // 1000 + 1
            if until >= wheel.second:
                self._recalls.add(recalled_key(message.properties), until)
        return len(places) < RECALLS_MAX

    def _move_on(self, wheel: TimerWheel) -> None:
        """The clock was set back: a write's worth of what is stored anew for that."""
        moving = self._clock.gather(wheel, self._recalls.keys, self._portion.count)
        if moving is not None:
            at = wheel.at_due, wheel.at_place
            seen = self._frontier if self._late else self.seen  # nothing was delivered since
            state = self._clock.state(wheel, at, seen, moving.moves)
            moved = partial(self._clock.moved, wheel, moving)
            count = moving.records.encoder.count
            self._write_some(moving.records, state, moved, len(moving.units), moving.last, count)

    def _deliver_late(self, wheel: TimerWheel, now: int) -> float:
        """What was overdue when it was read, or a portion of it. Its second has passed."""
        records = self._records()
        late = self._late[: self._portion.count]
        anew, wait_ms, frontier = 0, 0, self._frontier
        for index, place in enumerate(late):
            try:
                message = self._store.record_at(place)
                early_ms, is_anew = self._copies.add_late(wheel, records, message, now)
            except BatchFull:
                late = late[:index]
                break
            except (MessageNotFound, RecordTooLarge) as error:
                self._aside.place(place, error)
                continue
            frontier, anew = message.queue_offset + 1, anew + is_anew
            wait_ms = max(wait_ms, early_ms)
        if wait_ms > 0:
            return wait_ms / 1000
        left = self._late[len(late) :]
        at = wheel.at_due, wheel.at_place
        state = self._clock.state(wheel, at, frontier if left else self.seen)
        delivered = partial(self._delivered_late, left)
        self._write_some(records, state, delivered, len(late), late[-1], anew)
        return 0.0

    def _delivered_late(self, left: list[int]) -> None:
        self._late = left

    def _turn_back(self, wheel: TimerWheel, now: int) -> bool:
        """The clock was set back: what is sent from now on counts by the new one. Raises OSError,
        and what appending raises."""
        if len(wheel.passed) >= PASSED_MAX or self._late:
            return False
        # First: whoever starts takes a timercheck that is later than the state for RocketMQ's, and
        # what has been put into the wheel since for delivered. If it fails, nothing has happened.
        here = TimerCheck(max(now - 1, 0) // 1000 * 1000, wheel.end, self.seen)
        write_check(self._family.store, here, now)
        self._check = None
        log.warning("the clock was set back by %d s; timers go by it", (wheel.at_due - now) // 1000)
        wheel.turn_back(now)
        self._due_by = None
        state = self._clock.state(wheel, (wheel.at_due, wheel.at_place), self.seen)
        self._write(InnerRecords(), state, lambda: None)
        return True

    # --- writes ---

    def _write(self, records: InnerRecords, state: TimersState, stored: Callable[[], None]) -> None:
        """
        Args:
            stored: what follows of it.
        """

        def follow() -> None:
            self._number += 1
            self._frontier = state.frontier
            stored()

        self._unsure = follow
        after = Position(0, self._number + 1)
        self._deriver.write(records, after, note=state.pack(), cover=Cover.WRITTEN)
        self._unsure = None
        follow()

    def _write_some(
        self,
        records: InnerRecords,
        state: TimersState,
        stored: Callable[[], None],
        tried: int,
        last: int,
        anew: int,
    ) -> bool:
        """Write; whether that is stored. Where the log never takes one of them, fewer are next.

        Args:
            tried: messages that it is about; `last`: physical offset of the last one.
            anew: so many of the records are no deliveries.
        """
        count = records.encoder.count - anew

        def follow() -> None:
            self.delivered += count
            stored()

        try:
            self._write(records, state, follow)
        except MessageIllegal as error:
            if self._portion.refused(tried):
                self._aside.place(last, error)
                self._write(InnerRecords(), state, stored)
            return False
        self._portion.stored()
        return True

    def _records(self) -> InnerRecords:
        return InnerRecords(size_max=2 * self._bytes_max, properties_max=self._properties_max)

    def _make_sure(self) -> None:
        """Whether the last write was stored is in the log."""
        position = self._deriver.position()
        follow, self._unsure = self._unsure, None
        if position.number > self._number and follow is not None:
            follow()

    # --- files ---

    def _drop_over(self, wheel: TimerWheel) -> None:
        assert self._files is not None
        for start in wheel.over():
            self._files.drop(start)
            wheel.drop_before(start)

    def keep(self, *, at_end: bool = False) -> None:
        """Write timercheck, which is for RocketMQ; what it says is then on the disk."""
        wheel, files = self._wheel, self._files
        if wheel is None or files is None:
            return
        try:
            if at_end:
                wheel.relink()
                files.sync()
            if self._check is not None and self._flushed.value >= self._check[1]:
                write_check(self._family.store, self._check[0], now_ms())
                self._check = None
            if self._late or self._unsure is not None:
                return
            if self._due_by is None and not self._is_behind():
                wheel.turn(now_ms())  # or this second is what was delivered last, however long ago
            here = TimerCheck(wheel.second * 1000, wheel.end, self.seen)
            if at_end and self._dispatched() >= self._wrote.value:
                write_check(self._family.store, here, now_ms())
            elif self._check is None:
                self._check = here, self._wrote.value
        except OSError as error:
            log.warning("timercheck is not written: %s", error)

    def _is_behind(self) -> bool:
        """Whether there is something that is not in the wheel yet."""
        reach = self._store.positions.queue_range(TIMER_TOPIC, 0)
        return reach is not None and self.seen < reach[1]

    def close(self) -> None:
        self._wheel = None
        if self._files is not None:
            self._files.close()
            self._files = None
