"""Progress of groups: commits of offsets, which are changes of the ledger."""

from __future__ import annotations

import logging
import time
from functools import partial

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.runtime.request import Request, conclude_all
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol import names
from cometmq.protocol.commands import (
    BeginGroup,
    Command,
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import NotOwner, OffsetIllegal
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import OffsetSet

log = logging.getLogger(__name__)


class Progress:
    """Handles commits, and answers how far groups have come.

    All commits of a round are answered together, once the ledger has what they changed.
    """

    def __init__(self, books: Books, members: Members) -> None:
        self._books = books
        self._offsets = books.offsets
        self._topics = books.topics
        self._configs = books.groups.configs
        self._members = members
        self._commits: list[Request] = []  # of this round

    def finish_round(self) -> None:
        """The commits of this round are answered when they are kept."""
        if self._commits:
            commits, self._commits = self._commits, []
            self._books.then(partial(conclude_all, commits))

    # --- commands ---

    def on_commit_offsets(self, command: CommitOffsets, request: Request) -> None:
        self._books.check_room()
        if command.member:  # first: the last commit of a group that is deleted does not make it
            self._check_owner(command)
        if command.group not in self._configs:
            self._members.config_of(command.group)
        for entry in command.offsets:
            check_place(self._topics, entry.topic, entry.queue_id, entry.queue_offset)
        if not command.member and command.group in self._members.groups:
            self._take_from_owners(command)
        for entry in command.offsets:
            self._commit(command, entry)
        self._commits.append(request)

    def on_begin_group(self, command: BeginGroup, request: Request) -> None:
        self._books.check_room()
        names.check_group(command.group)
        self._members.config_of(command.group)
        for entry in command.offsets:
            check_place(self._topics, entry.topic, entry.queue_id, entry.queue_offset)
        known = self._offsets.topics_of(command.group)
        for entry in command.offsets:
            if entry.topic not in known:
                place = command.group, entry.topic, entry.queue_id
                self._books.move(OffsetSet(*place, entry.queue_offset))
        self._commits.append(request)

    def on_fetch_offsets(self, command: FetchOffsets, request: Request) -> None:
        if not self._offsets.topics_of(command.group):  # stored offsets are shown for any name
            names.check_group(command.group)
        self._books.tell(request, partial(self._group_offsets, command))

    def _group_offsets(self, command: FetchOffsets) -> Command:
        return GroupOffsets(
            [
                QueueOffset(
                    queue.topic,
                    queue.queue_id,
                    self._offsets.get(command.group, queue.topic, queue.queue_id),
                )
                for queue in command.queues
            ]
        )

    def _check_owner(self, command: CommitOffsets) -> None:
        group = self._members.groups.get(command.group)
        if group is None or not group.touch(command.member, time.monotonic()):
            raise NotOwner(f"{command.member[:140]} is not a member of group {command.group}")
        for entry in command.offsets:
            key = QueueKey(entry.topic, entry.queue_id)
            group.check_commit(command.member, key, entry.epoch)

    def _take_from_owners(self, command: CommitOffsets) -> None:
        """An administrator moves offsets of owned queues only if that is what the command says.

        The owners' epochs end with it, and that is kept before the offsets are: their commits of
        what they have read so far cannot undo it.
        """
        group = self._members.groups[command.group]
        keys = [QueueKey(entry.topic, entry.queue_id) for entry in command.offsets]
        owned = [key for key in keys if group.owner_of(key)]
        if owned and not command.force:
            raise NotOwner(
                f"queue {owned[0].queue_id} of {owned[0].topic} belongs to "
                f"{group.owner_of(owned[0])}: end the members of group {command.group}, or force it"
            )
        self._members.renew(command.group, owned)

    def _commit(self, command: CommitOffsets, entry: QueueOffset) -> None:
        group, member = command.group, command.member
        topic, queue_id, queue_offset = entry.topic, entry.queue_id, entry.queue_offset
        before = self._offsets.get(group, topic, queue_id)
        if queue_offset == before or (queue_offset < before and member and not command.seek):
            return
        if queue_offset < before:
            text = "group %s: queue %d of %s goes back from %d to %d, as %s wants"
            whom = member or "an administrator"
            log.warning(text, group, queue_id, topic, before, queue_offset, whom)
        self._books.move(OffsetSet(group, topic, queue_id, queue_offset))


def check_place(topics: TopicBook, topic: str, queue_id: int, queue_offset: int) -> None:
    """Raise OffsetIllegal for what can be no group's place, TopicNotExist."""
    config = topics.config_of(topic)
    if not (0 <= queue_id < config.read_queue_nums or 0 <= queue_id < config.write_queue_nums):
        count = max(config.read_queue_nums, config.write_queue_nums)
        raise OffsetIllegal(f"queue {queue_id} of {topic}: it has {count}")
    if not 0 <= queue_offset <= INT64_MAX:
        raise OffsetIllegal(f"queue offset {queue_offset}: 0 to {INT64_MAX}")
