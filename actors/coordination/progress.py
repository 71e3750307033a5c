"""Progress of groups: commits of offsets, which are changes of the ledger."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.ledger import Action
from cometmq.actors.coordination.members import Members
from cometmq.actors.runtime.access import CommitRun
from cometmq.actors.runtime.request import Request, RequestRun
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol import names
from cometmq.protocol.commands import (
    PROTOCOL_VERSION,
    BeginGroup,
    Command,
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    QueueKey,
    QueueOffset,
    tag_of,
)
from cometmq.protocol.errors import (
    CometError,
    NotOwner,
    OffsetIllegal,
)
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import OffsetSet
from cometmq.shm.kernel._kernel import Commits, is_late, is_queue_of

log = logging.getLogger(__name__)


class Progress:
    """Takes commits, and tells how far groups have come.

    Nearly all commits change nothing but offsets: those the kernel makes, as they came, by the
    rules that it has for both of us. With whatever else there is to do, or to refuse, it leaves a
    commit to `on_commit_offsets`.

    Args:
        handle: carries out one request.
    """

    def __init__(
        self, books: Books, members: Members, handle: Callable[[Request], None]
    ) -> None:  # fmt: skip
        self._books = books
        self._offsets = books.offsets
        self._topics = books.topics
        self._configs = books.groups.configs
        self._members = members
        self._handle = handle
        self._plain = Commits(
            rows=books.offsets.table,
            topics=books.topics.configs,
            groups=books.groups.configs,
            members=members.groups,
            popped=books.popped.queues,
            queue_key=QueueKey,
            tag=tag_of(CommitOffsets),
            change_tag=tag_of(OffsetSet),
            version=PROTOCOL_VERSION,
            is_barred=names.is_internal_group,
        )
        self._commits: list[Action] = []  # of this round

    def finish_round(self) -> None:
        """The commits of this round are answered when they are kept."""
        if self._commits:
            commits, self._commits = self._commits, []
            self._books.then(partial(self._answer_commits, commits))

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
        self._commits.append(request.conclude)

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
        self._commits.append(request.conclude)

    def on_commit_run(self, command: CommitRun, request: RequestRun) -> None:
        at, count = 0, len(command.packets)
        while at < count:
            made = self._make_plain(command, at)
            if made:
                self._commits.append(partial(request.conclude_some, at, at + made))
                at += made
            if at < count:
                one = request.one(at)
                at += 1
                if one is not None:
                    self._handle(one)

    def _make_plain(self, command: CommitRun, start: int) -> int:
        """Make those that come next and are plain; how many."""
        room = self._books.room
        made, changes, moves = self._plain.take(
            command.packets, start, command.skip, room, time.monotonic()
        )
        if moves:
            self._books.moved(changes, moves)
        return made

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

    @staticmethod
    def _answer_commits(commits: Sequence[Action], error: CometError | None) -> None:
        for conclude in commits:
            conclude(error)

    def _check_owner(self, command: CommitOffsets) -> None:
        group = self._members.groups.get(command.group)
        if group is None or command.member not in group:
            raise NotOwner(f"{command.member[:140]} is not a member of group {command.group}")
        group.touch(command.member, time.monotonic())
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
        if is_late(before, queue_offset, bool(member), command.seek):
            return
        if queue_offset < before:
            text = "group %s: queue %d of %s goes back from %d to %d, as %s wants"
            whom = member or "an administrator"
            log.warning(text, group, queue_id, topic, before, queue_offset, whom)
        self._books.move(OffsetSet(group, topic, queue_id, queue_offset))


def check_place(topics: TopicBook, topic: str, queue_id: int, queue_offset: int) -> None:
    """Raise OffsetIllegal for what can be no group's place, TopicNotExist."""
    config = topics.config_of(topic)
    if not is_queue_of(config, queue_id):
        count = max(config.read_queue_nums, config.write_queue_nums)
        raise OffsetIllegal(f"queue {queue_id} of {topic}: it has {count}")
    if not 0 <= queue_offset <= INT64_MAX:
        raise OffsetIllegal(f"queue offset {queue_offset}: 0 to {INT64_MAX}")
