"""Consumers of groups without queues: who is there, and what each of them wants.

They have no membership: one is there from what it asks for on, for as long as its messages may be
invisible and a session beside, unless it says that it stops or its process is seen to have ended.
It is not kept: after a restart of this process each is known again once it asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from cometmq.actors.coordination.members import (
    MEMBER_NAME_MAX,
    MEMBERS_MAX,
    MEMBERS_OF_SENDER_MAX,
    Members,
)
from cometmq.actors.coordination.processes import MemberProcesses
from cometmq.actors.coordination.senders import Senders
from cometmq.actors.runtime.service import Request
from cometmq.actors.tables.differences import Subscriptions
from cometmq.actors.tables.group_settings import wants_same_subscriptions
from cometmq.protocol.commands import (
    PopMessages,
    StopPopping,
    Subscription,
    SubscriptionDifference,
)
from cometmq.protocol.errors import ArgumentIllegal, SystemBusy
from cometmq.protocol.filters import check_filters_on, compile_filter
from cometmq.protocol.tags import joined, parse_tags, split

LOOK_S: Final = 0.1  # between two looks at processes
FATE: Final = "a message reaches whoever pops it, who may not want it, and then nobody gets it"

Who = tuple[str, str]  # topic, consumer


class Poppers:
    """See the module.

    Args:
        session_s: that a consumer is there behind what it asked for.
    """

    def __init__(self, members: Members, *, session_s: float, filters_on: bool) -> None:
        self._members = members
        self._session_s = session_s
        self._filters_on = filters_on
        self._wanted: dict[str, dict[str, Subscriptions]] = {}  # group -> topic
        self._until: dict[str, dict[Who, float]] = {}  # group -> time.monotonic()
        self._senders = Senders(MEMBERS_OF_SENDER_MAX)
        self._processes = MemberProcesses()
        self._look_again_at = 0.0

    # --- who comes and goes ---

    def note(self, command: PopMessages, request: Request) -> None:
        """It asks. Raises SubscriptionsDiffer where its group refuses that; SystemBusy,
        ArgumentIllegal, SubscriptionIllegal, FilterIllegal, FiltersOff."""
        group, topic, name = command.group, command.topic, command.consumer
        if not name:  # the consumer did not state its name
            self._check_expressions(command)
            return
        who = topic, name
        wanted = self._wanted.get(group, {}).get(topic) or Subscriptions(group, FATE)
        asked = {topic: joined(command.tags, command.sql)}
        is_new = wanted.asked.get(name) != asked
        if is_new:
            self._check(command, wanted, asked)
        there = self._until.get(group, {})
        if who not in there and len(there) >= MEMBERS_MAX:
            raise SystemBusy(f"group {group} has {MEMBERS_MAX} consumers, and takes no more")
        self._senders.note(group, "/".join(who), request.sender)
        self._processes.note(group, name, command.process)
        stays_s = max(0, command.wait_ms) / 1000 + max(self._session_s, command.invisible_ms / 1000)
        self._until.setdefault(group, {})[who] = time.monotonic() + stays_s
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
                self._expire_in(command.group)  # one of those may have been the other
                self._drop_ended()
            wanted.check_same(name, asked)

    def _check_expressions(self, command: PopMessages) -> None:
        parse_tags(command.tags)
        if command.sql:
            check_filters_on(self._filters_on)
            compile_filter(command.sql)

    def stop(self, command: StopPopping) -> None:
        """It has gone."""
        for who in list(self._until.get(command.group, ())):
            if who[1] == command.consumer:
                self._remove(command.group, who)

    def expire(self) -> None:
        """Forget those that have not asked for too long."""
        for group in list(self._until):
            self._expire_in(group)

    def _expire_in(self, group: str) -> None:
        now = time.monotonic()
        there = self._until.get(group, {})
        for who in [each for each, until in there.items() if until <= now]:
            self._remove(group, who)

    def _drop_ended(self) -> None:
        """Not again before some time has gone by: it may be asked for with each command."""
        now = time.monotonic()
        if now < self._look_again_at:
            return
        self._look_again_at = now + LOOK_S
        names = {group: {name for _, name in there} for group, there in self._until.items()}
        for group, name in self._processes.ended(names):
            for who in [each for each in self._until.get(group, ()) if each[1] == name]:
                self._remove(group, who)

    def _remove(self, group: str, who: Who) -> None:
        there, topics = self._until[group], self._wanted[group]
        topic, name = who
        self._senders.forget(group, "/".join(who))
        del there[who]
        topics[topic].remove(name)
        if not topics[topic].asked:
            del topics[topic]
        if not there:
            del self._until[group], self._wanted[group]
        self._register(group)

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
        return self._members.active(group) + self.names(group)

    def names(self, group: str) -> list[str]:
        """Who is there."""
        self._expire_in(group)
        self._drop_ended()
        return sorted({name for _, name in self._until.get(group, ())})

    def subscriptions(self, group: str) -> list[Subscription]:
        """What they want; a topic stands there once for each expression."""
        return [
            Subscription(topic, *split(text))
            for topic, wanted in sorted(self._wanted.get(group, {}).items())
            for text in sorted({asked[topic] for asked in wanted.asked.values()})
        ]

    def differences(self, group: str) -> Iterator[SubscriptionDifference]:
        """Every one that does not want what most do, by topic."""
        for _, wanted in sorted(self._wanted.get(group, {}).items()):
            yield from wanted.differences()
