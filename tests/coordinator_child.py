"""A coordinator, the processes around it, and what runs it in a child. No tests here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pykka

from cometmq.actors.coordinator import CoordinatorActor
from cometmq.actors.service import ServiceActor
from cometmq.protocol.channel import RemoteRef
from cometmq.protocol.commands import (
    BrokerEndpoints,
    Command,
    Done,
    EndpointsChanged,
    TopicInfo,
    TopicsChanged,
)
from cometmq.protocol.errors import Refused

ANYWHERE = "tcp://127.0.0.1:*"
INSIDE = [(ANYWHERE, True)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    default_topic_queue_nums: int = 8
    flush_consumer_offset_interval_ms: int = 5_000
    consumer_session_timeout_ms: int = 30_000


class FakeCommitlog(ServiceActor):
    """Confirms topics, or refuses to."""

    role = "commitlog"

    def __init__(self, *, refuse: bool = False, bind: Sequence[tuple[str, bool]] = INSIDE) -> None:
        super().__init__(bind=bind)
        self.told: list[list[TopicInfo]] = []
        self._refuse = refuse

    def on_topics_changed(self, command: TopicsChanged, _request: object) -> Command:
        if self._refuse:
            raise Refused("not today")
        self.told.append(command.topics)
        return Done()


def address_of(actor: pykka.ActorRef[Any]) -> str:
    return str(actor.proxy().addresses.get()[0])


@contextmanager
def running(actor: pykka.ActorRef[Any]) -> Iterator[RemoteRef]:
    """The actor through its socket; stopped afterwards."""
    line = RemoteRef(address_of(actor))
    try:
        yield line
    finally:
        line.stop()
        actor.stop(timeout=10)


def endpoints_at(coordinator: str, broker: str = "b") -> BrokerEndpoints:
    return BrokerEndpoints(
        cluster="c",
        broker=broker,
        broker_id=0,
        commitlog="tcp://127.0.0.1:1",
        readers=["tcp://127.0.0.1:2"],
        coordinator=coordinator,
    )


@contextmanager
def coordinator(
    store_dir: Path,
    settings: Settings | None = None,
    *,
    refuse: bool = False,
    name_servers: Sequence[str] = (),
    confirm_timeout_s: float = 5,
) -> Iterator[RemoteRef]:
    """A coordinator with a commitlog process beside it, told where it listens."""
    with ExitStack() as stack:
        commitlog = FakeCommitlog.start(refuse=refuse)
        stack.enter_context(running(commitlog))
        actor = CoordinatorActor.start(
            settings or Settings(),
            store_dir,
            commitlog_endpoint=address_of(commitlog),
            name_server_endpoints=name_servers,
            confirm_timeout_s=confirm_timeout_s,
            bind=INSIDE,
        )
        line = stack.enter_context(running(actor))
        line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
        yield line


def coordinate(store_dir: Path, commitlog: str, ready: Connection) -> None:
    """Run a coordinator in this process until it is killed."""
    actor = CoordinatorActor.start(
        Settings(), store_dir, commitlog_endpoint=commitlog, name_server_endpoints=[], bind=INSIDE
    )
    ready.send(address_of(actor))
    actor.actor_stopped.wait()
