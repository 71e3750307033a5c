"""Retry topics of groups: which one redelivers a message, and which ones a group reads. Pure.

Popped messages are redelivered from %RETRY%group_topic, RocketMQ's default. Another group may have
a retry topic of that name: a group called group_topic, or another pair of group and topic. In that
case %RETRY%group+topic is used, which no other group can have. Consumers read both.
"""

from __future__ import annotations

from collections.abc import Iterator

from cometmq.actors.tables.groups import GroupBook
from cometmq.actors.tables.offsets import OffsetBook
from cometmq.actors.tables.retries import retry_topic
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol.commands import GivenBack
from cometmq.protocol.errors import NameIllegal
from cometmq.protocol.names import POP_RETRY_SIGNS, RETRY_PREFIX, pop_retry_topic

BY_DEFAULT, OWN = POP_RETRY_SIGNS


class RetryTopics:
    """Retry topics, derived from the groups, topics and offsets that the coordinator knows."""

    def __init__(self, groups: GroupBook, topics: TopicBook, offsets: OffsetBook) -> None:
        self._groups = groups.configs
        self._topics = topics
        self._offsets = offsets

    def topic_of(self, group: str, entry: GivenBack, *, popped: bool) -> str:
        """Return the topic from which a message that was given back is redelivered."""
        name = retry_topic(group, entry, popped=popped)
        if name == RETRY_PREFIX + group or not self._is_shared(group, name):
            return name
        return retry_topic(group, entry, popped=popped, sign=OWN)

    def read_by(self, group: str, topic: str) -> list[str]:
        """Return the retry topics that a consumer of this topic in a group without queues reads."""
        names = (RETRY_PREFIX + group, *(pop_retry_topic(group, topic, s) for s in POP_RETRY_SIGNS))
        return [
            name for name in dict.fromkeys(names)
            if name in self._topics
            and (name == names[0] or name.removeprefix(RETRY_PREFIX) not in self._groups)
        ]  # fmt: skip

    def of_group(self, group: str) -> list[str]:
        """Return all retry topics that belong to this group only."""
        plain = RETRY_PREFIX + group
        own, by_default = pop_retry_topic(group, "", OWN), pop_retry_topic(group, "", BY_DEFAULT)
        known = self._offsets.topics_of(group)
        return [
            name for name in self._topics.configs
            if name == plain or name.startswith(own) or (
                name.startswith(by_default)
                and (name in known or name.removeprefix(by_default) in known)
                and not self._is_shared(group, name)
            )
        ]  # fmt: skip

    def check_new(self, group: str) -> None:
        """Raise NameIllegal for a new group that would receive another group's retries."""
        name = RETRY_PREFIX + group
        if group in self._groups or name not in self._topics:
            return
        for other, topic in self._pairs(name):
            if name not in self._offsets.topics_of(other):
                continue  # that group shares queues, or has had no retries
            raise NameIllegal(
                f"group {group} cannot be created: its retry topic {name} has retries of group "
                f"{other} for topic {topic}; use another name, or delete that topic once they are "
                "consumed"
            )

    def _is_shared(self, group: str, name: str) -> bool:
        """Return whether another group reads the topic as well, or would read it."""
        if name.removeprefix(RETRY_PREFIX) in self._groups:
            return True
        return any(other != group for other, _ in self._pairs(name))

    def _pairs(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield pairs of group and topic whose retry topic has this name."""
        words = name.removeprefix(RETRY_PREFIX).split(BY_DEFAULT)
        for count in range(1, len(words)):
            group, topic = BY_DEFAULT.join(words[:count]), BY_DEFAULT.join(words[count:])
            if group in self._groups and topic in self._offsets.topics_of(group):
                yield group, topic
