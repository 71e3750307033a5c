"""Fencing of sends: which attempts their sender gave up, and come too late if they come."""

from __future__ import annotations

from typing import Final

from cometmq.protocol.commands import Section
from cometmq.protocol.errors import Overtaken
from cometmq.protocol.names import LONG_TOPIC_MAX

FENCES_MAX: Final = 65_536  # queues of senders in trouble; the oldest are forgotten


class Fences:
    """A producer sends one batch after the other to a queue, but perhaps by another connection.

    One that it has given up may still lie in the earlier connection, and would be stored behind
    those that follow. So the next one that it sends has a fence, and what comes later with a lower
    number is refused. Nothing is kept of producers that never had to give up. A process that takes
    this one's place has other connections, and needs no fences of before.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str, int], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def let_pass(self, sender: int, section: Section) -> None:
        """Raises Overtaken if the sender has given it up."""
        if not section.number or len(section.topic) > LONG_TOPIC_MAX:
            return
        key = sender, section.topic, section.queue_id
        fence = self._numbers.get(key, 0)
        if section.number < fence:
            raise Overtaken(
                f"attempt {section.number} to send to {section.topic}/{section.queue_id} was given "
                f"up before it came: attempt {fence} is here already"
            )
        if section.fence:
            self._numbers.pop(key, None)  # to the end: the oldest come first
            self._numbers[key] = section.number
            if len(self._numbers) > FENCES_MAX:
                del self._numbers[next(iter(self._numbers))]
