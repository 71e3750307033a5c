"""A world of timers: clocks and a log that are a test's own, and schedulers that come and go."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.scheduling import timer_clock, timer_copies, timers
from cometmq.actors.scheduling.beside import ALONE_MAX, Beside
from cometmq.actors.scheduling.portion import Portion, SetAside
from cometmq.actors.scheduling.timer_clock import TimerClock
from cometmq.actors.scheduling.timer_copies import TimerCopies
from cometmq.actors.scheduling.timers import Timers
from cometmq.actors.tables.timers import WINDOW_MS, Recalls, TimersState
from cometmq.protocol.errors import MessageTooLarge
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.protocol.uptime import Uptime
from cometmq.shm.kernel.codec import LogView, Message, decode
from cometmq.shm.kernel.layout import PROPERTIES_MAX_BYTES, TIMER_SLOT, TIMER_WHEEL_SLOTS
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import InnerBatch, LogAppender, TimerWheel

CLOCK: Final = 0x0123ABCD
HOST: Final = bytes(8)
SEGMENT: Final = 1 << 22
UNITS: Final = 1 << 20
DAY_MS: Final = 86_400_000


@cache
def wheel_memory() -> bytearray:
    """Of a wheel, 38 MB: all worlds have the same, one after the other."""
    return bytearray(TIMER_SLOT.size * TIMER_WHEEL_SLOTS)


class World:
    """Clocks and a log; schedulers come and go. Times in ms."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up, self.ahead = 10**9, 10**12
        self._memory = memoryview(bytearray(SEGMENT))
        self._log = LogAppender(HOST, SEGMENT)
        self._log.attach(self._memory, 0, 0)
        self._cursors: dict[str, QueueCursor] = {}
        self._view = LogView(SEGMENT)
        self._view.set(0, self._memory)
        self._place = place
        self._slots, self._units = wheel_memory(), bytearray(UNITS)
        self.waiting: list[Message] = []  # the topic of timers
        self.came: dict[bytes, list[int]] = {}  # body -> times, by `up`
        self.state = TimersState()
        self.dies = ""  # "before" or "after" a write is stored,
        self.writes_left = 0  # the next one, or behind so many
        self.refused: set[bytes] = set()  # bodies that the log never takes
        monkeypatch.setattr(timer_clock, "clock_name", lambda: f"{CLOCK:08x}")
        monkeypatch.setattr(timers, "now_ms", lambda: self.now)
        monkeypatch.setattr(timer_copies, "now_up", lambda: Uptime(f"{CLOCK:08x}", self.up))
        self.begin()

    @property
    def now(self) -> int:
        return self.up + self.ahead

    def begin(self) -> None:
        """A scheduler begins, with what the log and the timer log say."""
        size = len(self._slots)
        ctypes.memset((ctypes.c_char * size).from_buffer(self._slots), 0, size)
        units = LogView(UNITS)
        units.set(0, memoryview(self._units))
        state = self.state
        self.wheel = TimerWheel(
            memoryview(self._slots), units, 0, state.at_due, state.at_place, state.passed
        )
        self.wheel.load(SEGMENT)
        store: Any = SimpleNamespace(
            record_at=self.record_at, log=self._view,
            positions=SimpleNamespace(queue_range=lambda *_: (0, len(self.waiting))),
        )  # fmt: skip
        recalls, self.aside = Recalls(), SetAside(store)
        clock = TimerClock(state, store, InnerRecords, self.aside, lambda: self.ahead)
        clock.begin(self.wheel)
        self.scheduler: Any = Timers.__new__(Timers)
        vars(self.scheduler).update(
            _family=SimpleNamespace(store=self._place), _store=store, _clock=clock, _late=[],
            _recalls=recalls, _due_by=None, _bytes_max=1 << 20, _window_ms=WINDOW_MS,
            _copies=TimerCopies(store, clock, recalls.keys, self.aside), _aside=self.aside,
            _properties_max=PROPERTIES_MAX_BYTES,
            _frontier=state.frontier, seen=0, delivered=0, _wheel=self.wheel,
            _own_end=0, _beside=Beside(), _wrote=SimpleNamespace(value=0), _dispatched=lambda: 0,
            _drop_over=lambda _wheel: None, _write=self.write, _read=self.read, _unsure=None,
            _portion=Portion(ALONE_MAX),
        )  # fmt: skip
        known = [each.physical_offset for each in self.waiting]
        self.scheduler.seen = sum(each <= self.wheel.last_place for each in known)

    def record_at(self, place: int) -> Message:
        size = int.from_bytes(self._memory[place : place + 4], "big")
        return next(iter(decode(self._memory[place : place + size])))

    def write(self, records: InnerRecords, state: TimersState, stored: Any) -> None:
        dies = self.dies if not self.writes_left else ""
        self.writes_left = max(0, self.writes_left - 1)
        if dies == "before":
            raise ConnectionError
        count, keys, payload = records.encoder.count, records.queues, records.encoder.take()
        if any(each in payload for each in self.refused):
            raise MessageTooLarge("as the test wants it")
        if count:
            topics = [key.topic for key in keys]
            cursors = [self._cursors.setdefault(each, QueueCursor(each, 0)) for each in topics]
            batch = InnerBatch(self._log, cursors, payload, count)
            places = memoryview(batch.append(self.now) or b"").cast("q")[1::2]
            assert len(places) == count
            for place in places:
                message = self.record_at(place)
                if message.topic == TIMER_TOPIC:
                    self.waiting.append(message)
                else:
                    self.came.setdefault(bytes(message.body), []).append(self.up)
        self.state = state
        if dies == "after":
            raise ConnectionError
        self.scheduler._frontier = state.frontier
        stored()

    def read(self, wheel: TimerWheel) -> bool:
        one = self.scheduler
        while one.seen < len(self.waiting):
            record = self.waiting[one.seen].record
            _, one.seen, one._late, odd = wheel.put(record, WINDOW_MS, one._frontier)
            assert not odd
            if one._late:
                return True
        return False

    def _store(self, body: bytes, more: str) -> Message:
        records = InnerRecords()
        stamp = Uptime(f"{CLOCK:08x}", self.up).as_property().decode()
        real = f"REAL_TOPIC\1t\2REAL_QID\0010\2{stamp}"
        records.encoder.add(records.queue(TIMER_TOPIC, 0), body, (more + real).encode())
        state, dies, self.dies = self.state, self.dies, ""
        self.write(records, state, lambda: None)
        self.dies = dies
        return self.waiting[-1]

    def _timed(self, due: int) -> str:
        return f"TIMER_DELIVER_MS\1{due}\2TIMER_OUT_MS\1{(due - 1) // 1000 * 1000}\2"

    def send(self, name: str, delay: int) -> int:
        """When it is due, as its receipt says."""
        due = self.now + delay
        more = f"UNIQ_KEY\1{name}\2TIMER_DELAY_MS\1{delay}\2{self._timed(due)}"
        self._store(name.encode(), more)
        return due

    def recall(self, name: str, due: int) -> None:
        self._store(b"0", f"TIMER_DEL_UNIQKEY\1t+{name}\2{self._timed(due)}")

    def step(self) -> float | None:
        """A scheduler that dies is followed by another one."""
        try:
            pause: float | None = self.scheduler.step()
        except ConnectionError:
            self.dies = ""
            self.begin()
            return 0.0
        return pause

    def run(self) -> None:
        """Until it waits."""
        while not self.step():
            pass

    def wait(self, ms: int) -> None:
        end = self.up + ms
        while self.up < end:
            self.run()
            self.up = min(self.up + 500, end) if ms < DAY_MS else min(self.up + 600_000, end)
        self.run()
