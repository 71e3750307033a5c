"""What a child of test_recovery_killed does: recover a store, and die or fail somewhere."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dying
from dying import Line

from cometmq.shm.derived import consume_queue, queue_builder, queue_check
from cometmq.shm.live import queue_table
from cometmq.shm.log import recovery
from cometmq.shm.os import files
from cometmq.shm.tools import repair

SEGMENT, QUEUE_SEGMENT = 65_536, 2_000
MODULES = (consume_queue, files, queue_builder, queue_check, queue_table, recovery, repair)
WATCHED = frozenset(str(module.__file__) for module in MODULES)
SYSTEM_CALLS = (
    "open", "unlink", "rename", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "pwrite",
    "pread", "lseek",
)  # fmt: skip


def recover(store: Path) -> repair.StoreRecovered:
    return repair.recover_store(store, SEGMENT, QUEUE_SEGMENT)


def lines_of_a_recovery(store: Path) -> Counter[Line]:
    """Every line that it passes, with how often."""
    return dying.lines_of(lambda: recover(store), WATCHED)


def die_at(store: Path, line: Line, nth: int) -> int:
    """Recover in a child that ends, as if killed, at the nth pass of a line; its exit status."""
    return dying.die_at(lambda: recover(store), WATCHED, line, nth)


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
