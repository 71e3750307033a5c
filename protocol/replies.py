"""Requests and replies: RocketMQ's properties and topic, and the names of requesters.

A request is a message that names its requester; whoever consumes it sends the reply to the
coordinator of the broker that it lies at, where the requester waits. The requester's name is
derived from a secret: those who read the request can answer it, and cannot fetch what others
answer.
Source: RocketMQ RequestResponseFuture, MessageUtil, ReplyMessageProcessor.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import Final

CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"  # milliseconds that the requester waits
CLUSTER: Final = "CLUSTER"
MSG_TYPE: Final = "MSG_TYPE"
REPLY: Final = "reply"  # its value, of replies
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"  # when the broker handed it on
ARRIVE_TIME: Final = "ARRIVE_TIME"  # when the requester had it

# What a user's own properties may not be, of a request or a reply.
KEPT_PROPERTIES: Final = frozenset(
    {CORRELATION_ID, REPLY_TO_CLIENT, TTL, CLUSTER, MSG_TYPE, PUSH_REPLY_TIME, ARRIVE_TIME}
)

REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"
SECRET_CHARACTERS: Final = (32, 128)  # the least, so that nobody tries them all, and the most
NAME_MAX: Final = 255  # characters of a correlation id, and of a requester's name
PROPERTIES_BYTES_MAX: Final = 32_767


def reply_topic(cluster: str) -> str:
    """Where replies go in that cluster."""
    return cluster + REPLY_TOPIC_SUFFIX


@lru_cache(maxsize=1024)
def requester_of(secret: str) -> str:
    """The name of whoever knows the secret, for REPLY_TO_CLIENT."""
    return "cometmq@" + sha256(secret.encode()).hexdigest()[:40]


def encode_properties(properties: dict[str, str]) -> bytes:
    """As a record has them. Raises ValueError for what would read as something else, or is long."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value)
    if text.count("\x01") + text.count("\x02") != 2 * sum(map(bool, properties.values())):
        raise ValueError("a property contains \\x01 or \\x02")
    found = text.encode()
    if len(found) > PROPERTIES_BYTES_MAX:
        raise ValueError(f"properties of {len(found)} bytes, at most {PROPERTIES_BYTES_MAX}")
    return found
