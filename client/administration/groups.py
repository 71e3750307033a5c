"""Consumer groups: who is in them, how far they have come, and moving their offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from cometmq.client.administration.brokers import Brokers
from cometmq.client.administration.descriptions import (
    GroupOverview,
    GroupQueueDescription,
    GroupReport,
    OffsetMove,
    SubscriptionDifference,
)
from cometmq.client.arguments import checked
from cometmq.client.questions import Position, resolve
from cometmq.protocol.commands import (
    BrokerEndpoints,
    ChangeMode,
    CloneOffsets,
    DeleteGroup,
    DescribeGroup,
    Done,
    FetchOffsets,
    GroupDescription,
    GroupList,
    GroupOffsets,
    GroupQueue,
    ListGroups,
    OffsetsCloned,
    OffsetsReset,
    PutGroup,
    QueueKey,
    QueueReset,
    ResetOffsets,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    GroupNotExist,
    NameIllegal,
    NotConfirmed,
    NotReachable,
    Refused,
    SystemBusy,
)
from cometmq.protocol.names import check_group, check_usable_group, refuse_internal_group
from cometmq.protocol.tags import in_words

GROUP_ROUNDS_MAX: Final = 8
RESETS_MAX: Final = 8_192  # queues in one command


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

        All messages of a queue in which the group has never committed count as unread. A group from
        a RocketMQ store is shown even if no client may use its name, such as `group@broadcast`.
        """
        members: set[str] = set()
        subscriptions: dict[str, str] = {}
        differences: dict[SubscriptionDifference, None] = {}  # a set in order
        settings: dict[str, Any] = {}
        queues: list[GroupQueueDescription] = []
        missing: Refused | None = None
        known = False
        for master in self._masters():
            try:
                found = self._group_of(master, group)
            except (GroupNotExist, NameIllegal) as error:
                missing = missing or error
                continue
            known = True
            members.update(found.members)
            subscriptions |= {
                each.topic: in_words(each.tags, each.sql) for each in found.subscriptions
            }
            for each in found.differences:
                differences[
                    SubscriptionDifference(each.member, each.topic, each.tags, each.usual_tags)
                ] = None
            settings = settings or _values(found.settings)
            queues += self._lags(master, found.queues)
        if not known and missing is not None:
            raise missing
        return GroupReport(
            group, sorted(members), subscriptions, queues, list(differences), settings
        )

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
    def create_group(self, group: str, settings: Mapping[str, Any] | None = None) -> None:
        """Create a group on all brokers. One that is there with these settings stays as it is.

        Args:
            settings: by RocketMQ's key, as `update_group` has them; else RocketMQ's defaults.

        Raises GroupExists if it is there with other settings, TooManyGroups.
        """
        check_usable_group(group)
        command = PutGroup(group, _texts(settings or {}))
        for master in self._masters():
            self._ask(master.coordinator, command, Done)

    @checked
    def update_group(self, group: str, settings: Mapping[str, Any]) -> None:
        """Change settings of a group, on all brokers that have it. Others stay as they are.

        Args:
            settings: by RocketMQ's key: consumeEnable, consumeBroadcastEnable,
                consumeMessageOrderly, retryQueueNums, retryMaxTimes, groupRetryPolicy,
                consumeTimeoutMinute, notifyConsumerIdsChangedEnable, attributes; and
                sameSubscriptions: members whose tags differ from the others' are refused.

        Without consumeEnable, members hear NoPermission: nothing is consumed until it is there.

        Raises GroupNotExist; BadRequest, which names the setting.
        """
        check_usable_group(group)
        self._where_known(PutGroup(group, _texts(settings), ChangeMode.UPDATE))

    @checked
    def delete_group(
        self, group: str, *, force: bool = False, keep_retry_topic: bool = False
    ) -> None:
        """Forget a group: its settings, members and offsets, and its retry topic.

        Its dead-letter topic keeps its messages. A group from a RocketMQ store can be deleted even
        if no client may use its name.

        Args:
            force: delete the group even if it has members. Members that keep running create it
                again.

        Raises GroupNotExist, GroupInUse.
        """
        refuse_internal_group(group)
        self._where_known(DeleteGroup(group, force, keep_retry_topic))

    def _where_known(self, command: PutGroup | DeleteGroup) -> None:
        """Have it done by all brokers that know the group; GroupNotExist if none does."""
        missing: list[Refused] = []
        masters = self._masters()
        for master in masters:
            try:
                self._ask(master.coordinator, command, Done)
            except (GroupNotExist, NameIllegal) as error:
                missing.append(error)
        if len(missing) == len(masters):
            raise missing[0]

    @checked
    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Position,
        queue_id: int | None = None,
        *,
        clamp: bool = False,
        force: bool = False,
    ) -> dict[tuple[str, int], int]:
        """Move a group's progress, forwards or back, also while members read.

        Members that own the queues go on at the new place, within a second; what they have read
        before and not committed yet is forgotten.

        Args:
            to: "earliest", "latest", a queue offset, or a datetime. An offset needs `queue_id`.
            queue_id: only there (on every broker); None = all queues.
            clamp: an offset outside of the queue stands for the nearer end.
            force: has no effect any more.

        Returns:
            The new progress by (broker, queue id).

        Raises:
            OffsetIllegal: the queue offset is outside of the queue; the text names both.
        """
        check_usable_group(group)
        if isinstance(to, int) and queue_id is None:
            raise ArgumentIllegal("an offset belongs to one queue: say which, by queue_id")
        moved: dict[tuple[str, int], int] = {}
        for each, keys in self._queues(topic, queue_id):
            if clamp and isinstance(to, int):
                places = [
                    max(reach.min_queue_offset, min(to, reach.max_queue_offset))
                    for reach in self._ranges(each, keys)
                ]
            else:
                places = resolve(self._routes, each, keys, to, self._timeout_s)
            resets = [
                QueueReset(key.topic, key.queue_id, place)
                for key, place in zip(keys, places, strict=True)
            ]
            for move in self._reset(each, group, resets):
                moved[each.broker, move.queue_id] = move.queue_offset
        return moved

    @checked
    def shift_offsets(
        self, group: str, topic: str, by: int, queue_id: int | None = None
    ) -> list[OffsetMove]:
        """Move a group's progress by so many messages in each queue, also while members read.

        What would lie outside of a queue is its nearer end; a queue in which the group has never
        committed stays as it is. Both show in what is returned.

        Args:
            by: on if positive, back if negative.
            queue_id: only there (on every broker); None = all queues.

        Raises OffsetIllegal if the group has never committed in any of the queues of a broker.
        """
        check_usable_group(group)
        moves: list[OffsetMove] = []
        for each, keys in self._queues(topic, queue_id):
            resets = [
                QueueReset(
                    key.topic, key.queue_id, by, reach.min_queue_offset, reach.max_queue_offset
                )
                for key, reach in zip(keys, self._ranges(each, keys), strict=True)
            ]
            moves += self._reset(each, group, resets, shift=True)
        return moves

    def _queues(
        self, topic: str, queue_id: int | None
    ) -> list[tuple[BrokerEndpoints, list[QueueKey]]]:
        """Of each broker the queues of a topic, or the one. Raises ArgumentIllegal for none."""
        found = []
        for each in self._serving(topic):
            numbers = range(each.info.read_queues)
            keys = [QueueKey(topic, number) for number in numbers if queue_id in (None, number)]
            if keys:
                found.append((each.endpoints, keys))
        if not found:
            raise ArgumentIllegal(f"topic {topic} has no queue {queue_id}")
        return found

    def _reset(
        self,
        master: BrokerEndpoints,
        group: str,
        resets: Sequence[QueueReset],
        *,
        shift: bool = False,
    ) -> Iterator[OffsetMove]:
        for first in range(0, len(resets), RESETS_MAX):
            command = ResetOffsets(group, list(resets[first : first + RESETS_MAX]), shift)
            for each in self._ask(master.coordinator, command, OffsetsReset).queues:
                yield OffsetMove(
                    master.broker,
                    each.topic,
                    each.queue_id,
                    each.before,
                    each.wanted,
                    each.queue_offset,
                )

    @checked
    def clone_offsets(
        self, group: str, target: str, topics: Sequence[str] | None = None, *, force: bool = False
    ) -> int:
        """Have another group go on where this one has come to; in how many queues.

        A target that is not there is created, with this group's settings. Where this group has
        never committed, the target stays where it is.

        Args:
            topics: in these only; None = all in which this group has committed, but its retries.
            force: although the target has members: they go on at the new place.

        Raises GroupNotExist, GroupInUse.
        """
        check_group(group)
        check_usable_group(target)
        queues, missing = 0, 0
        masters = self._masters()
        for master in masters:
            try:
                known = self._group_of(master, group).queues
            except GroupNotExist:
                missing += 1
                continue
            there = sorted({each.topic for each in known if each.queue_offset >= 0})
            wanted = [topic for topic in there if topics is None or topic in topics]
            command = CloneOffsets(group, target, wanted, force)
            queues += self._ask(master.coordinator, command, OffsetsCloned).queues
        if missing == len(masters):
            raise GroupNotExist(f"group {group} is unknown to every broker")
        return queues

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


def refusal_of(error: CometError) -> CometError:
    """Return the error of one row of a list; raise it if the broker could not be asked."""
    if isinstance(error, NotReachable | NotConfirmed):
        raise error
    return error


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Each as JSON."""
    try:
        return {key: msgspec.json.encode(value).decode() for key, value in settings.items()}
    except (TypeError, UnicodeError) as error:
        raise ArgumentIllegal(f"settings {dict(settings)!r:.200}: {error}") from None


def _values(settings: Mapping[str, str]) -> dict[str, Any]:
    return {key: msgspec.json.decode(text) for key, text in settings.items()}
