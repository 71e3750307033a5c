"""Copies of timers: of what is due, and of what is stored anew to wait on."""

from __future__ import annotations

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.uptime import now_up
from cometmq.actors.scheduling.portion import SetAside, Targets
from cometmq.actors.scheduling.timer_clock import TimerClock
from cometmq.actors.tables.lean import WAITING
from cometmq.actors.tables.timers import is_recalled, recalled_key, rolled
from cometmq.protocol.errors import MessageNotFound
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.shm.kernel.codec import BatchFull, Message, RecordTooLarge, due_ms_of
from cometmq.shm.kernel.store import (
    TIMERS_DONE,
    TIMERS_EARLY,
    TIMERS_LARGE,
    TIMERS_NEW_QUEUE,
    TIMERS_NOWHERE,
    TIMERS_ROLL,
    TIMERS_SKEW_MS,
    TimerWheel,
)
from cometmq.shm.reading.store_reader import StoreReader


class TimerCopies:
    """Adds them to a write's records.

    Args:
        recalled: keys of what is not delivered.
        aside: takes what can be none.
    """

    def __init__(
        self, store: StoreReader, clock: TimerClock, recalled: set[bytes], aside: SetAside
    ) -> None:
        self._store = store
        self._clock = clock
        self._recalled = recalled
        self._aside = aside
        self._targets = Targets()

    def fill(
        self, wheel: TimerWheel, records: InnerRecords, now: int, most: int
    ) -> tuple[int, int]:
        """Of what is due; the number after them, and how many wait on."""
        queues: dict[bytes, int] = {}
        up, at, rolls, mapped = now_up().ms, wheel.next, 0, -1
        while True:
            try:
                reason, at, detail = wheel.fill(
                    records.encoder, self._store.log, queues, self._recalled, now, up, most, at
                )
                if reason == TIMERS_DONE:
                    return at, rolls
                if reason == TIMERS_NEW_QUEUE:
                    queue = self._targets.of(detail)
                    queues[detail] = -1 if queue is None else records.queue(*queue)
                elif reason in (TIMERS_ROLL, TIMERS_EARLY):
                    anew = self._roll if reason == TIMERS_ROLL else self._clock.retime
                    anew(records, self._store.record_at(detail))
                    rolls += 1
                    at += 1
                elif reason in (TIMERS_LARGE, TIMERS_NOWHERE):  # as it is
                    message = self._store.record_at(detail)
                    self._aside.add_copy(records, message, message.properties)
                    at += 1
                elif detail == mapped or not self._map(detail):
                    self._aside.place(detail, "it is gone, or damaged")
                    at += 1
                else:
                    mapped = detail
            except BatchFull:
                return at, rolls
            except RecordTooLarge as error:  # for waiting on
                self._aside.place(detail, error)
                at += 1

    def add_late(
        self, wheel: TimerWheel, records: InnerRecords, message: Message, now: int
    ) -> tuple[int, bool]:
        """Of one that was overdue when it was read: how many ms it is early all the same, and
        whether it waits on. Raises BatchFull; RecordTooLarge, where it cannot wait on."""
        properties = message.properties
        if is_recalled(properties, self._recalled):
            return 0, False
        due, by_clock = due_ms_of(message.record), self._clock.due_ms(message)
        was_stepped = by_clock > max(due, now) + TIMERS_SKEW_MS
        if was_stepped or due > wheel.at_due:
            (self._clock.retime if was_stepped else self._roll)(records, message)
            return 0, True
        if recalled_key(properties):
            return 0, False  # it was to be stored anew on its way, and its time is over
        self._aside.add_copy(records, message, properties)
        return max(due, by_clock) - now, False

    def _roll(self, records: InnerRecords, message: Message) -> None:
        """It waits for longer than the wheel lets it, or the log is kept."""
        queue = records.queue(TIMER_TOPIC, 0)
        records.add_copy(queue, message, WAITING, rolled(message.raw_properties))

    def _map(self, place: int) -> bool:
        """Have the segment of a record mapped; False if it is gone."""
        try:
            self._store.record_at(place)
        except MessageNotFound:
            return False
        return True
