"""Members of consumer groups: who is there, who waits for news, and what outlives a restart."""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial
from typing import Final, Protocol

from cometmq.actors.books.group_share import ConsumerGroup, GroupRecord
from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.files import now_ms
from cometmq.actors.coordination.processes import MemberProcesses
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.protocol import names
from cometmq.protocol.commands import (
    Command,
    Done,
    JoinGroup,
    LeaveGroup,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    GroupNotExist,
    NoPermission,
    NotConfirmed,
    SubscriptionIllegal,
    SystemBusy,
)
from cometmq.protocol.ledger import Change, GroupPut, TopicAsked
from cometmq.protocol.tags import parse_tags

log = logging.getLogger(__name__)

MEMBER_NAME_MAX: Final = 255
MEMBERS_MAX: Final = 10_000  # of one group
LOOK_S: Final = 0.1  # after a member is new
PAUSE_SHARE: Final = 0.375  # of it, between two looks: three times what it should be


class MemberSettings(Protocol):
    """What is needed of the broker's settings."""

    @property
    def auto_create_subscription_group(self) -> bool: ...
    @property
    def flush_consumer_offset_interval_ms(self) -> int: ...
    @property
    def consumer_session_timeout_ms(self) -> int: ...


class _Held:
    """A JoinGroup that waits for news. `timer` is None for one that does not want to wait."""

    __slots__ = ("request", "timer", "version")

    def __init__(self, request: Request, version: int, timer: Timer | None) -> None:
        self.request = request
        self.version = version
        self.timer = timer

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Members:
    """The groups, by the rules of books/group_share.py; JoinGroups that wait for news.

    Before anybody is told of a share, what has changed in its group is kept.
    """

    def __init__(self, actor: ServiceActor, settings: MemberSettings, books: Books) -> None:
        self._actor = actor
        self._settings = settings
        self._books = books
        self._topics = books.topics
        self._configs = books.groups.configs
        self._session_timeout_s = settings.consumer_session_timeout_ms / 1000
        self._looked_at = time.monotonic()  # for silent members
        # Above the versions and epochs of any earlier life, also if the file of members is lost.
        self._first_group_version = now_ms()
        self.groups: dict[str, ConsumerGroup] = {}
        self.subscribed = books.members.subscribed  # group -> topics that a member ever asked for
        self._kept_versions: dict[str, int] = {}  # group -> as the book has it
        self._unkept = Counter[str]()  # groups with changes on their way to the ledger
        self._changed: set[str] = set()  # groups that were changed in this round
        self._processes = MemberProcesses()
        self._look: Timer | None = None  # when it is next seen whether these have ended
        self._held: dict[str, dict[str, _Held]] = {}  # group -> member
        self._overtaken: list[tuple[ConsumerGroup, str, _Held]] = []  # by the member's next one
        self._stirred: set[str] = set()  # groups whose held JoinGroups must be looked at

    # --- for the coordinator ---

    def begin(self) -> None:
        """The books are as they were; from now on members are expected to be heard of."""
        self._go_on_with_members()
        self._looked_at = time.monotonic()

    def tell(self) -> None:
        """Answer the JoinGroups that wait no longer; of groups that are kept as they are told."""
        overtaken, self._overtaken = self._overtaken, []
        for group, member, held in overtaken:
            if self._unkept[group.name]:
                self._overtaken.append((group, member, held))
            else:
                self._answer_join(group, member, held)
        ready = {name for name in self._stirred if not self._unkept[name]}
        self._stirred -= ready
        for name in ready:
            self._answer_held(name)

    def end(self, error: CometError) -> None:
        """Whoever waits for news hears that there will be none."""
        for held_ones in self._held.values():
            for held in held_ones.values():
                held.request.fail(error)
        self._held.clear()

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "groups": len(self._configs),
            "members": sum(len(group.members) for group in self.groups.values()),
            "held_joins": sum(len(held) for held in self._held.values()),
        }

    def stir(self, group: str) -> None:
        """Its members may have news."""
        self._stirred.add(group)

    def known(self) -> set[str]:
        """Every group with a configuration, or that a member ever joined."""
        return {*self._configs, *self.groups, *self.subscribed}

    def topics_changed(self, topics: frozenset[str]) -> None:
        """Their queues are shared anew."""
        for name, group in self.groups.items():
            if not topics.isdisjoint(group.topics()):
                group.topics_changed()
                self._stirred.add(name)

    # --- commands ---

    def on_join_group(self, command: JoinGroup, request: Request) -> None:
        subscriptions = _checked_subscriptions(command)
        config = self.config_of(command.group)
        if not config.consume_enable:
            raise NoPermission(f"group {command.group} may not consume (consumeEnable)")
        group = self._group(command.group)
        if command.member not in group and len(group.members) >= MEMBERS_MAX:
            raise SystemBusy(f"group {command.group} has {MEMBERS_MAX} members, and takes no more")
        self._processes.note(command.group, command.member, command.process)
        if command.member not in group and group.members and self._look is None:
            # It may come in the place of one that has ended without a word.
            self._look = self._actor.after(LOOK_S, self._remove_ended)
        asked = self.subscribed.get(command.group, ())
        for topic in subscriptions:
            if topic in self._topics and topic not in asked:
                self._change(command.group, TopicAsked(command.group, topic))
        group.join(
            command.member,
            subscriptions,
            command.owned,
            version=command.version,
            now=time.monotonic(),
        )
        self._hold(group, command, request)

    def on_leave_group(self, command: LeaveGroup, request: Request) -> Command | None:
        group = self.groups.get(command.group)
        if group is not None and group.leave(command.member):
            self._stirred.add(command.group)
            self.keep()
            self._books.then(lambda _error: request.reply(Done()))
            return None
        return Done()

    def config_of(self, name: str) -> SubscriptionGroupConfig:
        """The group's configuration; made, if it is unknown and allowed."""
        names.check_group(name)
        config = self._configs.get(name)
        if config is not None:
            return config
        if not self._settings.auto_create_subscription_group:
            raise GroupNotExist(f"group {name} is unknown, and autoCreateSubscriptionGroup is off")
        config = SubscriptionGroupConfig(group_name=name)
        self._change(name, GroupPut(config))
        log.info("group %s is created", name)
        return config

    def _group(self, name: str) -> ConsumerGroup:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = self._new_group(name)
        return group

    def _new_group(
        self, name: str, record: GroupRecord | None = None, now: float = 0
    ) -> ConsumerGroup:
        return ConsumerGroup(
            name,
            self._topics.queue_counts,
            session_timeout_s=self._session_timeout_s,
            record=record,
            first_version=self._first_group_version,
            now=now,
        )

    # --- held JoinGroups ---

    def _hold(self, group: ConsumerGroup, command: JoinGroup, request: Request) -> None:
        """Keep the request until the end of the round, or longer if it wants to wait."""
        held_ones = self._held.setdefault(command.group, {})
        earlier = held_ones.pop(command.member, None)
        if earlier is not None:
            self._overtaken.append((group, command.member, earlier))
        wait_s = min(command.wait_ms / 1000, self._session_timeout_s / 3)
        timer = None
        if wait_s > 0:
            timer = self._actor.after(
                wait_s, partial(self._stop_holding, group, command.member, request)
            )
        held_ones[command.member] = _Held(request, command.version, timer)
        self._stirred.add(command.group)

    def _stop_holding(self, group: ConsumerGroup, member: str, request: Request) -> None:
        held = self._held.get(group.name, {}).get(member)
        if held is None or held.request is not request:
            return
        if self._unkept[group.name]:
            held.timer = None  # it is answered as soon as it may be told
        else:
            del self._held[group.name][member]
            self._answer_join(group, member, held)

    def _answer_held(self, name: str, error: CometError | None = None) -> None:
        """Answer the JoinGroups of a group that wait no longer."""
        group = self.groups[name]
        for member, held in _take_news(group, self._held.get(name, {})):
            if error is None:
                self._answer_join(group, member, held)
            else:
                held.request.fail(error)

    def _answer_join(self, group: ConsumerGroup, member: str, held: _Held) -> None:
        held.cancel()
        held.request.reply(group.share_of(member))

    def expire(self) -> None:
        """Remove the members that were silent, as far as they were listened to.

        Whoever stopped this process for a while (SIGSTOP, a machine that swaps, a disk that hangs)
        stopped the members' signs of life as well: each has the session's time again. And while
        more is waiting in the sockets than could be taken, theirs may be among it: silence counts
        up to the last moment at which nothing was left there.
        """
        self._remove_ended()
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - before > self._session_timeout_s * PAUSE_SHARE:
            text = "this process did not get on for %.1f s: all members have their session's time"
            log.warning(text + " of %g s again", now - before, self._session_timeout_s)
            for group in self.groups.values():
                group.attend_again(now)
        for name, group in self.groups.items():
            for member in group.expire(self._actor.inbox.heard_all_at):
                text = "group %s: member %s was silent for %g s; its queues go to others"
                log.warning(text, name, member, self._session_timeout_s)
                self._stirred.add(name)

    def _remove_ended(self) -> None:
        """Remove the members whose process has ended: nobody need wait until they have been silent
        for long enough."""
        self._look = None
        for name, member in self._processes.ended(self.groups):
            self.groups[name].leave(member)
            log.info("group %s: member %s has ended; its queues go to others", name, member)
            self._stirred.add(name)
        self.finish_round()
        self._books.send()
        self.tell()

    # --- across a restart ---

    def _go_on_with_members(self) -> None:
        """Take up the groups where an earlier coordinator left them, unless they are too old."""
        book = self._books.members
        self._first_group_version = max(self._first_group_version, book.highest)
        # The last sign of life is noted so often.
        interval_s = self._settings.flush_consumer_offset_interval_ms / 1000
        since_s = self._books.silent_s - interval_s
        now = time.monotonic()
        for name, record in book.records():
            group = self._new_group(name, record, now - max(0.0, since_s))
            group.expire(now)
            self.groups[name] = group
            self._stirred.add(name)
        self.keep()

    # --- what outlives this process ---

    def _change(self, group: str, change: Change) -> None:
        self._books.change(change)
        self._changed.add(group)

    def keep(self) -> None:
        """What has changed in groups becomes changes of the ledger."""
        for name in self._stirred:
            group = self.groups[name]
            if self._kept_versions.get(name) == group.version:
                continue
            self._kept_versions[name] = group.version
            for change in self._books.members.differences(name, group.record()):
                try:
                    self._change(name, change)
                except BadRequest as error:  # sharing goes on; only a restart would not know of it
                    log.error("group %s is not kept: %s", name, error)

    def finish_round(self) -> None:
        """Have it kept; until it is, nobody is told of it."""
        self.keep()
        if self._changed:
            changed, self._changed = self._changed, set()
            self._unkept.update(changed)
            self._books.then(partial(self._are_kept, changed))

    def _are_kept(self, groups: set[str], error: CometError | None) -> None:
        if isinstance(error, NotConfirmed):
            for name in groups & self.groups.keys():
                self._answer_held(name, error)  # they ask again
            self._books.then(partial(self._are_kept, groups))  # which comes
            return
        self._unkept.subtract(groups)
        self._unkept = +self._unkept
        self._stirred |= groups & self.groups.keys()
        if error is not None:
            # Sharing goes on; only a restart right now would not know of it.
            log.error("the members of %s are not kept: %s", ", ".join(sorted(groups)[:5]), error)
            for name in groups:
                self._kept_versions.pop(name, None)
        self._actor.call_soon(self.tell)


def _take_news(group: ConsumerGroup, held_ones: dict[str, _Held]) -> list[tuple[str, _Held]]:
    """Take out the JoinGroups that wait no longer: there is news, or no patience."""
    ready = [
        (member, held)
        for member, held in held_ones.items()
        if held.timer is None or member not in group or group.version_of(member) != held.version
    ]
    for member, held in ready:
        del held_ones[member]
        held.cancel()
    return ready


def _checked_subscriptions(command: JoinGroup) -> dict[str, str]:
    """topic -> tag expression; raises what is wrong with the command."""
    if not 1 <= len(command.member) <= MEMBER_NAME_MAX or not command.member.isprintable():
        shown = repr(command.member[:MEMBER_NAME_MAX])
        raise BadRequest(f"member name {shown}: 1 to {MEMBER_NAME_MAX} printable characters")
    if not command.subscriptions:
        raise SubscriptionIllegal(f"member {command.member} subscribes to nothing")
    subscriptions: dict[str, str] = {}
    for subscription in command.subscriptions:
        topic = subscription.topic
        names.check_topic(topic)
        parse_tags(subscription.tags)
        if subscriptions.setdefault(topic, subscription.tags) != subscription.tags:
            raise SubscriptionIllegal(f"member {command.member} subscribes to {topic} twice")
    return subscriptions
