"""Exceptions that can be copied and pickled, whatever arguments their constructors take."""

from __future__ import annotations

from typing import Any, TypeVar

_Raised = TypeVar("_Raised", bound=Exception)


def rebuilt(kind: type[_Raised], args: tuple[Any, ...], state: dict[str, Any]) -> _Raised:
    """Rebuild an exception from its class, its `args` and its attributes.

    Its constructor is not called: it may take other arguments than `args`. Raises TypeError if
    `kind` is not an exception class.
    """
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{kind!r} is not an exception class")
    made = kind.__new__(kind, *args)
    made.args = tuple(args)
    made.__dict__.update(state)
    return made
