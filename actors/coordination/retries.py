"""What members give back: the coordinator knows the group, the scheduler stores the copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    GIVEN_BACK_MAX,
    GiveBackMessages,
    MessagesGivenBack,
    StoreRetries,
)
from cometmq.protocol.configs import RetryPolicyType, SubscriptionGroupConfig
from cometmq.protocol.errors import ArgumentIllegal, CometError, ServiceNotAvailable, SystemBusy
from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX, check_topic
from cometmq.protocol.wire.channel import Channel, Pending

WAITING_MAX: Final = 256  # commands that the scheduler has not answered
TIMEOUT_S: Final = 5.0  # of the scheduler's answer

MakeTopic = Callable[[str, int], None]


class Retries:
    """Passes on what is given back, with what the group's configuration says.

    Args:
        endpoint: where the scheduler takes commands; empty: there is none.
        make_topic: takes a topic and its queues; makes it unless it is there.
    """

    def __init__(
        self,
        actor: ServiceActor,
        books: Books,
        members: Members,
        endpoint: str,
        make_topic: MakeTopic,
    ) -> None:
        self._actor = actor
        self._books = books
        self._members = members
        self._make_topic = make_topic
        self._scheduler = Channel(endpoint, "the scheduler") if endpoint else None
        self._waiting: set[Request] = set()

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def on_give_back_messages(self, command: GiveBackMessages, request: Request) -> None:
        if self._scheduler is None:
            raise ServiceNotAvailable("no scheduler belongs to this coordinator")
        if len(command.messages) > GIVEN_BACK_MAX:
            raise ArgumentIllegal(
                f"{len(command.messages)} messages given back at once, at most {GIVEN_BACK_MAX}"
            )
        if len(self._waiting) >= WAITING_MAX:
            raise SystemBusy(f"{WAITING_MAX} commands wait for the scheduler already")
        self._books.check_room()
        for topic in {entry.topic for entry in command.messages}:
            check_topic(topic)
        if any(entry.physical_offset < 0 for entry in command.messages):
            raise ArgumentIllegal("a message given back has a physical offset of 0 or more")
        self._waiting.add(request)
        pending = self._ask(
            command,
            lambda done: self._actor.call_soon(partial(self._hand_back, request, done)),
        )
        self._actor.after(TIMEOUT_S, partial(self._give_up, request, pending))

    def give_back(self, command: GiveBackMessages, settled: Callable[[list[int]], None]) -> None:
        """The same for the coordinator itself, and they come again at once: `settled` gets the
        codes, in the actor's thread; none when the scheduler has not answered in time, or its
        error."""
        waiting = True

        def hear(done: Pending | None) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                answer = done.answer if done is not None and done.error is None else None
                settled(answer.codes if isinstance(answer, MessagesGivenBack) else [])

        def give_up() -> None:
            if waiting and self._scheduler is not None:
                self._scheduler.give_up(pending, "StoreRetries", TIMEOUT_S)
                hear(None)

        pending = self._ask(
            command, lambda done: self._actor.call_soon(partial(hear, done)), at_once=True
        )
        self._actor.after(TIMEOUT_S, give_up)

    def _ask(
        self,
        command: GiveBackMessages,
        on_done: Callable[[Pending], None],
        *,
        at_once: bool = False,
    ) -> Pending:
        if self._scheduler is None:
            raise ServiceNotAvailable("no scheduler belongs to this coordinator")
        config = self._members.config_of(command.group)
        if config.retry_queue_nums > 0:
            self._make_topic(RETRY_PREFIX + command.group, config.retry_queue_nums)
        self._make_topic(DLQ_PREFIX + command.group, 1)
        return self._scheduler.request(_with_config(command, config, at_once), on_done=on_done)

    def _hand_back(self, request: Request, done: Pending) -> None:
        if request not in self._waiting:
            return  # too late
        self._waiting.discard(request)
        if done.error is not None:
            request.fail(done.error)
        elif done.answer is not None:
            request.reply(done.answer)

    def _give_up(self, request: Request, pending: Pending) -> None:
        if request not in self._waiting or self._scheduler is None:
            return
        self._waiting.discard(request)
        error: CometError = self._scheduler.give_up(pending, "StoreRetries", TIMEOUT_S)
        request.fail(error)


def _with_config(
    command: GiveBackMessages, config: SubscriptionGroupConfig, at_once: bool
) -> StoreRetries:
    times_max = command.max_reconsume_times
    policy = config.group_retry_policy
    exponential = policy.exponential_retry_policy
    waits = (0, 1, 0)
    if policy.type is RetryPolicyType.EXPONENTIAL and exponential is not None:
        waits = (exponential.initial, exponential.multiplier, exponential.max)
    return StoreRetries(
        command.group,
        command.messages,
        config.retry_max_times if times_max < 0 else times_max,
        config.retry_queue_nums,
        *waits,
        at_once,
    )
