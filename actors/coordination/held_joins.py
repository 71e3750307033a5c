"""JoinGroups that are held until there is news for the member, or it has waited for long enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cometmq.actors.runtime.held import NEVER, HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.group_share import ConsumerGroup
from cometmq.protocol.commands import GroupShare, JoinGroup
from cometmq.protocol.errors import CometError

HELD_MAX: Final = 131_072


class HeldJoin(HeldRequest[ConsumerGroup]):
    """A JoinGroup. Without a deadline it waits only until it may be told of changes."""

    __slots__ = ("member", "version")

    def __init__(
        self, group: ConsumerGroup, command: JoinGroup, request: Request, deadline: float, name: str
    ) -> None:
        super().__init__(group, request, deadline, name)
        self.member = command.member
        self.version = command.version

    @property
    def has_news(self) -> bool:
        group = self.key
        return (
            self.deadline == NEVER
            or self.member not in group
            or group.version_of(self.member) != self.version
        )


class HeldJoins(TimedRequests[ConsumerGroup, HeldJoin]):
    """One of each member at most; an earlier one is answered in any case.

    Args:
        wait_max_s: no JoinGroup is held for longer.
        is_unkept: whether a group has changes that nobody may be told of yet.
    """

    def __init__(
        self, actor: ServiceActor, wait_max_s: float, is_unkept: Callable[[str], bool]
    ) -> None:
        super().__init__(actor, "members of groups", HELD_MAX, self._end)
        self._wait_max_s = wait_max_s
        self._is_unkept = is_unkept

    def hold(self, group: ConsumerGroup, command: JoinGroup, request: Request) -> None:
        """Keep the request until the end of the round, or longer if it wants to wait."""
        earlier = self.named(group, command.member)
        if earlier is not None:
            self.release(earlier)
            self._end_soon(earlier)
        wait_s = min(command.wait_ms / 1000, self._wait_max_s)
        deadline = time.monotonic() + wait_s if wait_s > 0 else NEVER
        self.add(HeldJoin(group, command, request, deadline, command.member))

    def answer(self, group: ConsumerGroup, error: CometError | None = None) -> None:
        """Answer those of a group that wait no longer; with an error, if there is one."""
        for held in self.of(group):
            if held.has_news:
                request = self.release(held)
                if error is None:
                    request.reply(group.share_of(held.member))
                else:
                    request.fail(error)

    def _end(self, held: HeldJoin) -> GroupShare | None:
        if not self._is_unkept(held.key.name):
            return held.key.share_of(held.member)
        self._end_soon(held)
        return None

    def _end_soon(self, held: HeldJoin) -> None:
        """Answer it as soon as its member may be told."""
        command = held.request.command
        assert isinstance(command, JoinGroup)
        self.add(HeldJoin(held.key, command, held.request, NEVER, ""))
