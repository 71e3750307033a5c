"""Moves of offsets by an administrator, while members read: to other places, to another group.

The epochs of the owners end with it, and that is kept before the offsets are: so no commit of what
they have read so far can undo it, and they take the queues on anew, at the new place.
"""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.groups import check_unused
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.poppers import Poppers
from cometmq.actors.coordination.progress import check_place
from cometmq.actors.runtime.request import Request
from cometmq.protocol import names
from cometmq.protocol.commands import (
    CloneOffsets,
    Command,
    OffsetsCloned,
    OffsetsReset,
    QueueKey,
    QueueReset,
    ResetOffsets,
    ResetQueue,
)
from cometmq.protocol.errors import BadRequest, CometError, GroupNotExist, OffsetIllegal
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import GroupPut, OffsetSet

log = logging.getLogger(__name__)


class Moves:
    """Resets and clones offsets of groups."""

    def __init__(self, books: Books, members: Members, poppers: Poppers) -> None:
        self._books = books
        self._offsets = books.offsets
        self._members = members
        self._poppers = poppers

    def on_reset_offsets(self, command: ResetOffsets, request: Request) -> None:
        group = command.group
        names.check_group(group)
        self._books.check_room()
        if len({(each.topic, each.queue_id) for each in command.queues}) < len(command.queues):
            raise BadRequest(f"a queue stands twice in a reset of group {group}")
        moved = [self._reset(group, each, shift=command.shift) for each in command.queues]
        if command.shift and all(each.before < 0 for each in moved):
            raise OffsetIllegal(
                f"group {group} has not committed in any of these queues: there is nothing to "
                "shift from"
            )
        if all(each.queue_offset < 0 for each in moved):
            raise BadRequest(f"a reset of group {group} names no queue")
        self._members.config_of(group)
        changes = [
            OffsetSet(group, each.topic, each.queue_id, each.queue_offset)
            for each in moved
            if each.queue_offset >= 0
        ]
        self._move(changes)
        log.warning("group %s: %d queues are reset, as an administrator wants", group, len(changes))
        self._books.then(partial(_answer, request, OffsetsReset(moved)))

    def on_clone_offsets(self, command: CloneOffsets, request: Request) -> None:
        group, target = command.group, command.target
        names.check_group(group)
        names.check_group(target)
        self._books.check_room()
        if group == target:
            raise BadRequest(f"group {group} cannot be cloned to itself")
        config = self._books.groups.configs.get(group)
        known = self._offsets.topics_of(group)
        if config is None and not known:
            raise GroupNotExist(f"group {group} is unknown to this broker")
        check_unused(self._poppers, target, by_force=command.force)
        own_retries = f"{names.RETRY_PREFIX}{group}"
        changes = [
            OffsetSet(target, topic, queue_id, self._offsets.get(group, topic, queue_id))
            for topic in sorted(known.intersection(command.topics) - {own_retries})
            for queue_id in self._offsets.queue_ids(group, topic)
        ]
        if target not in self._books.groups.configs:
            self._books.check_new_group(target)
            config = config or self._members.config_of(group)
            self._books.change(GroupPut(msgspec.structs.replace(config, group_name=target)))
            log.info("group %s is created, with the settings of %s", target, group)
        self._move(changes)
        text = "group %s: %d queues are where those of group %s are, as an administrator wants"
        log.warning(text, target, len(changes), group)
        self._books.then(partial(_answer, request, OffsetsCloned(len(changes))))

    def _reset(self, group: str, each: QueueReset, *, shift: bool) -> ResetQueue:
        """What becomes of a queue. Raises OffsetIllegal."""
        before = self._offsets.get(group, each.topic, each.queue_id)
        wanted = after = each.queue_offset
        if shift:
            wanted = max(0, min(before + each.queue_offset, INT64_MAX)) if before >= 0 else -1
            low, high = each.min_queue_offset, each.max_queue_offset
            after = max(low, min(wanted, high)) if before >= 0 else -1
        check_place(
            self._books.topics, each.topic, each.queue_id, max(after, 0) if shift else after
        )
        return ResetQueue(each.topic, each.queue_id, before, wanted, after)

    def _move(self, changes: list[OffsetSet]) -> None:
        """Of one group: fence the owners off, then move."""
        if changes:
            queues = [QueueKey(each.topic, each.queue_id) for each in changes]
            self._members.renew(changes[0].group, queues)
        for change in changes:
            self._books.move(change)


def _answer(request: Request, answer: Command, error: CometError | None) -> None:
    if error is None:
        request.reply(answer)
    else:
        request.fail(error)
