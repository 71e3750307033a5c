"""Where the wall clock is, for the wheel of timers, and what is done when it was stepped.

What has a delay is due by a clock that nobody sets, but RocketMQ's wheel has it by the wall clock.
So when that one is set back, what waits by a delay is stored anew, with the time that it has now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple

from cometmq.actors.runtime.clock_steps import ahead_ms
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.uptime import clock_name
from cometmq.actors.scheduling.portion import SetAside
from cometmq.actors.tables.lean import WAITING
from cometmq.actors.tables.timers import Move, TimersState, is_recalled, retimed
from cometmq.protocol.errors import MessageNotFound
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.shm.kernel.codec import BatchFull, Message, RecordTooLarge, due_ms_by, due_ms_of
from cometmq.shm.kernel.store import TIMERS_SKEW_MS, TIMERS_UNMAPPED, TimerWheel
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

AHEADS_MAX: Final = 8
MOVES_MAX: Final = 8
COUNT_MAX: Final = 2_048  # messages of one write
DAY_MS: Final = 86_400_000


class Moving(NamedTuple):
    """What is stored anew by one write."""

    records: InnerRecords
    moves: list[Move]  # when that is stored
    units: list[int]  # positions in the timer log
    position: int  # where the search goes on

    @property
    def last(self) -> int:
        """Physical offset of the last one that it is about."""
        return self.moves[-1][0] - 1


class TimerClock:
    """What the state of the timers says of clocks.

    Args:
        state: as it was written last.
        records: makes room for a write's.
        aside: takes what no log takes.
        ahead: how far the wall clock is ahead of CLOCK_BOOTTIME, in ms; a test's own.
        begun: how far it was when the process began; None: now.
    """

    def __init__(
        self,
        state: TimersState,
        store: StoreReader,
        records: Callable[[], InnerRecords],
        aside: SetAside,
        ahead: Callable[[], int] = ahead_ms,
        *,
        begun: int | None = None,
    ) -> None:
        self._store = store
        self._records = records
        self._aside = aside
        self._read = ahead
        self._clock = int(clock_name(), 16)
        is_same = state.clock == self._clock and state.aheads
        self.aheads = list(state.aheads) if is_same else [ahead() if begun is None else begun]
        self.is_kept = bool(is_same)  # in the log, where this clock is; receipts are read by that
        self.moves: list[Move] = list(state.moves)
        # In the timer log, where the search for what is stored anew goes on; None: it is over
        self.position: int | None = 0 if state.moving and self._is_current() else None
        self._unread = -1  # the unit whose record could not be read last

    def state(
        self, wheel: TimerWheel, at: tuple[int, int], seen: int, moves: list[Move] | None = None
    ) -> TimersState:
        """What is written, when all is delivered up to `at`.

        Args:
            seen: queue offset of what comes next from the topic.
            moves: when that is stored.
        """
        return TimersState(
            *at, seen, wheel.passed, self._clock, self.aheads,
            self.moves if moves is None else moves, self.position is not None,
        )  # fmt: skip

    def due_ms(self, message: Message) -> int:
        """By the wall clock as it is, as far as it was looked at."""
        return due_ms_by(message.record, self._clock, self.aheads[-1])

    def retime(self, records: InnerRecords, message: Message) -> None:
        """Store one anew whose delay ends at another time than it says: the clock was stepped."""
        properties = retimed(message.raw_properties, self.due_ms(message))
        records.add_copy(records.queue(TIMER_TOPIC, 0), message, WAITING, properties)

    def kept(self) -> None:
        self.is_kept = True

    # --- steps ---

    def show(self, wheel: TimerWheel) -> None:
        """Have the wheel know of it."""
        wheel.follow_clock(self._clock, self.aheads[-1], self.moves)

    def begin(self, wheel: TimerWheel) -> None:
        """Have a wheel that was just made know of it."""
        self.show(wheel)
        if self.moves:
            self._find_recalls(wheel)

    @property
    def keep_ms(self) -> int:
        """For how long behind its own time what recalls another has a say: so much later that other
        one may lie, which goes by the clock as it is."""
        return max(self.aheads) - min(self.aheads) + DAY_MS if self.moves else 0

    def _find_recalls(self, wheel: TimerWheel) -> None:
        wheel.find_recalls(self._store.log, wheel.at_due - self.keep_ms)

    def follow(self, wheel: TimerWheel) -> None:
        """Look where the wall clock is now. A step that is not seen yet has nothing delivered
        early: the wheel asks the other clock, too."""
        ahead = self._read()
        step_ms = ahead - self.aheads[-1]
        if abs(step_ms) > TIMERS_SKEW_MS:
            log.warning("the clock was stepped by %+.1f s: timers with a delay wait as long as "
                        "before", step_ms / 1000)  # fmt: skip
            self.aheads = [*self.aheads, ahead][-AHEADS_MAX:]
            self.show(wheel)
        if step_ms < -TIMERS_SKEW_MS or wheel.is_askew:
            self._begin(wheel)

    def _begin(self, wheel: TimerWheel) -> None:
        wheel.is_askew = False
        is_first = not self.moves
        self.moves = [each for each in self.moves if each[3] > wheel.at_due]
        if not self._is_current():
            if len(self.moves) >= MOVES_MAX:
                log.error(
                    "the clock was set back %d times: timers with a delay are late", MOVES_MAX
                )
                self.position = None
                self.show(wheel)
                return
            self.moves.append((0, self._clock, self.aheads[-1], 0))
        self.position = 0
        self.show(wheel)
        if is_first:  # what is put from here on counts by itself
            self._find_recalls(wheel)

    def _is_current(self) -> bool:
        """Whether what was moved last was moved to where the clock is now."""
        return bool(self.moves) and self.moves[-1][1:3] == (self._clock, self.aheads[-1])

    # --- what is stored anew ---

    def gather(self, wheel: TimerWheel, recalled: Set[bytes], count_max: int) -> Moving | None:
        """What is due before it would come up, in the order of places, as much as one write holds;
        None: there is nothing this time, or, without a position, nothing more.

        Args:
            recalled: keys of what is not stored anew: it is over.
            count_max: messages of the write.
        """
        end, _, _, until = self.moves[-1]
        assert self.position is not None
        found, position = self._search(wheel, end, self.position, min(count_max, COUNT_MAX))
        records, units = self._records(), []
        for place, unit in found:
            try:
                message = self._store.record_at(place)
            except MessageNotFound as error:
                self._aside.place(place, error)
                continue
            try:
                if not is_recalled(message.properties, recalled):
                    self.retime(records, message)
            except RecordTooLarge as error:
                self._aside.message(message, error)
            except BatchFull:
                position = unit
                break
            units.append(unit)
            end, until = place + 1, max(until, due_ms_of(message.record))
        if not units:
            self.position = position if position < wheel.end else None
            return None
        now = end, self._clock, self.aheads[-1], until
        return Moving(records, [*self.moves[:-1], now], units, position)

    def _search(
        self, wheel: TimerWheel, begin: int, position: int, count_max: int
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """(place, position of its unit), and where the search goes on."""
        reason, found, after = wheel.askew(self._store.log, begin, position, count_max)
        if reason == TIMERS_UNMAPPED:
            place, unit = found.pop()
            try:
                self._store.record_at(place)
            except MessageNotFound:
                return found, after
            if unit != self._unread:  # it is mapped now, and looked at again, once
                after, self._unread = unit, unit
        return found, after

    def moved(self, wheel: TimerWheel, moving: Moving) -> None:
        """That is stored."""
        self.moves = moving.moves
        self.position = moving.position if moving.position < wheel.end else None
        self.show(wheel)
        for unit in moving.units:
            wheel.pass_over(unit)
