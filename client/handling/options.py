"""How a consumer's `run` is to work: what its arguments say, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NamedTuple, TypedDict, get_type_hints

from cometmq.client.arguments import check
from cometmq.client.handling.outcomes import check_awaited, check_handler
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.shm.kernel.codec import Message

Handler = Callable[[Any], Any]
Middleware = Callable[[Handler], Handler]

CONCURRENCY_MAX: Final = 4_096
BATCH_MAX: Final = 8_192


class RunOptions(TypedDict, total=False):
    """Of `Consumer.run`, but for `handler`."""

    concurrency: int
    batch: int
    ordered_by: Callable[[Message], Hashable] | None
    orderly: bool
    middleware: Iterable[Middleware]
    consume_timeout_s: float
    suspend_s: float
    span: int
    stuck_s: float
    end_timeout_s: float


class Handling(NamedTuple):
    """See `Consumer.run`."""

    concurrency: int = 20
    batch: int = 1
    ordered_by: Callable[[Message], Hashable] | None = None
    orderly: bool = False
    middleware: Iterable[Middleware] = ()
    consume_timeout_s: float = 900.0
    suspend_s: float = 1.0
    span: int = 2_000
    stuck_s: float = 60.0
    end_timeout_s: float = 30.0

    @classmethod
    def of(cls, options: RunOptions) -> Handling:
        """Raises ArgumentIllegal."""
        hints = get_type_hints(RunOptions)
        for name, value in options.items():
            if name not in hints:
                raise ArgumentIllegal(f"run() has no argument {name!r}")
            check(name, value, hints[name])
        handling = cls(**options)
        handling.check()
        return handling

    def check(self) -> None:
        """Raises ArgumentIllegal."""
        _within("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        _within("batch", self.batch, 1, BATCH_MAX)
        _within("span", self.span, 1, math.inf)
        _within("consume_timeout_s", self.consume_timeout_s, 0.001, math.inf)
        _within("suspend_s", self.suspend_s, 0.01, 30)
        _within("stuck_s", self.stuck_s, 0.001, math.inf)
        _within("end_timeout_s", self.end_timeout_s, 0, math.inf)
        if self.orderly and self.ordered_by is not None:
            raise ArgumentIllegal("orderly=True keeps the order of whole queues: no ordered_by=")

    def wrapped(self, handler: Handler, *, is_async: bool) -> Handler:
        """The handler in its middleware, of which the first is the outermost."""
        check_handler(handler, is_async=is_async)
        if is_async:
            check_awaited(handler)
        for each in reversed(list(self.middleware)):
            handler = each(handler)
            check_handler(handler, is_async=is_async)
        return handler


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        up_to = "" if most == math.inf else f", at most {most:g}"
        raise ArgumentIllegal(f"{name}={value!r}: at least {least:g}{up_to}")
