"""Exceptions as values: copied and pickled, whatever their constructors take."""

from __future__ import annotations

from typing import Any, TypeVar

_Raised = TypeVar("_Raised", bound=Exception)


def rebuilt(kind: type[_Raised], args: tuple[Any, ...], state: dict[str, Any]) -> _Raised:
    """One that was taken apart into its class, its `args` and its attributes.

    Its constructor is not called: it may take other arguments than `args`. Raises TypeError for
    what is no exception.
    """
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{kind!r} is no exception")
    made = kind.__new__(kind, *args)
    made.args = tuple(args)
    made.__dict__.update(state)
    return made
