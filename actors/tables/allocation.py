"""Allocation of queues to the members of a group, by RocketMQ's AVG rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cometmq.protocol.commands import QueueKey


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
