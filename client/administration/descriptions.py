"""What Admin's methods return: topics, queues, groups, deletions and holds."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple


class QueueDescription(NamedTuple):
    broker: str
    queue_id: int
    min_queue_offset: int  # of the oldest message that is still there
    max_queue_offset: int  # of the next message to come
    hidden: bool = False  # it holds messages, but the topic has so many queues no more


class TopicDescription(NamedTuple):
    topic: str
    read_queues: int  # of all brokers
    write_queues: int
    queues: list[QueueDescription]

    @property
    def message_count(self) -> int:
        """Messages that are still there."""
        return sum(each.max_queue_offset - each.min_queue_offset for each in self.queues)


class GroupQueueDescription(NamedTuple):
    broker: str
    topic: str
    queue_id: int
    queue_offset: int  # committed; -1 = never
    max_queue_offset: int
    lag: int  # messages to come; those without a matching tag count as well
    member: str  # owner, or empty


class GroupOverview(NamedTuple):
    group: str
    members: list[str]
    topics: list[str]


class SubscriptionDifference(NamedTuple):
    member: str
    topic: str
    tags: str  # that the member asks for; empty: it does not subscribe to the topic
    usual_tags: str  # that most of the group ask for


class GroupReport(NamedTuple):
    group: str
    members: list[str]
    subscriptions: dict[str, str]  # topic -> tag expression
    queues: list[GroupQueueDescription]
    # Members that do not subscribe as most do; at most 50 of each broker.
    differences: list[SubscriptionDifference]
    settings: dict[str, Any]  # by RocketMQ's key; see Admin.update_group

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.queues)


class OffsetMove(NamedTuple):
    broker: str
    topic: str
    queue_id: int
    before: int  # -1 = the group had never committed
    wanted: int  # may lie outside of the queue
    queue_offset: int  # where the group goes on; -1 = as before


class DeletedDescription(NamedTuple):
    broker: str
    segments: list[int]  # physical offsets at which they began, oldest first
    segment_bytes: int
    min_physical_offset: int  # the log begins here now
    held_by: list[str]  # holds that keep the oldest segment that is left


class HoldDescription(NamedTuple):
    broker: str
    name: str
    physical_offset: int  # nothing at or above it is deleted
    expires: datetime | None  # None: until it is dropped
    overridden: bool  # the disk was too full: some of it is gone
