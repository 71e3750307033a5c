"""RocketMQ's configuration of a topic and of a consumer group, field by field.

They stand so in topics.json and subscriptionGroup.json, and in the ledger's changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from cometmq.protocol.integers import Int32


class Bean(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A Java object: snake_case here, RocketMQ's camelCase elsewhere.

    A change of the ledger has only what is not RocketMQ's default; a file has every key.
    """


class TopicFilterType(StrEnum):
    SINGLE_TAG = "SINGLE_TAG"
    MULTI_TAG = "MULTI_TAG"


class TopicConfig(Bean, frozen=True, kw_only=True, gc=False):
    topic_name: str
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = 6  # bits: 8 priority, 4 read, 2 write, 1 inherit
    topic_filter_type: TopicFilterType = TopicFilterType.SINGLE_TAG
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] = {}  # such as message.type: FIFO; without the command line's "+"


#: Attributes of a topic that select another storage in RocketMQ, and their plain values.
PLAIN_ATTRIBUTES: Final = {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}


def why_not_served(config: TopicConfig) -> str:
    """Return the attribute that makes a topic's queues other than plain ones, such as
    `queue.type=BatchCQ`; empty for a topic that can be served. A leading `+`, as in admin commands,
    is ignored."""
    for name, value in config.attributes.items():
        plain = PLAIN_ATTRIBUTES.get(name.removeprefix("+"))
        if plain is not None and value.casefold() != plain.casefold():
            return f"{name.removeprefix('+')}={value}"
    return ""


class RetryPolicyType(StrEnum):
    EXPONENTIAL = "EXPONENTIAL"
    CUSTOMIZED = "CUSTOMIZED"


class CustomizedRetryPolicy(Bean, frozen=True, kw_only=True):
    """Waits before the 1st, 2nd, ... next delivery, in ms; RocketMQ's delay levels by default."""

    next: tuple[int, ...] = (
        *(seconds * 1000 for seconds in (1, 5, 10, 30)),
        *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
    )


class ExponentialRetryPolicy(Bean, frozen=True, kw_only=True):
    initial: int = 5_000  # ms
    max: int = 7_200_000  # ms
    multiplier: int = 2


class GroupRetryPolicy(Bean, frozen=True, kw_only=True):
    """How long a message waits before it is delivered again. An absent policy has its defaults."""

    type: RetryPolicyType = RetryPolicyType.CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


class SimpleSubscriptionData(Bean, frozen=True, kw_only=True):
    topic: str
    expression_type: str | None = None
    expression: str | None = None
    version: int = 0


class SubscriptionGroupConfig(Bean, frozen=True, kw_only=True):
    """A consumer group. A file of RocketMQ 4.x lacks some of the keys: they get the defaults."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    group_retry_policy: GroupRetryPolicy = GroupRetryPolicy()
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int32 = 0
    consume_timeout_minute: Int32 = 15
    subscription_data_set: tuple[SimpleSubscriptionData, ...] | None = None
    attributes: dict[str, str] = {}
