"""Allocation of queues to the members of a group, by RocketMQ's AVG rule; tags compared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from cometmq.protocol.commands import QueueKey
from cometmq.protocol.tags import parse_tags

log = logging.getLogger(__name__)


def allocate(
    subscriptions: Mapping[str, Iterable[str]], queue_counts: Mapping[str, int]
) -> dict[QueueKey, str]:
    """Which member is to have each queue.

    Args:
        subscriptions: member -> its topics.
        queue_counts: topic -> readable queues.
    """
    subscribers: dict[str, list[str]] = {}
    for member, topics in subscriptions.items():
        for topic in topics:
            subscribers.setdefault(topic, []).append(member)
    return {
        QueueKey(topic, queue_id): member
        for topic, members in subscribers.items()
        for queue_id, member in allocate_average(queue_counts.get(topic, 0), members).items()
    }


def allocate_average(queue_count: int, members: Sequence[str]) -> dict[int, str]:
    """RocketMQ's AVG: queue id -> member. Neighbouring queues stay together.

    The members are sorted as text; the first `queue_count % len(members)` get one queue more.
    """
    shares: dict[int, str] = {}
    if not members:
        return shares
    base, more = divmod(queue_count, len(members))
    queue_id = 0
    for index, member in enumerate(sorted(members)):
        for _ in range(base + (index < more)):
            shares[queue_id] = member
            queue_id += 1
    return shares


class TagComparison:
    """Logs it, once, when members ask for different tags: each sees only part of its queues."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._warned: set[str] = set()  # topics whose differing tags have been logged

    def compare(self, topics: Iterable[str], subscriptions: Iterable[Mapping[str, str]]) -> None:
        """`subscriptions`: of each member, topic -> tag expression."""
        members = list(subscriptions)
        for topic in topics:
            wanted = {parse_tags(asked[topic]) for asked in members if topic in asked}
            if len(wanted) == 1:
                self._warned.discard(topic)
            elif topic not in self._warned:
                self._warned.add(topic)
                log.warning(
                    "group %s: its members subscribe to different tags of %s; a message reaches "
                    "only the owner of its queue, who may not want it",
                    self._group,
                    topic,
                )
