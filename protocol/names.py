"""Which names a topic or a group may have. Source: RocketMQ TopicValidator."""

from __future__ import annotations

import re
from typing import Final

from cometmq.protocol.errors import NameIllegal

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
TOPIC_MAX: Final = 127
LONG_TOPIC_MAX: Final = 255  # retry and dead-letter topics
GROUP_MAX: Final = 120

# Topics that the broker itself writes; RocketMQ refuses them to clients.
SYSTEM_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)

STAGING_NAME_MAX: Final = 120
# These are arguments of their own: as a property they would contradict the argument.
RESERVED_PROPERTIES: Final = frozenset({"TAGS", "KEYS", "UNIQ_KEY", "WAIT"})

_STAGING: Final = re.compile(r"[a-zA-Z0-9_-]+\Z")  # they become names of files
_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+\Z")


def _check(kind: str, name: str, length_max: int) -> None:
    if not name:
        raise NameIllegal(f"the {kind} name is empty")
    if len(name) > length_max:
        raise NameIllegal(f"{kind} name of {len(name)} characters, at most {length_max}")
    if not _LEGAL.match(name):
        raise NameIllegal(f"{kind} name {name[:140]!r}: only %|a-zA-Z0-9_- are allowed")


def check_topic(topic: str) -> None:
    """Raise NameIllegal unless the name may be a topic's."""
    long = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    _check("topic", topic, LONG_TOPIC_MAX if long else TOPIC_MAX)


def check_writable_topic(topic: str) -> None:
    """Raise NameIllegal unless a client may send to a topic of that name."""
    check_topic(topic)
    if topic in SYSTEM_TOPICS:
        raise NameIllegal(f"topic {topic} is the broker's own")


def check_group(group: str) -> None:
    """Raise NameIllegal unless the name may be a consumer group's."""
    _check("group", group, GROUP_MAX)


def check_hold(name: str) -> None:
    """Raise NameIllegal unless a hold may have that name."""
    _check("hold", name, GROUP_MAX)


def check_staging_name(kind: str, name: str) -> None:
    """Raise NameIllegal unless the name may be a sink's or a stage's."""
    if not 0 < len(name) <= STAGING_NAME_MAX or not _STAGING.match(name):
        raise NameIllegal(
            f"{kind} name {name[:140]!r}: 1 to {STAGING_NAME_MAX} of a-zA-Z0-9_- are allowed"
        )
