"""Arguments of the wrong kind, told at once and in words, by the annotations of what is called."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from cometmq.protocol.errors import ArgumentIllegal

P = ParamSpec("P")
R = TypeVar("R")
_WORDS: Final[Mapping[Any, str]] = {
    str: "text",
    bytes: "bytes",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
}


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """Raise ArgumentIllegal instead of calling `method` with what its annotations do not allow.

    Takes some microseconds: for what is not called for each message.
    """
    signature = inspect.signature(method)
    hints: dict[str, Any] = {}

    @functools.wraps(method)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        if not hints:
            hints.update(typing.get_type_hints(method))
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise ArgumentIllegal(f"{method.__qualname__}(): {error}") from None
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind not in (
                inspect.Parameter.VAR_KEYWORD,
                inspect.Parameter.VAR_POSITIONAL,
            ):
                check(name, value, hints[name])
        return method(*arguments, **keywords)

    return call


def check(name: str, value: object, hint: Any) -> None:
    """Raise ArgumentIllegal unless the value is of that kind."""
    if not _is(value, hint):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        raise ArgumentIllegal(f"{name} is {_words(hint)}, not {type(value).__name__}: {shown}")


def _is(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and value == value  # not NaN, which is neither above nor below a bound
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(origin or hint, type):
        return True  # Any, TypeVars
    kind = origin or hint
    if not isinstance(value, kind):
        return False
    if kind is not str and issubclass(kind, Iterable) and isinstance(value, (str, bytes)):
        return kind is bytes
    if isinstance(value, Mapping):
        return issubclass(kind, Mapping)
    if kind is tuple and inner and inner[-1] is not ...:
        assert isinstance(value, tuple)
        return len(value) == len(inner) and all(map(_is, value, inner))
    if inner and isinstance(value, (list, tuple, set, frozenset)):
        return all(_is(each, inner[0]) for each in value)
    return True


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(each) for each in inner))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple and inner and inner[-1] is not ...:
        return f"({', '.join(map(_words, inner))})"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None and inner and issubclass(origin, Iterable):
        return f"several, each {_words(inner[0])}"
    return _WORDS.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"
