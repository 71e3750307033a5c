"""Transactions: what producers say and ask goes to the scheduler, which carries it out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol.commands import (
    CHECK_WAIT_MS_MAX,
    AwaitChecks,
    Command,
    EndTransactions,
)
from cometmq.protocol.errors import ServiceNotAvailable, SystemBusy
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC, check_group
from cometmq.protocol.wire.channel import Channel, Pending

WAITING_MAX: Final = 4_096  # commands of a kind that the scheduler has not answered
TIMEOUT_S: Final = 10.0  # of the scheduler's answer

MakeTopic = Callable[[str, int], None]


class Transactions:
    """Passes commands on to the scheduler, which has no port of its own.

    Args:
        endpoint: where the scheduler takes commands; empty: there is none.
        make_topic: takes a topic and its queues; makes it unless it is there.
    """

    def __init__(self, actor: ServiceActor, endpoint: str, make_topic: MakeTopic) -> None:
        self._actor = actor
        self._make_topic = make_topic
        self._scheduler = Channel(endpoint, "the scheduler") if endpoint else None
        self._ends: dict[Request, Timer] = {}
        self._checks: dict[Request, Timer] = {}

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def on_end_transactions(self, command: EndTransactions, request: Request) -> None:
        self._pass_on(command, request, self._ends, TIMEOUT_S)

    def on_await_checks(self, command: AwaitChecks, request: Request) -> None:
        wait_s = min(command.wait_ms, CHECK_WAIT_MS_MAX) / 1000
        self._pass_on(command, request, self._checks, TIMEOUT_S + wait_s)

    def _pass_on(
        self,
        command: EndTransactions | AwaitChecks,
        request: Request,
        waiting: dict[Request, Timer],
        timeout_s: float,
    ) -> None:
        check_group(command.group)
        if self._scheduler is None:
            raise ServiceNotAvailable("no scheduler belongs to this coordinator")
        if len(waiting) >= WAITING_MAX:
            raise SystemBusy(f"{WAITING_MAX} such commands wait for the scheduler already")
        for topic in (HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC):  # RocketMQ's brokers know them, too
            self._make_topic(topic, 1)
        pending = self._scheduler.request(
            command,
            on_done=lambda done: self._actor.call_soon(
                partial(self._hand_back, waiting, request, done)
            ),
        )
        give_up = partial(self._give_up, waiting, request, pending, command, timeout_s)
        waiting[request] = self._actor.after(timeout_s, give_up)

    def _hand_back(self, waiting: dict[Request, Timer], request: Request, done: Pending) -> None:
        timer = waiting.pop(request, None)
        if timer is None:
            return  # too late
        timer.cancel()
        if done.error is not None:
            request.fail(done.error)
        elif done.answer is not None:
            request.reply(done.answer, [frame.buffer for frame in done.payload])

    def _give_up(
        self,
        waiting: dict[Request, Timer],
        request: Request,
        pending: Pending,
        command: Command,
        timeout_s: float,
    ) -> None:
        if waiting.pop(request, None) is not None and self._scheduler is not None:
            request.fail(self._scheduler.give_up(pending, type(command).__name__, timeout_s))
