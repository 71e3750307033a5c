"""Held requests: found by key, by name and by deadline, against a simple model."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.actors.runtime.held import NEVER, HeldRequest, HeldRequests, TimedRequests
from cometmq.actors.runtime.loop import Timer
from cometmq.protocol.commands import Done
from cometmq.protocol.errors import ShuttingDown, SystemBusy

Held = HeldRequest[int]


def held_request(key: int, deadline: float = NEVER, name: str = "", sender: bytes = b"one") -> Held:
    request: Any = Mock(sender=sender)
    return HeldRequest(key, request, deadline, name)


STEPS = st.lists(
    st.tuples(
        st.sampled_from("aaaarkef"),
        st.integers(0, 3),
        st.sampled_from([0, 1, 2, 3, 5, 8, NEVER]),
        st.sampled_from(["", "", "x", "y"]),
        st.sampled_from([b"one", b"two"]),
    ),
    max_size=60,
)


@given(STEPS)
def test_held_requests_do_what_a_list_would(
    steps: list[tuple[str, int, float, str, bytes]],
) -> None:
    """a: add; r: release one; k: release a key; e: expire two; f: fail all."""
    requests = HeldRequests[int, Held]("pulls", limit=8, sender_limit=5)
    model: list[Held] = []
    for what, key, at, name, sender in steps:
        if what == "a":
            earlier = requests.named(key, name) if name else None
            if earlier is not None:
                requests.release(earlier)
                model.remove(earlier)
            held = held_request(key, at, name, sender)
            if len(model) >= 8 or sum(each.request.sender == sender for each in model) >= 5:
                with pytest.raises(SystemBusy):
                    requests.add(held)
            else:
                requests.add(held)
                model.append(held)
        elif what == "r" and model:
            held = model.pop(key % len(model))
            assert requests.release(held) is held.request
        elif what == "k":
            assert requests.release_key(key) == [each for each in model if each.key == key]
            model = [each for each in model if each.key != key]
        elif what == "e":
            due = sorted(each.deadline for each in model if each.deadline <= min(at, 100))[:2]
            found = requests.release_expired(at, 2)
            assert [each.deadline for each in found] == due
            model = [each for each in model if each not in found]
        elif what == "f":
            requests.fail_all(ShuttingDown("over"))
            assert all(each.request.fail.call_count == 1 for each in model)
            model = []
        assert len(requests) == len(model)
        assert set(requests) == set(model)
        assert all(requests.holds(each) for each in model)
        for each_key in range(4):
            assert requests.of(each_key) == [each for each in model if each.key == each_key]
        timed = [each for each in model if each.deadline != NEVER]
        assert requests.first is min(timed, key=lambda each: each.deadline, default=None)
        names = {(each.key, each.name): each for each in model if each.name}
        for each_key in range(4):
            for each_name in "xy":
                assert requests.named(each_key, each_name) is names.get((each_key, each_name))


def test_released_requests_leave_nothing_behind() -> None:
    requests = HeldRequests[int, Held]("pulls", limit=10)
    for number in range(10_000):
        held = held_request(number, number, "name")
        requests.add(held)
        requests.release(held)
    assert len(requests._due) < 200
    assert requests.keys == []
    assert requests._by_sender == requests._by_name == {}


class Actor:
    """Timers that run when the test says."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def after(self, delay_s: float, action: Any) -> Timer:
        self.timers.append(Timer(delay_s, None, action))
        return self.timers[-1]

    def carry_out(self, request: Any, action: Any, held: Held) -> None:
        request.reply(action(held))


def test_one_timer_answers_the_expired_in_turns() -> None:
    actor: Any = Actor()
    requests = TimedRequests[int, Held](actor, "pulls", 1_000, lambda _held: Done(), 1_000)
    all_of_them = [held_request(number, -number) for number in range(300)]
    for held in all_of_them:
        requests.add(held)
    forever = held_request(0)
    requests.add(forever)
    assert sum(timer.action is not None for timer in actor.timers) == 1
    actor.timers[-1].action()
    assert [requests.holds(held) for held in all_of_them] == [True] * 44 + [False] * 256
    actor.timers[-1].action()
    assert list(requests) == [forever]
    assert all(held.request.reply.call_count == 1 for held in all_of_them)
