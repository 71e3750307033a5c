"""What a child of test_recovery_killed does: recover a store, and die or fail somewhere."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cometmq.shm import (
    consume_queue,
    files,
    queue_builder,
    queue_check,
    queue_table,
    recovery,
    repair,
)

SEGMENT, QUEUE_SEGMENT = 65_536, 2_000
MODULES = (consume_queue, files, queue_builder, queue_check, queue_table, recovery, repair)
WATCHED = frozenset(str(module.__file__) for module in MODULES)
SYSTEM_CALLS = (
    "open", "unlink", "rename", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "pwrite",
    "pread", "lseek",
)  # fmt: skip
DIED = 77

Line = tuple[str, int]


def recover(store: Path) -> repair.StoreRecovered:
    return repair.recover_store(store, SEGMENT, QUEUE_SEGMENT)


def lines_of_a_recovery(store: Path) -> Counter[Line]:
    """Every line that it passes, with how often."""
    passed: Counter[Line] = Counter()

    def see(line: Line) -> None:
        passed[line] += 1

    with traced(see):
        recover(store)
    return passed


def die_at(store: Path, line: Line, nth: int) -> int:
    """Recover in a child that ends, as if killed, at the nth pass of a line; its exit status."""
    child = os.fork()
    if child == 0:
        left = nth

        def see(passed: Line) -> None:
            nonlocal left
            if passed == line:
                left -= 1
                if not left:
                    os._exit(DIED)

        try:
            with traced(see):
                recover(store)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def traced(see: Callable[[Line], None], watched: frozenset[str] = WATCHED) -> Iterator[None]:
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


def fail_at_call(store: Path, nth: int) -> bool:
    """Recover while the nth system call fails with EIO; whether there was such a call."""
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **keywords)

        return call

    kept = {name: getattr(os, name) for name in SYSTEM_CALLS}
    try:
        for name, real in kept.items():
            setattr(os, name, failing(real))
        recover(store)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    finally:
        for name, real in kept.items():
            setattr(os, name, real)
    return calls >= nth
