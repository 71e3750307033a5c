"""Groups: commands to the coordinator, of consumer groups and their offsets."""

from __future__ import annotations

from typing import Annotated

from cometmq.protocol.commands.reading import QueueKey
from cometmq.protocol.commands.root import (
    EVERY,
    Answer,
    Command,
    On,
    Part,
    ServedBy,
    Since,
    administer,
    by_clients,
    describe,
    read,
)
from cometmq.protocol.integers import Int32, Int64


class Subscription(Part, frozen=True):
    topic: str
    tags: str = "*"
    sql: Annotated[str, Since("0.2.0")] = ""  # SQL92 expression; "": none


class JoinGroup(Command, frozen=True, tag=40):
    """Join, stay in, or learn the share of a group: membership, heartbeat and assignment in one.

    -> GroupShare, at once when it differs from `version`, else after at most `wait_ms`.
    `owned` names the queues that the member still works on: a queue is given to another member
    only when its owner no longer names it, or has left, or was silent for the session time.
    Fails with SubscriptionIllegal over 5,000 topics, GroupInUse for a new member of a group that
    consumers without queues are in.
    """

    access = by_clients(read("group", On.GROUP), read("subscriptions.topic"), later=True)

    group: str
    member: str  # unique per consumer
    subscriptions: list[Subscription]
    owned: list[QueueKey] = []
    version: Int64 = -1
    wait_ms: Int64 = 0
    # Which process the member lives in. A coordinator on the same machine sees by it that a member
    # has ended without LeaveGroup. Empty: it is not told.
    process: Annotated[str, Since("0.2.0")] = ""


class GroupShare(Answer, frozen=True, tag=41):
    """The queues that this member owns now. A queue missing here must be given up.

    So must a queue with another epoch than before: it has belonged to another member meanwhile, or
    an administrator has moved its offset. It may be taken on again then.
    """

    version: Int64
    queues: list[QueueKey]
    members: Int64
    session_timeout_ms: Int64
    # Of these ownerships, by queue; to be named in each commit.
    epochs: Annotated[list[Int64], Since("0.2.0")] = []
    # The ids of the replicas that messages are read from: as a rule, and when they lie far back.
    reads_from: Annotated[Int64, Since("0.2.0")] = 0
    reads_far_from: Annotated[Int64, Since("0.2.0")] = 1


class LeaveGroup(Command, frozen=True, tag=42):
    """-> Done. The member's queues are free at once."""

    access = by_clients(read("group", On.GROUP), later=True)

    group: str
    member: str


class QueueOffset(Part, frozen=True):
    topic: str
    queue_id: Int32
    queue_offset: Int64  # the next message to consume
    # Of the ownership by which a member commits; 0: an older client's.
    epoch: Annotated[Int64, Since("0.2.0")] = 0


class CommitOffsets(Command, frozen=True, tag=43):
    """Keep a group's progress. -> Done once it is as safe as a message that was sent.

    With a member that does not own one of the queues, or owns it by another epoch: NotOwner, and
    nothing is kept. A member's offset below the kept one is passed over: it comes late.

    An empty member is an administrator, who may move offsets back as well, but not of a queue that
    a member owns: NotOwner.
    """

    access = by_clients(
        read("group", On.GROUP),
        read("offsets.topic"),
        administer("group", On.GROUP, unless="member"),
        later=True,
    )

    group: str
    offsets: list[QueueOffset]
    member: str = ""
    # The member wants to go on exactly there, also further back.
    seek: Annotated[bool, Since("0.2.0")] = False
    # An administrator's: also of owned queues; owners take them on anew.
    force: Annotated[bool, Since("0.2.0")] = False


class BeginGroup(Command, frozen=True, tag=179):
    """Consumer to coordinator: set a new group's initial offsets. -> Done, as for a commit.

    It has no effect in topics in which the group has progress in any queue: of several members of a
    new group the first one counts, and queues that are added to a topic are read from their first
    message.
    """

    access = by_clients(read("group", On.GROUP), read("offsets.topic"), later=True)
    new_in = "0.2.0"

    group: str
    offsets: list[QueueOffset]


class FetchOffsets(Command, frozen=True, tag=44):
    """-> GroupOffsets; queue_offset -1 where nothing was ever committed."""

    access = by_clients(
        describe("group", On.GROUP), describe("queues.topic"), later=True, served_by=ServedBy.SLAVE
    )

    group: str
    queues: list[QueueKey]


class GroupOffsets(Answer, frozen=True, tag=45):
    offsets: list[QueueOffset]


class ListGroups(Command, frozen=True, tag=46):
    """The groups by name, from one on. -> GroupList

    Without `paged`, what does not fit into one answer is refused.
    """

    access = by_clients(describe(EVERY, On.GROUP), served_by=ServedBy.EVERY)

    group: Annotated[str, Since("0.2.0")] = ""  # to begin with
    # Of that group: so many of its members and topics are left out.
    entry: Annotated[Int64, Since("0.2.0")] = 0
    paged: Annotated[bool, Since("0.2.0")] = False


class GroupInfo(Part, frozen=True):
    group: str
    members: list[str]
    topics: list[str]


class GroupList(Answer, frozen=True, tag=47):
    groups: list[GroupInfo]
    # The page after this one begins there; empty: this was the last.
    next_group: Annotated[str, Since("0.2.0")] = ""
    next_entry: Annotated[Int64, Since("0.2.0")] = 0


class DescribeGroup(Command, frozen=True, tag=48):
    """-> GroupDescription

    Without `paged`, what does not fit into one answer is refused.
    """

    access = by_clients(describe("group", On.GROUP), later=True, served_by=ServedBy.EVERY)

    group: str
    # So many members, subscriptions and queues are left out.
    entry: Annotated[Int64, Since("0.2.0")] = 0
    paged: Annotated[bool, Since("0.2.0")] = False


class GroupQueue(Part, frozen=True):
    topic: str
    queue_id: Int32
    queue_offset: Int64  # committed; -1 = never
    member: str  # owner, or empty


class SubscriptionDifference(Part, frozen=True):
    """A member that does not subscribe to a topic as most of its group do."""

    member: str
    topic: str
    tags: str  # empty: it does not subscribe to the topic
    usual_tags: str


class GroupDescription(Answer, frozen=True, tag=49):
    group: str
    members: list[str]
    subscriptions: list[Subscription]
    queues: list[GroupQueue]  # that the group may read, or that hold messages of its topics
    entries: Annotated[Int64, Since("0.2.0")] = 0  # members, subscriptions and queues, in all pages
    # Where the next page begins; 0: this was the last one.
    next_entry: Annotated[Int64, Since("0.2.0")] = 0
    # The first of them; on the first page only.
    differences: Annotated[list[SubscriptionDifference], Since("0.2.0")] = []
    difference_count: Annotated[Int64, Since("0.2.0")] = 0
    # By RocketMQ's key, each as JSON; on the first page only. Empty: the group has none.
    settings: Annotated[dict[str, str], Since("0.2.0")] = {}
