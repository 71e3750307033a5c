"""Transactions: what producers ask goes to the scheduler, and where pending ones begin is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.actors.tables.transactions import GROUP, QUEUES
from cometmq.protocol.commands import (
    CHECK_WAIT_MS_MAX,
    AwaitChecks,
    BeginTransactions,
    FetchOffsets,
)
from cometmq.protocol.errors import ServiceNotAvailable, SystemBusy
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC, check_group
from cometmq.protocol.wire.channel import Channel, Pending

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
        self._actor = actor
        self._make_topic = make_topic
        self._fetch = fetch
        self._scheduler = Channel(endpoint, "the scheduler") if endpoint else None
        self._waiting: dict[Request, Timer] = {}

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def on_begin_transactions(self, _command: BeginTransactions, request: Request) -> None:
        self._make_topics()
        self._fetch(FetchOffsets(GROUP, list(QUEUES)), request)

    def _make_topics(self) -> None:
        for topic in (HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC):  # RocketMQ's brokers know them, too
            self._make_topic(topic, 1)

    def on_await_checks(self, command: AwaitChecks, request: Request) -> None:
        check_group(command.group)
        if self._scheduler is None:
            raise ServiceNotAvailable("no scheduler belongs to this coordinator")
        if len(self._waiting) >= WAITING_MAX:
            raise SystemBusy(f"{WAITING_MAX} such commands wait for the scheduler already")
        self._make_topics()
        timeout_s = TIMEOUT_S + min(command.wait_ms, CHECK_WAIT_MS_MAX) / 1000
        pending = self._scheduler.request(
            command,
            on_done=lambda done: self._actor.call_soon(partial(self._hand_back, request, done)),
        )
        self._waiting[request] = self._actor.after(
            timeout_s, partial(self._give_up, request, pending, timeout_s)
        )

    def _hand_back(self, request: Request, done: Pending) -> None:
        timer = self._waiting.pop(request, None)
        if timer is None:
            return  # too late
        timer.cancel()
        if done.error is not None:
            request.fail(done.error)
        elif done.answer is not None:
            request.reply(done.answer, [frame.buffer for frame in done.payload])

    def _give_up(self, request: Request, pending: Pending, timeout_s: float) -> None:
        if self._waiting.pop(request, None) is not None and self._scheduler is not None:
            request.fail(self._scheduler.give_up(pending, "AwaitChecks", timeout_s))
