"""Versions of topic lists that no coordinator gave (Fault 17)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from family import RunningBroker
from patience import patient

from cometmq.protocol.commands import (
    GetRoute,
    ListTopics,
    RegisterBroker,
    TopicList,
    TopicRoute,
    TopicsKnown,
)
from cometmq.protocol.wire.channel import Channel

WAIT_S = patient(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("versions") / "store") as running:
        running.create_topic("first", 1)
        yield running


@pytest.mark.parametrize("version", [(1 << 63) - 1, 1 << 53, 1_000_000])
@pytest.mark.parametrize("is_own_run", [False, True])
def test_topic_is_created_once_the_name_server_has_it(
    broker: RunningBroker, version: int, is_own_run: bool
) -> None:
    """The name server holds a later version by somebody else: it is told from the beginning."""
    known = broker.ask("coordinator", ListTopics())
    assert isinstance(known, TopicList)
    run = known.run if is_own_run else known.run + 1
    with Channel(broker.ready.name_server) as channel:
        foreign = TopicList([], [], run, since=1 if is_own_run else 0, version=version)
        told, _ = channel.ask(RegisterBroker(broker.endpoints, foreign), timeout_s=WAIT_S)
        assert told == TopicsKnown(run, version)
        topic = f"t-{version}-{is_own_run}"
        broker.create_topic(topic, 1)
        route, _ = channel.ask(GetRoute(topic), timeout_s=WAIT_S)
        assert isinstance(route, TopicRoute)
        assert isinstance(channel.ask(GetRoute("first"), timeout_s=WAIT_S)[0], TopicRoute)
