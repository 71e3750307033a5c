"""What the scheduler makes of steps of the clock for timers with a delay."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.scheduling import timer_clock
from cometmq.actors.scheduling.portion import SetAside
from cometmq.actors.scheduling.timer_clock import AHEADS_MAX, DAY_MS, MOVES_MAX, Moving, TimerClock
from cometmq.actors.tables.timers import Move, TimersState, retimed
from cometmq.protocol.uptime import Uptime
from cometmq.shm.kernel.codec import decode, due_ms_by, due_ms_of
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import TIMERS_SKEW_MS, InnerEncoder, LogAppender, WaitingBatch

SEED = 20_261_125
HOST = bytes(8)
CLOCK = 0x0123ABCD
STORE: Any = SimpleNamespace(log=object())
NONE: Any = None


class Wheel:
    """What a clock has to do with one."""

    def __init__(self) -> None:
        self.is_askew = False
        self.at_due = 1
        self.shown: tuple[int, int, list[Move]] = (0, 0, [])
        self.found = 0
        self.end = 156
        self.marked: list[int] = []

    def follow_clock(self, clock: int, ahead: int, moves: list[Move]) -> None:
        self.shown = clock, ahead, list(moves)

    def pass_over(self, unit: int) -> None:
        self.marked.append(unit)

    def find_recalls(self, log: Any, since: int) -> None:
        assert log is STORE.log
        assert since <= self.at_due - DAY_MS
        self.found += 1


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: TimersState | None = None) -> None:
        monkeypatch.setattr(timer_clock, "clock_name", lambda: f"{CLOCK:08x}")
        self.ahead = 10**12
        self.wheel: Any = Wheel()
        self.clock = TimerClock(
            state or TimersState(), STORE, InnerRecords, SetAside(STORE), lambda: self.ahead
        )

    def step(self, ms: int) -> None:
        self.ahead += ms
        self.clock.follow(self.wheel)


def test_a_step_forward_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Clock(monkeypatch)
    one.step(TIMERS_SKEW_MS)
    assert (one.clock.aheads, one.clock.position) == ([10**12], None)  # it is none yet
    one.step(1)
    assert one.clock.aheads[-1] == 10**12 + TIMERS_SKEW_MS + 1
    assert (one.clock.position, one.clock.moves, one.wheel.found) == (None, [], 0)


def test_a_step_back_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Clock(monkeypatch)
    one.step(-TIMERS_SKEW_MS)
    assert one.clock.position is None
    one.step(-1)
    ahead = 10**12 - TIMERS_SKEW_MS - 1
    assert one.wheel.shown == (CLOCK, ahead, [(0, CLOCK, ahead, 0)])
    assert (one.clock.position, one.wheel.found) == (0, 1)


def test_what_is_found_later_goes_on_with_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Clock(monkeypatch)
    one.step(-1_000)
    one.clock.moved(one.wheel, Moving(NONE, [(50, CLOCK, 10**12 - 1_000, 99)], [52, 104], 156))
    assert (one.clock.position, one.wheel.marked) == (None, [52, 104])
    one.wheel.is_askew = True
    one.step(0)
    assert not one.wheel.is_askew
    assert (one.clock.position, one.clock.moves) == (0, [(50, CLOCK, 10**12 - 1_000, 99)])


def test_what_has_passed_is_forgotten_and_the_rest_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Clock(monkeypatch)
    for number in range(MOVES_MAX + 3):
        one.step(-1_000)
        if one.clock.position is not None:
            now = number, CLOCK, one.ahead, 100 + number
            moves = [*one.clock.moves[:-1], now]
            one.clock.moved(one.wheel, Moving(NONE, moves, [], one.wheel.end))
    assert len(one.clock.moves) == MOVES_MAX  # then messages are late, and never lost
    assert len(one.clock.aheads) == AHEADS_MAX
    one.wheel.at_due = 104
    one.step(-1_000)
    assert [each[3] for each in one.clock.moves] == [105, 106, 107, 0]


def test_a_process_that_begins_in_the_same_boot_has_seen_what_the_one_before_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: list[Move] = [(50, CLOCK, 10**12, 99)]
    state = TimersState(clock=CLOCK, aheads=[5, 10**12], moves=moves)
    assert TimersState.unpack(state.pack()) == state
    one = Clock(monkeypatch, state)
    one.step(0)
    assert (one.clock.aheads, one.clock.position) == ([5, 10**12], None)
    going_on = TimersState(clock=CLOCK, aheads=[10**12], moves=moves, moving=True)
    assert Clock(monkeypatch, going_on).clock.position == 0
    stepped = Clock(monkeypatch, TimersState(clock=CLOCK, aheads=[10**12 + 5_000]))
    stepped.step(0)
    assert stepped.clock.position == 0
    other = Clock(monkeypatch, TimersState(clock=7, aheads=[10**12 + 5_000], moves=moves))
    other.step(0)
    assert (other.clock.aheads, other.clock.position) == ([10**12], None)
    assert other.clock.moves == moves  # what was moved has been


def test_a_state_of_the_release_before_is_read() -> None:
    state = TimersState.unpack(b"\x94\x05\x06\x07\x90")
    assert state == TimersState(5, 6, 7)


def test_what_is_stored_anew_is_due_when_its_delay_is_over() -> None:
    """Whatever its clocks said: of records as this broker stores them."""
    print("seed", SEED)
    chance = random.Random(SEED)
    for _ in range(100):
        now, up, delay = (chance.randrange(10**12) for _ in range(3))
        stamp = Uptime(f"{CLOCK:08x}", up).as_property()
        properties = b"UNIQ_KEY\1k\2TIMER_DELAY_MS\1%d" % delay
        body = b"body"
        size = 22 + len(body) + len(properties)
        element = b"".join([
            size.to_bytes(4, "big"), bytes(12), len(body).to_bytes(4, "big"), body,
            len(properties).to_bytes(2, "big"), properties,
        ])  # fmt: skip
        log = LogAppender(HOST, 1 << 20)
        memory = memoryview(bytearray(1 << 16))
        log.attach(memory, 0, 0)
        queue = QueueCursor("rmq_sys_wheel_timer", 0)
        more = b"REAL_TOPIC\1t\2REAL_QID\0010\2" + stamp
        waiting = WaitingBatch(log, queue, element, 1, more, now=now, latest=10**15 - 1)
        waiting.append()
        (message,) = decode(memory[: waiting.size])
        assert due_ms_of(message.record) == now + delay
        ahead = chance.randrange(10**12)
        assert due_ms_by(message.record, CLOCK, ahead) == up + delay + ahead
        assert due_ms_by(message.record, CLOCK + 1, ahead) == now + delay
        encoder = InnerEncoder()
        anew = retimed(message.raw_properties, up + delay + ahead)
        encoder.add_stored(0, message.record, anew)
        assert stamp in anew
        assert anew.count(b"TIMER_OUT_MS\1") == anew.count(b"TIMER_DELIVER_MS\1") == 1
        assert b"TIMER_ROLL_TIMES\0011\2" in anew
        assert b"TIMER_DELIVER_MS\1%d\2" % (up + delay + ahead) in anew
