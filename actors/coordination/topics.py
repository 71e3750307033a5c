"""Commands on topics: what there is, and what becomes known to whom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from cometmq.actors.coordination.announcing import Announcing
from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.members import Members
from cometmq.actors.runtime.service import Request
from cometmq.actors.tables.topics import (
    MADE_ATTRIBUTE,
    QUEUES_MAX,
    TEMPLATE_TOPIC,
    TopicBook,
    check_info,
    check_served,
    made_queues,
)
from cometmq.protocol import names
from cometmq.protocol.commands import (
    BrokerRoute,
    ChangeMode,
    Command,
    CreateTopic,
    CreateTopics,
    DeleteTopic,
    Done,
    EndpointsChanged,
    EnsureTopic,
    ListTopics,
    RefusedTopic,
    TopicInfo,
    TopicRoute,
    TopicsCreated,
)
from cometmq.protocol.configs import TopicConfig
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    MessagesUnread,
    NameIllegal,
    NotConfirmed,
    ServiceNotAvailable,
    TopicExists,
    TopicNotExist,
)
from cometmq.protocol.ledger import Change, OffsetsForgotten, TopicPut, TopicRemoved
from cometmq.protocol.names import LONG_TOPIC_MAX
from cometmq.protocol.perm import READ_WRITE
from cometmq.protocol.replies import reply_topic
from cometmq.shm.live.queue_table import QueueRange

log = logging.getLogger(__name__)

REFUSED_NAMED_MAX: Final = 100  # in the answer to CreateTopics
NAMED_MAX: Final = 5  # in a sentence

Stored = Callable[[str], Mapping[int, QueueRange]]


def its_own(topics: TopicBook, stored: Stored) -> Stored:
    """Wrap `stored` to omit queues that belong to a deleted topic of the same name: the current
    topic never had them."""

    def found(topic: str) -> Mapping[int, QueueRange]:
        made, queues = made_queues(topics.get(topic)), stored(topic)
        return queues if made is None else {k: each for k, each in queues.items() if k < made}

    return found


class TopicSettings(Protocol):
    """What is needed of the broker's settings."""

    @property
    def auto_create_topic_enable(self) -> bool: ...
    @property
    def broker_cluster_name(self) -> str: ...
    @property
    def default_topic_queue_nums(self) -> int: ...


def template_queues(settings: TopicSettings) -> int | None:
    """Of the topic that others are created after; None where none is created by itself."""
    return settings.default_topic_queue_nums if settings.auto_create_topic_enable else None


class _PutTopics(NamedTuple):
    """A request to be answered when the topics that it names are kept and known."""

    request: Request
    topics: list[str]
    answer: Callable[[], Command]


class Topics:
    """Creates, changes and deletes topics, and answers when every process knows them.

    Args:
        stored: the queues of a topic that ever held a message, and what they hold. Raises
            ServiceNotAvailable while that is not known.
        wait_dispatched: until `stored` knows all that is in the log. Raises ServiceNotAvailable
            when that takes too long.
    """

    def __init__(
        self,
        settings: TopicSettings,
        books: Books,
        members: Members,
        stored: Stored,
        wait_dispatched: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._books = books
        self._topics = books.topics
        self._members = members
        self._offsets = books.offsets
        self._left = stored
        self.stored = its_own(books.topics, stored)  # without queues that a deleted topic left
        self._wait_dispatched = wait_dispatched
        self._wanted: list[_PutTopics] = []  # what this round wants to be known
        self._changes: list[Change] = []  # of this round
        self._announcing: Announcing

    # --- for the coordinator ---

    def begin(self, announcing: Announcing) -> None:
        """The books are as they were."""
        self._announcing = announcing

    def finish_round(self) -> None:
        """Once the changes of this round are kept, tell the others, and answer when they know."""
        wanted, self._wanted = self._wanted, []
        changes, self._changes = self._changes, []
        waiting = []
        for each in wanted:
            if self._topics.are_kept(each.topics):
                self._announcing.answer_when_known(
                    each.request, each.topics, each.answer, is_change=False
                )
            else:
                waiting.append(each)
        if changes or waiting:
            self._books.then(partial(self._are_kept, changes, waiting))

    def _are_kept(
        self, changes: list[Change], waiting: list[_PutTopics], error: CometError | None
    ) -> None:
        if isinstance(error, NotConfirmed):  # they come later, and may be told then
            self._books.then(partial(self._are_kept, changes, []))
        elif error is None and changes:
            topics = {_topic_of(change) for change in changes}
            if len(topics) > NAMED_MAX:
                log.info("%d topics are created, changed or deleted", len(topics))
            self._topics.kept(changes)
            self._members.topics_changed(frozenset(topics))
            self._announcing.topics_changed()
        elif error is not None and changes:
            log.error("changes of topics are not kept: %s", error)
        for each in waiting:
            if error is not None:
                each.request.fail(error)
            else:
                self._announcing.answer_when_known(
                    each.request, each.topics, each.answer, is_change=True
                )

    def delete(self, request: Request, *topics: str) -> None:
        """Forget topics; answer Done when every process knows that."""
        for topic in topics:
            # First the offsets: a topic of the same name must never find them.
            if self._offsets.groups_of(topic):
                self._books.change(OffsetsForgotten(topic))
            self._change(TopicRemoved(topic))
            log.info("topic %s is deleted", topic)
        self._want_known(request, list(topics), Done)

    # --- commands ---

    def on_ensure_topic(self, command: EnsureTopic, request: Request) -> None:
        topic = command.topic
        self._check_served(topic)
        names.check_writable_topic(topic)
        group = topic.removeprefix(names.RETRY_PREFIX)
        if group != topic and (topic not in self._topics or group in self._books.groups.configs):
            config = self._members.config_of(group)
            self.make(topic, max(config.retry_queue_nums, 1))
        elif topic == reply_topic(self._settings.broker_cluster_name):
            self.make(topic, 1)
        elif topic not in self._topics:
            if topic == TEMPLATE_TOPIC or not self._settings.auto_create_topic_enable:
                raise TopicNotExist(
                    f"topic {topic} is unknown, and autoCreateTopicEnable is off: it is made by "
                    f"`cometmq topic create {topic}`"
                )
            count = self._settings.default_topic_queue_nums
            self._put_topic(TopicInfo(topic, count, count, READ_WRITE))
        self._want_known(request, [topic], lambda: self._route(topic))

    def make(self, topic: str, queues: int) -> None:
        """Create a topic for the broker's own use, or raise its number of queues to this one; never
        lower it."""
        queues = min(queues, QUEUES_MAX)  # the number may come from a file, unchecked
        if topic not in self._topics:
            self._put_topic(TopicInfo(topic, queues, queues, READ_WRITE))
            return
        there = self._topics.info_of(topic)
        if min(there.read_queues, there.write_queues) < queues:
            most = max(there.read_queues, queues), max(there.write_queues, queues)
            self._put_topic(TopicInfo(topic, *most, there.perm))

    def on_create_topic(self, command: CreateTopic, request: Request) -> None:
        info = command.info
        self._check_changeable(info.topic)
        before: TopicInfo | None = None
        if command.mode == ChangeMode.CREATE:
            self._create(info)
        elif command.mode in (ChangeMode.UPDATE, ChangeMode.FORCE):
            before = self._update(info, by_force=command.mode == ChangeMode.FORCE)
        else:
            raise BadRequest(f"mode {command.mode}: 0 create, 1 update, 2 update by force")
        answer = partial(self._route, info.topic)
        if before is not None:
            lowered = self._topics.info_of(info.topic)
            answer = partial(self._answer_lowered, before, lowered)
        self._want_known(request, [info.topic], answer)

    def on_create_topics(self, command: CreateTopics, request: Request) -> None:
        created: list[str] = []
        refused: list[RefusedTopic] = []
        for info in command.infos:
            try:
                self._check_changeable(info.topic)
                self._create(info)
            except CometError as error:
                refused.append(RefusedTopic(info.topic[:LONG_TOPIC_MAX], error.code, str(error)))
            else:
                created.append(info.topic)
        answer = TopicsCreated(refused[:REFUSED_NAMED_MAX], len(refused))
        self._want_known(request, created, lambda: answer)

    def on_delete_topic(self, command: DeleteTopic, request: Request) -> None:
        topic = command.topic
        self._check_changeable(topic)
        self._topics.config_of(topic)
        self.delete(request, topic)

    def on_list_topics(self, command: ListTopics, _request: Request) -> Command:
        page = self._topics.page(command.run, command.since)
        if not (command.paged or page.complete):
            raise BadRequest(
                f"{len(self._topics)} topics do not fit into one answer, and this client does not "
                "ask for pages: it is too old for this broker"
            )
        return page

    def on_endpoints_changed(self, command: EndpointsChanged, request: Request) -> None:
        self._announcing.endpoints_changed(command.endpoints, request)

    # --- inside ---

    def _check_served(self, topic: str) -> None:
        """Raise NoPermission for a topic that only RocketMQ can serve."""
        config = self._topics.get(topic)
        if config is not None:
            check_served(config)

    def _check_changeable(self, topic: str) -> None:
        names.check_writable_topic(topic)
        if topic == TEMPLATE_TOPIC:
            raise NameIllegal(f"topic {topic} is the broker's own; see autoCreateTopicEnable")
        self._check_served(topic)

    def _create(self, info: TopicInfo) -> None:
        """Create a topic. Raises TopicExists if it is there with other settings."""
        check_info(info)
        config = self._topics.get(info.topic)
        if config is None:
            self._put_topic(info)
            return
        there = self._topics.info_of(info.topic)
        if there != info:
            raise TopicExists(
                f"topic {info.topic} exists: {_difference(there, info)}; nothing was changed "
                "(to change it: topic update)"
            )

    def _update(self, info: TopicInfo, *, by_force: bool) -> TopicInfo | None:
        """Change a topic. Return its previous settings if it loses read queues without `by_force`,
        which have to be read to their ends; otherwise None.

        Raises TopicNotExist, MessagesUnread.
        """
        there = self._topics.info_of(info.topic)
        wanted = TopicInfo(
            info.topic,
            info.read_queues or there.read_queues,
            info.write_queues or there.write_queues,
            there.perm if info.perm == -1 else info.perm,
        )
        check_info(wanted)
        lowers = wanted.read_queues < there.read_queues and not by_force
        if lowers:
            self._check_all_is_read(info.topic, wanted.read_queues)
        if wanted != there:
            self._put_topic(wanted)
        return there if lowers else None

    def _answer_lowered(self, before: TopicInfo, lowered: TopicInfo) -> Command:
        """Answer an update that removed queues, once every process knows it and appends nothing to
        them. Restore the queues if messages were stored in them after the check for unread ones.
        Raises MessagesUnread."""
        try:
            self._check_all_is_read(before.topic, lowered.read_queues)
        except CometError:
            if self._topics.get(before.topic) and self._topics.info_of(before.topic) == lowered:
                log.warning("topic %s has its queues again: they are not read", before.topic)
                self._put_topic(before)
                self.finish_round()
                self._books.send()
            raise
        return self._route(before.topic)

    def _check_all_is_read(self, topic: str, first: int) -> None:
        """Raise MessagesUnread unless every group is at the end of the queues from `first` on.

        Without any group, whatever lies there is unread.
        """
        self._wait_dispatched()
        groups = self._books.members.asking_for(topic) | self._offsets.groups_of(topic)
        unread: dict[int, int] = {}  # queue -> messages
        behind: set[str] = set()
        for queue_id, (low, high) in self.stored(topic).items():
            if queue_id < first or low == high:
                continue
            reached = {group: self._offsets.get(group, topic, queue_id) for group in groups}
            if not groups or min(reached.values()) < high:
                unread[queue_id] = high - max(low, min(reached.values(), default=low))
                behind |= {group for group, offset in reached.items() if offset < high}
        if unread:
            who = f"by {_some(sorted(behind))}" if behind else "by anybody, as no group reads it"
            raise MessagesUnread(
                f"topic {topic} with {first} read queues would hide {sum(unread.values())} "
                f"messages in queues {_some(sorted(unread))}, which are not read {who}; let them "
                "be read (lower the write queues alone meanwhile), or force it"
            )

    def _put_topic(self, info: TopicInfo) -> None:
        """Create or change a topic. Raises TooManyTopics."""
        known = self._topics.get(info.topic)
        config = msgspec.structs.replace(
            known or TopicConfig(topic_name=info.topic),
            read_queue_nums=info.read_queues,
            write_queue_nums=info.write_queues,
            perm=info.perm,
        )
        self._topics.check_put(info.topic)
        made = made_queues(known)
        if made is not None or (known is None and self._has_left(info)):
            made = max(made or 0, info.read_queues, info.write_queues)
            attributes = config.attributes | {MADE_ATTRIBUTE: str(made)}
            config = msgspec.structs.replace(config, attributes=attributes)
        self._change(TopicPut(config))
        text = "topic %s is %s: %d read queues, %d write queues, perm %d"
        done = "changed" if known else "created"
        level = logging.INFO if known or len(self._changes) <= NAMED_MAX else logging.DEBUG
        log.log(level, text, info.topic, done, info.read_queues, info.write_queues, info.perm)
        if info.write_queues > info.read_queues:
            log.warning("topic %s: nobody will read the queues beyond its read queues", info.topic)

    def _has_left(self, info: TopicInfo) -> bool:
        """Return whether a deleted topic of that name left messages, or may have, in queues that
        the new one does not have."""
        if self._topics.was_deleted(info.topic):
            return True
        queues = max(info.read_queues, info.write_queues)
        try:
            return any(each >= queues for each in self._left(info.topic))
        except ServiceNotAvailable:
            return False  # unknown while the broker starts

    def _want_known(
        self, request: Request, topics: list[str], answer: Callable[[], Command]
    ) -> None:
        """Answer, after this round, when every process knows these topics."""
        self._wanted.append(_PutTopics(request, topics, answer))

    def _change(self, change: Change) -> None:
        self._books.change(change)
        self._changes.append(change)

    def _route(self, topic: str) -> Command:
        assert self._announcing.endpoints is not None
        info = self._topics.info_of(topic)
        return TopicRoute(topic, [BrokerRoute(self._announcing.endpoints, info)])


def _topic_of(change: Change) -> str:
    if isinstance(change, TopicPut):
        return change.config.topic_name
    assert isinstance(change, TopicRemoved)
    return change.topic


def _difference(there: TopicInfo, wanted: TopicInfo) -> str:
    """In words, for who asked for another topic than there is."""
    return ", ".join(
        f"{field.replace('_', ' ')} {getattr(there, field)}, not {getattr(wanted, field)}"
        for field in ("read_queues", "write_queues", "perm")
        if getattr(there, field) != getattr(wanted, field)
    )


def _some(things: Sequence[object]) -> str:
    shown = ", ".join(map(str, things[:NAMED_MAX]))
    more = len(things) - NAMED_MAX
    return f"{shown} and {more} more" if more > 0 else shown
