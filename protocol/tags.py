"""Tag expressions. Source: RocketMQ FilterAPI, TagsType."""

from __future__ import annotations

import re
from typing import Final

from cometmq.protocol.errors import SubscriptionIllegal

ALL_TAGS: Final = "*"
TAG_SEPARATOR: Final = "||"
_SQL_FOLLOWS: Final = "\n"  # no tag has it
# What tags hardly ever have, and comparisons always: k=v is a tag, and k = v is none.
_SQL: Final = re.compile(
    r"""['<>] | =\s | \s= | =[-+.]?\d | \bin\s*\( | \bis\s+(not\s+)?null\b
    | \bbetween\s+\S+\s+and\b""",
    re.IGNORECASE | re.VERBOSE,
)


def check_expression(expression: str) -> frozenset[str] | None:
    """`parse_tags` of what a person has written: an SQL92 expression is no tag.

    It would be one in all that is stored and sent, and no message would ever have it. Raises
    SubscriptionIllegal.
    """
    tags = parse_tags(expression)
    if tags is not None and _SQL.search(expression):
        raise SubscriptionIllegal(
            f"{expression[:100]!r} looks like an SQL92 expression: that is given as sql=, --where "
            'or where; tags are "paid || refunded" for some of them, "*" for all'
        )
    return tags


def joined(tags: str, sql: str) -> str:
    """One text for what a member subscribes by: its first line are the tags, SQL92 the rest."""
    return tags + _SQL_FOLLOWS + sql if sql else tags


def in_words(tags: str, sql: str) -> str:
    """As people are shown it."""
    return f"{tags} where {sql}" if sql else tags


def split(subscribed: str) -> tuple[str, str]:
    """Tags and SQL92 of such a text."""
    tags, _, sql = subscribed.partition(_SQL_FOLLOWS)
    return tags, sql


def expression_of(subscribed: str) -> str:
    """What RocketMQ would be given for it, which knows tags or SQL92; empty: no SQL92.

    It is TRUE of each message that has one of the tags and of which the SQL92 is TRUE.
    """
    tags, sql = split(subscribed)
    names = sorted(parse_tags(tags) or ()) if sql else ()
    if not names:
        return sql
    quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    return f"TAGS IN ({quoted}) AND ({sql})"


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
