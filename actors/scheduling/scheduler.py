"""The scheduler: what is to happen later, when its time has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.loop import Timer
from cometmq.actors.runtime.service import ServiceActor
from cometmq.actors.scheduling.checks import Checks
from cometmq.actors.scheduling.delays import BYTES_MAX, DelayLevel, now_ms
from cometmq.actors.scheduling.portion import SetAside
from cometmq.actors.scheduling.retries import Retries
from cometmq.actors.scheduling.revival import Revival
from cometmq.actors.scheduling.timers import READ_COUNT, Timers
from cometmq.conf.delay_levels import LEVELS_MAX
from cometmq.protocol.errors import CometError, ShuttingDown, StoreDamaged
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.os.files import CONFIG_DIR
from cometmq.shm.reading.store_reader import ReadLimits, StoreReader
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import DelayOffsetTable

log = logging.getLogger(__name__)

LOOK_S: Final = 60.0  # a timer runs by another clock than what is due: that one may have been set

SET_LOOK_S: Final = 1.0  # while something waits for a time of the wall clock
DISPATCH_S: Final = 5.0  # how long an orderly shutdown waits for the dispatcher
TURN_S: Final = 0.001  # the loop sleeps for whole milliseconds; what is less is slept out

Waiting = DelayLevel | Timers


class SchedulerActor(ServiceActor):
    """Copies delayed messages to their topics when they are due, stores retries, and asks what has
    become of transactions.

    Writes, alone: config/delayOffset.json, config/timercheck, timerwheel and timerlog/, which are
    for RocketMQ or made of the log; that knows by itself how far it has come. The copies are
    stored by the commitlog process.
    Wakes on: a timer for the first that is due; the stripes of the levels' queues (or `queues`,
    for a level that never had a message); `dispatched`, while something was stored that may not be
    read yet; commands of the coordinator.
    Dies of nothing that matters to others: the next one asks the log how far this one has come.
    """

    role = "scheduler"
    part_types: ClassVar[tuple[type, ...]] = (Retries, Checks)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        self._family = family
        self._commitlog = Channel(family.addresses["commitlog"], "the commitlog process")
        control = family.control
        self._table = family.queue_table()
        self._store = _open_store(family)
        self._retries = Retries(
            family,
            self._commitlog,
            self._store,
            lambda: self._dispatched.value,
            lambda: self.call_soon(self.on_doorbell),
        )
        self._checks = Checks(self, family, self._commitlog, self._store)
        self._aside = SetAside(self._store)
        self._timed = Timers(
            family, self._commitlog, self._store, lambda: self._dispatched.value, self._aside
        )
        self._revival = Revival(self, family, self._table, self._store)
        self._timed_alarm: Timer | None = None
        super().__init__(bind=bind)
        self._dispatched = Dispatched(family)
        self._wrote = control.read(Counter.WROTE)
        self._queues = control.sleep_on(Counter.QUEUES, family.doorbell)
        self._stripes = control.sleep_on_stripes(family.doorbell)
        self._watch = self._table.watch(self._stripes)
        self._levels: list[DelayLevel] = []
        # Levels whose queue is not in the table yet; that have something which is not dispatched.
        self._unplaced: set[Waiting] = set()
        self._undispatched: set[Waiting] = set()

    def parts(self) -> Sequence[object]:
        return (self._retries, self._checks)

    # --- start ---

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.SERVING)
        self._family.wait_recovered()
        self._file = ConfigFile(
            self._family.store / CONFIG_DIR / "delayOffset.json", DelayOffsetTable
        )
        self._shown = self._load_offsets()
        # Also those that the table had before: what waits there is not lost.
        used = [queue_id + 1 for topic, queue_id in self._table.queues() if topic == DELAY_TOPIC]
        count = max(len(self._family.settings.delay_levels_ms), *used, 1)
        for level in range(1, min(count, LEVELS_MAX) + 1):
            each = DelayLevel(self._family, self._commitlog, self._store, level, self._aside)
            each.begin = min(self._shown.offset_table.get(level, 0), self._end_of(each))
            self._levels.append(each)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self.every(self._family.settings.flush_delay_offset_interval_ms / 1000, self._write_offsets)
        for each in self._levels:
            if self._slot_of(each) is None:
                self._sleep(each)  # it never had a message: there is nothing to ask the log for
            else:
                self.call_soon(partial(self._go_on, each))
        self._checks.begin()
        self._go_on_with_timers()
        self._revival.begin()

    def _load_offsets(self) -> DelayOffsetTable:
        """It is for RocketMQ: levels that the log knows do without it.

        In a group nobody believes it: it may tell of deliveries that were never confirmed, and
        were cut from this log since. What they delivered would be passed over.
        """
        if self._family.settings.is_in_group:
            return DelayOffsetTable()
        try:
            return self._file.load() or DelayOffsetTable()
        except (StoreDamaged, OSError) as error:
            log.error("%s; what RocketMQ has delivered of delayed messages comes again", error)
            return DelayOffsetTable()

    # --- levels ---

    def _go_on(self, level: DelayLevel) -> None:
        """One step of a level; the others, and whoever asks, are heard before the next."""
        try:
            wait_s = level.deliver()
        except Exception as error:
            wait_s = self._pause(level, error)
        else:
            level.failures = 0
        if wait_s is None:
            self._sleep(level)
        elif wait_s == 0:
            self.call_soon(partial(self._go_on, level))
        else:
            self.after(min(wait_s, LOOK_S), partial(self._go_on, level))

    def _pause(self, level: Waiting, caught: Exception) -> float:
        """It goes on by itself, whatever has happened: nothing else would wake it."""
        error = caught if isinstance(caught, OSError) else explained(caught, "%s", level.name)
        level.failures += 1
        wait_s = pause_s(level.failures)
        say = log.warning if level.failures == 1 else log.debug
        say("%s: goes on in %.1f s: %s", level.name, wait_s, error)
        return wait_s

    def _go_on_with_timers(self) -> None:
        """One step; then when the next is due, or something more is stored."""
        timers = self._timed
        if self._timed_alarm is not None:
            self._timed_alarm.cancel()
            self._timed_alarm = None
        try:
            wait_s = timers.step()
        except Exception as error:
            wait_s = self._pause(timers, error)
            self._timed_alarm = self.after(wait_s, self._go_on_with_timers)
            return
        timers.failures = 0
        if wait_s is not None and wait_s < TURN_S:
            time.sleep(wait_s)  # the pace of what is due together, if any: nothing is waited for
            self.call_soon(self._go_on_with_timers)
            return
        if wait_s is not None:
            look_s = SET_LOOK_S if timers.pending else LOOK_S
            self._timed_alarm = self.after(min(wait_s, look_s), self._go_on_with_timers)
        if not timers.rests:
            self._sleep(timers)

    def _sleep(self, level: Waiting) -> None:
        """Until something more is stored there."""
        slot = self._slot_of(level)
        if slot is None:
            self._unplaced.add(level)
        elif self._watch.end(slot) > level.seen:
            self._undispatched.add(level)
        else:
            self._watch.set(level, slot, level.seen)
        self.call_soon(self.on_doorbell)  # it may have come before we armed

    def on_doorbell(self) -> None:
        """Armed first: what comes while we look wakes us again."""
        for stripe in self._watch.stripes():
            self._stripes[stripe].arm()
        if self._unplaced:
            self._queues.arm()
        if self._undispatched or self._retries.waits or self._timed.waits:
            self._dispatched.arm()
        self._retries.go_on()
        news: list[Waiting] = [*self._watch.news(len(self._levels) + 1), *self._dispatched_now()]
        for each in news:
            if isinstance(each, DelayLevel):
                self._go_on(each)
        if self._timed in news or self._timed.waits:
            self._go_on_with_timers()

    def _dispatched_now(self) -> list[Waiting]:
        """Of those that wait for the dispatcher, the ones that it has come to. A queue is in the
        table a moment before its first message is in the queue: what it waits for then is another
        counter."""
        placed = [each for each in self._unplaced if self._slot_of(each) is not None]
        shown = [each for each in self._undispatched if self._end_of(each) > each.seen]
        self._unplaced.difference_update(placed)
        self._undispatched.difference_update(shown)
        return placed + shown

    def _slot_of(self, level: Waiting) -> int | None:
        return self._table.slot_of(level.topic, level.queue_id)

    def _end_of(self, level: Waiting) -> int:
        reach = self._table.range_of(level.topic, level.queue_id)
        return reach.max_queue_offset if reach else 0

    # --- for RocketMQ ---

    def _write_offsets(self) -> None:
        """delayOffset.json, if anything was delivered since; timercheck."""
        self._timed.keep()
        offsets = self._shown.offset_table | {
            each.level: each.offset for each in self._levels if each.offset
        }
        if offsets == self._shown.offset_table:
            return
        version = self._shown.data_version.next(now_ms())
        table = DelayOffsetTable(data_version=version, offset_table=offsets)
        try:
            self._file.store(table, durable=False)
        except (OSError, CometError) as error:
            log.warning("delayOffset.json is not written: %s", error)
            return
        self._shown = table

    # --- the end ---

    def settle(self) -> None:
        self._checks.end(ShuttingDown("the scheduler is shutting down"))
        self._write_offsets()
        # While the dispatcher is behind, timercheck is not written: a RocketMQ that opens this
        # store would deliver all messages again that were delivered since the last timercheck.
        if not self._dispatched.wait_for(self._wrote.value, DISPATCH_S):
            log.warning("the dispatcher is behind at shutdown; timercheck stays as it was")
        self._timed.keep(at_end=True)

    def on_stop(self) -> None:
        super().on_stop()
        self._checks.close()
        self._timed.close()
        self._revival.close()
        self._commitlog.close()

    def statistics(self) -> meters.Figures:
        return (
            {
                meters.DELIVERED_LATER: sum(each.delivered for each in self._levels),
                meters.TIMERS_PENDING: self._timed.pending,
                meters.TIMERS_DELIVERED: self._timed.delivered,
                meters.NEVER_DELIVERED: self._aside.count,
            }
            | self._retries.statistics()
            | self._checks.statistics()
            | self._revival.statistics()
        )


def _open_store(family: Family) -> StoreReader:
    """The store as far as it is dispatched."""
    return family.store_reader(
        ReadLimits(
            hot_bytes=BYTES_MAX,
            hot_count=READ_COUNT,
            cold_bytes=BYTES_MAX,
            cold_count=READ_COUNT,
            skip_removed=False,  # one unreadable entry hides no others
        )
    )
