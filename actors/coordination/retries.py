"""What members give back: the coordinator knows the group, the scheduler stores the copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    GIVEN_BACK_MAX,
    GiveBackMessages,
    GivenBack,
    MessagesGivenBack,
    StoreRetries,
)
from cometmq.protocol.configs import RetryPolicyType, SubscriptionGroupConfig
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    HandleUnknown,
    ServiceNotAvailable,
    SystemBusy,
)
from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX, check_topic
from cometmq.protocol.wire.channel import Channel, Pending

WAITING_MAX: Final = 256  # commands that the scheduler has not answered
TIMEOUT_S: Final = 5.0  # of the scheduler's answer
_GONE: Final = HandleUnknown.code

MakeTopic = Callable[[str, int], None]
Settled = Callable[[list[int], CometError | None], None]  # the codes, or why there are none


class Claims(Protocol):
    """Who has what was popped."""

    def claim(self, group: str, given: GivenBack) -> bool:
        """Whether it is out under its handle. Then it goes nowhere else until it is settled."""

    def settle(self, group: str, given: GivenBack, *, is_stored: bool) -> None:
        """A copy of it is kept, and it is done with; or not, and it stays out."""


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
        self._waiting = 0
        self.claims: Claims | None = None

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
        if self._waiting >= WAITING_MAX:
            raise SystemBusy(f"{WAITING_MAX} commands wait for the scheduler already")
        self._books.check_room()
        for topic in {entry.topic for entry in command.messages}:
            check_topic(topic)
        if any(entry.physical_offset < 0 for entry in command.messages):
            raise ArgumentIllegal("a message given back has a physical offset of 0 or more")
        codes = [0 if self._may_go(command.group, each) else _GONE for each in command.messages]
        ours = [each for each, code in zip(command.messages, codes, strict=True) if not code]
        if not ours:
            request.reply(MessagesGivenBack(codes))
            return
        self._waiting += 1
        settled = partial(self._settled, command.group, ours, codes, request)
        try:
            self._pass_on(msgspec.structs.replace(command, messages=ours), settled)
        except CometError as error:
            settled([], error)

    def _may_go(self, group: str, given: GivenBack) -> bool:
        return not given.handle or (self.claims is not None and self.claims.claim(group, given))

    def _settled(
        self,
        group: str,
        ours: Sequence[GivenBack],
        codes: list[int],
        request: Request,
        stored: Sequence[int],
        error: CometError | None,
    ) -> None:
        """The scheduler has answered, or will not. `codes` has 0 for each of `ours`."""
        self._waiting -= 1
        popped = False
        for at, given in enumerate(ours):
            if given.handle and self.claims is not None:
                is_stored = error is None and stored[at] == 0
                self.claims.settle(group, given, is_stored=is_stored)
                popped = True
        if error is not None:
            request.fail(error)
            return
        left = iter(stored)
        answer = MessagesGivenBack([code or next(left) for code in codes])
        if popped:
            self._books.tell(request, lambda: answer)
            self._books.send()
        else:
            request.reply(answer)

    def give_back(self, command: GiveBackMessages, settled: Callable[[list[int]], None]) -> None:
        """The same for the coordinator itself, and they come again at once: `settled` gets the
        codes, in the actor's thread; none when the scheduler has not answered in time, or its
        error."""
        self._pass_on(command, lambda codes, _error: settled(codes), at_once=True)

    def _pass_on(
        self, command: GiveBackMessages, settled: Settled, *, at_once: bool = False
    ) -> None:
        """`settled` is called once, in the actor's thread."""
        waiting = True

        def hear(done: Pending | None, error: CometError | None) -> None:
            nonlocal waiting
            if not waiting:
                return  # too late
            waiting = False
            answer = None if done is None else done.answer
            if error is None and not isinstance(answer, MessagesGivenBack):
                error = ServiceNotAvailable("the scheduler has not said what it stored")
            settled(answer.codes if isinstance(answer, MessagesGivenBack) else [], error)

        def give_up() -> None:
            if waiting and self._scheduler is not None:
                hear(None, self._scheduler.give_up(pending, "StoreRetries", TIMEOUT_S))

        pending = self._ask(
            command,
            lambda done: self._actor.call_soon(partial(hear, done, done.error)),
            at_once=at_once,
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
