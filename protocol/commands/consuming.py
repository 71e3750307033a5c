"""Consuming: what becomes of messages that were not consumed."""

from __future__ import annotations

from typing import Final

from cometmq.protocol.commands.root import Answer, Command, On, Part, by_clients, by_family, read
from cometmq.protocol.integers import Int32, Int64

GIVEN_BACK_MAX: Final = 4_096  # messages in one command


UNKNOWN_PLACE: Final = -1  # a physical offset that only the coordinator may leave out


class GivenBack(Part, frozen=True):
    """A message that was not consumed, and where it lies, as it was delivered."""

    topic: str
    queue_id: Int32
    queue_offset: Int64
    physical_offset: Int64
    # When it comes again: 0: later each time; n: by that delay level; -1: never, it is dead.
    delay_level: Int32 = 0
    after_ms: Int64 = -1  # rather than by a level: by the one that waits at least so long
    # Under which it was popped. If it is not out under that any more: HandleUnknown, and no copy is
    # stored; else it is done with, where it was, in the same step. 0: it was pulled. Of a group
    # that takes messages in order, no copy is stored either: it comes again where it is, after
    # `after_ms` (-1: 1 s, whatever `delay_level` says), with what follows it. Dead letters go there
    # as ever.
    handle: Int64 = 0


class GiveBackMessages(Command, frozen=True, tag=100):
    """Client to coordinator: deliver messages again later. -> MessagesGivenBack

    A copy of each is stored, with one attempt more, in %RETRY%group, or in %RETRY%group_topic if it
    was popped; after `max_reconsume_times` attempts, in %DLQ%group. The original may then be
    acknowledged. These topics are created on first use. A group without retry queues drops the
    message. If %RETRY%group_topic could be the retry topic of another group as well,
    %RETRY%group+topic is used.
    """

    access = by_clients(read("group", On.GROUP), read("messages.topic"), later=True)
    new_in = "0.2.0"

    group: str
    messages: list[GivenBack]
    max_reconsume_times: Int32 = -1  # -1: as the group's configuration says
    popped: bool = False  # all of them were popped, even those without a handle


class MessagesGivenBack(Answer, frozen=True, tag=101):
    """For each message 0, once its copy is as safe as a message that was sent; or an error's code:
    then it is not given back."""

    codes: list[Int32]


class StoreRetries(Command, frozen=True, tag=89):
    """Coordinator to scheduler: GiveBackMessages, with what the group's configuration says.
    -> MessagesGivenBack"""

    access = by_family(later=True)

    group: str
    messages: list[GivenBack]
    max_reconsume_times: Int32
    retry_queues: Int32
    # How long it waits after its nth attempt: first * multiplier ** n, at most so long. 0: by level
    # n + 3.
    first_wait_ms: Int64 = 0
    wait_multiplier: Int64 = 1
    most_wait_ms: Int64 = 0
    at_once: bool = False  # they do not wait at all
    # Of each message, how often it was handed out, where its record does not say that; else empty.
    handed_out: list[Int32] = []
    # For each message the number of this attempt to give it back. A request that is repeated after
    # a lost answer has the same number, and no second copy is stored. Otherwise empty.
    attempts: list[Int64] = []
    # For each message the topic of its retry, unless it becomes a dead letter.
    retry_topics: list[str] = []
