"""Access: who says a command, and whether this process takes it from there.

Every door asks it before an actor sees the command: ZeroMQ's sockets and the lines of this machine
(`request_from`), and the process itself (ServiceActor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from cometmq.protocol.commands import Audience, Command
from cometmq.protocol.errors import UnknownCommand


class Principal(msgspec.Struct, frozen=True):
    """Who says something.

    Args:
        is_family: one of this broker's own processes.
    """

    name: str
    is_family: bool = False


FAMILY: Final = Principal("family", is_family=True)
ANYBODY: Final = Principal("anybody")  # who has not shown who it is

Allows = Callable[[Command, Principal], None]


def allow(_command: Command, _principal: Principal) -> None:
    """Access control's place: called for each command of those who are not of the family, of which
    `command.access.needed_for(command)` tells the rights that it needs. It raises NoPermission
    for what the principal may not do. This one lets everybody do everything."""


class Doorman:
    """Admits what one actor takes.

    Args:
        role: of the actor.
        takes: the commands that it has a handler for.
        allows: is asked what is behind `allow`; `allow` itself is not even called.
    """

    def __init__(
        self, role: str, takes: Iterable[type[Command]], allows: Allows = allow
    ) -> None:  # fmt: skip
        self._role = role
        self._takes = frozenset(takes)
        self._from_outside = frozenset(
            kind for kind in self._takes if kind.access.audience is not Audience.FAMILY
        )
        self._allows = None if allows is allow else allows

    def admit(self, command: Command, principal: Principal) -> None:
        """Raise UnknownCommand, or what access control raises, for what an actor is not to see."""
        if principal.is_family:
            if type(command) not in self._takes:
                raise self._refusal(type(command))
            return
        if type(command) not in self._from_outside:
            raise self._refusal(type(command))
        if self._allows is not None:
            self._allows(command, principal)

    def _refusal(self, kind: type[Command]) -> UnknownCommand:
        if kind in self._takes:
            return UnknownCommand(f"{kind.__name__} is not taken from outside")
        return UnknownCommand(f"{self._role} does not take {kind.__name__}")
