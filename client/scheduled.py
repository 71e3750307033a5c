"""Messages that wait for a time of their own: which there are, on all brokers."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from cometmq.client.administration.brokers import Brokers
from cometmq.client.arguments import checked
from cometmq.protocol.commands import BrokerEndpoints, PullMessages, PullResult
from cometmq.protocol.names import TIMER_TOPIC
from cometmq.protocol.timed import Handle
from cometmq.shm.kernel.codec import Message, decode, due_ms_of

PAGE_BYTES: Final = 1_048_576
PAGE_COUNT: Final = 1_024


class Scheduled(NamedTuple):
    """A message that waits."""

    due_ms: int
    broker: str
    message: Message

    @property
    def topic(self) -> str:
        """Where it will be delivered."""
        return self.message.properties.get("REAL_TOPIC", "")

    @property
    def recall_handle(self) -> str:
        """What `Producer.recall` takes."""
        return str(Handle(self.topic, self.broker, self.due_ms, self.message.msg_id))


class ScheduledAdmin(Brokers):
    """See Admin."""

    @checked
    def scheduled(self, topic: str | None = None, max_count: int = 1_024) -> list[Scheduled]:
        """Messages with a time of their own that wait to be delivered, the next first; at most so
        many. What has been recalled is left out.

        It reads all that is stored of such messages, delivered ones too.

        Args:
            topic: for that one alone.
        """
        return heapq.nsmallest(max_count, self._waiting(topic), key=lambda each: each.due_ms)

    def _waiting(self, topic: str | None) -> Iterator[Scheduled]:
        now = time.time_ns() // 1_000_000
        for ends in self._masters():
            recalled: set[str] = set()
            anew: dict[str, int] = {}  # how often those were that are stored anew on their way
            for each in self._stored(ends):
                properties = each.message.properties
                if "TIMER_DEL_UNIQKEY" in properties and each.due_ms > now:
                    recalled.add(properties["TIMER_DEL_UNIQKEY"])
                if times := _times_anew(properties):
                    key = each.message.msg_id
                    anew[key] = max(times, anew.get(key, 0))
            for each in self._stored(ends):
                properties, key = each.message.properties, each.message.msg_id
                if each.due_ms <= now or "TIMER_DEL_UNIQKEY" in properties:
                    continue
                if topic is not None and each.topic != topic:
                    continue
                if key in recalled or f"{each.topic}+{key}" in recalled:
                    continue
                if _times_anew(properties) >= anew.get(key, 0):
                    yield each

    def _stored(self, ends: BrokerEndpoints) -> Iterator[Scheduled]:
        """All, page by page."""
        at = 0
        channel = self._routes.channel(ends.readers[0], f"a reader of {ends.broker}")
        while True:
            command = PullMessages(TIMER_TOPIC, 0, at, PAGE_COUNT, PAGE_BYTES)
            page, payload = channel.ask(command, timeout_s=self._timeout_s)
            assert isinstance(page, PullResult)
            for message in decode(payload[0].buffer) if payload else ():
                yield Scheduled(due_ms_of(message.record), ends.broker, message)
            if page.next_queue_offset <= at:
                return
            at = page.next_queue_offset


def _times_anew(properties: Mapping[str, str]) -> int:
    """How often a record was stored anew."""
    times = properties.get("TIMER_ROLL_TIMES", "")
    return int(times) if times.isascii() and times.isdigit() and len(times) < 10 else 0
