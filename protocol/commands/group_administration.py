"""Administration of groups: commands to the coordinator, on their settings and offsets."""

from __future__ import annotations

from cometmq.protocol.commands.administration import ChangeMode
from cometmq.protocol.commands.root import (
    Answer,
    Command,
    On,
    Part,
    administer,
    by_administrators,
    by_clients,
    describe,
    read,
)
from cometmq.protocol.integers import INT64_MAX, Int32, Int64


class PutGroup(Command, frozen=True, tag=120):
    """Create a group, or change its settings, by `mode`. -> Done

    To create one that is there with other settings: GroupExists. To change one that is not:
    GroupNotExist. What is not named keeps its value, or RocketMQ's default.
    """

    access = by_administrators(administer("group", On.GROUP), later=True)
    new_in = "0.2.0"

    group: str
    settings: dict[str, str] = {}  # by RocketMQ's key, each as JSON
    mode: Int32 = ChangeMode.CREATE


class DeleteGroup(Command, frozen=True, tag=121):
    """Forget a group: its settings, members, offsets and retry topic. -> Done

    With members that are there: GroupInUse, unless by force. Those that go on begin it anew.
    """

    access = by_administrators(administer("group", On.GROUP), later=True)
    new_in = "0.2.0"

    group: str
    force: bool = False
    keep_retry_topic: bool = False


class QueueReset(Part, frozen=True):
    topic: str
    queue_id: Int32
    queue_offset: Int64  # to go on at; with `shift`: so many messages on, or back if negative
    # What the queue holds. A shift ends there.
    min_queue_offset: Int64 = 0
    max_queue_offset: Int64 = INT64_MAX


class ResetOffsets(Command, frozen=True, tag=122):
    """Have a group go on elsewhere. -> OffsetsReset, once that survives a kill

    Members that own these queues take them on anew, at the new place: what they commit by what
    they have read before is refused. It is refused as a whole. One that was not answered may be
    done in part, if it is larger than an entry of the ledger.
    """

    access = by_clients(administer("group", On.GROUP), read("queues.topic"), later=True)
    new_in = "0.2.0"

    group: str
    queues: list[QueueReset]
    shift: bool = False


class ResetQueue(Part, frozen=True):
    topic: str
    queue_id: Int32
    before: Int64  # -1: never committed
    wanted: Int64
    queue_offset: Int64  # -1: it was shifted from nowhere, and is where it was


class OffsetsReset(Answer, frozen=True, tag=123):
    queues: list[ResetQueue]  # in the order asked for


class CloneOffsets(Command, frozen=True, tag=124):
    """Have another group go on where this one does. -> OffsetsCloned, once that survives a kill

    A target that is not there is made, with the settings of the group. With members that are
    there: GroupInUse, unless by force; these take the queues on anew. Where the group has never
    committed, the target stays where it is. The group's retry topic is its own.
    """

    access = by_clients(
        describe("group", On.GROUP), administer("target", On.GROUP), read("topics"), later=True
    )
    new_in = "0.2.0"

    group: str
    target: str
    topics: list[str]  # in which it is to go on there
    force: bool = False


class OffsetsCloned(Answer, frozen=True, tag=125):
    queues: Int64
