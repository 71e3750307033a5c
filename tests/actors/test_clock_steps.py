"""What counts as a step of the wall clock, and for how long a step forward is remembered."""

from __future__ import annotations

import pytest

from cometmq.actors.runtime import clock_steps
from cometmq.actors.runtime.clock_steps import REMEMBERED, STEP_MS, ClockSteps, StepsForward

DAY_MS = 86_400_000


class Clocks:
    """How far the wall clock is ahead, and the monotonic one in s."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        self.now_s = 1_000.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(clock_steps.time, "monotonic", lambda: found.now_s)
    return found


@pytest.mark.parametrize("step", [STEP_MS + 1, DAY_MS, -STEP_MS - 1, -DAY_MS])
def test_a_step_is_told_once(clocks: Clocks, step: int) -> None:
    steps = ClockSteps(lambda: clocks.ahead_ms)
    assert steps.look() == 0
    clocks.ahead_ms += step
    assert (steps.look(), steps.look()) == (step, 0)


def test_what_is_less_is_none_until_it_adds_up(clocks: Clocks) -> None:
    steps = ClockSteps(lambda: clocks.ahead_ms)
    found = []
    for step in (STEP_MS, 1, STEP_MS // 2, STEP_MS // 2, -STEP_MS, -STEP_MS, -1):
        clocks.ahead_ms += step
        found.append(steps.look())
    assert found == [0, STEP_MS + 1, 0, 0, 0, 0, -STEP_MS - 1]


def test_a_step_forward_counts_for_what_is_older(clocks: Clocks) -> None:
    forward = StepsForward(ClockSteps(lambda: clocks.ahead_ms))
    assert forward.within_ms(0) == 0
    clocks.ahead_ms = DAY_MS
    assert forward.within_ms(0) == DAY_MS  # just now, for all that is known
    clocks.now_s += 5
    assert forward.within_ms(4_999) == 0
    assert forward.within_ms(5_000) == DAY_MS


def test_a_step_back_does_not_take_away_what_was_forward(clocks: Clocks) -> None:
    forward = StepsForward(ClockSteps(lambda: clocks.ahead_ms))
    clocks.ahead_ms = DAY_MS
    forward.within_ms(0)
    clocks.ahead_ms = 0
    assert forward.within_ms(1_000) == DAY_MS


def test_few_are_remembered(clocks: Clocks) -> None:
    forward = StepsForward(ClockSteps(lambda: clocks.ahead_ms))
    for _ in range(REMEMBERED + 5):
        clocks.ahead_ms += DAY_MS
        forward.within_ms(0)
    assert forward.within_ms(1_000) == REMEMBERED * DAY_MS
