"""Looking after topics and groups."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from cometmq.client.routes import ASK_S, Answer, Routes, broker_routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    Command,
    CommitOffsets,
    CreateTopic,
    DeletedSegments,
    DeleteSegments,
    DeleteTopic,
    DescribeGroup,
    Done,
    DropHold,
    FetchOffsets,
    FoundOffset,
    GetMessageAt,
    GetQueueRange,
    GroupDescription,
    GroupList,
    GroupOffsets,
    Hold,
    HoldList,
    ListGroups,
    ListHolds,
    ListTopics,
    PlaceHold,
    PullResult,
    QueryMessages,
    QueryResult,
    QueueKey,
    QueueOffset,
    QueueRange,
    SearchOffset,
    TopicInfo,
    TopicList,
    TopicRoute,
)
from cometmq.protocol.errors import GroupNotExist, MessageNotFound, TopicNotExist
from cometmq.protocol.names import check_group, check_topic, check_writable_topic
from cometmq.shm._kernel import Message, decode
from cometmq.shm.index_file import TIME_MAX, carries

Position = str | int | datetime

ID_DIGITS: Final = {32: 4, 56: 16}  # hex digits of an offset message id -> bytes of its address


class QueueDescription(NamedTuple):
    broker: str
    queue_id: int
    min_queue_offset: int  # of the oldest message that is still there
    max_queue_offset: int  # of the next message to come


class TopicDescription(NamedTuple):
    topic: str
    read_queues: int  # of all brokers
    write_queues: int
    queues: list[QueueDescription]

    @property
    def message_count(self) -> int:
        """Messages that are still there."""
        return sum(each.max_queue_offset - each.min_queue_offset for each in self.queues)


class GroupQueueDescription(NamedTuple):
    broker: str
    topic: str
    queue_id: int
    queue_offset: int  # committed; -1 = never
    max_queue_offset: int
    lag: int  # messages to come; those without a matching tag count as well
    member: str  # owner, or empty


class GroupOverview(NamedTuple):
    group: str
    members: list[str]
    topics: list[str]


class GroupReport(NamedTuple):
    group: str
    members: list[str]
    subscriptions: dict[str, str]  # topic -> tag expression
    queues: list[GroupQueueDescription]

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.queues)


class DeletedDescription(NamedTuple):
    broker: str
    segments: list[int]  # physical offsets at which they began, oldest first
    segment_bytes: int
    min_physical_offset: int  # the log begins here now
    held_by: list[str]  # holds that keep the oldest segment that is left


class HoldDescription(NamedTuple):
    broker: str
    name: str
    physical_offset: int  # nothing at or above it is deleted
    expires: datetime | None  # None: until it is dropped
    overridden: bool  # the disk was too full: some of it is gone


class Admin:
    """Topics, groups, offsets and single messages, on all brokers of a name server.

        with Admin("127.0.0.1:9876") as admin:
            admin.create_topic("orders", queues=16)
            print(admin.describe_group("billing").lag)

    Threads may share it. Every method asks and waits, at most `timeout_s` for each answer, and
    raises NotReachable or NotConfirmed when none comes. What concerns several brokers is done one
    by one: when it raises, some may have done it; doing it again does no harm.

    Args:
        name_server: "host:port", a ZeroMQ address, or several (a list, or separated by ";").
        timeout_s: for one answer.
    """

    def __init__(self, name_server: str | Iterable[str], *, timeout_s: float = ASK_S) -> None:
        self._routes = Routes(name_server)
        self._timeout_s = timeout_s

    # --- topics ---

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
        """Create a topic, or change it.

        Args:
            queues: on each broker.
            read_queues, write_queues: where they are to differ. To use fewer queues, lower
                `write_queues` first, and `read_queues` when the others have been read.
            perm: 4 = read, 2 = write, 6 = both.
            broker: only there; None = on all.
        """
        check_writable_topic(topic)
        info = TopicInfo(topic, read_queues or queues, write_queues or queues, perm)
        for master in self._masters(broker):
            self._ask(master.coordinator, CreateTopic(info), TopicRoute)

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its offsets. Its records stay on the disk until they expire."""
        check_topic(topic)
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            self._ask(each.endpoints.coordinator, DeleteTopic(topic), Done)

    def topics(self) -> list[str]:
        """The names of all topics."""
        found: set[str] = set()
        for master in self._masters():
            answer = self._ask(master.coordinator, ListTopics(), TopicList)
            found.update(info.topic for info in answer.topics)
        return sorted(found)

    def describe_topic(self, topic: str) -> TopicDescription:
        """Its queues and what is in them. Raises TopicNotExist."""
        routes = broker_routes(self._routes.find(topic, self._timeout_s))
        queues = [
            QueueDescription(each.endpoints.broker, queue_id, *self._range(each.endpoints, key))
            for each in routes
            for queue_id in range(max(each.info.read_queues, each.info.write_queues))
            for key in (QueueKey(topic, queue_id),)
        ]
        return TopicDescription(
            topic,
            sum(each.info.read_queues for each in routes),
            sum(each.info.write_queues for each in routes),
            queues,
        )

    def queue_range(self, topic: str, queue_id: int, *, broker: str | None = None) -> range:
        """The queue offsets that are there, oldest to newest."""
        endpoints = self._serving(topic, queue_id, broker)
        return range(*self._range(endpoints, QueueKey(topic, queue_id)))

    def search_offset(
        self, topic: str, queue_id: int, time: datetime | int, *, broker: str | None = None
    ) -> int:
        """The queue offset of the first message stored at a time or later.

        Args:
            time: a datetime, or milliseconds since 1970.
        """
        endpoints = self._serving(topic, queue_id, broker)
        return self._search(endpoints, QueueKey(topic, queue_id), _milliseconds(time))

    # --- groups ---

    def groups(self) -> list[GroupOverview]:
        """All groups, with the members that are there now and the topics they ever read."""
        found: dict[str, GroupOverview] = {}
        for master in self._masters():
            for each in self._ask(master.coordinator, ListGroups(), GroupList).groups:
                known = found.get(each.group, GroupOverview(each.group, [], []))
                found[each.group] = GroupOverview(
                    each.group,
                    sorted({*known.members, *each.members}),
                    sorted({*known.topics, *each.topics}),
                )
        return [found[name] for name in sorted(found)]

    def describe_group(self, group: str) -> GroupReport:
        """A group's members, and how far it has come in each queue. Raises GroupNotExist."""
        check_group(group)
        members: set[str] = set()
        subscriptions: dict[str, str] = {}
        queues: list[GroupQueueDescription] = []
        missing: GroupNotExist | None = None
        known = False
        for master in self._masters():
            try:
                found = self._ask(master.coordinator, DescribeGroup(group), GroupDescription)
            except GroupNotExist as error:
                missing = error
                continue
            known = True
            members.update(found.members)
            subscriptions |= {each.topic: each.tags for each in found.subscriptions}
            for each in found.queues:
                first, end = self._range(master, QueueKey(each.topic, each.queue_id))
                lag = max(0, end - max(first, each.queue_offset))
                queues.append(
                    GroupQueueDescription(
                        master.broker,
                        each.topic,
                        each.queue_id,
                        each.queue_offset,
                        end,
                        lag,
                        each.member,
                    )
                )
        if not known and missing is not None:
            raise missing
        return GroupReport(group, sorted(members), subscriptions, queues)

    def reset_offsets(
        self, group: str, topic: str, to: Position, queue_id: int | None = None
    ) -> dict[tuple[str, int], int]:
        """Move a group's progress, forwards or back. Best while the group has no members.

        A running consumer goes on where it is and later commits over it; it can `seek`.

        Args:
            to: "begin", "end", a queue offset, or a datetime. An offset needs `queue_id`.
            queue_id: only there (on every broker); None = all queues.

        Returns:
            The new progress by (broker, queue id).
        """
        check_group(group)
        if isinstance(to, int) and queue_id is None:
            raise ValueError("an offset belongs to one queue: say which, by queue_id")
        moved: dict[tuple[str, int], int] = {}
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            offsets = [
                QueueOffset(topic, number, self._resolve(each.endpoints, topic, number, to))
                for number in range(each.info.read_queues)
                if queue_id in (None, number)
            ]
            if offsets:
                self._ask(each.endpoints.coordinator, CommitOffsets(group, offsets), Done)
            moved |= {(each.endpoints.broker, new.queue_id): new.queue_offset for new in offsets}
        if not moved:
            raise ValueError(f"topic {topic} has no queue {queue_id}")
        return moved

    def committed(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """A group's committed progress by (broker, queue id); -1 = it never committed there."""
        check_group(group)
        found: dict[tuple[str, int], int] = {}
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            keys = [QueueKey(topic, queue_id) for queue_id in range(each.info.read_queues)]
            command = FetchOffsets(group, keys)
            for entry in self._ask(each.endpoints.coordinator, command, GroupOffsets).offsets:
                found[each.endpoints.broker, entry.queue_id] = entry.queue_offset
        return found

    # --- brokers and messages ---

    def brokers(self) -> list[BrokerEndpoints]:
        """All brokers that the name server knows, and where their processes listen."""
        return self._routes.brokers(self._timeout_s)

    def get_message(
        self, message_id: str, *, topic: str | None = None, broker: str | None = None
    ) -> Message:
        """The message of an id.

        Args:
            message_id: an offset message id, RocketMQ's hex of host, port and physical offset (the
                host in it is what the broker calls itself; among several brokers each is asked
                until one has the very message); with `topic` also a `msg_id`, the UNIQ_KEY that
                its producer gave it.
            topic: of the message.

        Raises MessageNotFound, ValueError for what can be no id.
        """
        try:
            _, physical_offset = parse_offset_msg_id(message_id)
        except ValueError:
            if topic is None:
                raise
        else:
            message = self._message_at(message_id.upper(), physical_offset, broker)
            if message is not None:
                return message
        if topic is None:
            raise MessageNotFound(
                f"no broker has a message {message_id}; if its producer made that id, say in which "
                "topic it is"
            )
        found = self.query_messages(topic, message_id, unique=True, max_count=1, broker=broker)
        if not found:
            raise MessageNotFound(f"topic {topic} has no message {message_id}")
        return found[0]

    def _message_at(self, wanted: str, physical_offset: int, broker: str | None) -> Message | None:
        for master in self._masters(broker):
            channel = self._routes.channel(master.readers[0], f"a reader of {master.broker}")
            try:
                answer, payload = channel.ask(
                    GetMessageAt(physical_offset), timeout_s=self._timeout_s
                )
            except MessageNotFound:
                continue
            if isinstance(answer, PullResult) and payload:
                for message in decode(payload[0].buffer):
                    if message.offset_msg_id == wanted:
                        return message
        return None

    def query_messages(
        self,
        topic: str,
        key: str,
        *,
        begin: datetime | int | None = None,
        end: datetime | int | None = None,
        max_count: int = 64,
        unique: bool = False,
        broker: str | None = None,
    ) -> list[Message]:
        """The newest messages of a topic that have a key, oldest first.

        What was sent a moment ago may not be found yet: keys are indexed behind the messages.

        Args:
            key: one of the message's keys.
            begin, end: store times, both inclusive: datetimes or milliseconds. None: any.
            max_count: of all brokers; one broker's answer holds at most 1,024, or 4 MiB of them.
            unique: `key` is the message's UNIQ_KEY, which its producer gave it.
            broker: only there; None = on all that have the topic.
        """
        command = QueryMessages(
            topic,
            key,
            max_count,
            0 if begin is None else _milliseconds(begin),
            TIME_MAX if end is None else _milliseconds(end),
            unique,
        )
        found: list[Message] = []
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            if broker in (None, each.endpoints.broker):
                found += self._query(each.endpoints, command)
        found.sort(key=lambda message: message.store_timestamp_ms)  # stable: of one broker's order
        return found[-max_count:] if max_count > 0 else []

    def _query(self, endpoints: BrokerEndpoints, command: QueryMessages) -> list[Message]:
        channel = self._routes.channel(endpoints.readers[0], f"a reader of {endpoints.broker}")
        answer, payload = channel.ask(command, timeout_s=self._timeout_s)
        if not isinstance(answer, QueryResult) or not payload:
            return []
        return [
            message
            for message in decode(payload[0].buffer)
            if carries(message, command.topic, command.key, unique=command.unique)
        ]

    # --- cleaning ---

    def delete_expired(self, *, broker: str | None = None) -> list[DeletedDescription]:
        """Delete what fileReservedTime allows now, whatever the hour; what went, by broker.

        Args:
            broker: only there; None = on all.
        """
        found = []
        for master in self._masters(broker):
            gone = self._ask(master.coordinator, DeleteSegments(), DeletedSegments)
            found.append(DeletedDescription(master.broker, *msgspec.structs.astuple(gone)))
        return found

    def place_hold(
        self,
        name: str,
        physical_offset: int = 0,
        *,
        lease_s: float | None = None,
        broker: str | None = None,
        store_id: str = "",
    ) -> list[HoldDescription]:
        """Have nothing at or above a physical offset deleted; the holds there are now.

        A hold survives restarts of the broker. Placing it again moves it and renews its lease.
        Only a disk over diskSpaceCleanForciblyRatio overrides it, and then a line in the broker's
        log says so.

        Args:
            physical_offset: below the log's beginning: from that beginning on.
            lease_s: it ends by itself after that time; None = it stays until it is dropped.
            broker: only there; None = on all. An offset means the same on one broker only.
            store_id: what `cometmq.store` in the store's folder says: a broker that has another
                store refuses. "" = it is not asked.
        """
        lease_ms = 0 if lease_s is None else max(1, int(lease_s * 1000))
        return self._on_holds(PlaceHold(name, physical_offset, lease_ms, store_id), broker)

    def drop_hold(self, name: str, *, broker: str | None = None) -> list[HoldDescription]:
        """End a hold; those that are left. Nothing happens if there is none of that name."""
        return self._on_holds(DropHold(name), broker)

    def holds(self, *, broker: str | None = None) -> list[HoldDescription]:
        """The holds of a broker, or of all."""
        return self._on_holds(ListHolds(), broker)

    def _on_holds(self, command: Command, broker: str | None) -> list[HoldDescription]:
        return [
            _described(master.broker, hold, answer.min_physical_offset)
            for master in self._masters(broker)
            for answer in (self._ask(master.coordinator, command, HoldList),)
            for hold in answer.holds
        ]

    # --- helpers ---

    def _masters(self, broker: str | None = None) -> list[BrokerEndpoints]:
        masters = self._routes.masters(self._timeout_s)
        found = [each for each in masters if broker in (None, each.broker)]
        if not found:
            names = ", ".join(each.broker for each in masters)
            raise ValueError(f"no broker {broker!r}: there are {names}")
        return found

    def _serving(self, topic: str, queue_id: int, broker: str | None) -> BrokerEndpoints:
        for each in broker_routes(self._routes.find(topic, self._timeout_s)):
            count = max(each.info.read_queues, each.info.write_queues)
            if broker in (None, each.endpoints.broker) and 0 <= queue_id < count:
                return each.endpoints
        raise TopicNotExist(f"queue {queue_id} of topic {topic} on {broker or 'any broker'}")

    def _range(self, endpoints: BrokerEndpoints, key: QueueKey) -> tuple[int, int]:
        command = GetQueueRange(key.topic, key.queue_id)
        found = self._ask(_reader(endpoints, key.queue_id), command, QueueRange)
        return found.min_queue_offset, found.max_queue_offset

    def _search(self, endpoints: BrokerEndpoints, key: QueueKey, timestamp_ms: int) -> int:
        command = SearchOffset(key.topic, key.queue_id, timestamp_ms)
        return self._ask(_reader(endpoints, key.queue_id), command, FoundOffset).queue_offset

    def _resolve(
        self, endpoints: BrokerEndpoints, topic: str, queue_id: int, position: Position
    ) -> int:
        key = QueueKey(topic, queue_id)
        if isinstance(position, int):
            return position
        if isinstance(position, datetime):
            return self._search(endpoints, key, _milliseconds(position))
        if position not in ("begin", "end"):
            raise ValueError(f"{position!r}: 'begin', 'end', an offset or a datetime")
        return self._range(endpoints, key)[position == "end"]

    def _ask(self, endpoint: str, command: Command, kind: type[Answer]) -> Answer:
        return self._routes.ask(endpoint, command, kind, self._timeout_s)

    def close(self) -> None:
        """Let go of all lines. May be called twice."""
        self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _reader(endpoints: BrokerEndpoints, queue_id: int) -> str:
    return endpoints.readers[queue_id % len(endpoints.readers)]


def _described(broker: str, hold: Hold, log_min: int) -> HoldDescription:
    expires = datetime.fromtimestamp(hold.expires_ms / 1000) if hold.expires_ms else None
    overridden = hold.physical_offset < log_min
    return HoldDescription(broker, hold.name, hold.physical_offset, expires, overridden)


def _milliseconds(time: datetime | int) -> int:
    return int(time.timestamp() * 1000) if isinstance(time, datetime) else time


def parse_offset_msg_id(text: str) -> tuple[str, int]:
    """("ip:port", physical offset) of an offset message id."""
    host_bytes = ID_DIGITS.get(len(text))
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        host_bytes = None
    if host_bytes is None:
        raise ValueError(f"{text[:80]!r} is no offset message id: 32 or 56 hex digits")
    address = ipaddress.ip_address(raw[:host_bytes])
    port = int.from_bytes(raw[host_bytes : host_bytes + 4], "big")
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{port}", int.from_bytes(raw[host_bytes + 4 :], "big")
