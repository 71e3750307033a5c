"""Administration: commands to the coordinator, on topics, on holds, and on what may be deleted."""

from __future__ import annotations

from typing import Annotated, Final

from cometmq.protocol.commands.root import (
    EVERY,
    Answer,
    Command,
    On,
    Part,
    ServedBy,
    Since,
    administer,
    by_administrators,
)
from cometmq.protocol.commands.topics import TopicInfo
from cometmq.protocol.integers import Int32, Int64


class ChangeMode:
    """What CreateTopic may do where the topic is there already."""

    CREATE: Final = 0  # it must be as asked for; else TopicExists, which names the difference
    UPDATE: Final = 1  # it must be there, and is changed unless that hides unread messages
    FORCE: Final = 2  # as UPDATE, whatever it hides


class CreateTopic(Command, frozen=True, tag=32):
    """Create a topic, or change it, by `mode`. -> TopicRoute.

    To change: 0 queues, or a perm of -1, stand for "as it is".
    """

    access = by_administrators(administer("info.topic"), later=True)

    info: TopicInfo
    mode: Annotated[Int32, Since("0.2.0")] = ChangeMode.CREATE


class DeleteTopic(Command, frozen=True, tag=33):
    """-> Done. Its offsets are forgotten; its records stay until they expire, and are those of a
    topic of that name that is made later."""

    access = by_administrators(administer("topic"), later=True)

    topic: str


class CreateTopics(Command, frozen=True, tag=37):
    """Create many topics at once, each as by CreateTopic with CREATE. -> TopicsCreated"""

    access = by_administrators(administer("infos.topic", itemwise=True), later=True)
    new_in = "0.2.0"

    infos: list[TopicInfo]


class RefusedTopic(Part, frozen=True):
    topic: str
    code: Int32  # of the error, as in Failed
    text: str


class TopicsCreated(Answer, frozen=True, tag=38):
    """All others are there, and every process knows them."""

    refused: list[RefusedTopic]  # the first of them
    refused_count: Int64


class DeleteSegments(Command, frozen=True, tag=73):
    """Delete what fileReservedTime allows now, whatever the hour. -> DeletedSegments

    Taken by the coordinator, which hands it on to the cleaner. RocketMQ DELETE_EXPIRED_COMMITLOG.
    """

    access = by_administrators(administer(EVERY, On.BROKER), later=True, served_by=ServedBy.EVERY)


class DeletedSegments(Answer, frozen=True, tag=84):
    segments: list[Int64]  # start offsets
    segment_bytes: Int64
    min_physical_offset: Int64
    held_by: list[str] = []  # holds that kept more from being deleted


class Hold(Part, frozen=True):
    """Nothing at or above that physical offset is deleted while the hold is there."""

    name: str
    physical_offset: Int64
    expires_ms: Int64 = 0  # milliseconds since 1970; 0 = never

    def is_live(self, now_ms: int) -> bool:
        """Whether its lease has not ended by then."""
        return not self.expires_ms or self.expires_ms > now_ms


class PlaceHold(Command, frozen=True, tag=80):
    """Place a hold, or move one of the same name and renew its lease. -> HoldList

    What is deleted already cannot be held: an offset below the log is taken for its beginning.
    """

    access = by_administrators(administer(EVERY, On.BROKER), later=True)

    name: str
    physical_offset: Int64 = 0
    lease_ms: Int64 = 0  # 0 = until it is dropped
    store_id: str = ""  # refused by a broker whose store is another one; "" = of any


class DropHold(Command, frozen=True, tag=81):
    """-> HoldList. It is no error if there is none."""

    access = by_administrators(administer(EVERY, On.BROKER), later=True)

    name: str


class ListHolds(Command, frozen=True, tag=82):
    """-> HoldList"""

    access = by_administrators(administer(EVERY, On.BROKER), later=True, served_by=ServedBy.EVERY)


class HoldList(Answer, frozen=True, tag=83):
    """A hold below `min_physical_offset` was overridden: the disk was too full."""

    holds: list[Hold]
    min_physical_offset: Int64  # the log begins here
