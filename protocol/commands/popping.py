"""Queue-less consumption (RocketMQ: POP): messages are taken one by one, and acknowledged likewise.

Any number of consumers of a group take messages of all queues. What one has taken is invisible to
the others for a time; it is acknowledged, or comes again with one attempt more.
"""

from __future__ import annotations

from typing import Annotated, Final

from cometmq.protocol.commands.root import Answer, Command, On, Part, Since, by_clients, read
from cometmq.protocol.integers import Int32, Int64

POP_COUNT_MAX: Final = 8_192  # messages in one answer
POP_ACKS_MAX: Final = 1_024  # entries in one command
ATTEMPT_MAX: Final = 64  # characters
INVISIBLE_MS_MIN: Final = 100
INVISIBLE_MS_MAX: Final = 12 * 3_600_000
POP_WAIT_MS_MAX: Final = 15_000  # RocketMQ: pollTime


class PopMessages(Command, frozen=True, tag=170):
    """Consumer to coordinator: which messages may I have? -> PoppedMessages. RocketMQ POP_MESSAGE.

    They are of the topic and of the group's retry topic; the consumer reads them itself, from a
    reader. An empty answer waits for a message for up to `wait_ms`. A new group begins at the first
    message of each queue, or behind the last one; with a `max_count` of 0 nothing else is done.

    A group takes its messages in order or not, as its `consumeMessageOrderly` says; one that was
    never used becomes what is asked for first. In order, at most 32 of a queue are out, and nothing
    behind them.

    Raises GroupInUse if the group has members that share queues, or takes its messages the other
    way; SubscriptionsDiffer if it refuses consumers of a topic that want other messages of it;
    SystemBusy, NoPermission, TopicNotExist, GroupNotExist, ArgumentIllegal, SubscriptionIllegal,
    FilterIllegal, FiltersOff.
    """

    access = by_clients(read("group", On.GROUP), read("topic"), later=True)
    new_in = "0.2.0"

    group: str
    topic: str
    max_count: Int32 = 32
    invisible_ms: Int64 = 60_000
    wait_ms: Int64 = 0
    from_latest: bool = False
    consumer: str = ""  # any name of who asks, at most 255 printable characters; see StopPopping
    orderly: bool = False  # RocketMQ: order
    # Any name of this request, at most 64 characters. With `orderly`, a request that is repeated
    # with the same name after a lost answer returns the same messages. See StopPopping as well.
    attempt: str = ""
    # What the consumer will want of what it reads, to be compared with the group's others.
    tags: str = "*"
    sql: str = ""
    process: str = ""  # that it lives in; see JoinGroup


class Popped(Part, frozen=True):
    """Neighbours in a queue that this consumer has until `until_ms` (since 1970)."""

    topic: str
    queue_id: Int32
    queue_offset: Int64  # of the first
    count: Int32
    handle: Int64  # known to nobody else
    until_ms: Int64
    # In order, of each message: how often it was handed out before. Empty: never. RocketMQ:
    # orderCountInfo.
    counts: list[Int32] = []


class PoppedMessages(Answer, frozen=True, tag=171):
    """What the consumer has now; kept as safely as a commit, before it is answered."""

    popped: list[Popped]


class PopAck(Part, frozen=True):
    """Some of the messages that came under a handle are done with."""

    topic: str
    queue_id: Int32
    handle: Int64
    queue_offset: Int64  # of the first of them
    count: Int32


class AckPopped(Command, frozen=True, tag=172):
    """Consumer to coordinator: these are done with. -> PopsSettled. RocketMQ ACK_MESSAGE.

    Answered once it is kept as safely as a commit. What is acknowledged already is so again; so is
    what came back long ago, or before the coordinator was killed. In order a word counts, though
    its time is over, until somebody else has the message.
    """

    access = by_clients(read("group", On.GROUP), read("acks.topic"), later=True)
    new_in = "0.2.0"

    group: str
    acks: list[PopAck]


class PopExtension(Part, frozen=True):
    """What came under that handle, and is not done with, stays invisible; from now on so long.

    0, of a group that takes messages in order: nobody has begun with it. It is free at once, and
    this time does not count as an attempt.
    """

    topic: str
    queue_id: Int32
    handle: Int64
    invisible_ms: Int64


class ChangeInvisible(Command, frozen=True, tag=173):
    """Consumer to coordinator: have these for longer, or shorter. -> PopsSettled. RocketMQ
    CHANGE_MESSAGE_INVISIBLETIME."""

    access = by_clients(read("group", On.GROUP), read("extensions.topic"), later=True)
    new_in = "0.2.0"

    group: str
    extensions: list[PopExtension]


class ReleasePopped(Command, frozen=True, tag=178):
    """Consumer to coordinator: release messages that no handler has begun with. -> PopsSettled

    They are available to any consumer of the group at once, and no attempt is counted. Other
    messages under the same handle stay with their consumer. With `orderly`, the messages of the
    take behind a released one are released with it. A repeated release has no effect.
    """

    access = by_clients(read("group", On.GROUP), read("releases.topic"), later=True)
    new_in = "0.2.0"

    group: str
    releases: list[PopAck]


class StopPopping(Command, frozen=True, tag=175):
    """Consumer to coordinator: I wait no longer, and want nothing more. What waits for messages
    under that name is answered empty. -> Done

    With an `attempt` it concerns only that PopMessages, whose answer may be lost: a waiting one is
    answered empty; the messages of an answered one are released as by ReleasePopped. One that
    arrives afterwards is answered empty: use another attempt for the next request.
    """

    access = by_clients(read("group", On.GROUP), later=True)
    new_in = "0.2.0"

    group: str
    consumer: str
    attempt: Annotated[str, Since("0.2.0")] = ""


class PopsSettled(Answer, frozen=True, tag=174):
    """For each entry 0, or an error's code: HandleUnknown, OffsetIllegal."""

    codes: list[Int32]
