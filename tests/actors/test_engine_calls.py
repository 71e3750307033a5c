"""What a replica's `ha` process has the engine asked, with a real engine: SQLite."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from patience import patient

from cometmq.actors.replication.core.record import GroupRecord, Life
from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.group.engine_calls import EngineCalls
from cometmq.actors.replication.group.sessions import session_id

GROUP = "orders"
WAIT_S = patient(60)


class Replica:
    """The actor's end: it makes the calls that come, in the test's thread."""

    def __init__(self, url: str) -> None:
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self.session_until: float | None = None
        self.calls = EngineCalls(
            GROUP,
            30.0,
            lambda: open_engine(url),
            self,
            call_soon=self._calls.put,
            after=lambda _delay_s, _call: None,
            listen_to=lambda _descriptor: None,
        )

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            self._calls.get(timeout=max(0.0, deadline - time.monotonic()))()

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> None: ...

    def cas_applied(self, ticket: int, version: int) -> None: ...

    def cas_refused(self, ticket: int, version: int, record: GroupRecord) -> None: ...

    def cas_unknown(self, ticket: int) -> None: ...

    def session(self, until: float | None) -> None:
        self.session_until = until

    def sessions(self, alive: Iterable[Life]) -> None: ...


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'engine'}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    with open_engine(url) as opened:
        yield opened


def until_alive(engine: Engine, *lives: Life) -> None:
    """A former session is closed in a thread of its own, which nothing tells the end of."""
    deadline = time.monotonic() + WAIT_S
    while engine.alive(GROUP) != {session_id(life) for life in lives}:
        assert time.monotonic() < deadline, engine.alive(GROUP)
        time.sleep(0.01)


@pytest.mark.parametrize("held", [False, True])
def test_an_empty_store_is_there_as_the_life_behind_its_predecessor_s(
    held: bool, url: str, engine: Engine
) -> None:
    """It has a session, or one is just being opened, when it hears which number its life has."""
    replica = Replica(url)
    first, next_ = ("n2", "uuid", 1), ("n2", "uuid", 5)
    replica.calls.open(first)
    if held:
        replica.until(lambda: replica.session_until is not None)
        until_alive(engine, first)
        replica.session_until = None
    else:
        replica.until(lambda: replica.calls.watched_fd >= 0)
    replica.calls.live_as(next_)
    replica.calls.live_as(next_)
    replica.until(lambda: replica.session_until is not None)
    until_alive(engine, next_)
    replica.calls.close()
    until_alive(engine)


@pytest.mark.parametrize("held", [False, True])
def test_who_leaves_has_no_session_until_it_comes_back(
    held: bool, url: str, engine: Engine
) -> None:
    """It has a session, or one is just being opened."""
    replica, life = Replica(url), ("n2", "uuid", 1)
    replica.calls.open(life)
    if held:
        replica.until(lambda: replica.session_until is not None)
        until_alive(engine, life)
    else:
        replica.until(lambda: replica.calls.watched_fd >= 0)
    replica.calls.leave()
    assert replica.session_until is None
    replica.calls.tick()
    replica.calls.live_as(("n2", "uuid", 2))  # as a start does that has waited for room
    if not held:
        replica.until(lambda: not replica.calls._holds_soon)
    until_alive(engine)
    replica.calls.come_back()
    replica.until(lambda: replica.session_until is not None)
    until_alive(engine, ("n2", "uuid", 2))
    replica.calls.close()
