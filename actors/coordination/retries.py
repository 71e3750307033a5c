"""What members give back: the coordinator knows the group, the scheduler stores the copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.relay import Relay
from cometmq.actors.runtime.held import NEVER
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.attempts import Attempts
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
    NotConfirmed,
    ServiceNotAvailable,
    from_code,
)
from cometmq.protocol.ledger import OffsetSet
from cometmq.protocol.names import DLQ_PREFIX, RETRY_PREFIX, check_topic
from cometmq.protocol.wire.channel import Pending

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


class Ordered(Protocol):
    """Who has what of groups that take messages in order: those give back in place."""

    def keeps_order(self, group: str) -> bool: ...
    def give_back(self, group: str, given: GivenBack, times_max: int) -> int | None:
        """The code; None: it goes to the dead letters, and nowhere else until it is settled."""

    def handed_out(self, group: str, given: GivenBack) -> int:
        """How often before."""

    def settle(self, group: str, given: GivenBack, *, is_stored: bool) -> None:
        """See Claims."""


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
        self._books = books
        self._members = members
        self._retry_topics = books.retry_topics
        self._make_topic = make_topic
        self._scheduler = Relay(actor, endpoint, "the scheduler", WAITING_MAX)
        self._attempts = Attempts()
        self.claims: Claims | None = None
        self.ordered: Ordered | None = None

    def close(self) -> None:
        self._scheduler.close()

    def on_give_back_messages(self, command: GiveBackMessages, request: Request) -> None:
        if len(command.messages) > GIVEN_BACK_MAX:
            raise ArgumentIllegal(
                f"{len(command.messages)} messages given back at once, at most {GIVEN_BACK_MAX}"
            )
        self._scheduler.check_room(request)
        self._books.check_room()
        for topic in {entry.topic for entry in command.messages}:
            check_topic(topic)
        if any(entry.physical_offset < 0 for entry in command.messages):
            raise ArgumentIllegal("a message given back has a physical offset of 0 or more")
        if self.ordered is not None and self.ordered.keeps_order(command.group):
            self._give_back_in_order(self.ordered, command, request)
            return
        codes = [None if self._may_go(command.group, each) else _GONE for each in command.messages]
        ours = [each for each, code in zip(command.messages, codes, strict=True) if code is None]
        if not ours:
            request.reply(MessagesGivenBack([_GONE] * len(codes)))
        else:
            self._give_back_ours(command, ours, codes, request, self.claims)

    def _may_go(self, group: str, given: GivenBack) -> bool:
        return not given.handle or (self.claims is not None and self.claims.claim(group, given))

    def _give_back_in_order(
        self, ordered: Ordered, command: GiveBackMessages, request: Request
    ) -> None:
        """Dead letters alone are stored."""
        group, times_max = command.group, command.max_reconsume_times
        if times_max < 0:
            times_max = self._members.config_of(group).retry_max_times
        codes: list[int | None] = []
        letters, handed_out = [], []
        for given in command.messages:
            code = ordered.give_back(group, given, times_max) if given.handle else None
            codes.append(code)
            if code is None:
                dead = msgspec.structs.replace(given, delay_level=-1)
                letters.append(dead if given.handle else given)
                handed_out.append(ordered.handed_out(group, given) if given.handle else 0)
        if letters:
            self._give_back_ours(command, letters, codes, request, ordered, handed_out)
        else:
            answer = MessagesGivenBack([code or 0 for code in codes])
            self._books.then(partial(_answer, request, answer))

    def _give_back_ours(
        self,
        command: GiveBackMessages,
        ours: list[GivenBack],
        codes: Sequence[int | None],
        request: Request,
        claims: Claims | Ordered | None,
        handed_out: Sequence[int] = (),
    ) -> None:
        """`codes` has None for each of `ours`."""
        settled = partial(self._settled, command.group, ours, codes, request, claims)
        try:
            self._scheduler.expect(request, NEVER)
            ours_alone = msgspec.structs.replace(command, messages=ours)
            self._pass_on(ours_alone, settled, handed_out=handed_out)
        except CometError as error:
            settled([], error)

    def _settled(
        self,
        group: str,
        ours: Sequence[GivenBack],
        codes: Sequence[int | None],
        request: Request,
        claims: Claims | Ordered | None,
        stored: Sequence[int],
        error: CometError | None,
    ) -> None:
        """The scheduler has answered, or will not. `codes` has None for each of `ours`."""
        self._scheduler.release_key(request)
        popped = False
        for at, given in enumerate(ours):
            if given.handle and claims is not None:
                is_stored = error is None and stored[at] == 0
                claims.settle(group, given, is_stored=is_stored)
                popped = True
        if error is not None:
            request.fail(error)
            return
        left = iter(stored)
        answer = MessagesGivenBack([next(left) if code is None else code for code in codes])
        if popped:
            self._books.tell(request, lambda: answer)
            self._books.send()
        else:
            request.reply(answer)

    def give_back(
        self,
        command: GiveBackMessages,
        settled: Callable[[list[int]], None],
        handed_out: Sequence[int] = (),
    ) -> None:
        """The same for the coordinator itself, and they come again at once: `settled` gets the
        codes, in the actor's thread; none when the scheduler has not answered in time, or its
        error.

        Args:
            handed_out: see StoreRetries.
        """
        self._pass_on(
            command, lambda codes, _error: settled(codes), at_once=True, handed_out=handed_out
        )

    def _pass_on(
        self,
        command: GiveBackMessages,
        settled: Settled,
        *,
        at_once: bool = False,
        handed_out: Sequence[int] = (),
    ) -> None:
        """`settled` is called once, in the actor's thread."""
        group, now = command.group, time.monotonic()
        places = [
            (group, each.topic, each.queue_id, each.queue_offset) for each in command.messages
        ]
        attempts = [self._attempts.number(place, now) for place in places]

        def hear(done: Pending) -> None:
            answer, error = done.answer, done.error
            if error is None and not isinstance(answer, MessagesGivenBack):
                error = ServiceNotAvailable("the scheduler has not said what it stored")
            codes = answer.codes if isinstance(answer, MessagesGivenBack) else []
            for place, attempt, code in zip(places, attempts, codes, strict=False):
                if not isinstance(from_code(code, ""), NotConfirmed):
                    self._attempts.end(place, attempt)
            settled(codes, error)

        wanted = self._wanted(command, at_once, handed_out, attempts)
        self._scheduler.ask(wanted, hear, TIMEOUT_S)

    def _wanted(
        self,
        command: GiveBackMessages,
        at_once: bool,
        handed_out: Sequence[int],
        attempts: list[int],
    ) -> StoreRetries:
        """What the scheduler is asked for, whose topics exist then."""
        group = command.group
        config = self._members.config_of(group)
        popped = at_once or command.popped
        of = self._retry_topics.topic_of
        topics = [of(group, each, popped=popped or each.handle != 0) for each in command.messages]
        if config.retry_queue_nums > 0:
            for topic in sorted({*topics}):
                is_new = topic not in self._books.topics
                self._make_topic(topic, config.retry_queue_nums)
                if is_new and topic != RETRY_PREFIX + group:  # the offset marks it as this group's
                    self._books.change(OffsetSet(group, topic, 0, 0))
        self._make_topic(DLQ_PREFIX + group, 1)
        return _with_config(command, config, at_once, handed_out, attempts, topics)


def _answer(request: Request, answer: MessagesGivenBack, error: CometError | None) -> None:
    if error is None:
        request.reply(answer)
    else:
        request.fail(error)


def _with_config(
    command: GiveBackMessages,
    config: SubscriptionGroupConfig,
    at_once: bool,
    handed_out: Sequence[int],
    attempts: list[int],
    topics: list[str],
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
        list(handed_out),
        attempts,
        topics,
    )
