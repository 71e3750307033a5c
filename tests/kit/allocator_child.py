"""What a child of test_segments does: get segments ready, and die somewhere."""

from __future__ import annotations

from collections import Counter as Count
from pathlib import Path

import dying
from dying import Line

from cometmq.actors.maintenance import allocator, hot_window
from cometmq.actors.maintenance.allocator import AllocatorActor
from cometmq.actors.runtime.family import Family
from cometmq.conf import BrokerSettings
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase
from cometmq.shm.log import segments

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


class Allocator(AllocatorActor):
    """One without a process of its own."""

    def close(self) -> None:
        self._hot.close()
        self._maker.close()
        self.inbox.close()


def get_ready(store: Path, flush: str = "SYNC_FLUSH") -> Allocator:
    """What an allocator does until it has nothing left to do."""
    segments.STEP_BYTES = SEGMENT // 4  # type: ignore[misc]
    actor = Allocator(family_of(store, flush))
    actor._maker.begin()
    actor._work()
    while actor._next is not None:
        actor._work()
    return actor


def lines_of_it(store: Path) -> Count[Line]:
    return dying.lines_of(lambda: get_ready(store).settle(), WATCHED)


def die_at(store: Path, line: Line, nth: int) -> int:
    return dying.die_at(lambda: get_ready(store).settle(), WATCHED, line, nth)
