"""Access: who says a command, and whether this process takes it from there.

Every door asks it before an actor sees the command: ZeroMQ's sockets and the lines of this machine
(`request_from`), and the process itself (ServiceActor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from cometmq.protocol.commands import Audience, Command, CommitOffsets
from cometmq.protocol.commands.root import tag_of
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
NO_TAG: Final = -1  # no command has it

Allows = Callable[[Command, Principal], None]


class CommitRun(Command, frozen=True):
    """CommitOffsets that came one behind the other, for an actor that takes them so. It is made
    where they come in, and never on the wire.

    Args:
        packets: as they came, of one frame each.
        skip: bytes in each before the frame.
    """

    access = CommitOffsets.access

    packets: list[bytes]
    skip: int


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

    `run_tag` is that of the commands which it is handed in runs; NO_TAG: of none.
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
        # What access control judges has to be decoded before.
        takes_runs = CommitRun in self._from_outside and self._allows is None
        self.run_tag = tag_of(CommitOffsets) if takes_runs else NO_TAG

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
