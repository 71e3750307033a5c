"""What a child of test_segments does: get segments ready, and die somewhere."""

from __future__ import annotations

import os
from collections import Counter as Count
from pathlib import Path

from recovery_child import DIED, Line, traced

from cometmq.actors import allocator, hot_window
from cometmq.actors.allocator import AllocatorActor
from cometmq.actors.family import Family
from cometmq.conf import BrokerSettings
from cometmq.shm import segments
from cometmq.shm.control import CONTROL_FILE, ControlFile, Counter, Phase

SEGMENT = 64 << 10
WATCHED = frozenset(str(module.__file__) for module in (allocator, hot_window, segments))


def begin_run(store: Path, flush: str = "SYNC_FLUSH") -> Family:
    """A control file as recovery of an empty log leaves it."""
    (store / "commitlog").mkdir(parents=True, exist_ok=True)
    control = ControlFile.create(store / CONTROL_FILE, {})
    control.own(Counter.PHASE).reset(Phase.RECOVERED)
    return family_of(store, flush)


def family_of(store: Path, flush: str = "SYNC_FLUSH") -> Family:
    settings = BrokerSettings.from_keys(
        {
            "mappedFileSizeCommitLog": SEGMENT,
            "maxMessageSize": 1 << 10,
            "flushDiskType": flush,
            "storePathRootDir": str(store),
        }
    )
    return Family("allocator", settings, store, [-1] * 8, 1, {})


def get_ready(store: Path, flush: str = "SYNC_FLUSH") -> AllocatorActor:
    """What an allocator does until it has nothing left to do."""
    segments.STEP_BYTES = SEGMENT // 4  # type: ignore[misc]
    actor = AllocatorActor(family_of(store, flush))
    actor._maker.begin()
    actor._work()
    while actor._next is not None:
        actor._work()
    return actor


def lines_of_it(store: Path) -> Count[Line]:
    passed: Count[Line] = Count()

    def see(line: Line) -> None:
        passed[line] += 1

    with traced(see, WATCHED):
        get_ready(store).settle()
    return passed


def die_at(store: Path, line: Line, nth: int) -> int:
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
            with traced(see, WATCHED):
                get_ready(store).settle()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
