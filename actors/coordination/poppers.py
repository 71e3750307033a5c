"""Consumers of groups without queues: who is there, and what each of them wants.

They have no membership: one is there from what it asks for on, for as long as its messages may be
invisible and a session beside, unless it says that it stops or its process is seen to have ended.
It is not kept: after a restart of this process each is known again once it asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from cometmq.actors.coordination.members import MEMBER_NAME_MAX, Members
from cometmq.actors.coordination.membership import Kind, Member
from cometmq.actors.runtime.service import Request
from cometmq.actors.tables.differences import Subscriptions
from cometmq.actors.tables.group_settings import wants_same_subscriptions
from cometmq.protocol.commands import (
    POP_WAIT_MS_MAX,
    PopMessages,
    StopPopping,
    Subscription,
    SubscriptionDifference,
)
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.filters import check_filters_on, compile_filter
from cometmq.protocol.tags import joined, parse_tags, split

FATE: Final = "a message reaches whoever pops it, who may not want it, and then nobody gets it"


class Poppers:
    """See the module.

    Args:
        session_s: that a consumer is there behind what it asked for.
    """

    def __init__(self, members: Members, *, session_s: float, filters_on: bool) -> None:
        self._members = members
        self._membership = members.membership
        self._session_s = session_s
        self._filters_on = filters_on
        self._wanted: dict[str, dict[str, Subscriptions]] = {}  # group -> topic

    # --- who comes and goes ---

    def note(self, command: PopMessages, request: Request) -> None:
        """It asks. Raises SubscriptionsDiffer where its group refuses that; SystemBusy,
        ArgumentIllegal, SubscriptionIllegal, FilterIllegal, FiltersOff."""
        group, topic, name = command.group, command.topic, command.consumer
        if not name:  # the consumer did not state its name
            self._check_expressions(command)
            return
        wanted = self._wanted.get(group, {}).get(topic) or Subscriptions(group, FATE)
        asked = {topic: joined(command.tags, command.sql)}
        is_new = wanted.asked.get(name) != asked
        if is_new:
            self._check(command, wanted, asked)
        wait_ms = min(max(0, command.wait_ms), POP_WAIT_MS_MAX)  # the time for which it is held
        stays_s = wait_ms / 1000 + max(self._session_s, command.invisible_ms / 1000)
        until, sender = time.monotonic() + stays_s, request.sender
        self._membership.note(Member(Kind.POPS, group, name, sender, command.process, topic, until))
        if is_new:
            self._wanted.setdefault(group, {})[topic] = wanted
            wanted.put(name, asked)
            wanted.warn(name)
            self._register(group)

    def _check(self, command: PopMessages, wanted: Subscriptions, asked: dict[str, str]) -> None:
        name = command.consumer
        if len(name) > MEMBER_NAME_MAX or not name.isprintable():
            raise ArgumentIllegal(f"a consumer's name has {MEMBER_NAME_MAX} printable characters")
        self._check_expressions(command)
        if wants_same_subscriptions(self._members.config_of(command.group)):
            if wanted.difference(name, asked) is not None:
                self.expire()  # one of those may have been the other
            wanted.check_same(name, asked)

    def _check_expressions(self, command: PopMessages) -> None:
        parse_tags(command.tags)
        if command.sql:
            check_filters_on(self._filters_on)
            compile_filter(command.sql)

    def stop(self, command: StopPopping) -> None:
        """It has gone."""
        for member in self._membership.of(Kind.POPS, command.group):
            if member.name == command.consumer:
                self._membership.forget(Kind.POPS, member.group, member.name, member.topic)
                self._forget(member)

    def expire(self) -> None:
        """Forget those that have not asked for too long, or whose process has ended."""
        for member in self._membership.take_expired(Kind.POPS):
            self._forget(member)
        for member in self._membership.take_ended(Kind.POPS):
            self._forget(member)

    def _forget(self, member: Member) -> None:
        """What it wanted."""
        topics = self._wanted[member.group]
        topics[member.topic].remove(member.name)
        if not topics[member.topic].asked:
            del topics[member.topic]
        if not topics:
            del self._wanted[member.group]
        self._register(member.group)

    def _register(self, group: str) -> None:
        """RocketMQ knows its filters, unless members that share queues have others by now."""
        if self._members.active(group):
            return
        usual: dict[str, str] = {}
        for topic in self._wanted.get(group, {}).values():
            usual |= topic.usual()
        self._members.filters.register(group, usual)

    # --- what anybody may know ---

    def members_of(self, group: str) -> list[str]:
        """Those that share its queues, or those that take its messages one by one."""
        return self._members.active(group) + self._membership.names(Kind.POPS, group)

    def subscriptions(self, group: str) -> list[Subscription]:
        """What they want; a topic stands there once for each expression."""
        self.expire()
        return [
            Subscription(topic, *split(text))
            for topic, wanted in sorted(self._wanted.get(group, {}).items())
            for text in sorted({asked[topic] for asked in wanted.asked.values()})
        ]

    def differences(self, group: str) -> Iterator[SubscriptionDifference]:
        """Every one that does not want what most do, by topic."""
        for _, wanted in sorted(self._wanted.get(group, {}).items()):
            yield from wanted.differences()
