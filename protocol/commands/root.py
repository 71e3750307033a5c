"""What commands and answers are made of, and what each declares beside its fields.

A command says who may say it: its *audience*, the rights that it needs, and of what. That is
checked where a command comes in (actors/runtime/access.py), before any actor sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple

import msgspec


class Audience(Enum):
    """Who may say a command. Whoever comes to a port of clients is never of the family."""

    NOBODY = "nobody"  # an answer
    FAMILY = "the broker's own processes"
    BROKER = "brokers"  # others of the cluster, to a name server
    CLIENT = "clients"
    ADMINISTRATOR = "administrators"


class Right(Enum):
    """What a command may need. DESCRIBE is part of each of the others."""

    DESCRIBE = "describe"
    CREATE = "create"
    PUBLISH = "publish"
    READ = "read"
    ADMINISTER = "administer"


class On(Enum):
    """What a right is on."""

    TOPIC = "topic"
    GROUP = "group"
    SINK = "sink"  # of staged messages
    PRODUCER = "producer"  # that has a producer_id
    BROKER = "broker"


EVERY: Final = ""  # in place of a field, or as a name: all that there are


class Need(NamedTuple):
    """A right that is needed.

    Args:
        field: that holds the name, or the names: `topic`, `sections.topic`; EVERY: of all.
        unless: a field; with a true value in it this right is not needed.
        is_optional: an empty name needs no right. Without this it stands for all names.
        itemwise: the command's items are answered one by one: the handler refuses only those that
            name the broker's own topics or groups.
    """

    right: Right
    on: On
    field: str
    unless: str = ""
    is_optional: bool = False
    itemwise: bool = False


class Needed(NamedTuple):
    """A right that a certain command needs."""

    right: Right
    on: On
    name: str  # EVERY: of all of them


class ServedBy(Enum):
    """Replicas of a broker that carry a command out. The others refuse it with NotMaster.

    The default is the master, for commands that change something or assign something to a client.
    """

    MASTER = "the master"
    SLAVE = "the master and its slaves"  # a follower of a replica group may lag behind
    EVERY = "every replica"


class Access(msgspec.Struct, frozen=True):
    """Audience and rights of a command, and the replicas that serve it.

    Args:
        needs: all of them.
        later: it may be answered after its handler has returned, through the request: so it is not
            taken from within the process, where an answer is what the handler returns.
    """

    audience: Audience
    needs: tuple[Need, ...] = ()
    later: bool = False
    served_by: ServedBy = ServedBy.MASTER

    def needed_for(self, command: Command) -> Iterator[Needed]:
        """The rights that this command needs."""
        for need in self.needs:
            if need.unless and getattr(command, need.unless):
                continue
            for name in names_of(command, need.field):
                if name or not need.is_optional:
                    yield Needed(need.right, need.on, name)


def names_of(command: Command, field: str) -> set[str]:
    """Return the names in the field of a command that a Need refers to."""
    if field == EVERY:
        return {EVERY}
    first, _, second = field.partition(".")
    value: Any = getattr(command, first)
    if not isinstance(value, list):
        return {getattr(value, second) if second else value}
    return {getattr(each, second) for each in value} if second else set(value)


class Since(NamedTuple):
    """The release that first had a field, beside its type: `Annotated[Int32, Since("1.1.0")]`.

    None: that which first had the command. A field that was added stands behind all older ones and
    has a default, which is what older senders mean.
    """

    version: str


class Command(msgspec.Struct, frozen=True, array_like=True):
    """The root of all commands and answers."""

    access: ClassVar[Access]
    new_in: ClassVar[str] = ""  # the first release that has it; empty: the first of all

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(getattr(cls, "access", None), Access):
            raise TypeError(f"{cls.__name__} does not declare who may say it: `access`")


class Answer(Command, frozen=True):
    """What only comes back."""

    access = Access(Audience.NOBODY)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A structure inside a command."""


def tag_of(kind: type[msgspec.Struct]) -> int:
    """The number by which a command, or a change of the ledger, is known where it is written."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int), f"{kind.__name__} has no tag"
    return tag


# --- how a command declares it ---


def describe(field: str, on: On = On.TOPIC) -> Need:
    return Need(Right.DESCRIBE, on, field)


def create(field: str, on: On = On.TOPIC) -> Need:
    """Need the right to create a topic or group with defaults, if it does not exist."""
    return Need(Right.CREATE, on, field)


def publish(
    field: str, on: On = On.TOPIC, *, is_optional: bool = False, itemwise: bool = False
) -> Need:
    return Need(Right.PUBLISH, on, field, is_optional=is_optional, itemwise=itemwise)


def read(field: str, on: On = On.TOPIC) -> Need:
    return Need(Right.READ, on, field)


def administer(field: str, on: On = On.TOPIC, *, unless: str = "", itemwise: bool = False) -> Need:
    return Need(Right.ADMINISTER, on, field, unless, itemwise=itemwise)


def by_clients(*needs: Need, later: bool = False, served_by: ServedBy = ServedBy.MASTER) -> Access:
    return Access(Audience.CLIENT, needs, later, served_by)


def by_administrators(
    *needs: Need, later: bool = False, served_by: ServedBy = ServedBy.MASTER
) -> Access:
    return Access(Audience.ADMINISTRATOR, needs, later, served_by)


def by_brokers(*needs: Need, later: bool = False, served_by: ServedBy = ServedBy.MASTER) -> Access:
    return Access(Audience.BROKER, needs, later, served_by)


def by_family(*, later: bool = False, served_by: ServedBy = ServedBy.MASTER) -> Access:
    return Access(Audience.FAMILY, (), later, served_by)
