"""What is told of consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.coordination.poppers import Poppers
from cometmq.actors.runtime.service import Request
from cometmq.actors.tables.group_pages import page_of_group, page_of_groups
from cometmq.actors.tables.group_settings import settings_of
from cometmq.protocol import names
from cometmq.protocol.commands import (
    Command,
    DescribeGroup,
    GroupDescription,
    GroupInfo,
    GroupQueue,
    ListGroups,
)
from cometmq.protocol.errors import (
    BadRequest,
    GroupNotExist,
)
from cometmq.shm.live.queue_table import QueueRange

DIFFERENCES_MAX: Final = 50  # that are named

Stored = Callable[[str], Mapping[int, QueueRange]]


class Views:
    """Lists and describes groups.

    Args:
        stored: the queues of a topic that ever held a message, and what they hold. Raises
            ServiceNotAvailable while that is not known.
    """

    def __init__(self, books: Books, members: Members, poppers: Poppers, stored: Stored) -> None:
        self._books = books
        self._topics = books.topics
        self._members = members
        self._poppers = poppers
        self._offsets = books.offsets
        self._configs = books.groups.configs
        self._stored = stored

    def on_list_groups(self, command: ListGroups, _request: Request) -> Command:
        known = self._members.known() | self._offsets.groups()
        found = page_of_groups(
            sorted(name for name in known if name >= command.group),
            self._overview,
            command.entry,
        )
        if found.next_group and not command.paged:
            raise BadRequest(
                f"{len(known)} groups do not fit into one answer, and this client does not ask "
                "for pages: it is too old for this broker"
            )
        return found

    def _overview(self, name: str) -> GroupInfo:
        return GroupInfo(name, self._poppers.members_of(name), self._topics_of(name))

    def _topics_of(self, group: str) -> list[str]:
        """The topics that the group has committed in, or that a member ever asked for."""
        known = self._members.groups.get(group)
        now = known.topics() if known else ()
        return sorted(
            self._offsets.topics_of(group).union(now, self._members.subscribed.get(group, ()))
        )

    def on_describe_group(self, command: DescribeGroup, request: Request) -> None:
        if not self.is_known(command.group):  # a known group is shown, whatever its name
            names.check_group(command.group)
        self._books.tell(request, partial(self._describe_group, command))

    def is_known(self, name: str) -> bool:
        """Return whether a group has a configuration, members or offsets.

        It may have members or offsets only, since the file of an older store may lack it. Offsets
        from RocketMQ's store may belong to groups with names that clients may not use.
        """
        return name in self._members.known() or bool(self._offsets.topics_of(name))

    def _describe_group(self, command: DescribeGroup) -> Command:
        name = command.group
        group = self._members.groups.get(name)
        topics = self._topics_of(name)
        if group is None and not topics and not self.is_known(name):
            raise GroupNotExist(f"group {name} is unknown to this broker")
        found = page_of_group(
            name,
            self._poppers.members_of(name),
            (group.subscriptions() if group else []) + self._poppers.subscriptions(name),
            [(topic, self._queues_of_interest(name, topic)) for topic in topics],
            lambda queue: GroupQueue(
                queue.topic,
                queue.queue_id,
                self._offsets.get(name, queue.topic, queue.queue_id),
                group.owner_of(queue) if group else "",
            ),
            command.entry,
        )
        if command.entry == 0:
            found = self._with_first(found)
        if found.next_entry and not command.paged:
            raise BadRequest(
                f"the {found.entries} members, subscriptions and queues of group {name} do not fit "
                "into one answer, and this client does not ask for pages: it is too old for this "
                "broker"
            )
        return found

    def _with_first(self, page: GroupDescription) -> GroupDescription:
        """With what stands on the first page only."""
        group, config = self._members.groups.get(page.group), self._configs.get(page.group)
        differing = [] if group is None else list(group.subscribed.differences())
        differing += self._poppers.differences(page.group)
        return msgspec.structs.replace(
            page,
            differences=differing[:DIFFERENCES_MAX],
            difference_count=len(differing),
            settings={} if config is None else settings_of(config),
        )

    def _queues_of_interest(self, group: str, topic: str) -> list[int]:
        """The queues of a topic that the group may read, has read, or that hold messages."""
        if topic not in self._topics:
            return sorted(self._offsets.queue_ids(group, topic))
        return sorted(
            {
                *range(self._topics.queue_counts.get(topic, 0)),
                *self._offsets.queue_ids(group, topic),
                *(queue_id for queue_id, (low, high) in self._stored(topic).items() if low < high),
            }
        )
