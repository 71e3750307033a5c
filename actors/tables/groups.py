"""Consumer groups' configurations, as they stand in subscriptionGroup.json. Pure: no I/O."""

from __future__ import annotations

from cometmq.actors.tables.book import Book
from cometmq.protocol.configs import SubscriptionGroupConfig
from cometmq.protocol.errors import TooManyGroups
from cometmq.protocol.ledger import Change, GroupPut, GroupRemoved

Undo = tuple[str, SubscriptionGroupConfig | None] | None  # what stood there


class GroupBook(Book):
    """The configurations by group.

    Args:
        configs: to begin with; they are the book's from now on.
        groups_max: no more are created.
    """

    kinds = (GroupPut, GroupRemoved)

    def __init__(self, configs: dict[str, SubscriptionGroupConfig], groups_max: int) -> None:
        self.configs = configs
        self._groups_max = groups_max

    def check_put(self, group: str) -> None:
        """Raises TooManyGroups where it would be one more."""
        if group not in self.configs and len(self.configs) >= self._groups_max:
            raise TooManyGroups(
                f"group {group} is not created: the broker has {self._groups_max} groups, as many "
                "as maxGroups allows"
            )

    def apply(self, change: Change) -> Undo:
        """Make the change; what `undo` wants to take it back."""
        if isinstance(change, GroupPut):
            return self._set(change.config.group_name, change.config)
        if isinstance(change, GroupRemoved):
            return self._set(change.group, None)
        return None

    def undo(self, undo: Undo) -> None:
        """Take a change back; the last one first."""
        if undo is not None:
            self._set(*undo)

    def _set(self, group: str, config: SubscriptionGroupConfig | None) -> Undo:
        self.changes += 1
        before = self.configs.pop(group, None) if config is None else self.configs.get(group)
        if config is not None:
            self.configs[group] = config
        return group, before
