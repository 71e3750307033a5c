"""Topics and their queues: to create, change, describe and delete them, and to find offsets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Final

from cometmq.client.administration.brokers import Brokers, milliseconds
from cometmq.client.administration.descriptions import QueueDescription, TopicDescription
from cometmq.client.arguments import checked
from cometmq.protocol.commands import (
    BrokerEndpoints,
    ChangeMode,
    CreateTopic,
    CreateTopics,
    DeleteTopic,
    Done,
    FoundOffset,
    GetQueueRange,
    ListQueues,
    ListTopics,
    QueueKey,
    QueueList,
    QueueRange,
    SearchOffset,
    TopicInfo,
    TopicList,
    TopicRoute,
    TopicsCreated,
)
from cometmq.protocol.errors import (
    CometError,
    NotConfirmed,
    TopicNotExist,
    UnknownCommand,
    from_code,
)
from cometmq.protocol.names import check_writable_topic
from cometmq.protocol.topics import fetch_topics, in_commands

log = logging.getLogger(__name__)

BULK_S: Final = 30.0  # for some thousand topics at once
BULK_TRIES: Final = 3


class TopicAdmin(Brokers):
    """See Admin."""

    @checked
    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = 6,
        broker: str | None = None,
    ) -> None:
        """Create a topic. One that is there already with these settings stays as it is.

        Args:
            queues: on each broker.
            read_queues, write_queues: where they are to differ.
            perm: 4 = read, 2 = write, 6 = both.
            broker: only there; None = on all.

        Raises TopicExists if it is there with other settings, TooManyTopics.
        """
        check_writable_topic(topic)
        info = TopicInfo(topic, read_queues or queues, write_queues or queues, perm)
        for master in self._masters(broker):
            self._ask(master.coordinator, CreateTopic(info), TopicRoute)

    @checked
    def create_topics(
        self,
        topics: Iterable[str],
        queues: int = 8,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = 6,
        broker: str | None = None,
    ) -> list[tuple[str, CometError]]:
        """Create many topics, thousands in one request; those that were refused, and why.

        The arguments are those of `create_topic`. Of each request, at most the first 100 refusals
        are told.
        """
        wanted = []
        for topic in topics:
            check_writable_topic(topic)
            wanted.append(TopicInfo(topic, read_queues or queues, write_queues or queues, perm))
        refused: list[tuple[str, CometError]] = []
        for master in self._masters(broker):
            for infos in in_commands(wanted):
                answer = self._create_many(master.coordinator, infos)
                refused += [
                    (each.topic, from_code(each.code, each.text)) for each in answer.refused
                ]
        return refused

    def _create_many(self, address: str, infos: list[TopicInfo]) -> TopicsCreated:
        """Again if it is not confirmed: what is there already is no error."""
        command = CreateTopics(infos)
        for _ in range(BULK_TRIES - 1):
            with suppress(NotConfirmed):
                return self._routes.ask(address, command, TopicsCreated, BULK_S)
        return self._routes.ask(address, command, TopicsCreated, BULK_S)

    @checked
    def update_topic(
        self,
        topic: str,
        queues: int | None = None,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        broker: str | None = None,
        force: bool = False,
    ) -> None:
        """Change a topic. What is not given stays as it is.

        Args:
            queues: on each broker. To use fewer, lower `write_queues` first, and `read_queues`
                when the others have been read.
            read_queues, write_queues: where they are to differ.
            perm: 4 = read, 2 = write, 6 = both.
            broker: only there; None = on all that have the topic.
            force: although messages in the queues that nobody would read any more are unread.

        Raises TopicNotExist, MessagesUnread.
        """
        check_writable_topic(topic)
        info = TopicInfo(
            topic,
            read_queues or queues or 0,
            write_queues or queues or 0,
            -1 if perm is None else perm,
        )
        command = CreateTopic(info, ChangeMode.FORCE if force else ChangeMode.UPDATE)
        for each in self._serving(topic, broker):
            self._ask(each.endpoints.coordinator, command, TopicRoute)

    @checked
    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its offsets. Its records stay on the disk until they expire, and a
        topic of that name that is made later has those that are left."""
        check_writable_topic(topic)
        for each in self._serving(topic):
            self._ask(each.endpoints.coordinator, DeleteTopic(topic), Done)

    @checked
    def topics(self) -> list[str]:
        """The names of all topics."""
        return sorted({topic for _, topics in self._all_topics() for topic in topics})

    @checked
    def describe_topic(self, topic: str) -> TopicDescription:
        """Its queues and what is in them, also in those that it has no more. TopicNotExist."""
        routes = self._serving(topic)
        queues: list[QueueDescription] = []
        for each in routes:
            held = self._held_queues(each.endpoints, {topic: each.info}, topic)
            queues += _queues_of(each.endpoints.broker, each.info, held.get(topic, {}))
        return _description(topic, [each.info for each in routes], queues)

    @checked
    def describe_topics(self) -> list[TopicDescription]:
        """All topics, by name; in a few requests, however many there are."""
        infos: dict[str, list[TopicInfo]] = {}
        queues: dict[str, list[QueueDescription]] = {}
        for master, topics in self._all_topics():
            held = self._held_queues(master, topics)
            for topic, info in topics.items():
                infos.setdefault(topic, []).append(info)
                queues.setdefault(topic, []).extend(
                    _queues_of(master.broker, info, held.get(topic, {}))
                )
        return [_description(topic, infos[topic], queues[topic]) for topic in sorted(infos)]

    def _all_topics(self) -> Iterator[tuple[BrokerEndpoints, dict[str, TopicInfo]]]:
        """Every broker with its topics."""
        for master in self._masters():
            address = master.coordinator
            known = fetch_topics(partial(self._ask_topics, address))
            yield master, known.topics

    def _ask_topics(self, address: str, question: ListTopics) -> TopicList:
        return self._ask(address, question, TopicList)

    def _held_queues(
        self, endpoints: BrokerEndpoints, topics: Mapping[str, TopicInfo], topic: str = ""
    ) -> dict[str, dict[int, tuple[int, int]]]:
        """Return the offset ranges of all queues that ever held a message, by topic and queue id.

        An older broker reports only the queues that its topics have now.
        """
        try:
            return self._listed_queues(endpoints, topic)
        except UnknownCommand as error:
            log.debug("%s: %s", endpoints.broker, error)
        keys = [
            QueueKey(info.topic, queue_id)
            for info in topics.values()
            for queue_id in range(max(info.read_queues, info.write_queues))
        ]
        reaches = self._ranges(endpoints, keys)
        held: dict[str, dict[int, tuple[int, int]]] = {}
        for key, reach in zip(keys, reaches, strict=True):
            found = reach.min_queue_offset, reach.max_queue_offset
            held.setdefault(key.topic, {})[key.queue_id] = found
        return held

    def _listed_queues(
        self, endpoints: BrokerEndpoints, topic: str
    ) -> dict[str, dict[int, tuple[int, int]]]:
        held: dict[str, dict[int, tuple[int, int]]] = {}
        question = ListQueues(topic)
        while True:
            answer = self._ask(endpoints.readers[0], question, QueueList)
            for each in answer.queues:
                reach = each.min_queue_offset, each.max_queue_offset
                held.setdefault(each.topic, {})[each.queue_id] = reach
            if not answer.next:
                return held
            question = ListQueues(topic, answer.next)

    @checked
    def queue_range(self, topic: str, queue_id: int, *, broker: str | None = None) -> range:
        """The queue offsets that are there, oldest to newest."""
        endpoints = self._serving_queue(topic, queue_id, broker)
        return range(*self._range(endpoints, QueueKey(topic, queue_id)))

    @checked
    def search_offset(
        self, topic: str, queue_id: int, time: datetime | int, *, broker: str | None = None
    ) -> int:
        """The queue offset of the first message stored at a time or later.

        Args:
            time: a datetime, or milliseconds since 1970.
        """
        endpoints = self._serving_queue(topic, queue_id, broker)
        return self._search(endpoints, QueueKey(topic, queue_id), milliseconds(time))

    def _serving_queue(self, topic: str, queue_id: int, broker: str | None) -> BrokerEndpoints:
        for each in self._serving(topic, broker):
            count = max(each.info.read_queues, each.info.write_queues)
            if 0 <= queue_id < count:
                return each.endpoints
            if queue_id in self._held_queues(each.endpoints, {topic: each.info}, topic).get(
                topic, {}
            ):
                return each.endpoints
        raise TopicNotExist(f"queue {queue_id} of topic {topic} on {broker or 'any broker'}")

    def _range(self, endpoints: BrokerEndpoints, key: QueueKey) -> tuple[int, int]:
        command = GetQueueRange(key.topic, key.queue_id)
        found = self._ask(_reader(endpoints, key.queue_id), command, QueueRange)
        return found.min_queue_offset, found.max_queue_offset

    def _search(self, endpoints: BrokerEndpoints, key: QueueKey, timestamp_ms: int) -> int:
        command = SearchOffset(key.topic, key.queue_id, timestamp_ms)
        return self._ask(_reader(endpoints, key.queue_id), command, FoundOffset).queue_offset


def _queues_of(
    broker: str, info: TopicInfo, held: Mapping[int, tuple[int, int]]
) -> list[QueueDescription]:
    """A topic's queues, and those that hold messages although it has them no more."""
    count = max(info.read_queues, info.write_queues)
    ids = {*range(count), *(queue_id for queue_id, (low, high) in held.items() if low < high)}
    return [
        QueueDescription(broker, queue_id, *held.get(queue_id, (0, 0)), hidden=queue_id >= count)
        for queue_id in sorted(ids)
    ]


def _description(
    topic: str, infos: Sequence[TopicInfo], queues: list[QueueDescription]
) -> TopicDescription:
    return TopicDescription(
        topic,
        sum(info.read_queues for info in infos),
        sum(info.write_queues for info in infos),
        queues,
    )


def _reader(endpoints: BrokerEndpoints, queue_id: int) -> str:
    return endpoints.readers[queue_id % len(endpoints.readers)]
