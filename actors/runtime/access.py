"""Access control: the sender of a command, and whether this process accepts it from there.

Every listener checks a command before an actor receives it (`request_from`), and so does the
process itself (ServiceActor).

The rights that a command declares (`access.needs`) also say which of its fields must not name the
broker's internal topics and groups: no command from outside may change those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

import msgspec

from cometmq.protocol import names
from cometmq.protocol.commands import EVERY, Audience, Command, Need, On, Right
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


# Checks that refuse clients' use of the broker's internal topics and groups, by right, whatever
# access control says. Every client may describe these topics and groups.
_GUARDS: Final[dict[tuple[On, Right], Callable[[str], None]]] = {
    (On.TOPIC, Right.CREATE): names.refuse_internal_topic,
    (On.TOPIC, Right.PUBLISH): names.refuse_internal_topic,
    (On.TOPIC, Right.ADMINISTER): names.refuse_internal_topic,
    (On.TOPIC, Right.READ): names.refuse_hidden_topic,
    (On.GROUP, Right.CREATE): names.refuse_internal_group,
    (On.GROUP, Right.PUBLISH): names.refuse_internal_group,
    (On.GROUP, Right.ADMINISTER): names.refuse_internal_group,
    (On.GROUP, Right.READ): names.refuse_internal_group,
}
GUARDED: Final = Audience.CLIENT, Audience.ADMINISTRATOR  # brokers register all topics


def guard_of(need: Need) -> Callable[[str], None] | None:
    """Return the check that raises NameIllegal for internal names; None: no check."""
    if need.field == EVERY or need.itemwise:
        return None
    return _GUARDS.get((need.on, need.right))


class _Guarded(NamedTuple):
    """A field of a command that must not name internal topics or groups."""

    field: str
    part: str  # of its items, if these have the names
    refuse: Callable[[str], None]


def _refuse_each(command: Command, field: str, part: str, refuse: Callable[[str], None]) -> None:
    """Call `refuse` for each name in the field. No set of names is built: most fields have one."""
    value = getattr(command, field)
    if part:
        for each in value if type(value) is list else (value,):
            refuse(getattr(each, part))
    elif type(value) is str:
        refuse(value)
    else:
        for each in value:
            refuse(each)


def _guarded_fields(kind: type[Command]) -> tuple[_Guarded, ...]:
    access = kind.access
    if access.audience not in GUARDED:
        return ()
    found: dict[_Guarded, None] = {}
    for need in access.needs:
        refuse = guard_of(need)
        if refuse is not None:
            field, _, part = need.field.partition(".")
            found[_Guarded(field, part, refuse)] = None
    return tuple(found)


class Policy(Protocol):
    """What principals may do. `command.access.needed_for(command)` tells the rights that a command
    needs."""

    def check(self, command: Command, principal: Principal) -> None:
        """Raise NoPermission for a command that the principal may not send."""


class Authorizer:
    """Access control of a process. It is asked for each request of those who are not of the family,
    with the request's principal. Without a policy everybody may do everything."""

    def __init__(self) -> None:
        self._policy: Policy | None = None

    def reload(self, policy: Policy | None) -> None:
        """Replace the policy, from any thread: for requests that come from now on."""
        self._policy = policy

    def check(self, command: Command, principal: Principal) -> None:
        """Raise NoPermission."""
        if self._policy is not None:
            self._policy.check(command, principal)


AUTHORIZER: Final = Authorizer()  # of this process


class Doorman:
    """Admits what one actor takes.

    Args:
        role: of the actor.
        takes: the commands that it has a handler for.
    """

    def __init__(self, role: str, takes: Iterable[type[Command]]) -> None:
        self._role = role
        self._takes = frozenset(takes)
        self._from_outside = frozenset(
            kind for kind in self._takes if kind.access.audience is not Audience.FAMILY
        )
        self._guarded = {kind: _guarded_fields(kind) for kind in self._from_outside}

    def admit(self, command: Command, principal: Principal) -> None:
        """Raise if the actor must not receive the command: UnknownCommand, NameIllegal for an
        internal name, or the error of access control."""
        kind = type(command)
        if principal.is_family:
            if kind not in self._takes:
                raise self._refusal(kind)
            return
        guarded = self._guarded.get(kind)
        if guarded is None:
            raise self._refusal(kind)
        AUTHORIZER.check(command, principal)
        for field, part, refuse in guarded:
            _refuse_each(command, field, part, refuse)

    def _refusal(self, kind: type[Command]) -> UnknownCommand:
        if kind in self._takes:
            return UnknownCommand(f"{kind.__name__} is not taken from outside")
        return UnknownCommand(f"{self._role} does not take {kind.__name__}")
