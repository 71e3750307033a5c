"""What RocketMQ's files say was delivered, where the log does not say so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cometmq.actors.scheduling.scheduler import SchedulerActor
from cometmq.actors.scheduling.timers import Timers
from cometmq.protocol.commands import Position
from cometmq.shm.derived.timer_files import TimerCheck, write_check
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import DelayOffsetTable

DUE_MS = 1_795_000_000_000


@pytest.mark.parametrize("in_group", [False, True])
def test_in_a_group_it_is_not_believed(in_group: bool, tmp_path: Path) -> None:
    """A master that was deposed has written them, and its last deliveries were cut from the log:
    what it delivered then has to be delivered by whoever is master now."""
    config = tmp_path / "config"
    config.mkdir()
    file = ConfigFile(config / "delayOffset.json", DelayOffsetTable)
    file.store(DelayOffsetTable(offset_table={3: 100}), durable=False)
    write_check(tmp_path, TimerCheck(DUE_MS, 0, 7), DUE_MS)
    settings = SimpleNamespace(is_in_group=in_group, mapped_file_size_timer_log_bytes=52_000)
    family = SimpleNamespace(settings=settings, store=tmp_path)

    scheduler = cast(Any, SimpleNamespace(_family=family, _file=file))
    assert SchedulerActor._load_offsets(scheduler).offset_table == ({} if in_group else {3: 100})

    positions = SimpleNamespace(log_range=lambda: (0, 0), queue_range=lambda _topic, _queue: (0, 9))
    timers = SimpleNamespace(
        _family=family,
        _settings=settings,
        _files=None,
        _store=SimpleNamespace(
            positions=positions, get_message=lambda *_, **__: SimpleNamespace(payload=None)
        ),
        _deriver=SimpleNamespace(position=lambda: Position(0, 0)),
        _clock=SimpleNamespace(aheads=(0,)),
        _bytes_max=1 << 20,
        _records=None,
        _aside=None,
    )
    wheel = Timers._open(cast(Any, timers))
    assert (wheel.at_due, timers.seen) == ((0, 0) if in_group else (DUE_MS, 7))
    del wheel, timers._wheel
    timers._files.close()
