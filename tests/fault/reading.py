"""What can be consumed of topics while a rig runs, read past all groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from fault.history import value_of

from cometmq.protocol.commands import PullMessages, PullResult, PullStatus
from cometmq.protocol.errors import TopicNotExist
from cometmq.shm.kernel.codec import Message

Pull = Callable[[PullMessages], tuple[PullResult, list[Message]]]


class Values:
    """Of each topic all values that were ever stored; read on from where the last look came to.

    Args:
        pull: asks a reader of the broker that runs now.
    """

    def __init__(self, pull: Pull) -> None:
        self._pull = pull
        self._seen: dict[str, set[str]] = defaultdict(set)
        self._next: dict[tuple[str, int], int] = defaultdict(int)

    def of(self, topic: str, queues: int) -> set[str]:
        """None of a topic that is not there."""
        seen = self._seen[topic]
        for queue in range(queues):
            while True:
                command = PullMessages(topic, queue, self._next[topic, queue], 2_000)
                try:
                    answer, messages = self._pull(command)
                except TopicNotExist:
                    return seen
                seen.update(value_of(message.body) for message in messages)
                self._next[topic, queue] = answer.next_queue_offset
                if answer.status != PullStatus.FOUND:
                    break
        return seen
