"""What Spark's Python processes print after a query has succeeded, and need not."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any


class Tracebacks:
    """The module `traceback` for pyspark.daemon, but for the one of a closed socket.

    Spark closes its end of a worker's socket as soon as it has all that it wants, as after `take`,
    and when the worker was idle for a minute. The worker's last flush then fails, and its daemon
    prints that, though the query has succeeded.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        if not _was_closed(sys.exc_info()[1]):
            traceback.print_exc()


def _was_closed(error: BaseException | None) -> bool:
    """Whether pyspark.daemon's own flush met a closed socket, and nothing else went wrong."""
    closed = BrokenPipeError | ConnectionResetError
    if not isinstance(error, closed) or not isinstance(error.__context__, closed | EOFError | None):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parts[-2:] == ("pyspark", "daemon.py")


def keep_quiet() -> None:
    """In a daemon of pyspark's, and in the workers that are forked from it."""
    for name in ("__main__", "pyspark.daemon"):
        module = sys.modules.get(name)
        if getattr(module, "traceback", None) is traceback and hasattr(module, "manager"):
            module.__dict__["traceback"] = Tracebacks()
