"""Revival of a store whose RocketMQ broker ended before the first of its check points was due."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.scheduling import revival
from cometmq.actors.scheduling.revival import GROUP, Revival
from cometmq.protocol.commands import Command, FetchOffsets, QueueKey
from cometmq.shm.live.queue_table import QueueRange

TOPIC = "rmq_sys_REVIVE_LOG_c"


def test_a_revive_topic_that_comes_later_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check points lie in the timer wheel at the start, and their topic has no queue yet. What
    had been popped came back only behind the next start of the broker."""
    ranges: dict[int, QueueRange] = {}
    asked: list[Command] = []
    alarms: list[Callable[[], None]] = []

    def channel(*_: object) -> Any:
        return SimpleNamespace(
            request=lambda command, **_: asked.append(command), close=lambda: None
        )

    def after(_wait_s: float, call: Callable[[], None]) -> Any:
        alarms.append(call)
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(revival, "Channel", channel)
    family: Any = SimpleNamespace(
        settings=SimpleNamespace(broker_cluster_name="c"), addresses={"coordinator": "there"}
    )
    table: Any = SimpleNamespace(ranges_of=lambda topic: ranges if topic == TOPIC else {})
    actor: Any = SimpleNamespace(after=after, call_soon=lambda _: None)
    part = Revival(actor, family, table, SimpleNamespace())  # type: ignore[arg-type]
    part.begin()
    for _ in range(2):
        alarms.pop()()
    assert not asked
    ranges[0] = QueueRange(0, 1)
    alarms.pop()()
    assert asked == [FetchOffsets(GROUP, [QueueKey(TOPIC, 0)])]
    part.close()
