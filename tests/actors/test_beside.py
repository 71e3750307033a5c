"""What is due together, and others who send meanwhile: how much at once, and how long they rest."""

from __future__ import annotations

import pytest

from cometmq.actors.scheduling.beside import (
    ALONE_MAX,
    COUNT_MAX,
    COUNT_MIN,
    OF_LATE_S,
    PER_S,
    REST_SHARE,
    Beside,
)


def test_others_come_first_for_a_while_after_they_have_sent() -> None:
    beside = Beside()
    assert beside.count(now=10.0, others_stored=False) == ALONE_MAX
    assert beside.count(now=10.0, others_stored=True) == COUNT_MIN
    for later in 0.0, OF_LATE_S - 0.001:
        assert not beside.is_alone(10.0 + later)
        assert beside.count(now=10.0 + later, others_stored=False) == COUNT_MIN
    assert beside.is_alone(10.0 + OF_LATE_S + 0.001)
    assert beside.count(now=10.0 + OF_LATE_S + 0.001, others_stored=False) == ALONE_MAX


@pytest.mark.parametrize("took_s", [0.0, 0.0001, 0.0003, 0.0005, 0.001, 0.0015, 0.002, 0.01, 3.0])
def test_the_pace_is_kept_where_it_can_be_and_a_third_is_left_to_others(took_s: float) -> None:
    """What the next write has, if it takes as long as the one before."""
    beside = Beside()
    beside.rest_s(took_s, COUNT_MIN)
    count = beside.count(now=0.0, others_stored=True)
    assert COUNT_MIN <= count <= COUNT_MAX
    rest_s = beside.rest_s(took_s, count)
    assert rest_s >= REST_SHARE * took_s
    per_s = count / (took_s + rest_s)
    assert per_s <= PER_S * 1.01
    if count < COUNT_MAX:
        assert per_s == pytest.approx(PER_S, rel=0.01)


def test_after_a_slow_write_they_are_small_again() -> None:
    beside = Beside()
    beside.rest_s(1.0, COUNT_MIN)
    assert beside.count(now=0.0, others_stored=True) == COUNT_MAX
    beside.rest_s(0.0001, COUNT_MAX)
    assert beside.count(now=0.0, others_stored=True) == COUNT_MIN


def test_after_a_few_nobody_rests_for_long() -> None:
    assert Beside().rest_s(0.0004, 5) == pytest.approx(0.0004 * REST_SHARE)
