"""Settings of a consumer group, by RocketMQ's keys: which there are, their bounds. Pure: no I/O.

Each is told and given as JSON. What RocketMQ has no key for stands among the attributes, which a
RocketMQ broker keeps as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cometmq.protocol.configs import (
    CustomizedRetryPolicy,
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    RetryPolicyType,
    SubscriptionGroupConfig,
)
from cometmq.protocol.errors import BadRequest, GroupInUse, NoPermission
from cometmq.protocol.integers import INT32_MAX, INT64_MAX

SAME_SUBSCRIPTIONS: Final = "sameSubscriptions"
SAME_ATTRIBUTE: Final = "cometmq.same.subscriptions"
ATTRIBUTES_MAX: Final = 100
TEXT_MAX: Final = 255  # characters of an attribute's name, and of its value
VALUE_MAX: Final = 65_536  # characters of any setting, as JSON
QUEUES_MAX: Final = 65_535
WAITS_MAX: Final = 100  # of a customized retry policy

_FIELDS: Final = {
    "consumeEnable": "consume_enable",
    "consumeBroadcastEnable": "consume_broadcast_enable",
    "consumeMessageOrderly": "consume_message_orderly",
    "brokerId": "broker_id",
    "whichBrokerWhenConsumeSlowly": "which_broker_when_consume_slowly",
    "retryQueueNums": "retry_queue_nums",
    "retryMaxTimes": "retry_max_times",
    "groupRetryPolicy": "group_retry_policy",
    "consumeTimeoutMinute": "consume_timeout_minute",
    "notifyConsumerIdsChangedEnable": "notify_consumer_ids_changed_enable",
    "attributes": "attributes",
}
KEYS: Final = (*_FIELDS, SAME_SUBSCRIPTIONS)
_TYPES: Final = {
    field.encode_name: field.type for field in msgspec.structs.fields(SubscriptionGroupConfig)
}
_BOUNDS: Final = {
    "brokerId": (0, INT32_MAX),
    "whichBrokerWhenConsumeSlowly": (0, INT32_MAX),
    "retryQueueNums": (0, QUEUES_MAX),
    "retryMaxTimes": (0, INT32_MAX),
    "consumeTimeoutMinute": (1, INT32_MAX),
}


def settings_of(config: SubscriptionGroupConfig) -> dict[str, str]:
    """Every setting that can be changed, as JSON; of the retry policy what is in use."""
    values: dict[str, Any] = {key: getattr(config, field) for key, field in _FIELDS.items()}
    values["groupRetryPolicy"] = _policy(config.group_retry_policy)
    values["attributes"] = {
        name: value for name, value in config.attributes.items() if name != SAME_ATTRIBUTE
    }
    values[SAME_SUBSCRIPTIONS] = wants_same_subscriptions(config)
    return {key: msgspec.json.encode(value).decode() for key, value in values.items()}


def changed(
    config: SubscriptionGroupConfig, settings: Mapping[str, str]
) -> SubscriptionGroupConfig:
    """The configuration with these settings, each as JSON. Raises BadRequest."""
    values = {key: _value(key, text) for key, text in settings.items()}
    same = values.pop(SAME_SUBSCRIPTIONS, wants_same_subscriptions(config))
    attributes = dict(values.pop("attributes", config.attributes))
    attributes.pop(SAME_ATTRIBUTE, None)
    if same:
        attributes[SAME_ATTRIBUTE] = "true"
    fields = {_FIELDS[key]: value for key, value in values.items()}
    return msgspec.structs.replace(config, attributes=attributes, **fields)


def wants_same_subscriptions(config: SubscriptionGroupConfig) -> bool:
    """Whether members that subscribe differently are refused."""
    return config.attributes.get(SAME_ATTRIBUTE) == "true"


def check_consuming(config: SubscriptionGroupConfig) -> None:
    """Raise NoPermission unless the group may consume."""
    if not config.consume_enable:
        raise NoPermission(
            f"group {config.group_name} may not consume: its consumeEnable is false "
            f"(`cometmq group update {config.group_name} --set consumeEnable=true`)"
        )


def check_order(config: SubscriptionGroupConfig, *, orderly: bool) -> None:
    """Raise GroupInUse unless the group takes its messages in this way."""
    if config.consume_message_orderly != orderly:
        group, there = config.group_name, "in order" if not orderly else "in no order"
        raise GroupInUse(
            f"group {group} takes its messages {there}: its consumers are orderly={not orderly}. "
            f"To change that, while none is out: `cometmq group update {group} --set "
            f"consumeMessageOrderly={str(orderly).lower()}`"
        )


def _value(key: str, text: str) -> Any:
    if key not in KEYS:
        from difflib import get_close_matches  # nobody needs it who makes no mistake

        near = get_close_matches(key[:TEXT_MAX], KEYS, 1)
        hint = f"; is {near[0]} meant?" if near else f": there are {', '.join(KEYS)}"
        raise BadRequest(f"a group has no setting {key[:TEXT_MAX]!r}{hint}")
    if len(text) > VALUE_MAX:
        raise BadRequest(f"{key}: {len(text)} characters, at most {VALUE_MAX}")
    kind: Any = bool if key == SAME_SUBSCRIPTIONS else _TYPES[key]
    try:
        value = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"{key} = {text[:TEXT_MAX]!r}: {error}") from None
    low, high = _BOUNDS.get(key, (0, 0))
    if key in _BOUNDS and not low <= value <= high:
        raise BadRequest(f"{key} = {value}: {low} to {high}")
    if isinstance(value, GroupRetryPolicy):
        _check_policy(value)
    if isinstance(value, dict):
        _check_attributes(value)
    return value


def _policy(policy: GroupRetryPolicy) -> dict[str, Any]:
    """With every number, also RocketMQ's defaults."""
    if policy.type == RetryPolicyType.EXPONENTIAL:
        rule = policy.exponential_retry_policy or ExponentialRetryPolicy()
        return {"type": policy.type, "exponentialRetryPolicy": msgspec.structs.asdict(rule)}
    waits = (policy.customized_retry_policy or CustomizedRetryPolicy()).next
    return {"type": policy.type, "customizedRetryPolicy": {"next": waits}}


def _check_policy(policy: GroupRetryPolicy) -> None:
    waits = (policy.customized_retry_policy or CustomizedRetryPolicy()).next
    if not 1 <= len(waits) <= WAITS_MAX or not all(0 <= wait <= INT64_MAX for wait in waits):
        raise BadRequest(f"groupRetryPolicy: 1 to {WAITS_MAX} waits, in ms and not negative")
    rule = policy.exponential_retry_policy or ExponentialRetryPolicy()
    if not (1 <= rule.initial <= rule.max <= INT64_MAX and 1 <= rule.multiplier <= INT32_MAX):
        raise BadRequest(
            f"groupRetryPolicy: initial {rule.initial} ms, max {rule.max} ms, multiplier "
            f"{rule.multiplier}: 1 <= initial <= max, 1 <= multiplier"
        )


def _check_attributes(attributes: Mapping[str, str]) -> None:
    if len(attributes) > ATTRIBUTES_MAX:
        raise BadRequest(f"attributes: {len(attributes)} of them, at most {ATTRIBUTES_MAX}")
    for name, value in attributes.items():
        if not 1 <= len(name) <= TEXT_MAX or len(value) > TEXT_MAX:
            raise BadRequest(
                f"attributes: {name[:TEXT_MAX]!r}: 1 to {TEXT_MAX} characters, the value at most "
                f"{TEXT_MAX}"
            )
