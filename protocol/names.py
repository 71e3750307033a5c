"""Which names a topic or a group may have. Source: RocketMQ TopicValidator."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Final

from cometmq.protocol.derived import DERIVED_TOPIC
from cometmq.protocol.errors import ArgumentIllegal, MessageIllegal, NameIllegal
from cometmq.protocol.ledger import LEDGER_TOPIC
from cometmq.protocol.tags import TAG_SEPARATOR

KEY_SEPARATOR: Final = " "  # RocketMQ MessageConst.KEY_SEPARATOR
RETRY_PREFIX: Final = "%RETRY%"
POP_RETRY_SIGNS: Final = "_+"  # between group and topic in retry topics of RocketMQ's POP
DLQ_PREFIX: Final = "%DLQ%"
TOPIC_MAX: Final = 127
LONG_TOPIC_MAX: Final = 255  # retry and dead-letter topics
GROUP_MAX: Final = 120
NAME_CHARACTERS: Final = string.ascii_letters + string.digits + "%|_-"
# RocketMQ's brokers name retry topics of pop consumers group+topic, which no client may.
STORED_TOPIC_CHARACTERS: Final = NAME_CHARACTERS + "+"

# What the broker keeps for itself in the log. Nobody else reads it, and no view shows it.
HIDDEN_TOPICS: Final = frozenset({LEDGER_TOPIC, DERIVED_TOPIC})

DELAY_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
# Of transactions: half messages; which of them have ended; and those that nobody ended.
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"

# Topics that the broker itself writes; RocketMQ refuses them to clients.
SYSTEM_TOPICS: Final = HIDDEN_TOPICS | frozenset(
    {
        DELAY_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        GIVEN_UP_TOPIC,
        TIMER_TOPIC,
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)

# Groups of RocketMQ's own. Source: MixAll.isSysConsumerGroup.
SYSTEM_GROUPS: Final = frozenset(
    {"TOOLS_CONSUMER", "SCHEDULE_CONSUMER", "FILTERSRV_CONSUMER", "CID_ONS-HTTP-PROXY"}
)
SYSTEM_GROUP_PREFIXES: Final = ("CID_RMQ_SYS_", "CID_ONSAPI_", "SELF_TEST_")

# Topics of RocketMQ's brokers: timers, check points of POP, ... Source: TopicValidator.
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_INTERNAL_TOPICS: Final = SYSTEM_TOPICS | {
    prefix + group for prefix in (RETRY_PREFIX, DLQ_PREFIX) for group in SYSTEM_GROUPS
}
_INTERNAL_TOPIC_PREFIXES: Final = (
    SYSTEM_TOPIC_PREFIX,
    *(f"{RETRY_PREFIX}{group}{POP_RETRY_SIGNS[-1]}" for group in sorted(SYSTEM_GROUPS)),
    *(prefix + group for prefix in (RETRY_PREFIX, DLQ_PREFIX) for group in SYSTEM_GROUP_PREFIXES),
)

STAGING_NAME_MAX: Final = 120
# These are arguments of their own: as a property they would contradict the argument.
RESERVED_PROPERTIES: Final = frozenset({"TAGS", "KEYS", "UNIQ_KEY", "WAIT"})

_STAGING: Final = re.compile(r"[a-zA-Z0-9_-]+\Z")  # they become names of files
_LEGAL: Final = re.compile(rf"[{re.escape(NAME_CHARACTERS)}]+\Z")
_LEGAL_STORED: Final = re.compile(rf"[{re.escape(STORED_TOPIC_CHARACTERS)}]+\Z")


_TIMED: Final = "the arguments deliver_at and deliver_after have a message wait"
# What asks for a delivery that no property gets: the message would be delivered at once.
UNKEPT_PROPERTIES: Final = {
    "DELAY": "the argument delay_level has a message wait",
    "TIMER_DELIVER_MS": _TIMED,
    "TIMER_DELAY_MS": _TIMED,
    "TIMER_DELAY_SEC": _TIMED,
    "TIMER_DEL_UNIQKEY": "Producer.recall takes a message back",
    "TRAN_MSG": "Producer.transaction sends messages of transactions",
}
_NOT_PLAIN: Final = RESERVED_PROPERTIES | UNKEPT_PROPERTIES.keys()


def check_properties(properties: Mapping[str, str]) -> None:
    """Raise MessageIllegal for a property that has an argument of its own, and for one that asks
    for what a broker does not do."""
    if _NOT_PLAIN.isdisjoint(properties):
        return
    names = sorted(_NOT_PLAIN.intersection(properties))
    for name in names:
        if name in UNKEPT_PROPERTIES:
            raise MessageIllegal(unkept(name, properties[name]))
    raise MessageIllegal(f"property {', '.join(names)}: use the argument of that name")


def unkept(name: str, value: str) -> str:
    """What the sender of a message with such a property is told; the writer says it, too."""
    return (
        f"property {name} = {value!r:.80}: {UNKEPT_PROPERTIES[name]}; with the property alone it "
        "would be delivered at once"
    )


def check_tag(tag: str) -> None:
    """Raise MessageIllegal for what is an expression for a subscription, and no message's tag."""
    if TAG_SEPARATOR in tag:
        raise MessageIllegal(
            f"tags = {tag[:100]!r}: a message has one tag; it is subscriptions that name several, "
            f"joined by {TAG_SEPARATOR!r}"
        )


def joined_keys(keys: Iterable[str]) -> str:
    """Return several keys as a message holds them, separated by spaces.

    Raises ArgumentIllegal for a key that no query could find: an empty one, or one with a space.
    """
    each_of_them = list(keys)
    for key in each_of_them:
        if not isinstance(key, str):
            raise ArgumentIllegal(f"keys has a {type(key).__name__}: each key must be a str")
        check_search_key(key)
    return KEY_SEPARATOR.join(each_of_them)


def check_search_key(key: str) -> None:
    """Raise ArgumentIllegal for a text that cannot be one key of a message."""
    if not key or KEY_SEPARATOR in key:
        what = "is empty" if not key else "has a space, which separates keys"
        raise ArgumentIllegal(
            f"key {key[:100]!r} {what}: it would not be found; replace its spaces, or give its "
            "words as keys of their own"
        )


def pop_retry_topic(group: str, topic: str, sign: str = POP_RETRY_SIGNS[0]) -> str:
    """Return the retry topic of a group without queues for messages of this topic.

    Args:
        sign: separator of group and topic. RocketMQ's brokers read `_` by default
            (KeyBuilder.buildPopRetryTopicV1). With `+` (V2, read with enableRetryTopicV2) the name
            cannot be that of another group's retry topic.
    """
    name = f"{RETRY_PREFIX}{group}{sign}{topic}"
    return name if len(name) <= LONG_TOPIC_MAX else RETRY_PREFIX + group


def _check(kind: str, name: str, length_max: int, legal: re.Pattern[str] = _LEGAL) -> None:
    if not isinstance(name, str):
        raise NameIllegal(f"a {kind} name is one text, not {type(name).__name__}: {name!r:.80}")
    if not name:
        raise NameIllegal(f"the {kind} name is empty")
    if len(name) > length_max:
        raise NameIllegal(f"{kind} name of {len(name)} characters, at most {length_max}")
    if not legal.match(name):
        raise NameIllegal(f"{kind} name {name[:140]!r}: only %|a-zA-Z0-9_- are allowed")


def check_topic(topic: str) -> None:
    """Raise NameIllegal unless the name may be a topic's."""
    long = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    popped = long and topic.startswith(RETRY_PREFIX)
    legal = _LEGAL_STORED if popped else _LEGAL
    _check("topic", topic, LONG_TOPIC_MAX if long else TOPIC_MAX, legal)


def is_internal_topic(topic: str) -> bool:
    """Return whether only the broker may write or change the topic, as in RocketMQ."""
    return topic in _INTERNAL_TOPICS or topic.startswith(_INTERNAL_TOPIC_PREFIXES)


def is_internal_group(group: str) -> bool:
    """Return whether the group is the broker's own, or one of RocketMQ's tools."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIXES)


def refuse_internal_topic(topic: str) -> None:
    """Raise NameIllegal if a client may not send to the topic, create it or change it."""
    if is_internal_topic(topic):
        raise NameIllegal(
            f"topic {topic[:LONG_TOPIC_MAX]} is the broker's own: clients cannot write or change it"
        )


def refuse_hidden_topic(topic: str) -> None:
    """Raise NameIllegal if no client may read the topic of that name."""
    if topic in HIDDEN_TOPICS:
        raise NameIllegal(f"topic {topic} is the broker's own: clients cannot read it")


def refuse_internal_group(group: str) -> None:
    """Raise NameIllegal if a client may not consume as that group, or change it."""
    if is_internal_group(group):
        raise NameIllegal(
            f"group {group[:GROUP_MAX]} is the broker's own: clients cannot use or change it; use "
            "another name"
        )


def check_writable_topic(topic: str) -> None:
    """Raise NameIllegal unless a client may send to a topic of that name."""
    check_topic(topic)
    refuse_internal_topic(topic)


def check_readable_topic(topic: str) -> None:
    """Raise NameIllegal unless a client may read a topic of that name."""
    check_topic(topic)
    refuse_hidden_topic(topic)


def check_group(group: str) -> None:
    """Raise NameIllegal unless the name may be a consumer group's."""
    _check("group", group, GROUP_MAX)


def check_usable_group(group: str) -> None:
    """Raise NameIllegal unless a client may consume, or send transactions, as that group."""
    check_group(group)
    refuse_internal_group(group)


def check_hold(name: str) -> None:
    """Raise NameIllegal unless a hold may have that name."""
    _check("hold", name, GROUP_MAX)


def check_producer_id(name: str) -> None:
    """Raise NameIllegal unless a producer may have that producer_id."""
    _check("producer", name, GROUP_MAX)


def check_staging_name(kind: str, name: str) -> None:
    """Raise NameIllegal unless the name may be a sink's or a stage's."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= STAGING_NAME_MAX
        or not _STAGING.match(name)
    ):
        raise NameIllegal(
            f"{kind} name {name!r:.140}: 1 to {STAGING_NAME_MAX} of a-zA-Z0-9_- are allowed"
        )
