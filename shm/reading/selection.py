"""Selection of messages: the filter of a subscription, tags and SQL92, and keys."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cometmq.protocol.filters import compile_filter
from cometmq.protocol.tags import parse_tags
from cometmq.shm.kernel.codec import Filter, Message


class Selection(NamedTuple):
    """Messages that have one of the tags and match the filter. None: no restriction."""

    tags: frozenset[str] | None
    filter: Filter | None

    @property
    def is_all(self) -> bool:
        return self.tags is None and self.filter is None


@lru_cache(maxsize=4096)
def selection_of(tags: str, sql: str = "") -> Selection:
    """Raises SubscriptionIllegal, FilterIllegal."""
    return Selection(parse_tags(tags), filter_of(sql))


@lru_cache(maxsize=1024)
def filter_of(sql: str) -> Filter | None:
    """Of an SQL92 expression; "": None. Raises FilterIllegal."""
    return Filter(*compile_filter(sql)) if sql else None


def carries(message: Message, topic: str, key: str, *, unique: bool = False) -> bool:
    """Whether a message has that key, and not only one of the same hash.

    Args:
        unique: it must be the message's UNIQ_KEY; else one of its KEYS.
    """
    if message.topic != topic:
        return False
    properties = message.properties
    if unique:
        return properties.get("UNIQ_KEY") == key
    return key in properties.get("KEYS", "").split(" ")
