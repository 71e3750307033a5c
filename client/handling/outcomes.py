"""Outcomes: what a handler can say of a message besides "done" and "failed"."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final, NamedTuple, Self

from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.rebuilding import rebuilt

AFTER_S_MAX: Final = 366 * 86_400.0


class _Outcome(Exception):
    """Exception of a handler that decides what happens to a message. Copies and pickles keep its
    state, whatever arguments the constructor of its class takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self.args, self.__dict__)


def checked_after(after: timedelta | float | None) -> float | None:
    """Return `after` in seconds. Raises ArgumentIllegal unless it is a valid time."""
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if seconds is not None and (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or math.isnan(seconds)
        or not 0 <= seconds <= AFTER_S_MAX
    ):
        raise ArgumentIllegal(
            f"Retry(after={after!r:.200}): `after` is a timedelta, or seconds from 0 to "
            f"{AFTER_S_MAX:.0f}"
        )
    return seconds


def _retry(kind: type[Retry], args: tuple[Any, ...], state: dict[str, Any]) -> Retry:
    """Rebuild a copied or pickled `Retry`. Raises ArgumentIllegal for an invalid time."""
    made = rebuilt(kind, args, state)
    checked_after(made.after_s)
    return made


class Retry(_Outcome):
    """Raised by a handler: deliver the message again, `after` so long (a timedelta, or seconds).

    Without `after` the broker decides: 10 s, 30 s, 1 min ... 2 h, later each time. With it the
    message waits at least so long, as the broker's `messageDelayLevel` has it. In order
    (`orderly=True`) it is how long the queue waits: 10 ms to 30 s, 1 s without it.

    Raises ArgumentIllegal for what is no time.
    """

    after_s: float | None = None  # also of one whose class does not call this one's __init__

    def __new__(cls, *given: object, **named: object) -> Self:
        if cls.__init__ is Retry.__init__ and not (
            len(given) + len(named) <= 1 and named.keys() <= {"after"}
        ):
            arguments = [*map(repr, given), *(f"{name}={value!r}" for name, value in named.items())]
            raise ArgumentIllegal(
                f"Retry({', '.join(arguments):.200}): the only parameter is `after`, a timedelta "
                "or seconds from 0 on: raise Retry(after=3), and log the reason"
            )
        return super().__new__(cls)

    def __init__(self, after: timedelta | float | None = None) -> None:
        seconds = checked_after(after)
        super().__init__("again" if seconds is None else f"again after {seconds:g} s")
        self.after_s = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _retry, (type(self), self.args, self.__dict__)


class Reject(_Outcome):
    """Raised by a handler: nobody can do this. The message goes to the dead letters at once."""

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)


class Verdict(NamedTuple):
    """What a failed delivery is given back with; see GivenBack."""

    delay_level: int = 0
    after_ms: int = -1
    after_s: float | None = None


DEAD: Final = Verdict(delay_level=-1)
LATE: Final = Verdict(delay_level=3)  # RocketMQ: what was not done within consumeTimeout


def verdict_of(error: BaseException) -> Verdict:
    if isinstance(error, Reject):
        return DEAD
    after_s = error.after_s if isinstance(error, Retry) else None
    if isinstance(after_s, int | float) and 0 <= after_s <= AFTER_S_MAX:
        return Verdict(after_ms=round(after_s * 1000), after_s=after_s)
    return Verdict()


def failure_in(returned: Any) -> BaseException | None:
    """What a handler returned that it should have raised, or what has not even begun; anything else
    says that it is done. Nothing of the object is asked: whoever does may hear an exception."""
    kind = type(returned)
    if issubclass(kind, Retry | Reject):
        failure: BaseException = returned
        return failure
    if returned is Retry:
        return Retry()
    if returned is Reject:
        return Reject()
    if kind is CoroutineType:
        returned.close()
        return TypeError("the handler returned a coroutine, which nobody awaits: see AsyncConsumer")
    if kind is GeneratorType or kind is AsyncGeneratorType:
        return TypeError("the handler returned a generator, of which nobody has run a line")
    return None


def check_handler(handler: Callable[..., Any], *, is_async: bool) -> None:
    """Raise ArgumentIllegal unless it is a function of the kind that is asked for."""
    call = vars(type(handler)).get("__call__")  # an object's own may be `async def`
    if not is_async and any(map(inspect.iscoroutinefunction, (handler, call))):
        raise ArgumentIllegal(
            "the handler is `async def`: run() of AsyncConsumer and AsyncPopConsumer takes it"
        )
    kinds = inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(each) for kind in kinds for each in (handler, call)):
        raise ArgumentIllegal("the handler has a `yield`: to call it runs nothing of it")
    if not callable(handler):
        raise ArgumentIllegal(f"a handler can be called; {type(handler).__name__} cannot")


def check_awaited(handler: Callable[..., Any]) -> None:
    """Raise ArgumentIllegal unless it is `async def`, or is said to stand for what is: an object's
    `__call__`, a partial, what functools.wraps has put around it."""
    inner = inspect.unwrap(handler)
    call = vars(type(inner)).get("__call__")
    if not any(map(inspect.iscoroutinefunction, (handler, inner, call))):
        raise ArgumentIllegal(
            "the handler is not `async def`, and would hold up the event loop: run() of Consumer "
            "and PopConsumer takes it. What returns an awaitable is awaited by one that is: "
            "`async def handle(message): await call(message)`"
        )
