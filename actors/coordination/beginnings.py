"""Where a queue-less group begins that comes for the first time, or with an offset of no message.

At the end: behind all that was acknowledged before, which may not be dispatched yet. So what asks
waits until the dispatcher has come to where the log ended then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.topics import Stored
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.group_settings import check_consuming, check_order
from cometmq.actors.tables.popped import Key
from cometmq.protocol.commands import (
    ATTEMPT_MAX,
    POP_COUNT_MAX,
    PopMessages,
    PoppedMessages,
    StopPopping,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    GroupInUse,
    NoPermission,
    SystemBusy,
)
from cometmq.protocol.ledger import GroupPut, OffsetSet, TopicAsked
from cometmq.protocol.names import check_topic

log = logging.getLogger(__name__)

HELD_MAX: Final = 16_384  # commands that wait for messages
NOTICED_MAX: Final = 10_000  # queues with an offset behind their end; the oldest are noticed again
BEGIN_S: Final = 5.0  # so long the beginning at an end waits for the dispatcher; our clients, 10 s


class Arrivals(Protocol):
    """How far the dispatcher has come; see Dispatched."""

    @property
    def value(self) -> int: ...
    @property
    def due(self) -> int: ...
    def arm(self) -> None: ...


def stops(stop: StopPopping, pop: PopMessages) -> bool:
    """Return whether `stop` cancels that pop request."""
    is_meant = not stop.attempt or stop.attempt == pop.attempt
    return is_meant and (stop.group, stop.consumer) == (pop.group, pop.consumer)


def check_attempt(attempt: str) -> None:
    """Raise ArgumentIllegal for a text that names no attempt."""
    if len(attempt) > ATTEMPT_MAX or not attempt.isprintable():
        raise ArgumentIllegal(f"an attempt is {ATTEMPT_MAX} printable characters at most")


class Beginning(HeldRequest[None]):
    """A command whose group begins at the end, which is known once so much is dispatched."""

    __slots__ = ("command", "due")

    def __init__(self, command: PopMessages, request: Request, due: int) -> None:
        super().__init__(None, request, time.monotonic() + BEGIN_S)
        self.command = command
        self.due = due


class Beginnings(TimedRequests[None, Beginning]):
    """See the module."""

    def __init__(self, actor: ServiceActor, books: Books, members: Members, stored: Stored) -> None:
        super().__init__(actor, "consumers", HELD_MAX, _too_late)
        self._books = books
        self._members = members
        self._stored = stored
        self.arrivals: Arrivals | None = None

    def check(self, command: PopMessages) -> None:
        check_topic(command.topic)
        if not 0 <= command.max_count <= POP_COUNT_MAX:
            raise ArgumentIllegal(f"max_count={command.max_count}: 0 to {POP_COUNT_MAX}")
        self._books.check_room()
        config = self._members.config_of(command.group)
        check_consuming(config)
        check_attempt(command.attempt)
        self._books.topics.config_of(command.topic)  # or it does not exist
        if not self._books.topics.queue_counts[command.topic]:
            raise NoPermission(f"topic {command.topic} may not be read")
        members = self._members.active(command.group)
        if members:
            raise GroupInUse(
                f"group {command.group} has members that share its queues ({members[0][:140]}): "
                "end them before it is used without queues"
            )
        self._check_order(command, config)

    def _check_order(self, command: PopMessages, config: SubscriptionGroupConfig) -> None:
        """A group that was never used becomes one that keeps an order, if that is what its first
        consumer wants."""
        group = command.group
        is_used = self._members.subscribed.get(group) or self._books.offsets.topics_of(group)
        if command.orderly and not config.consume_message_orderly and not is_used:
            config = msgspec.structs.replace(config, consume_message_orderly=True)
            self._books.change(GroupPut(config))
            log.info("group %s takes its messages in order", group)
        check_order(config, orderly=command.orderly)

    def waits(self, command: PopMessages, request: Request) -> bool:
        """What was acknowledged before lies below the end, though it may not be dispatched yet."""
        if not command.from_latest or self.arrivals is None or self._is_known(command):
            return False
        due = self.arrivals.due
        if self.arrivals.value >= due:
            return False
        self.add(Beginning(command, request, due))
        return True  # a look at the end of this round arms the counter

    def _is_known(self, command: PopMessages) -> bool:
        return command.topic in self._members.subscribed.get(command.group, ())

    def serve_due(self, dispatched: int, serve: Callable[[PopMessages, Request], None]) -> None:
        while (first := self.first) is not None and first.due <= dispatched:
            request = self.release(first)
            try:
                self.check(first.command)
                serve(first.command, request)
            except CometError as error:
                request.fail(error)

    def begin(self, command: PopMessages) -> None:
        """A group that comes for the first time begins somewhere, in each queue of the topic."""
        group, topic = command.group, command.topic
        if self._is_known(command):
            return
        self._books.change(TopicAsked(group, topic))
        if command.from_latest:
            stored = self._stored(topic)
            for queue_id in range(self._books.topics.config_of(topic).read_queue_nums):
                if self._books.offsets.get(group, topic, queue_id) < 0:
                    there = stored.get(queue_id)
                    end = 0 if there is None else there.max_queue_offset
                    self._books.change(OffsetSet(group, topic, queue_id, end))

    def stop(self, command: StopPopping) -> None:
        """This consumer waits no longer."""
        for each in self:
            if stops(command, each.command):
                self.release(each).reply(PoppedMessages([]))


def _too_late(held: Beginning) -> NoReturn:
    raise SystemBusy(
        f"where topic {held.command.topic} ends is not known yet: what was written before is not "
        f"dispatched after {BEGIN_S:g} s"
    )


class FarOffsets:
    """Offsets of groups behind the end of a queue, of which no message can be taken.

    Any client that may read can commit one, and it would block a group that takes messages
    without queues until the queue comes so far. RocketMQ has such a group continue at the end of
    the queue (OFFSET_OVERFLOW_BADLY). Members that share queues find the end themselves.

    A queue seems too short as well while its messages are dispatched, after a process has died. So
    an offset is moved once all is dispatched that could be read when it was noticed.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._noticed: dict[Key, tuple[int, int]] = {}  # what is to be dispatched; the end then

    def look(self, key: Key, end: int, dispatched: int, arrivals: Arrivals) -> None:
        """Move the group's offset to where the queue ended, if it lies behind it.

        Args:
            end: of the queue.
            dispatched: from before `end` was looked at.
        """
        offset = self._books.offsets.get(*key)
        if offset <= end:
            self._noticed.pop(key, None)
            return
        if key not in self._noticed:
            if len(self._noticed) >= NOTICED_MAX:
                del self._noticed[next(iter(self._noticed))]
            self._noticed[key] = arrivals.due, end
        due, end_then = self._noticed[key]
        if dispatched < due:
            return
        del self._noticed[key]
        self._books.change(OffsetSet(*key, end_then))
        log.warning(
            "group %s: queue %d of %s ended at %d, and the group's offset was %d: it continues at "
            "that end", key[0], key[2], key[1], end_then, offset,
        )  # fmt: skip
