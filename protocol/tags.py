"""Tag expressions. Source: RocketMQ FilterAPI, TagsType."""

from __future__ import annotations

from typing import Final

from cometmq.protocol.errors import SubscriptionIllegal

ALL_TAGS: Final = "*"
TAG_SEPARATOR: Final = "||"


def parse_tags(expression: str) -> frozenset[str] | None:
    """The tags that an expression names, None for all of them.

    Raises SubscriptionIllegal unless it is "*" (or empty), or tags joined by "||".
    """
    if expression.strip() in ("", ALL_TAGS):
        return None
    tags = frozenset(tag.strip() for tag in expression.split(TAG_SEPARATOR)) - {""}
    shown = repr(expression[:100])
    if not tags:
        raise SubscriptionIllegal(f"tag expression {shown} names no tag")
    for tag in tags:
        if tag == ALL_TAGS:
            raise SubscriptionIllegal(f'tag expression {shown}: "*" stands alone, or not at all')
        if "|" in tag:
            raise SubscriptionIllegal(f'tag expression {shown}: tags are joined by "||"')
        if not tag.isprintable():
            raise SubscriptionIllegal(f"tag expression {shown}: unprintable characters")
    return tags
