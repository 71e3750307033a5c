"""Paging of consumer groups: a group may have any number of members and queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cometmq.protocol.commands import (
    GroupDescription,
    GroupInfo,
    GroupList,
    GroupQueue,
    QueueKey,
    Subscription,
)

PAGE_BYTES: Final = 256 * 1024  # about; a head may have four times that
_ENTRY_BYTES: Final = 32  # of an entry, beside its texts


def page_of_groups(
    names: Sequence[str], overview: Callable[[str], GroupInfo], entry: int
) -> GroupList:
    """The first of these groups, as far as a page holds them.

    Args:
        entry: of the first group, so many members and topics were told before.
    """
    groups: list[GroupInfo] = []
    left = PAGE_BYTES
    for name in names:
        whole = overview(name)
        members, topics = whole.members[entry:], whole.topics[max(0, entry - len(whole.members)) :]
        left -= _bytes(name)
        told = 0
        for text in (*members, *topics):
            left -= _bytes(text)
            if left < 0:
                break
            told += 1
        groups.append(GroupInfo(name, members[:told], topics[: max(0, told - len(members))]))
        if told < len(members) + len(topics):
            return GroupList(groups, name, entry + told)
        entry = 0
    return GroupList(groups)


def page_of_group(
    name: str,
    members: Sequence[str],
    subscriptions: Sequence[Subscription],
    queues: Sequence[tuple[str, Sequence[int]]],
    describe: Callable[[QueueKey], GroupQueue],
    entry: int,
) -> GroupDescription:
    """What a page holds of a group's members, subscriptions and queues, in this order.

    Args:
        queues: queue ids by topic.
        entry: so many of all of them were told before.
    """
    entries = len(members) + len(subscriptions) + sum(len(ids) for _, ids in queues)
    page = GroupDescription(name, [], [], [], entries)
    left, at = PAGE_BYTES, max(0, entry)

    def is_full(*texts: str) -> bool:
        nonlocal left, at
        left -= sum(map(_bytes, texts))
        full = left < 0 and at > entry  # one entry fits in any case
        at += not full
        return full

    def rest() -> GroupDescription:
        return GroupDescription(
            name, page.members, page.subscriptions, page.queues, entries, next_entry=at
        )

    for member in members[at:]:
        if is_full(member):
            return rest()
        page.members.append(member)
    for subscription in subscriptions[at - len(members) :]:
        if is_full(subscription.topic, subscription.tags, subscription.sql):
            return rest()
        page.subscriptions.append(subscription)
    skip = at - len(members) - len(subscriptions)
    for topic, ids in queues:
        for queue_id in ids[skip:]:
            queue = describe(QueueKey(topic, queue_id))
            if is_full(topic, queue.member):
                return rest()
            page.queues.append(queue)
        skip = max(0, skip - len(ids))
    return page


def _bytes(text: str) -> int:
    return len(text.encode()) + _ENTRY_BYTES
