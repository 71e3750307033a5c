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

from cometmq.actors.books.delays import destination
from cometmq.actors.books.timers import (
    BACK_MS,
    PASSED_MAX,
    Recalls,
    TimersState,
    is_recalled,
    recalled_key,
    rolled,
    window_ms,
)
from cometmq.actors.runtime.deriver import Deriver
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.uptime import now_up
from cometmq.actors.semantics.delays import BYTES_MAX, WRITE_TIMEOUT_S, now_ms
from cometmq.actors.semantics.timer_clock import TimerClock
from cometmq.protocol.commands import Cover, Position
from cometmq.protocol.errors import CometError, MessageNotFound, MessageTooLarge
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.derived.timer_files import TimerCheck, TimerFiles, read_check, write_check
from cometmq.shm.kernel._kernel import (
    TIMERS_DONE,
    TIMERS_EARLY,
    TIMERS_LARGE,
    TIMERS_NEW_QUEUE,
    TIMERS_NO_ROOM,
    TIMERS_OCCUPIED,
    TIMERS_ROLL,
    TIMERS_SKEW_MS,
    BatchFull,
    Message,
    RecordTooLarge,
    TimerWheel,
    decode,
    due_ms_of,
)
from cometmq.shm.live.control import Counter
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

DELIVERED_MAX: Final = 2_048  # messages of one write,
BESIDE_MAX: Final = 512  # if anybody else has something stored meanwhile,
BESIDE_SHARE: Final = 2  # who then has so much more time than that write took
READ_COUNT: Final = 2_048  # messages that are put into the wheel at once,
RECALLS_MAX: Final = 2_048  # that are read at once, as well
READS_MAX: Final = 16  # so often before anything else is heard
HORIZON_S: Final = 60  # how far the wheel is searched for what is due next
AGAIN_MAX: Final = 100_000  # messages that a start reads again, about


class Timers:
    """How far timers are delivered, and when it goes on.

    Args:
        dispatched: how far the dispatcher has come.
    """

    topic = TIMER_TOPIC
    queue_id = 0
    name = "timers"

    def __init__(
        self, family: Family, commitlog: Channel, store: StoreReader, dispatched: Callable[[], int]
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
        self._own_end = 0  # of the log, behind what was delivered last
        self._flushed = family.control.read(Counter.FLUSHED)
        self._window_ms = window_ms(self._settings.file_reserved_time_hours)
        self._bytes_max = min(BYTES_MAX, self._settings.mapped_file_size_commit_log_bytes // 4)
        self._clock = TimerClock(TimersState(), store, self._bytes_max)
        self._deriver = Deriver(commitlog, "timers", timeout_s=WRITE_TIMEOUT_S)
        self._number = 0  # of the last write
        self._count_max = DELIVERED_MAX  # messages of the next one
        self._unsure: Callable[[], None] | None = None  # what is to be done if that was stored
        self._files: TimerFiles | None = None
        self._wheel: TimerWheel | None = None
        self._frontier = 0
        self._late: list[int] = []  # physical offsets: overdue when they were read
        self._recalls = Recalls()
        self._due_by: tuple[int, int] | None = None  # (time, end of the log by then)
        self._targets: dict[bytes, tuple[str, int] | None] = {}
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
        check = None if self._settings.is_in_group else read_check(self._family.store)
        if check is not None:
            state = state.joined(check.read_ms, check.queue_offset)
        segment_bytes = self._settings.mapped_file_size_timer_log_bytes
        self._files = self._files or TimerFiles(self._family.store, segment_bytes)
        log_max = self._believed_up_to(state.frontier)
        wheel = self._files.wheel(state.at_due, state.at_place, state.passed, log_max)
        after = self._read_up_to(wheel, check, state.frontier)
        if after is None:
            log.warning("the timer log is made anew, of all of %s", TIMER_TOPIC)
            del wheel  # it looks at the files
            self._files.clear()
            wheel = self._files.wheel(state.at_due, state.at_place, state.passed, log_max)
            after = 0
        reach = self._store.positions.queue_range(TIMER_TOPIC, 0)
        low, high = reach if reach else (0, 0)
        self.seen, self._frontier = min(max(after, low), high), state.frontier
        begun = self._clock.aheads[-1]
        self._clock = TimerClock(state, self._store, self._bytes_max, begun=begun)
        self._clock.begin(wheel)
        self._recalls = Recalls()
        self._wheel = wheel
        return wheel

    def _believed_up_to(self, frontier: int) -> int:
        """The physical offset at which the timer log ends for a start. It has no unit for what was
        overdue when it was read; behind the frontier that may be undelivered, so it is read again.
        """
        first = self._store.get_message(TIMER_TOPIC, 0, frontier, 1, max_bytes=self._bytes_max)
        if first.payload is None:
            return self._store.positions.log_range()[1]
        (message,) = decode(first.payload)
        return message.physical_offset

    def _read_up_to(self, wheel: TimerWheel, check: TimerCheck | None, frontier: int) -> int | None:
        """The queue offset behind what is in the timer log; None: nobody knows."""
        after = 0
        if wheel.last_place >= 0:
            try:
                record = self._store.record_at(wheel.last_place)
            except MessageNotFound:
                if wheel.last_place >= self._store.positions.log_range()[0]:
                    return None
            else:
                if record.topic != TIMER_TOPIC or record.queue_offset >= frontier:
                    return None
                after = record.queue_offset + 1
        if check is not None and wheel.end >= check.log_end:
            return min(max(after, check.queue_offset), frontier)
        return after

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
                log.error("the record at %d is never delivered: TIMER_OUT_MS is no time", place)
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
        began, is_alone = time.monotonic(), self._wrote.value == self._own_end
        records = InnerRecords(size_max=2 * self._bytes_max)
        most = min(self._count_max, DELIVERED_MAX if is_alone else BESIDE_MAX)
        after, rolls = self._fill(wheel, records, now, most)
        if after == wheel.next:  # by the clock that nobody sets it is some ms until then
            return max(wheel.left, 1) / 1000
        if not records.encoder.count:
            wheel.advance(after)
            return 0.0
        state = self._clock.state(wheel, wheel.place_of(after), self.seen)
        count = records.encoder.count - rolls
        try:
            self._write(records, state, partial(self._delivered_to, after, count))
        except MessageTooLarge as error:  # one of them is, and hinders all
            if self._count_max == 1:
                place = wheel.place_of(after)[1]
                self._write(InnerRecords(), state, partial(self._delivered_to, after, 0))
                _say_never(place, error)
            self._count_max = max(1, self._count_max // 2)
            return 0.0
        self._count_max = min(DELIVERED_MAX, 2 * self._count_max)
        if rolls:
            self._due_by = None  # they are read before anything that is due later
        self._own_end, self.rests = self._wrote.value, not is_alone
        return 0.0 if is_alone else BESIDE_SHARE * (time.monotonic() - began)

    def _delivered_to(self, number: int, count: int) -> None:
        assert self._wheel is not None
        self._wheel.advance(number)
        self.delivered += count

    def _fill(
        self, wheel: TimerWheel, records: InnerRecords, now: int, most: int
    ) -> tuple[int, int]:
        """Add copies of what is due; the number after them, and how many wait on."""
        queues: dict[bytes, int] = {}
        up, at, rolls, mapped = now_up().ms, wheel.next, 0, -1
        while True:
            try:
                reason, at, detail = wheel.fill(
                    records.encoder, self._store.log, queues, self._recalls.keys, now, up,
                    most, at,
                )  # fmt: skip
                if reason == TIMERS_DONE:
                    return at, rolls
                if reason == TIMERS_NEW_QUEUE:
                    queue = self._target(detail)
                    queues[detail] = -1 if queue is None else records.queue(*queue)
                elif reason == TIMERS_ROLL:
                    self._roll(records, self._store.record_at(detail))
                    rolls += 1
                    at += 1
                elif reason == TIMERS_EARLY:
                    self._clock.retime(records, self._store.record_at(detail))
                    rolls += 1
                    at += 1
                elif reason == TIMERS_LARGE or detail == mapped or not self._map(detail):
                    _say_never(detail, "too large" if reason == TIMERS_LARGE else "it is gone")
                    at += 1
                else:
                    mapped = detail
            except BatchFull:
                return at, rolls
            except RecordTooLarge as error:  # for waiting on
                _say_never(detail, error)
                at += 1

    def _map(self, place: int) -> bool:
        """Have the segment of a record mapped; False if it is gone."""
        try:
            self._store.record_at(place)
        except MessageNotFound:
            return False
        return True

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

    def _target(self, key: bytes) -> tuple[str, int] | None:
        """The queue that a message is meant for; None: there can be none."""
        if key not in self._targets:
            if len(self._targets) >= 65_536:
                self._targets.clear()
            topic, _, queue = key.decode(errors="replace").partition("\1")
            try:
                self._targets[key] = destination({"REAL_TOPIC": topic, "REAL_QID": queue})
            except CometError as error:
                log.error("timers are not delivered: %s", error)
                self._targets[key] = None
        return self._targets[key]

    def _roll(self, records: InnerRecords, message: Message) -> None:
        """Store one anew that waits for longer than the wheel lets it, or the log is kept."""
        records.encoder.add_stored(
            records.queue(TIMER_TOPIC, 0), message.record, rolled(message.raw_properties)
        )

    def _move_on(self, wheel: TimerWheel) -> None:
        """The clock was set back: a write's worth of what is stored anew for that."""
        moving = self._clock.gather(wheel, self._recalls.keys)
        if moving is not None:
            at = wheel.at_due, wheel.at_place
            seen = self._frontier if self._late else self.seen  # nothing was delivered since
            state = self._clock.state(wheel, at, seen, moving.moves)
            self._write(moving.records, state, partial(self._clock.moved, wheel, moving))

    def _deliver_late(self, wheel: TimerWheel, now: int) -> float:
        """What was overdue when it was read. Its second has passed."""
        records = InnerRecords(size_max=4 * self._bytes_max)
        rolls, wait_ms = 0, 0
        for place in self._late:
            try:
                message = self._store.record_at(place)
                if is_recalled(message.properties, self._recalls.keys):
                    continue
                due = due_ms_of(message.record)
                by_clock = self._clock.due_ms(message)
                was_stepped = by_clock > max(due, now) + TIMERS_SKEW_MS
                if was_stepped or due > wheel.at_due:
                    (self._clock.retime if was_stepped else self._roll)(records, message)
                    rolls += 1
                    continue
                if recalled_key(message.properties):
                    continue  # it was to be stored anew on its way, and its time is over
                wait_ms = max(wait_ms, due - now, by_clock - now)
                queue = self._target(
                    f"{message.properties.get('REAL_TOPIC', '')}\1"
                    f"{message.properties.get('REAL_QID', '')}".encode()
                )
                if queue is not None:
                    records.encoder.add_stored(records.queue(*queue), message.record)
            except (MessageNotFound, RecordTooLarge) as error:
                _say_never(place, error)
        if wait_ms > 0:
            return wait_ms / 1000
        state = self._clock.state(wheel, (wheel.at_due, wheel.at_place), self.seen)
        self._write(records, state, partial(self._delivered_late, records.encoder.count - rolls))
        return 0.0

    def _delivered_late(self, count: int) -> None:
        self._late = []
        self.delivered += count

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


def _say_never(place: int, why: object) -> None:
    log.error("the timer at physical offset %d is never delivered: %s", place, why)
