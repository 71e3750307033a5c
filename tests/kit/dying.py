"""Dying at any line of a piece of code: which lines it passes, and a child that ends at one.

A test that dies at each line takes minutes: it takes some of them, others in every run. With
COMETMQ_ALL_LINES in the environment it takes all, with COMETMQ_SEED those of an earlier run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from cometmq.protocol.errors import NotConfirmed, NotReachable

T = TypeVar("T")

DIED = 77  # exit status
TOOK_TOO_LONG = 78  # likewise: a wait timed out, which is not a wrong result

#: Exceptions for an answer that did not arrive in time.
LATE = (NotConfirmed, NotReachable, TimeoutError, subprocess.TimeoutExpired)

Line = tuple[str, int]  # file, number


def some_of(lines: Iterable[T], count: int) -> list[T]:
    """So many of them, in their order; the seed is printed."""
    found = list(lines)
    if "COMETMQ_ALL_LINES" in os.environ or len(found) <= count:
        return found
    seed = int(os.environ.get("COMETMQ_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{count} of {len(found)} lines: COMETMQ_SEED={seed}")
    return [found[at] for at in sorted(random.Random(seed).sample(range(len(found)), count))]


@contextmanager
def traced(see: Callable[[Line], None], watched: frozenset[str]) -> Iterator[None]:
    """Have every line of the watched files seen before it is run."""

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in watched:
            return None
        if event == "line":
            see((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(action: Callable[[], object], watched: frozenset[str]) -> Counter[Line]:
    """Every line that it passes, with how often."""
    passed: Counter[Line] = Counter()

    def see(line: Line) -> None:
        passed[line] += 1

    with traced(see, watched):
        action()
    return passed


def dying_at(line: Line, nth: int) -> Callable[[Line], None]:
    """For `traced`: ends the process, as if killed, at the nth pass of a line."""
    left = nth

    def see(passed: Line) -> None:
        nonlocal left
        if passed == line:
            left -= 1
            if not left:
                os._exit(DIED)

    return see


def die_at(action: Callable[[], object], watched: frozenset[str], line: Line, nth: int) -> int:
    """Do it in a child that dies there; the child's exit status."""

    def until_there() -> None:
        with traced(dying_at(line, nth), watched):
            action()

    return in_child(until_there)


def in_child(action: Callable[[], object]) -> int:
    """Call it in a child and return its exit status: 0, 1 after an error, which is printed, or
    DIED."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except LATE:
            status = TOOK_TOO_LONG
            traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return check_in_time(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def check_in_time(status: int) -> int:
    """Return the exit status of a child. Raise TimeoutError if it timed out: it has no result."""
    if status == TOOK_TOO_LONG:
        raise TimeoutError(
            "a child was not answered in time: this says nothing about the store; "
            "set COMETMQ_TEST_PATIENCE=5 for longer limits"
        )
    return status
