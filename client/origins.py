"""Origins: where messages came from, found again by copies that come back from another process.

A pickled message says by a name which of its consumer's connections it came by. In the process
that has it, and nowhere else, the name leads back there: to acknowledge, to give back, to reply.
Elsewhere the message keeps the name, for the way back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from secrets import token_hex
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakValueDictionary

_Origin = TypeVar("_Origin")

_origins: Final[WeakValueDictionary[tuple[int, str], object]] = WeakValueDictionary()


class Elsewhere:
    """Stands in, in another process, for where a message came from."""

    __slots__ = ("_found_by", "_names")

    def __init__(self, found_by: Callable[..., Any], *names: Any) -> None:
        self._found_by = found_by
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return self._found_by, self._names

    def reply(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "this message was copied to another process; it can be replied to in the one whose "
            "consumer was given it"
        )


def register(origin: object) -> str:
    """A name for it, for as long as it is there."""
    name = token_hex(8)
    _origins[os.getpid(), name] = origin
    return name


def find(name: str, kind: type[_Origin]) -> _Origin | None:
    """Of this process and of that kind; None: there is none, or none any more."""
    found = _origins.get((os.getpid(), name))
    return found if isinstance(found, kind) else None
