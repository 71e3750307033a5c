"""How many members come by one connection: a client cannot fill groups with members alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from cometmq.protocol.errors import SystemBusy

Key = tuple[str, str]  # group, member


class Senders:
    """Counts the members of each connection, all groups together.

    Args:
        members_max: of one connection.
    """

    def __init__(self, members_max: int) -> None:
        self._members_max = members_max
        self._members: defaultdict[bytes, set[Key]] = defaultdict(set)
        self._sender: dict[Key, bytes] = {}

    def note(self, group: str, member: str, sender: bytes) -> None:
        """A member comes by this connection. Raises SystemBusy if that has too many already."""
        key = group, member
        if self._sender.get(key) == sender:
            return
        if len(self._members.get(sender, ())) >= self._members_max:
            raise SystemBusy(
                f"member {member} of group {group}: its connection has {self._members_max} "
                "members already, and takes no more"
            )
        self.forget(group, member)
        self._members[sender].add(key)
        self._sender[key] = sender

    def forget(self, group: str, member: str) -> None:
        """It is no member any more."""
        sender = self._sender.pop((group, member), None)
        if sender is not None:
            self._members[sender].discard((group, member))
            if not self._members[sender]:
                del self._members[sender]

    def prune(self, groups: Mapping[str, Container[str]]) -> None:
        """Forget all but the members that there are, by group."""
        for group, member in list(self._sender):
            if member not in groups.get(group, ()):
                self.forget(group, member)
