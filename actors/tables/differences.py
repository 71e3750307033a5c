"""Differing subscriptions of a group's members: found, named, and logged once. Pure: no I/O.

The members of a group are to subscribe alike, as in RocketMQ: a message reaches only the owner of
its queue, who may not want it. Members may subscribe to different topics, whose queues are then
shared among those who do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from cometmq.protocol.commands import SubscriptionDifference
from cometmq.protocol.errors import SubscriptionIllegal, SubscriptionsDiffer
from cometmq.protocol.tags import ALL_TAGS, TAG_SEPARATOR, in_words, joined, parse_tags, split

log = logging.getLogger(__name__)

Asked = Mapping[str, str]  # topic -> tags and SQL92, as protocol/tags.py joins them
SHOWN_MAX: Final = 200  # characters of an expression
FATE: Final = "a message reaches only the owner of its queue, who may not want it"


class Subscriptions:
    """What the members of a group subscribe to.

    Args:
        group: its name.
        fate: what becomes of messages where they differ, for the log.
    """

    def __init__(self, group: str, fate: str = FATE) -> None:
        self._group = group
        self._fate = fate
        self.asked: dict[str, Asked] = {}  # by member; changed here only
        self._counts: dict[str, Counter[str]] = {}  # topic -> expression -> members
        self._warned: set[str] = set()  # topics whose differences have been logged

    def put(self, member: str, asked: Asked) -> None:
        """A member subscribes to this, and to nothing else."""
        self.remove(member)
        self.asked[member] = dict(asked)
        for topic, tags in asked.items():
            self._counts.setdefault(topic, Counter())[same_form(tags)] += 1

    def remove(self, member: str) -> bool:
        """It has gone; whether it was there."""
        before = self.asked.pop(member, None)
        if before is None:
            return False
        for topic, tags in before.items():
            counts = self._counts[topic] - Counter([same_form(tags)])
            self._counts[topic] = counts
            if len(counts) <= 1:
                self._warned.discard(topic)
            if not counts:
                del self._counts[topic]
        return True

    def difference(self, member: str, asked: Asked) -> SubscriptionDifference | None:
        """Where others want other tags than this member, if it begins to subscribe so."""
        before = self.asked.get(member, {})
        if before == asked:
            return None
        for topic, tags in asked.items():
            own = [same_form(before[topic])] if topic in before else []
            others = self._counts.get(topic, Counter()) - Counter(own)
            difference = _from_others(member, topic, tags, others)
            if difference is not None:
                return difference
        return None

    def check_same(self, member: str, asked: Asked) -> None:
        """Raise SubscriptionsDiffer if others want other tags."""
        difference = self.difference(member, asked)
        if difference is not None:
            raise SubscriptionsDiffer(
                f"group {self._group} takes no differing subscriptions (sameSubscriptions): "
                f"{_said(difference)}; end those members first, or allow it"
            )

    def warn(self, member: str) -> None:
        """Log, once for each topic, that others want other tags than this member."""
        for topic, tags in self.asked[member].items():
            difference = _from_others(member, topic, tags, self._counts[topic])
            if difference is not None and topic not in self._warned:
                self._warned.add(topic)
                log.warning("group %s: %s; %s", self._group, _said(difference), self._fate)

    def usual(self) -> dict[str, str]:
        """What most members want, by topic."""
        return {topic: _usual(counts) for topic, counts in self._counts.items()}

    def differences(self) -> Iterator[SubscriptionDifference]:
        """Every member that does not subscribe as most do, by topic; expressions are cut."""
        for topic, counts in sorted(self._counts.items()):
            usual = _usual(counts)
            if counts[usual] == len(self.asked):
                continue
            for member, asked in sorted(self.asked.items()):
                mine = same_form(asked[topic]) if topic in asked else ""
                if mine != usual:
                    yield _difference(member, topic, mine, usual)


def _said(difference: SubscriptionDifference) -> str:
    member, topic = difference.member, difference.topic
    if not difference.tags:
        return f"member {member} does not subscribe to {topic}, as others do"
    return (
        f"member {member} subscribes to {difference.tags!r} of {topic}, others to "
        f"{difference.usual_tags!r}"
    )


def _from_others(
    member: str, topic: str, tags: str, counts: Counter[str]
) -> SubscriptionDifference | None:
    """How it differs from the rest of what is counted, if it does."""
    mine = same_form(tags)
    others = Counter({each: count for each, count in counts.items() if each != mine})
    return _difference(member, topic, mine, _usual(others)) if others else None


def _difference(member: str, topic: str, tags: str, usual: str) -> SubscriptionDifference:
    return SubscriptionDifference(member, topic, _shown(tags), _shown(usual))


def _shown(subscribed: str) -> str:
    return in_words(*split(subscribed))[:SHOWN_MAX]


def same_form(subscribed: str) -> str:
    """One text for all expressions that mean the same. A file may hold what is none."""
    tags, sql = split(subscribed)
    try:
        wanted = parse_tags(tags)
    except SubscriptionIllegal:
        return subscribed
    return joined(ALL_TAGS if wanted is None else TAG_SEPARATOR.join(sorted(wanted)), sql)


def _usual(counts: Counter[str]) -> str:
    """What most want; of several the first as text."""
    return min(counts, key=lambda tags: (-counts[tags], tags))
