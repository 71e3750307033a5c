"""What the engine tells, while the core can hear of it and while it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.actors.replication.core.actions import Confirmed
from cometmq.actors.replication.group.driver import Driver
from cometmq.actors.replication.group.engine_updates import EngineUpdates


class Core:
    """Writes down what it hears of sessions; each event is followed by one action."""

    def __init__(self) -> None:
        self.heard: list[float | None] = []

    def start(self, _now: float) -> list[Confirmed]:
        return []

    def tick(self, _now: float) -> list[Confirmed]:
        return []

    def session(self, until: float | None) -> list[Confirmed]:
        self.heard.append(until)
        return [Confirmed(1)]


def test_an_action_that_takes_hours_gathers_no_news_of_the_session() -> None:
    """The session is told of twenty times a second; that it has ended is told once, and counts."""
    core, told = Core(), []
    run = SimpleNamespace(sure_until=told.append)
    driver = Driver(core, lambda _action: False, lambda: None, pytest.fail)  # type: ignore[arg-type]
    anything: Any = SimpleNamespace(now=run)
    news = EngineUpdates(core, anything, anything, anything)  # type: ignore[arg-type]
    news.begin(driver, anything)
    news.session(1.0)
    assert driver.is_busy
    for number in range(2, 2_000):
        news.session(float(number))
    news.session(None)
    news.session(2_000.0)
    assert len(told) == 2_001  # whoever hands out something reads that
    driver.go_on()
    driver.go_on()
    assert core.heard == [1.0, None]
    news.session(2_001.0)
    assert core.heard == [1.0, None, 2_001.0]
