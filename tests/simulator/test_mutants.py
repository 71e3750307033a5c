"""The simulator is judged: each planted bug is noticed, and the core without it is clean."""

from __future__ import annotations

import pytest
from simulator.directed import late_handshake, late_joining
from simulator.mutants import MUTANTS, I, J, _FollowingJ
from simulator.schedule import run
from simulator.truth import Violation

from cometmq.actors.replication.core.following import Following, Stage
from cometmq.actors.replication.core.frames import Agreed
from cometmq.actors.replication.core.replica import Replica

# By how many schedules of 3 replicas at the latest. I and J have courses of their own below.
FOUND_BY = {
    "B": 3000, "C": 3000, "D": 300, "E": 1500, "F": 300, "G": 1500, "H": 400, "K": 2000, "L": 300,
    "M": 3000, "N": 4000, "O": 200, "Q": 100,
}  # fmt: skip


def test_every_planted_bug_has_a_test() -> None:
    assert set(MUTANTS) == set(FOUND_BY) | {"I", "J"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_BY)
def test_random_schedules_notice(name: str) -> None:
    mutant = MUTANTS[name]
    for seed in range(FOUND_BY[name]):
        if run(seed, 3, mutant).violation:
            break
    else:
        pytest.fail(f"{name} ({mutant.__doc__}) was not noticed in {FOUND_BY[name]} schedules")
    assert not run(seed, 3).violation, "it is not the planted bug"


def test_a_member_that_joins_late_is_waited_for() -> None:
    assert late_joining(Replica) == 0
    with pytest.raises(Violation, match=r"^(lost|changed|stopped)"):
        late_joining(I)


def test_an_old_handshake_cuts_nothing() -> None:
    late_handshake(Replica)
    with pytest.raises(Violation, match=r"^(lost|changed|cut)"):
        late_handshake(J)


class _OtherSessions(Following):
    """Takes an Agreed at any time, by the rule for cuts."""

    def on_agreed(self, sender: str, frame: Agreed) -> None:
        if self._stage is Stage.STREAM:
            self._stage, self._nonce = Stage.MARKS, frame.nonce
        super().on_agreed(sender, frame)


class _Cutting(Following):
    """Knows no bytes that are never cut."""

    def _is_current(self) -> bool:
        return False


@pytest.mark.parametrize("rules", [_OtherSessions, _Cutting])
def test_each_of_two_rules_is_enough_against_an_old_handshake(rules: type[Following]) -> None:
    """J needs both gone: what it stands for is guarded twice."""
    assert issubclass(_FollowingJ, Following)
    late_handshake(type("Half", (Replica,), {"following_type": rules}))
