"""Children that die at a line (kit/dying.py): their ends are reported correctly."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import dying
import pytest

from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable

FILE = frozenset({__file__})


def pass_some_lines() -> int:
    number = 1
    number += 1
    return number


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_one_that_comes_to_its_line_dies_there() -> None:
    for line, count in dying.lines_of(pass_some_lines, FILE).items():
        assert dying.die_at(pass_some_lines, FILE, line, count) == dying.DIED


def test_one_that_does_not_come_there_ends_well() -> None:
    line = next(iter(dying.lines_of(pass_some_lines, FILE)))
    assert dying.die_at(pass_some_lines, FILE, line, 2) == 0


@pytest.mark.parametrize("error", [AssertionError("lost"), OSError(5), CometError("no")], ids=repr)
def test_an_error_is_printed(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    assert dying.in_child(failing(error)) == 1
    assert f"{type(error).__name__}" in capfd.readouterr().err


@pytest.mark.parametrize("error", [
    NotConfirmed("no answer"), NotReachable("nobody"), TimeoutError(),
    subprocess.TimeoutExpired("x", 1),
], ids=repr)  # fmt: skip
def test_what_took_too_long_is_no_wrong_result(error: Exception) -> None:
    """Fault 39: a time-out on a busy machine raises TimeoutError; it looked like a wrong store."""
    with pytest.raises(TimeoutError, match="this says nothing about the store"):
        dying.in_child(failing(error))
