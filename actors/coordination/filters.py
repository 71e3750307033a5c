"""SQL92 filters of groups: registered for RocketMQ as members come and go (books/filters.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.files import now_ms
from cometmq.actors.runtime.service import ServiceActor, Timer
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.ledger import Change

log = logging.getLogger(__name__)


TELL_S: Final = 0.1  # after a change: those that come meanwhile are told with it

Tell = Callable[[Mapping[str, list[str]]], None]


class Filters:
    """Changes the book of filters; whoever ends a round sends that.

    The dispatcher, which calculates what filters want, is told the expressions of each topic. It is
    no matter when: what it has not calculated is evaluated where it is read.

    Args:
        tell: takes topic -> expressions, all there are. Raises OSError.
    """

    def __init__(self, actor: ServiceActor, books: Books, tell: Tell) -> None:
        self._actor = actor
        self._books = books
        self._tell = tell
        self._seen = (0, 0)  # changes of filters and of topics
        self._told: dict[str, list[str]] | None = None  # None: an earlier process has told
        self._timer: Timer | None = None

    def begin(self, groups: Container[str]) -> None:
        """After a start, in which these groups have members."""
        self._change(self._books.filters.unheard(groups, now_ms()))

    def register(self, group: str, wanted: Mapping[str, str]) -> None:
        """What its members want, by topic; see FilterBook.differences."""
        self._change(self._books.filters.differences(group, wanted, now_ms()))

    def forget(self) -> None:
        """Drop those that no member has wanted for a day."""
        self._change(self._books.filters.forgotten(now_ms()))

    def finish_round(self) -> None:
        """Have the dispatcher told, if something may have changed."""
        seen = self._books.filters.changes, self._books.topics.version
        if seen != self._seen and self._timer is None:
            self._timer = self._actor.after(TELL_S, self._tell_changes)

    def _tell_changes(self) -> None:
        self._timer = None
        self._seen = self._books.filters.changes, self._books.topics.version
        wanted = self._books.filters.calculated(self._books.topics)
        if wanted == self._told:
            return
        try:
            self._tell(wanted)
        except OSError as error:  # filters are evaluated, as long as the disk is full
            log.error("the dispatcher is not told of filters: %s", error)
        else:
            self._told = wanted

    def _change(self, changes: Iterable[Change]) -> None:
        for change in list(changes):
            try:
                self._books.change(change)
            except BadRequest as error:  # a file of somebody else may hold anything
                log.error("a filter is not kept: %s", error)
