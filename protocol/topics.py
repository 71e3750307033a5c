"""A broker's topics, told in pages.

The coordinator numbers the changes of its topics, within one life of its own (a *run*). A page
(`TopicList`) holds what has changed in (since, version]: each topic as it is, once, at the number
of its last change. So the first pages from 0 on are all topics, and what follows are the
differences; creating one topic costs one short page, however many there are.

Whoever is told keeps a `TopicMirror` and answers with how far it has come; the coordinator goes on
from there. After a gap, or from another run, that is the beginning: the topics known so far stay
until the last page of the new ones has come, and are replaced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from cometmq.protocol import names
from cometmq.protocol.commands import ListTopics, TopicInfo, TopicList, TopicsKnown
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.perm import PERM_MAX

PAGE_BYTES: Final = 256 * 1024  # of one page, about; a head may have four times that
COMMAND_BYTES: Final = 768 * 1024  # of the topics in a command that creates many
ENTRY_BYTES: Final = 24  # what an entry may take beside its name


def entry_bytes(topic: str) -> int:
    """What a topic may take in a page. Names of topics are ASCII."""
    return len(topic) + ENTRY_BYTES


def check_told(info: TopicInfo) -> None:
    """Raise BadRequest or NameIllegal unless clients may be told of such a topic."""
    names.check_topic(info.topic)
    if not (0 <= info.read_queues < 1 << 31 and 0 <= info.write_queues < 1 << 31):
        raise BadRequest(f"topic {info.topic}: {info.read_queues}/{info.write_queues} queues")
    if not 0 <= info.perm <= PERM_MAX:
        raise BadRequest(f"topic {info.topic}: perm {info.perm}, 0 to {PERM_MAX}")


class TopicMirror:
    """What a process knows of the topics of one broker."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicInfo] = {}
        self._run = 0
        self._version = 0
        self._gathered: dict[str, TopicInfo] | None = None  # the new topics, until all have come

    @property
    def known(self) -> TopicsKnown:
        return TopicsKnown(self._run, self._version)

    def take(self, page: TopicList) -> set[str]:
        """Go on by a page, if it fits; the names of what has changed in `topics`."""
        if page.since == 0:
            self._run, self._version, self._gathered = page.run, 0, {}
        if page.run != self._run or page.since > self._version or page.version < self._version:
            return set()  # after a gap, or overtaken by a later page
        self._version = page.version
        if self._gathered is None:
            return _apply(page, self.topics)
        _apply(page, self._gathered)
        if not page.complete:
            return set()
        before, self.topics, self._gathered = self.topics, self._gathered, None
        return {name for name, info in self.topics.items() if before.get(name) != info} | {
            name for name in before if name not in self.topics
        }


def _apply(page: TopicList, topics: dict[str, TopicInfo]) -> set[str]:
    for info in page.topics:
        topics[info.topic] = info
    for name in page.removed:
        topics.pop(name, None)
    return {info.topic for info in page.topics} | set(page.removed)


def fetch_topics(ask: Callable[[ListTopics], TopicList]) -> TopicMirror:
    """All topics of a broker, page by page; what changes meanwhile is in it as well.

    Args:
        ask: puts the question to the broker's coordinator.
    """
    mirror = TopicMirror()
    catch_up(mirror, ask)
    return mirror


def catch_up(mirror: TopicMirror, ask: Callable[[ListTopics], TopicList]) -> None:
    """The same for a mirror that knows something already: only what has changed is asked for."""
    complete = False
    while not complete:
        known = mirror.known
        page = ask(ListTopics(known.run, known.version, paged=True))
        mirror.take(page)
        complete = page.complete


def in_commands(infos: Iterable[TopicInfo]) -> Iterator[list[TopicInfo]]:
    """The same, in lists of which each fits into a command."""
    wanted: list[TopicInfo] = []
    left = COMMAND_BYTES
    for info in infos:
        left -= entry_bytes(info.topic)
        if left < 0 and wanted:
            yield wanted
            wanted, left = [], COMMAND_BYTES - entry_bytes(info.topic)
        wanted.append(info)
    if wanted:
        yield wanted
