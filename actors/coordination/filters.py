"""SQL92 filters of groups: registered for RocketMQ as members come and go (tables/filters.py)."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping

from cometmq.actors.coordination.books import Books
from cometmq.actors.coordination.files import now_ms
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.ledger import Change

log = logging.getLogger(__name__)


class Filters:
    """Change the table of filters; the actor that ends a round sends the changes."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def begin(self, groups: Container[str]) -> None:
        """After a start, in which these groups have members."""
        self._change(self._books.filters.unheard(groups, now_ms()))

    def register(self, group: str, wanted: Mapping[str, str]) -> None:
        """What its members want, by topic; see FilterBook.differences."""
        self._change(self._books.filters.differences(group, wanted, now_ms()))

    def forget(self) -> None:
        """Drop those that no member has wanted for a day."""
        self._change(self._books.filters.forgotten(now_ms()))

    def _change(self, changes: Iterable[Change]) -> None:
        for change in list(changes):
            try:
                self._books.change(change)
            except BadRequest as error:  # a file of somebody else may hold anything
                log.error("a filter is not kept: %s", error)
