"""Choice of the queue for a message, and of another one if the broker has refused the first.

A producer's route may be 30 s old, so its topic may have other queues by now. A batch for a queue
that is gone is divided by the targets of its messages: those with an `ordering_key` go to the
queues of their keys in the new route, those without a target to any queue, and those with a
`queue_id` are refused if no broker has it. Later messages of the queue do not overtake them, and
neither do messages that are sent by the new route (`TopicLanes.must_wait`).
"""

from __future__ import annotations

from collections import deque

from cometmq.client.sending.attempts import Expired, may_leave_queue, queue_is_refused
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.outgoing import Target
from cometmq.client.sending.receipt import Batch
from cometmq.client.sending.window import Window
from cometmq.protocol.errors import ArgumentIllegal, CometError, NoPermission, again


def lane_for(lanes: TopicLanes, target: Target, key: str | None = None) -> Lane | None:
    """Return the queue that a target names; None = any. Raises ArgumentIllegal, NoPermission.

    Args:
        key: dedup key of the message: all messages of a key go to one broker.
    """
    if key is not None and target.queue_id is None and target.ordering_key is None:
        target.broker = lanes.broker_for(key)
    lane = None
    if target.ordering_key is not None:
        lane = lanes.for_key(target.ordering_key)
    elif target.queue_id is not None:
        lane = lanes.for_queue(target.queue_id)
    if target.broker is None:
        return lane
    lane = lane or lanes.next_of(target.broker)
    if lane is None or lane.broker != target.broker:
        raise ArgumentIllegal(
            f"broker {target.broker}, where the rest is, has no such queue of topic {target.topic}"
        )
    return lane


def check_served(lanes: TopicLanes, target: Target) -> None:
    """Raise ArgumentIllegal, NoPermission or NotMaster if there is no queue for a target."""
    lanes.writable()
    lane_for(lanes, target)


def choose_again(lanes: TopicLanes, lane: Lane, batch: Batch, index: int) -> Lane | None:
    """Return the queue for a message of a batch by the newest route, or None.

    Args:
        lane: the queue that was refused.
    """
    try:
        if batch.targets is not None:
            return lane_for(lanes, batch.targets[index]) or lanes.next()
        if batch.free:
            # All messages with one dedup key go to one broker.
            return (lanes.next_of(lane.broker) if batch.window_ms else None) or lanes.next()
    except CometError:
        pass
    return None


def lane_after(lanes: TopicLanes, lane: Lane, batch: Batch, error: CometError) -> Lane:
    """Return the queue for the next attempt with a batch of one message. Raises `error` if there
    is none. The caller holds the producer's lock."""
    if not may_leave_queue(batch, error):
        return (lanes.elsewhere(lane.broker) if batch.may_go_elsewhere else None) or lane
    other: Lane | None = lane
    if lane.gone:
        other = choose_again(lanes, lane, batch, 0)
    if other is None or (other is lane and is_final(error)):
        raise again(error)
    return other


def is_final(error: CometError) -> bool:
    """Return whether the error is final for a queue that the newest route has, too. QueueNotExist
    is not: the broker or the name server does not know of a change yet."""
    return isinstance(error, NoPermission)


def leave(lanes: TopicLanes, lane: Lane, window: Window) -> Expired:
    """Move the batches of a refused queue that is gone to others; return those without one.

    The caller holds the producer's lock.
    """
    refusal = lane.error
    if refusal is None or not queue_is_refused(refusal) or not lane.waiting:
        return []
    if not lane.gone:
        first = lane.waiting[0]
        if not first.number or not is_final(refusal) or not may_leave_queue(first, refusal):
            return []
        lane.waiting.popleft()  # the broker has not refused the others yet
        window.settled(first, refusal)
        return [(first, refusal)]
    lane.failures, lane.error = 0, None
    batches, lane.waiting = lane.waiting, deque()
    refused: Expired = []
    for batch in batches:
        for part, place in _divided(lanes, lane, batch, window):
            if place is None:
                window.settled(part, refusal)
                refused.append((part, refusal))
            else:
                part.broker, part.queue_id = place.broker, place.queue_id
                place.line_up_older(part)
    return refused


def _divided(
    lanes: TopicLanes, lane: Lane, batch: Batch, window: Window
) -> list[tuple[Batch, Lane | None]]:
    if batch.targets is None:
        return [(batch, choose_again(lanes, lane, batch, 0))]
    groups: dict[Lane | None, list[int]] = {}
    for index in range(batch.count):
        groups.setdefault(choose_again(lanes, lane, batch, index), []).append(index)
    if len(groups) == 1:
        return [(batch, place) for place in groups]
    parts = batch.divide(list(groups.values()))
    window.divided(batch, parts)
    return list(zip(parts, groups, strict=True))
