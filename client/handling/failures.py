"""What the log says of handlers that fail: the whole of each kind of failure, and no flood of it.

A kind is an exception's type, and the line that raised it. Its first failures are logged one by
one with their tracebacks; after that one in a while is, with the number of those like it that were
not. For a traceback costs more than to have a message delivered again, and when every message
fails, one of ten thousand tells as much as all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from types import CodeType
from typing import Final

from cometmq.client.handling.outcomes import Reject, Retry
from cometmq.client.handling.work import Unit, describe

BURST: Final = 10  # failures of a kind that are all logged
REST_S: Final = 1.0  # after them one is, that often
FORGET_S: Final = 60.0  # a kind that was not seen for so long begins anew
KINDS_MAX: Final = 256

_Kind = tuple[type[BaseException], CodeType | None, int]


class _Seen:
    __slots__ = ("count", "last", "silent_until", "untold")

    def __init__(self) -> None:
        self.count = 0
        self.untold = 0  # since the last one that was logged
        self.last = 0.0  # time.monotonic()
        self.silent_until = 0.0


class FailureLog:
    """Of one `run`. Threads may share it.

    Args:
        log: where failures are told.
        drops: there are no dead letters, see `Drops`.
    """

    def __init__(self, log: logging.Logger, *, drops: bool = False) -> None:
        self._log = log
        self._fate = "is dropped" if drops else "goes to the dead letters"
        self._lock = threading.Lock()
        self._kinds: dict[_Kind, _Seen] = {}

    def failed(self, unit: Unit, error: BaseException, *, is_last: bool = False) -> None:
        """The handler of this message, or batch, has raised that error, or returned it.

        Args:
            is_last: it does not come again, whatever the handler wants.
        """
        log = self._log
        if isinstance(error, Retry) and not is_last:
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s", describe(unit), error)
            return
        untold = self._note(_kind_of(error))
        if untold is None:
            return
        more = f" ({untold} more like it since the last one)" if untold else ""
        if isinstance(error, Retry | Reject):
            log.warning("%s %s: %s%s", describe(unit), self._fate, error, more)
        else:
            what = f"{describe(unit)}, which {self._fate}" if is_last else describe(unit)
            log.error("the handler failed on %s%s", what, more, exc_info=error)

    def end(self) -> None:
        """Tell of what was not told of."""
        with self._lock:
            kinds, self._kinds = self._kinds, {}
        for (kind, code, line), seen in kinds.items():
            if seen.untold:
                where = f"{code.co_filename}:{line}" if code else "nowhere"
                text = "the handler failed %d more times by %s at %s"
                self._log.error(text, seen.untold, kind.__name__, where)

    def _note(self, kind: _Kind) -> int | None:
        """How many like it were not logged; None: nor is this one."""
        now = time.monotonic()
        with self._lock:
            seen = self._kinds.get(kind)
            if seen is None:
                seen = self._kinds[kind] = self._new_kind()
            elif now - seen.last > FORGET_S:
                seen.count = 0
            seen.last = now
            seen.count += 1
            if seen.count > BURST:
                if now < seen.silent_until:
                    seen.untold += 1
                    return None
                seen.silent_until = now + REST_S
            untold, seen.untold = seen.untold, 0
            return untold

    def _new_kind(self) -> _Seen:
        """In place of the one that was not seen for longest, if there are too many."""
        if len(self._kinds) >= KINDS_MAX:
            del self._kinds[min(self._kinds, key=lambda kind: self._kinds[kind].last)]
        return _Seen()


def _kind_of(error: BaseException) -> _Kind:
    trace = error.__traceback__
    if trace is None:
        return type(error), None, 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return type(error), trace.tb_frame.f_code, trace.tb_lineno
