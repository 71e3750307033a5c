"""Origins of messages, by which copies that return from another process find their consumer.

A pickled message names the connection of its consumer that it was received by. Only the process of
that consumer resolves the name, to acknowledge the message, give it back or reply to it. In other
processes the message keeps the name unresolved.
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
    """Placeholder, in another process, for the origin of a message."""

    __slots__ = ("_found_by", "_names")

    def __init__(self, found_by: Callable[..., Any], *names: Any) -> None:
        self._found_by = found_by
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return self._found_by, self._names

    def reply(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "cannot reply: this message was copied to another process; reply in the process whose "
            "consumer received it"
        )


def register(origin: object) -> str:
    """Return a name by which the origin is found for as long as it exists."""
    name = token_hex(8)
    _origins[os.getpid(), name] = origin
    return name


def find(name: str, kind: type[_Origin]) -> _Origin | None:
    """Return the origin of that name and kind in this process; None if there is none now."""
    found = _origins.get((os.getpid(), name))
    return found if isinstance(found, kind) else None
