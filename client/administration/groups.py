"""Consumer groups: who is in them, how far they have come, and moving their offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cometmq.client.administration.brokers import Brokers
from cometmq.client.administration.descriptions import (
    GroupOverview,
    GroupQueueDescription,
    GroupReport,
)
from cometmq.client.arguments import checked
from cometmq.client.questions import Position, resolve
from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    DescribeGroup,
    Done,
    FetchOffsets,
    GroupDescription,
    GroupList,
    GroupOffsets,
    GroupQueue,
    ListGroups,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import ArgumentIllegal, GroupNotExist, SystemBusy
from cometmq.protocol.names import check_group

GROUP_ROUNDS_MAX: Final = 8


class GroupAdmin(Brokers):
    """See Admin."""

    @checked
    def groups(self) -> list[GroupOverview]:
        """All groups, with the members that are there now and the topics they ever read."""
        members: dict[str, set[str]] = {}
        topics: dict[str, set[str]] = {}
        for master in self._masters():
            question = ListGroups(paged=True)
            while True:
                answer = self._ask(master.coordinator, question, GroupList)
                for each in answer.groups:
                    members.setdefault(each.group, set()).update(each.members)
                    topics.setdefault(each.group, set()).update(each.topics)
                if not answer.next_group:
                    break
                question = ListGroups(answer.next_group, answer.next_entry, paged=True)
        return [
            GroupOverview(name, sorted(members[name]), sorted(topics[name]))
            for name in sorted(members)
        ]

    @checked
    def describe_group(self, group: str) -> GroupReport:
        """A group's members, and how far it has come in each queue. Raises GroupNotExist.

        Messages of a queue in which the group has never committed are unread, all of them.
        """
        check_group(group)
        members: set[str] = set()
        subscriptions: dict[str, str] = {}
        queues: list[GroupQueueDescription] = []
        missing: GroupNotExist | None = None
        known = False
        for master in self._masters():
            try:
                found = self._group_of(master, group)
            except GroupNotExist as error:
                missing = error
                continue
            known = True
            members.update(found.members)
            subscriptions |= {each.topic: each.tags for each in found.subscriptions}
            queues += self._lags(master, found.queues)
        if not known and missing is not None:
            raise missing
        return GroupReport(group, sorted(members), subscriptions, queues)

    def _group_of(self, master: BrokerEndpoints, group: str) -> GroupDescription:
        """All pages of what a broker knows of a group; from the start again if it changes."""
        for _ in range(GROUP_ROUNDS_MAX):
            whole = page = self._ask(
                master.coordinator, DescribeGroup(group, paged=True), GroupDescription
            )
            while page.next_entry and page.entries == whole.entries:
                question = DescribeGroup(group, page.next_entry, paged=True)
                page = self._ask(master.coordinator, question, GroupDescription)
                whole.members.extend(page.members)
                whole.subscriptions.extend(page.subscriptions)
                whole.queues.extend(page.queues)
            if not page.next_entry:
                return whole
        raise SystemBusy(f"group {group} changes all the time: try again")

    def _lags(
        self, master: BrokerEndpoints, queues: Sequence[GroupQueue]
    ) -> Iterator[GroupQueueDescription]:
        keys = [QueueKey(each.topic, each.queue_id) for each in queues]
        for each, reach in zip(queues, self._ranges(master, keys), strict=True):
            first, end = reach.min_queue_offset, reach.max_queue_offset
            lag = max(0, end - max(first, each.queue_offset))
            yield GroupQueueDescription(
                master.broker,
                each.topic,
                each.queue_id,
                each.queue_offset,
                end,
                lag,
                each.member,
            )

    @checked
    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Position,
        queue_id: int | None = None,
        *,
        force: bool = False,
    ) -> dict[tuple[str, int], int]:
        """Move a group's progress, forwards or back.

        Args:
            to: "earliest", "latest", a queue offset, or a datetime. An offset needs `queue_id`.
            queue_id: only there (on every broker); None = all queues.
            force: also of queues that members of the group own now. These go on at the new place;
                what they have read and not committed yet is forgotten.

        Returns:
            The new progress by (broker, queue id).

        Raises:
            NotOwner: a member owns one of the queues, and `force` was not asked for. On that broker
                nothing has been moved.
            OffsetIllegal: the queue offset is outside of the queue.
        """
        check_group(group)
        if isinstance(to, int) and queue_id is None:
            raise ArgumentIllegal("an offset belongs to one queue: say which, by queue_id")
        moved: dict[tuple[str, int], int] = {}
        for each in self._serving(topic):
            keys = [
                QueueKey(topic, number)
                for number in range(each.info.read_queues)
                if queue_id in (None, number)
            ]
            places = resolve(self._routes, each.endpoints, keys, to, self._timeout_s)
            offsets = [
                QueueOffset(key.topic, key.queue_id, place)
                for key, place in zip(keys, places, strict=True)
            ]
            if offsets:
                command = CommitOffsets(group, offsets, force=force)
                self._ask(each.endpoints.coordinator, command, Done)
            moved |= {(each.endpoints.broker, new.queue_id): new.queue_offset for new in offsets}
        if not moved:
            raise ArgumentIllegal(f"topic {topic} has no queue {queue_id}")
        return moved

    @checked
    def committed(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """A group's committed progress by (broker, queue id); -1 = it never committed there."""
        check_group(group)
        found: dict[tuple[str, int], int] = {}
        for each in self._serving(topic):
            keys = [QueueKey(topic, queue_id) for queue_id in range(each.info.read_queues)]
            command = FetchOffsets(group, keys)
            for entry in self._ask(each.endpoints.coordinator, command, GroupOffsets).offsets:
                found[each.endpoints.broker, entry.queue_id] = entry.queue_offset
        return found
