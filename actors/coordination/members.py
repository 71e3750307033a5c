"""Members of consumer groups: who is there, who waits for news, and what outlives a restart."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Final, Protocol

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.files import now_ms
from cometmq.actors.coordination.filters import Filters
from cometmq.actors.coordination.held_joins import HeldJoins
from cometmq.actors.coordination.membership import LOOK_S, Kind, Member, Membership
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.service import Request, ServiceActor, Timer
from cometmq.actors.tables.group_settings import (
    check_consuming,
    wants_same_subscriptions,
)
from cometmq.actors.tables.group_share import ConsumerGroup, GroupRecord
from cometmq.protocol import names
from cometmq.protocol.commands import (
    Command,
    Done,
    JoinGroup,
    LeaveGroup,
    QueueKey,
)
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    GroupInUse,
    GroupNotExist,
    NotConfirmed,
    SubscriptionIllegal,
)
from cometmq.protocol.filters import check_filters_on, compile_filter
from cometmq.protocol.ledger import Change, GroupPut, TopicAsked
from cometmq.protocol.tags import joined, parse_tags

log = logging.getLogger(__name__)

MEMBER_NAME_MAX: Final = 255
# Of one member. While its share is worked out nobody else is answered, and a command has room for
# a hundred thousand names.
SUBSCRIPTIONS_MAX: Final = 5_000
PAUSE_SHARE: Final = 0.375  # of it, between two looks: three times what it should be


class MemberSettings(Protocol):
    """What is needed of the broker's settings."""

    @property
    def auto_create_subscription_group(self) -> bool: ...
    @property
    def enable_property_filter(self) -> bool: ...
    @property
    def flush_consumer_offset_interval_ms(self) -> int: ...
    @property
    def consumer_session_timeout_ms(self) -> int: ...


class Members:
    """The groups, by the rules of books/group_share.py; JoinGroups that wait for news.

    Before anybody is told of a share, what has changed in its group is kept.
    """

    def __init__(
        self,
        actor: ServiceActor,
        settings: MemberSettings,
        books: Books,
        gate: Gate | None,
    ) -> None:
        self._actor = actor
        self.membership = Membership()
        self.gate = gate
        # In a group: for so long another master may go on telling members that queues are theirs.
        self._others_s = 0.0 if gate is None else gate.session_s
        self._settings = settings
        self._books = books
        self.filters = Filters(books)
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
        self._look: Timer | None = None  # when it is next seen whether these have ended
        self._held = HeldJoins(
            actor, self._session_timeout_s / 3, lambda name: self._unkept[name] > 0
        )
        self._stirred: set[str] = set()  # groups whose held JoinGroups must be looked at

    # --- for the coordinator ---

    def begin(self) -> None:
        """The books are as they were; from now on members are expected to be heard of."""
        self._go_on_with_members()
        self._looked_at = time.monotonic()

    def tell(self) -> None:
        """Answer the JoinGroups that wait no longer; of groups that are kept as they are told."""
        ready = {name for name in self._stirred if not self._unkept[name]}
        self._stirred -= ready
        for name in ready:
            self._held.answer(self.groups[name])

    def end(self, error: CometError) -> None:
        """Whoever waits for news hears that there will be none."""
        self._held.fail_all(error)

    def statistics(self) -> meters.Figures:
        return {
            meters.GROUPS: len(self._configs),
            meters.MEMBERS: sum(len(group.members) for group in self.groups.values()),
            meters.HELD_JOINS: len(self._held),
        }

    def active(self, name: str) -> list[str]:
        """The group's members, but those that are known to have ended."""
        self._drop_ended()
        group = self.groups.get(name)
        return [] if group is None else group.members

    def renew(self, name: str, queues: Iterable[QueueKey]) -> None:
        """Whoever owns one of these queues has to take it on anew: what it commits until then is
        refused. That is kept before whatever is changed next."""
        group = self.groups.get(name)
        if group is not None and group.renew(queues):
            self._stirred.add(name)
            self.keep()

    def refuse(self, name: str, error: CometError) -> None:
        """Members that wait for news hear this; they are members still, and may commit."""
        group = self.groups.get(name)
        for held in [] if group is None else self._held.release_key(group):
            held.request.fail(error)

    def evict(self, name: str) -> None:
        """The group is removed: its members are told, once that is kept, that nothing is theirs."""
        group = self.groups.pop(name, None)
        if group is None:
            return
        held_ones = self._held.release_key(group)
        for member in group.members:
            self.membership.forget(Kind.SHARES, name, member)
            group.leave(member)
        # What they commit names epochs that the next group of this name never gives out.
        self._first_group_version = max(self._first_group_version, group.version)
        self._kept_versions.pop(name, None)
        self._stirred.discard(name)

        def tell(_error: CometError | None) -> None:
            for held in held_ones:
                held.request.reply(group.share_of(held.member))

        self._books.then(tell)

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
        subscriptions = _checked_subscriptions(command, self._settings.enable_property_filter)
        config = self.config_of(command.group)
        check_consuming(config)
        group = self._group(command.group)
        group.reads_from = config.broker_id
        group.reads_far_from = config.which_broker_when_consume_slowly
        if command.member not in group and (
            poppers := self.membership.names(Kind.POPS, command.group)
        ):
            raise GroupInUse(
                f"group {command.group} has consumers that take its messages one by one "
                f"({poppers[0]}): end them before its queues are shared"
            )
        if wants_same_subscriptions(config):
            if group.subscribed.difference(command.member, subscriptions) is not None:
                self._drop_ended()  # one of those may have been the other
            group.subscribed.check_same(command.member, subscriptions)
        self.membership.note(
            Member(Kind.SHARES, command.group, command.member, request.sender, command.process)
        )
        if command.member not in group and group.subscribed.asked and self._look is None:
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
        self._stirred.add(command.group)
        self._held.hold(group, command, request)

    def on_leave_group(self, command: LeaveGroup, request: Request) -> Command | None:
        group = self.groups.get(command.group)
        if group is not None and group.leave(command.member):
            self.membership.forget(Kind.SHARES, command.group, command.member)
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
        self._books.check_new_group(name)
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

    def expire(self) -> None:
        """Remove the members that were silent, as far as they were listened to.

        Whoever stopped this process for a while (SIGSTOP, a machine that swaps, a disk that hangs)
        stopped the members' signs of life as well: each has the session's time again. And while
        more is waiting in the sockets than could be taken, theirs may be among it: silence counts
        up to the last moment at which nothing was left there. A master that is in doubt answers
        none of them, and does not count; nor does it while one before it, whom an operator has
        replaced, may not have heard of that.
        """
        self._remove_ended()
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - before > self._session_timeout_s * PAUSE_SHARE:
            text = "this process did not get on for %.1f s: all members have their session's time"
            log.warning(text + " of %g s again", now - before, self._session_timeout_s)
        is_sure = self.gate is None or self.gate.shares
        if now - before > self._session_timeout_s * PAUSE_SHARE or not is_sure:
            for group in self.groups.values():
                group.attend_again(now + self._others_s)
        for name, group in self.groups.items():
            for member in group.expire(self._actor.inbox.heard_all_at):
                text = "group %s: member %s was silent for %g s; its queues go to others"
                log.warning(text, name, member, self._session_timeout_s)
                self.membership.forget(Kind.SHARES, name, member)
                self._stirred.add(name)

    def _remove_ended(self) -> None:
        """Remove the members whose process has ended: nobody need wait until they have been silent
        for long enough."""
        self._look = None
        self._drop_ended()
        self.finish_round()
        self._books.send()
        self.tell()

    def _drop_ended(self) -> None:
        for member in self.membership.take_ended(Kind.SHARES):
            group = self.groups.get(member.group)
            if group is None or not group.leave(member.name):
                continue
            text = "group %s: member %s has ended; its queues go to others"
            log.info(text, member.group, member.name)
            self._stirred.add(member.group)

    # --- across a restart ---

    def _go_on_with_members(self) -> None:
        """Take up the groups where an earlier coordinator left them, unless they are too old."""
        book = self._books.members
        self._first_group_version = max(self._first_group_version, book.highest)
        # The last sign of life is noted so often.
        interval_s = self._settings.flush_consumer_offset_interval_ms / 1000
        silent_s = max(0.0, self._books.silent_s - interval_s)
        now = time.monotonic()
        seen = now + self._others_s if self._others_s else now - silent_s
        for name, record in book.records():
            group = self._new_group(name, record, seen)
            group.expire(now)
            for member in group.members:
                self.membership.note(Member(Kind.SHARES, name, member))
            self.groups[name] = group
            self._stirred.add(name)
        self.keep()
        self.filters.begin(self.groups)

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
            self.filters.register(name, group.subscribed.usual())
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
                self._held.answer(self.groups[name], error)  # they ask again
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


def _checked_subscriptions(command: JoinGroup, filters_on: bool) -> dict[str, str]:
    """topic -> tags and SQL92; raises what is wrong with the command."""
    if not 1 <= len(command.member) <= MEMBER_NAME_MAX or not command.member.isprintable():
        shown = repr(command.member[:MEMBER_NAME_MAX])
        raise BadRequest(f"member name {shown}: 1 to {MEMBER_NAME_MAX} printable characters")
    if not command.subscriptions:
        raise SubscriptionIllegal(f"member {command.member} subscribes to nothing")
    if len(command.subscriptions) > SUBSCRIPTIONS_MAX:
        raise SubscriptionIllegal(
            f"member {command.member} subscribes to {len(command.subscriptions)} topics, at most "
            f"{SUBSCRIPTIONS_MAX}: share them among several groups"
        )
    subscriptions: dict[str, str] = {}
    for subscription in command.subscriptions:
        topic = subscription.topic
        names.check_topic(topic)
        parse_tags(subscription.tags)
        if subscription.sql:
            check_filters_on(filters_on)
            compile_filter(subscription.sql)
        wanted = joined(subscription.tags, subscription.sql)
        if subscriptions.setdefault(topic, wanted) != wanted:
            raise SubscriptionIllegal(f"member {command.member} subscribes to {topic} twice")
    return subscriptions
