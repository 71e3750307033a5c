"""Transactions: what producers ask goes to the scheduler, and where pending ones begin is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cometmq.actors.coordination.relay import Relay
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.transactions import GROUP, QUEUES
from cometmq.protocol.commands import (
    CHECK_WAIT_MS_MAX,
    AwaitChecks,
    BeginTransactions,
    FetchOffsets,
)
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC, check_group

WAITING_MAX: Final = 4_096  # commands that the scheduler has not answered
TIMEOUT_S: Final = 10.0  # of the scheduler's answer, beside what it is to wait

MakeTopic = Callable[[str, int], None]


class Transactions:
    """Passes commands on to the scheduler, which has no port of its own.

    Args:
        endpoint: where the scheduler takes commands; empty: there is none.
        make_topic: takes a topic and its queues; makes it unless it is there.
        fetch: answers a command with the offsets of a group.
    """

    def __init__(
        self,
        actor: ServiceActor,
        endpoint: str,
        make_topic: MakeTopic,
        fetch: Callable[[FetchOffsets, Request], None],
    ) -> None:
        self._make_topic = make_topic
        self._fetch = fetch
        self._scheduler = Relay(actor, endpoint, "the scheduler", WAITING_MAX)

    def close(self) -> None:
        self._scheduler.close()

    def on_begin_transactions(self, _command: BeginTransactions, request: Request) -> None:
        self._make_topics()
        self._fetch(FetchOffsets(GROUP, list(QUEUES)), request)

    def _make_topics(self) -> None:
        for topic in (HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC):  # RocketMQ's brokers know them, too
            self._make_topic(topic, 1)

    def on_await_checks(self, command: AwaitChecks, request: Request) -> None:
        check_group(command.group)
        self._make_topics()
        wait_s = min(command.wait_ms, CHECK_WAIT_MS_MAX) / 1000
        self._scheduler.pass_on(request, TIMEOUT_S + wait_s)
