"""What topics there are, and the numbers of their changes. Pure: no I/O."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from cometmq.actors.tables.book import Book
from cometmq.protocol.commands import TopicInfo, TopicList
from cometmq.protocol.configs import TopicConfig, why_not_served
from cometmq.protocol.errors import (
    BadRequest,
    NameIllegal,
    NoPermission,
    TooManyTopics,
    TopicNotExist,
)
from cometmq.protocol.ledger import Change, TopicPut, TopicRemoved
from cometmq.protocol.perm import CLIENTS_MAX, INHERIT, READ, READ_WRITE
from cometmq.protocol.topics import PAGE_BYTES, check_told, entry_bytes

log = logging.getLogger(__name__)

TEMPLATE_TOPIC: Final = "TBW102"  # RocketMQ AUTO_CREATE_TOPIC_KEY_TOPIC
QUEUES_MAX: Final = 4_096  # of one topic
TOMBSTONES_MAX: Final = 10_000  # deleted topics that are told as such; then all is told anew
NAMED_MAX: Final = 5  # in a line of the log
# An attribute of a topic that was deleted and created again: the most queues that it has had since.
# Messages in queues beyond that number belong to the deleted topic, and no consumer reads them.
MADE_ATTRIBUTE: Final = "cometmq.made.queues"

Undo = tuple[str, TopicConfig | None] | None  # what stood there


class _Unkept:
    """A topic with changes that are on their way to the ledger."""

    __slots__ = ("changes", "kept")

    def __init__(self, kept: TopicConfig | None) -> None:
        self.kept = kept  # as it was before them; None: it was not there
        self.changes = 0


class TopicBook(Book):
    """The topics, as they stand in topics.json, and which of them have changed since when.

    A change is made at once, so that the next one is judged by it. It has its number, and is told
    to others, once it is *kept*: until then they are told what was before.

    Args:
        configs: to begin with; they are the book's from now on.
        topics_max: no more are created; topics that are there already stay.
        run: of the numbers; never that of an earlier life.
    """

    kinds = (TopicPut, TopicRemoved)

    def __init__(self, configs: dict[str, TopicConfig], topics_max: int, run: int) -> None:
        self.configs = configs  # changed here only
        self._topics_max = topics_max
        self._unkept: dict[str, _Unkept] = {}
        self.queue_counts: Mapping[str, int] = _QueueCounts(self.configs)
        self.run = run
        self._changed_at: dict[str, int] = {}  # topic, a deleted one too -> its last change
        self._order: list[tuple[int, str]] = []  # the same by number; where they differ it is old
        self._tombstones = 0
        self._floor = 0  # who is behind it cannot be told what was deleted
        self.version = 0  # of the last change that is kept
        self.first_version = 0  # of the topics as they were found

    def begin(self, template_queues: int | None) -> None:
        """What is there now was found: the changes that were made until now are kept.

        Args:
            template_queues: of TBW102, which is there while topics are created by themselves, as
                in RocketMQ; None: it goes. The settings remember that, no ledger.
        """
        template = self._template_change(template_queues)
        if template is not None:
            self.apply(template)
        self._unkept.clear()
        self._number(self._tellable())
        self.first_version = self.version

    # --- changing ---

    def apply(self, change: Change) -> Undo:
        """Make the change; what `undo` wants to take it back."""
        if isinstance(change, TopicPut):
            return self._set(change.config.topic_name, change.config)
        if isinstance(change, TopicRemoved):
            return self._set(change.topic, None)
        return None

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        if undo is not None:
            topic, config = undo
            self._set(topic, config)
            self._settle(topic, 2)  # that change and this one

    def _set(self, topic: str, config: TopicConfig | None) -> Undo:
        before = self.configs.get(topic)
        self._unkept.setdefault(topic, _Unkept(before)).changes += 1
        self.changes += 1
        if config is None:
            self.configs.pop(topic, None)
        else:
            self.configs[topic] = config
        return topic, before

    def kept(self, changes: Iterable[Change]) -> None:
        """These are kept: they have their numbers, and may be told."""
        topics = []
        for change in changes:
            if isinstance(change, TopicPut):
                topic, config = change.config.topic_name, change.config
            elif isinstance(change, TopicRemoved):
                topic, config = change.topic, None
            else:
                continue
            unkept = self._unkept.get(topic)
            if unkept is not None:
                unkept.kept = config
                self._settle(topic, 1)
            topics.append(topic)
        self._number(dict.fromkeys(topics))

    def _settle(self, topic: str, changes: int) -> None:
        unkept = self._unkept[topic]
        unkept.changes -= changes
        if not unkept.changes:
            del self._unkept[topic]

    def check_put(self, topic: str) -> None:
        """Raises TooManyTopics where it would be one more; the template is not one of them."""
        count = len(self.configs) - (TEMPLATE_TOPIC in self)
        if topic not in self and count >= self._topics_max and topic != TEMPLATE_TOPIC:
            raise TooManyTopics(
                f"topic {topic} is not created: the broker has {self._topics_max} topics, as many "
                "as maxTopics allows"
            )

    def _template_change(self, queues: int | None) -> Change | None:
        before = self.configs.get(TEMPLATE_TOPIC)
        if queues is None:
            return None if before is None else TopicRemoved(TEMPLATE_TOPIC)
        config = msgspec.structs.replace(
            before or TopicConfig(topic_name=TEMPLATE_TOPIC),
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=READ_WRITE | INHERIT,
        )
        return None if config == before else TopicPut(config)

    # --- what anybody may know ---

    def __contains__(self, topic: str) -> bool:
        return topic in self.configs

    def __len__(self) -> int:
        return len(self.configs)

    def are_kept(self, topics: Sequence[str]) -> bool:
        """Whether none of them has a change that is not kept yet."""
        return self._unkept.keys().isdisjoint(topics)

    def items(self) -> list[tuple[str, TopicConfig]]:
        """For a snapshot, which is made while the book goes on changing."""
        return list(self.configs.items())

    def get(self, topic: str) -> TopicConfig | None:
        return self.configs.get(topic)

    def config_of(self, topic: str) -> TopicConfig:
        """Raises TopicNotExist."""
        config = self.configs.get(topic)
        if config is None:
            raise TopicNotExist(f"topic {topic} is unknown to this broker")
        return config

    def info_of(self, topic: str) -> TopicInfo:
        """Raises TopicNotExist."""
        return _info(self.config_of(topic))

    def queues_not_served(self) -> Iterator[tuple[str, int]]:
        """Yield the queues of topics that only RocketMQ can serve."""
        for topic, config in self.configs.items():
            if why_not_served(config):
                count = max(config.read_queue_nums, config.write_queue_nums)
                yield from ((topic, queue_id) for queue_id in range(min(count, QUEUES_MAX)))

    def was_deleted(self, topic: str) -> bool:
        """Return whether the topic is known to have existed and does not exist now."""
        return topic not in self.configs and topic in self._changed_at

    def version_of(self, topic: str) -> int:
        """The number of the topic's last change."""
        return self._changed_at.get(topic, 0)

    def page(self, run: int, since: int, until: int | None = None) -> TopicList:
        """What has changed after a version, as far as one page holds it; see protocol/topics.py.

        Args:
            run: in which that version was given.
            until: leave out later changes.
        """
        until = self.version if until is None else until
        if run != self.run or not self._floor <= since <= until:
            since = 0
        infos: list[TopicInfo] = []
        removed: list[str] = []
        version, left = since, PAGE_BYTES
        for index in range(bisect_right(self._order, (since, "\uffff")), len(self._order)):
            number, topic = self._order[index]
            if number > until:
                break
            if self._changed_at.get(topic) != number:
                continue  # it has changed again
            left -= entry_bytes(topic)
            if left < 0:
                return TopicList(infos, removed, self.run, since, version, complete=False)
            config = self._told(topic)
            if config is None:
                removed.append(topic)
            else:
                infos.append(_info(config))
            version = number
        return TopicList(infos, removed, self.run, since, until, complete=True)

    # --- the numbers of changes ---

    def _number(self, topics: Iterable[str]) -> None:
        """Give each topic the next number; told is whatever stands there then."""
        for topic in topics:
            was_deleted = topic in self._changed_at and self._told(topic) is None
            self._tombstones += was_deleted
            self.version += 1
            self._changed_at[topic] = self.version
            self._order.append((self.version, topic))
        if self._tombstones > TOMBSTONES_MAX:
            self._forget_deleted()
        if len(self._order) > 2 * len(self._changed_at) + 1_000:
            self._order = [
                (number, topic)
                for number, topic in self._order
                if self._changed_at.get(topic) == number
            ]

    def _forget_deleted(self) -> None:
        self._floor = self.version
        self._tombstones = 0
        self._changed_at = {
            topic: number
            for topic, number in self._changed_at.items()
            if self._told(topic) is not None
        }

    def _told(self, topic: str) -> TopicConfig | None:
        """As it may be told: without the changes that a kill could still undo."""
        unkept = self._unkept.get(topic)
        return self.configs.get(topic) if unkept is None else unkept.kept

    def _tellable(self) -> Iterator[str]:
        """The topics that may be told to others: a file may hold anything."""
        refused = []
        for topic, config in self.configs.items():
            try:
                if topic != config.topic_name:
                    raise NameIllegal(f"{topic[:140]!r} is {config.topic_name[:140]!r} as well")
                check_told(_info(config))
                check_served(config)
            except NoPermission as error:
                log.warning("%s", error)
            except (NameIllegal, BadRequest) as error:
                refused.append(str(error))
            else:
                yield topic
        if refused:
            shown = "; ".join(refused[:NAMED_MAX])
            text = (
                "topics.json: %d topics are not served, since clients could not be told of them: %s"
            )
            log.warning(text, len(refused), shown)


def made_queues(config: TopicConfig | None) -> int | None:
    """Return the most queues that a topic has had since it was created again; None: it was not
    created again, and owns all queues of its name."""
    text = "" if config is None else config.attributes.get(MADE_ATTRIBUTE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


class _QueueCounts(Mapping[str, int]):
    """topic -> queues that may be read, as it is now."""

    def __init__(self, configs: Mapping[str, TopicConfig]) -> None:
        self._configs = configs

    def __getitem__(self, topic: str) -> int:
        config = self._configs[topic]
        return config.read_queue_nums if config.perm & READ and not why_not_served(config) else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


def _info(config: TopicConfig) -> TopicInfo:
    return TopicInfo(
        config.topic_name, config.read_queue_nums, config.write_queue_nums, config.perm
    )


def check_served(config: TopicConfig) -> None:
    """Raise NoPermission for a topic that RocketMQ does not store in plain queues."""
    why = why_not_served(config)
    if why:
        raise NoPermission(
            f"topic {config.topic_name} is not served: {why}; its messages and files stay "
            "unchanged for RocketMQ"
        )


def check_info(info: TopicInfo) -> None:
    """Raise BadRequest for numbers that no topic may be given."""
    for kind, count in (("read", info.read_queues), ("write", info.write_queues)):
        if not 1 <= count <= QUEUES_MAX:
            raise BadRequest(f"topic {info.topic}: {count} {kind} queues: 1 to {QUEUES_MAX}")
    if not 0 <= info.perm <= CLIENTS_MAX:
        raise BadRequest(f"topic {info.topic}: perm {info.perm}, 0 to {CLIENTS_MAX}")
