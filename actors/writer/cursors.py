"""The next offset of each queue, and whether a client may send to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import TopicList, TopicsKnown
from cometmq.protocol.errors import (
    MessageIllegal,
    NoPermission,
    QueueNotExist,
    SystemBusy,
    TopicNotExist,
)
from cometmq.protocol.names import TOPIC_MAX, check_writable_topic, is_internal_topic
from cometmq.protocol.perm import WRITE
from cometmq.protocol.topics import TopicMirror
from cometmq.shm.derived.other_queues import topics_not_served
from cometmq.shm.kernel.codec import is_queue_name
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.live.queue_table import SLOTS_MAX, QueueTable

log = logging.getLogger(__name__)


class Cursors:
    """The writer's ends of all queues, one of each.

    A client's batch goes to `writable`, which refuses a queue that the topic does not have. An
    actor's record goes to `for_record`, which picks another queue in that case. Internal topics
    need not be known.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._long_names = settings.auto_message_version_on_topic_len
        self._topics = TopicMirror()
        self._store = settings.store_path_root_dir
        self._not_served: dict[str, str] = {}
        self._cursors: dict[tuple[str, int], QueueCursor] = {}
        self._queue_ids: dict[str, list[int]] = {}  # topic -> its queues that have a cursor
        self.on_new: Callable[[list[QueueCursor]], None] | None = None

    def __len__(self) -> int:
        return len(self._cursors)

    def __iter__(self) -> Iterator[QueueCursor]:
        return iter(self._cursors.values())

    # --- the broker's topics ---

    @property
    def topic_count(self) -> int:
        return len(self._topics.topics)

    def knows(self, topic: str) -> bool:
        return topic in self._topics.topics

    def begin(self, topics: TopicMirror) -> None:
        """What the coordinator has answered at the start; from now on it tells every change."""
        self._topics = topics
        for cursor in self._cursors.values():
            self._bar(cursor)

    def take(self, page: TopicList) -> TopicsKnown:
        for topic in self._topics.take(page):
            for queue_id in tuple(self._queue_ids.get(topic, ())):
                self._bar(self._cursors[topic, queue_id])
        return self._topics.known

    def _bar(self, cursor: QueueCursor) -> None:
        """Appenders of the queue have to ask, unless it may be sent to."""
        info = self._topics.topics.get(cursor.topic)
        cursor.barred = is_internal_topic(cursor.topic) or not (
            info is not None
            and info.perm & WRITE
            and 0 <= cursor.queue_id < max(info.read_queues, info.write_queues)
        )

    # --- queues ---

    def load(self, table: QueueTable) -> None:
        """Once everything is dispatched, the queue table says which offsets come next."""
        self._not_served = topics_not_served(self._store)
        for topic, queue_id in table.queues():
            found = table.range_of(topic, queue_id)
            assert found is not None
            with suppress(MessageIllegal):  # it can be read, but not be written with these settings
                self._add(self._cursor(topic, queue_id, found.max_queue_offset))

    def writable(self, topic: str, queue_id: int) -> QueueCursor:
        """Of a queue that a client may send to; else raises why it may not."""
        queue = self._cursors.get((topic, queue_id))
        if queue is None or queue.barred:
            self._check_writable(topic, queue_id)
            queue = self.of(topic, queue_id)
        return queue

    def _check_writable(self, topic: str, queue_id: int) -> None:
        check_writable_topic(topic)
        info = self._topics.topics.get(topic)
        if info is None:
            raise TopicNotExist(f"topic {topic} does not exist on this broker")
        queues = max(info.read_queues, info.write_queues)
        if not 0 <= queue_id < queues:
            raise QueueNotExist(f"queue {queue_id} of {topic}, which has {queues} queues")
        if not info.perm & WRITE:
            raise NoPermission(f"topic {topic} is not writable")

    def for_record(self, topic: str, queue_id: int, *, has_waited: bool) -> QueueCursor:
        """Return the queue for an actor's record: a retry, a delayed message, or the end of a
        transaction. The topic may have changed since its queue was chosen; then another queue is
        used, so that no record goes to a queue that no consumer reads.

        Args:
            has_waited: whether the record waited since its queue was chosen. If so, an unknown
                topic was deleted meanwhile; otherwise it may be about to be created.

        Raises the errors of `of`.
        """
        there = self._queue_of(topic, queue_id, has_waited)
        if there != queue_id:
            log.debug("queue %d of %s does not exist: using queue %d", queue_id, topic, there)
        return self.of(topic, there)

    def _queue_of(self, topic: str, queue_id: int, has_waited: bool) -> int:
        """Return that queue, or else one that the topic has for readers and for writers."""
        if queue_id <= 0 or is_internal_topic(topic):  # internal ones have what actors use
            return queue_id
        info = self._topics.topics.get(topic)
        if info is None:
            return 0 if has_waited else queue_id  # the topic has a queue 0 if it is created again
        queues = min(info.read_queues, info.write_queues) or info.read_queues or info.write_queues
        return queue_id % queues if queues else 0

    def of(self, topic: str, queue_id: int) -> QueueCursor:
        """Of any queue, new maybe; whichever thread asks, there is never a second one.

        Raises MessageIllegal for what can be no queue, SystemBusy for one too many.
        """
        found = self._cursors.get((topic, queue_id))
        if found is not None:
            return found
        if not is_queue_name(topic, queue_id):
            raise MessageIllegal(f"queue {queue_id} of {topic!r:.300}: there can be no such queue")
        if topic in self._not_served:
            raise MessageIllegal(f"topic {topic} is not served: {self._not_served[topic]}")
        if len(self._cursors) >= SLOTS_MAX:
            raise SystemBusy(
                f"queue {queue_id} of {topic} would be one more than the {SLOTS_MAX} queues "
                "that can hold messages"
            )
        return self._add(self._cursor(topic, queue_id, 0))

    def _add(self, cursor: QueueCursor) -> QueueCursor:
        kept = self._cursors.setdefault((cursor.topic, cursor.queue_id), cursor)
        if kept is cursor:
            self._queue_ids.setdefault(cursor.topic, []).append(cursor.queue_id)
            self._bar(cursor)
            if self.on_new is not None:
                self.on_new([cursor])
        return kept

    def _cursor(self, topic: str, queue_id: int, next_offset: int) -> QueueCursor:
        size = len(topic.encode())
        if size > TOPIC_MAX and not self._long_names:
            raise MessageIllegal(
                f"topic {topic} has {size} bytes, a record of the first version at most "
                f"{TOPIC_MAX}: set autoMessageVersionOnTopicLen=true"
            )
        return QueueCursor(topic, queue_id, next_offset, self._long_names)
