"""Suppression of tracebacks that Spark's Python processes print after a successful query."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any


class Tracebacks:
    """The module `traceback` for pyspark.daemon, without tracebacks of a closed socket.

    Spark closes its end of a worker's socket as soon as it has enough rows, as after `take`, and
    when the worker was idle for a minute. The worker's last flush then fails, and its daemon prints
    the error although the query has succeeded.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not _was_closed(sys.exc_info()[1]):
            traceback.print_exc()


def _was_closed(error: BaseException | None) -> bool:
    """Return whether the only error is that of pyspark.daemon's own flush to a closed socket."""
    closed = BrokenPipeError | ConnectionResetError
    if not isinstance(error, closed) or not isinstance(error.__context__, closed | EOFError | None):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parts[-2:] == ("pyspark", "daemon.py")


def keep_quiet() -> None:
    """Suppress these tracebacks in a daemon of pyspark, and in the workers that it forks."""
    for name in ("__main__", "pyspark.daemon"):
        module = sys.modules.get(name)
        if getattr(module, "traceback", None) is traceback and hasattr(module, "manager"):
            module.__dict__["traceback"] = Tracebacks()
