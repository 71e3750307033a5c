"""Who asks a producer of what has become of transactions: the masters of the moment."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from cometmq.client.sending.checks import LOOK_S, Checks
from cometmq.protocol.commands import BrokerEndpoints
from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable

SOON_S = LOOK_S / 2


class FakePending:
    def __init__(self, channel: FakeChannel, on_done: Callable[[Any], None]) -> None:
        self.channel = channel
        self.on_done = on_done
        self.error: CometError | None = None

    def fail(self, error: CometError) -> None:
        self.error = error
        self.on_done(self)

    def result(self) -> Any:
        assert self.error is not None
        raise self.error


@dataclass
class FakeRoutes:
    """Brokers that keep whoever waits for checks waiting, until `lose`."""

    masters: list[str] | CometError
    asked: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    waiting: dict[str, FakePending] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def brokers(self, _timeout_s: float) -> list[BrokerEndpoints]:
        if isinstance(self.masters, CometError):
            raise self.masters
        slave = BrokerEndpoints("c", "b", 1, "", ["r"], "slave")
        return [BrokerEndpoints("c", "b", 0, "", ["r"], name) for name in self.masters] + [slave]

    def channel(self, endpoint: str, _what: str) -> Any:
        if endpoint in self.dead:
            raise NotReachable(endpoint)
        return FakeChannel(self, endpoint)

    def lose(self, endpoint: str) -> None:
        self.dead.add(endpoint)
        self.waiting.pop(endpoint).fail(NotReachable(endpoint))


@dataclass
class FakeChannel:
    routes: FakeRoutes
    endpoint: str

    def request(
        self, _command: object, *, on_done: Callable[[Any], None], **_limits: float
    ) -> FakePending:
        pending = self.routes.waiting[self.endpoint] = FakePending(self, on_done)
        self.routes.asked.put(self.endpoint)
        return pending

    def forget(self, _pending: FakePending) -> None:
        """Nothing comes of it any more."""


@pytest.fixture
def routes() -> FakeRoutes:
    return FakeRoutes(["first"])


@pytest.fixture
def checks(routes: FakeRoutes) -> Any:
    found = Checks("g", routes, lambda _pending: None, lambda _id: False)  # type: ignore[arg-type]
    yield found
    found.close()


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("away_s", [0.0, 0.3])
def test_the_next_master_is_found_soon(routes: FakeRoutes, away_s: float) -> None:
    """Also where the name server knows no master for a while."""
    assert routes.asked.get(timeout=SOON_S) == "first"
    began = time.monotonic()
    routes.masters = []
    routes.lose("first")
    while time.monotonic() - began < away_s:
        assert routes.asked.empty()
    routes.masters = ["second"]
    assert routes.asked.get(timeout=SOON_S) == "second"


@pytest.mark.usefixtures("checks")
def test_a_master_is_waited_for_although_no_name_server_answers(routes: FakeRoutes) -> None:
    assert routes.asked.get(timeout=SOON_S) == "first"
    routes.masters = NotConfirmed("no name server")
    routes.waiting.pop("first").fail(NotConfirmed("the broker has not answered"))
    assert routes.asked.get(timeout=SOON_S) == "first"


@pytest.mark.usefixtures("checks")
def test_a_broker_that_stays_away_is_not_asked_for_all_the_time(routes: FakeRoutes) -> None:
    looks = 0
    assert routes.asked.get(timeout=SOON_S) == "first"

    def counted(timeout_s: float) -> list[BrokerEndpoints]:
        nonlocal looks
        looks += 1
        return FakeRoutes.brokers(routes, timeout_s)

    routes.brokers = counted  # type: ignore[method-assign]
    routes.lose("first")
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert looks < 12
        time.sleep(0.05)  # a second of its absence
    while looks <= 2:  # and it goes on, as soon as the machine lets it
        assert time.monotonic() < deadline + SOON_S
        time.sleep(0.05)
