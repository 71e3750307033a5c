"""What RocketMQ's files in config/ hold, file by file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from cometmq.protocol.configs import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.integers import INT64_MAX, Int32, Int64
from cometmq.shm.state.java import java_hash_map_order

QueueOffset = Annotated[int, msgspec.Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]


class DataVersion(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """How often a table was changed. A higher one is newer; the fields compare in this order."""

    state_version: int = 0  # the controller's epoch, 0 without one
    counter: int = 0
    timestamp: int = 0  # ms

    def next(self, now_ms: int, state_version: int = 0) -> DataVersion:
        """The version after one more change."""
        return DataVersion(state_version, self.counter + 1, now_ms)


class Table(msgspec.Struct, kw_only=True, rename="camel"):
    """What a whole file holds. Whoever changes it sets `data_version` to its `next`."""

    data_version: DataVersion = DataVersion()

    def computed(self) -> dict[str, object]:
        """Further keys that RocketMQ writes, made of the others, and ignores when it reads."""
        return {}


class TopicTable(Table, kw_only=True):
    """topics.json"""

    topic_config_table: dict[str, TopicConfig] = {}


class SubscriptionGroupTable(Table, kw_only=True):
    """subscriptionGroup.json"""

    forbidden_table: dict[str, dict[str, Int32]] = {}  # group -> topic -> bits
    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}


class ConsumerOffsetTable(Table, kw_only=True):
    """consumerOffset.json: `topic@group` -> queue id -> queue offset of the next message."""

    offset_table: dict[str, dict[int, QueueOffset]] = {}

    def group_topic_map(self) -> dict[str, tuple[str, ...]]:
        """The topics of each group, in the order of RocketMQ's maps (ConsumerOffsetManager)."""
        topics: dict[str, list[str]] = {}
        for key in self.offset_table:
            topic, _, group = key.partition("@")
            if group and "@" not in group:
                topics.setdefault(group, []).append(topic)
        # new HashMap<>(128), and new HashSet<>(8) for each group
        return {
            group: tuple(java_hash_map_order(topics[group], 8))
            for group in java_hash_map_order(topics, 128)
        }

    def computed(self) -> dict[str, object]:
        return {"groupTopicMap": self.group_topic_map()}

    def beyond(self, ends: Mapping[tuple[str, int], int]) -> list[tuple[str, int, int]]:
        """What was committed behind the end of its queue: (key, queue id, where that end is)."""
        return [
            (key, queue_id, end)
            for key, offsets in self.offset_table.items()
            for queue_id, offset in offsets.items()
            if offset > (end := ends.get((key.partition("@")[0], queue_id), 0))
        ]


class DelayOffsetTable(Table, kw_only=True):
    """delayOffset.json: delay level -> queue offset of the next message in SCHEDULE_TOPIC_XXXX."""

    offset_table: dict[int, int] = {}


class BloomFilterData(msgspec.Struct, frozen=True, rename="camel"):
    bit_num: int = 0
    bit_pos: tuple[int, ...] = ()


class ConsumerFilterData(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The filter of a group for a topic. Times in ms since 1970."""

    consumer_group: str = ""
    topic: str = ""
    expression: str = ""
    expression_type: str = "SQL92"
    born_time: Int64 = 0
    dead_time: Int64 = 0
    dead: bool = False  # computed; nobody reads it
    client_version: Int64 = 0
    bloom_filter_data: BloomFilterData | None = None


class TopicFilters(msgspec.Struct, frozen=True, rename="camel"):
    """The filters of a topic, by group."""

    topic: str = ""
    group_filter_data: dict[str, ConsumerFilterData] = {}


class ConsumerFilterTable(msgspec.Struct, frozen=True, rename="camel"):
    """consumerFilter.json, by topic."""

    filter_data_by_topic: dict[str, TopicFilters] = {}


class OrderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a group that takes messages in order has of a queue: RocketMQ's OrderInfo, and two keys
    of ours, which it passes over. Times in ms since 1970."""

    a: str | None = None  # the attempt
    cm: Int64 = 0  # a bit for each of `o` that is acknowledged
    i: Int64 | None = None  # for so long it is invisible
    l: Int64 = 0  # noqa: E741 - last consumed
    o: list[Int64] = []  # the first queue offset, and the distances of the others from it
    oc: dict[int, Int32] | None = None  # queue offset -> how often it was handed out before
    ot: dict[int, Int64] | None = (
        None  # queue offset -> when it is visible, where that is another time
    )
    pop_time: Int64 = msgspec.field(default=0, name="popTime")
    handle: Int64 = msgspec.field(default=0, name="h")
    out_end: Int64 = msgspec.field(default=0, name="oe")  # from there on nothing is out


class ConsumerOrderInfoTable(msgspec.Struct, frozen=True):
    """consumerOrderInfo.json: `topic@group` -> queue id -> what is out."""

    table: dict[str, dict[int, OrderInfo]] = {}
