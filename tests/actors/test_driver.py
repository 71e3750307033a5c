"""What drives the core of a replica, and what ends it."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from cometmq.actors.replication.core.actions import Confirmed
from cometmq.actors.replication.group.driver import Driver
from cometmq.protocol.errors import DiskFull, StoreDamaged


class Ended(BaseException):
    pass


class Core:
    """Of each event one action comes."""

    def start(self, _now: float) -> list[Confirmed]:
        return [Confirmed(1)]


@pytest.mark.parametrize(
    "error", [DiskFull("promises: No space left"), StoreDamaged("a log"), OSError(5, "a disk")]
)
def test_a_promise_that_cannot_be_kept_ends_the_process_in_words(error: Exception) -> None:
    said: list[str] = []

    def end(why: str) -> NoReturn:
        said.append(why)
        raise Ended

    def carry_out(_action: object) -> bool:
        raise error

    core: Any = Core()
    driver = Driver(core, carry_out, lambda: None, end)
    with pytest.raises(Ended):
        driver.event(core.start, 0.0)
    assert said == [str(error)]


def test_what_nobody_thought_of_is_a_broken_invariant() -> None:
    core: Any = Core()

    def carry_out(_action: object) -> bool:
        raise KeyError("n0")

    driver = Driver(core, carry_out, lambda: None, pytest.fail)
    with pytest.raises(AssertionError, match="in the middle of an event"):
        driver.event(core.start, 0.0)
