"""Restarts of a process whose starts fail: their number and the pauses before them. Fault 37."""

from __future__ import annotations

from cometmq.actors.launch.process_table import (
    DEATHS_MAX,
    FAILED_STARTS_MAX,
    FIRST_PAUSE_S,
    PAUSE_MAX_S,
    ProcessTable,
)
from cometmq.actors.launch.restarts import Restarts
from cometmq.actors.runtime.loop import Timer
from cometmq.protocol.errors import CometError


class Role:
    """One role, whose processes die one after the other."""

    def __init__(self) -> None:
        self.table = ProcessTable(["dispatcher"])
        self._pid = 0

    def serve(self) -> None:
        self._pid += 1
        self.table.started("dispatcher", self._pid)
        self.table.serves("dispatcher")

    def die(self, *, without_room: bool = False) -> tuple[CometError | None, float]:
        """Report a death. Return why the broker ends, if it does, and the pause before a start."""
        if not self.table.pids:
            self._pid += 1
            self.table.started("dispatcher", self._pid)
        if without_room:
            self.table.lacks_room("dispatcher")
        assert self.table.gone(self._pid) == "dispatcher"
        why = self.table.why_it_is_over("dispatcher", self._pid, 65, is_ready=True)
        return why, self.table.pause_before_start("dispatcher")


def test_a_process_that_has_served_is_started_again_at_once() -> None:
    role = Role()
    for _ in range(DEATHS_MAX):
        role.serve()
        assert role.die() == (None, 0.0)
    role.serve()
    why, _ = role.die()
    assert "6 times in a row" in str(why)


def test_starts_that_fail_are_spaced_and_then_end_the_broker() -> None:
    role = Role()
    role.serve()
    role.die()
    pauses = []
    for _ in range(FAILED_STARTS_MAX):
        why, pause = role.die()
        assert why is None
        pauses.append(pause)
    assert pauses == [min(FIRST_PAUSE_S * 2**n, PAUSE_MAX_S) for n in range(FAILED_STARTS_MAX)]
    assert sum(pauses) > 10
    why, _ = role.die()
    assert "starts in a row have failed" in str(why)


def test_a_full_disk_ends_nothing_however_long_it_lasts() -> None:
    role = Role()
    role.serve()
    role.die()
    for number in range(100):
        why, pause = role.die(without_room=True)
        assert why is None
        assert number < 5 or pause == PAUSE_MAX_S
    role.serve()
    assert role.die() == (None, 0.0)
    assert role.die()[1] == FIRST_PAUSE_S


def test_starts_that_wait_are_forgotten_or_made_at_once() -> None:
    started: list[str] = []
    waiting: list[float] = []

    class Held(Timer):
        def __init__(self) -> None: ...

        def cancel(self) -> None:
            waiting.pop()

    def after(pause_s: float, _call: object) -> Timer:
        waiting.append(pause_s)
        return Held()

    restarts = Restarts(started.append, after)
    restarts.start("flush", 0.0)
    restarts.start("dispatcher", 0.25)
    assert (started, waiting) == (["flush"], [0.25])
    restarts.start_waiting()
    assert (started, waiting) == (["flush", "dispatcher"], [])
    restarts.start("dispatcher", 0.5)
    assert restarts.forget() == ["dispatcher"]
    assert (started, waiting) == (["flush", "dispatcher"], [])
