"""Ctrl-C: the end without a word where nothing can be torn apart, and kept away from work that can.

While modules are imported it must not be an exception: nobody is there to catch it yet, it may come
out as another one (RuntimeError, of a class that is being made), or be printed and forgotten, in a
callback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Final

EXIT_INTERRUPTED: Final = 130  # as a shell has it for SIGINT


def end_on_ctrl_c() -> bool:
    """From now on Ctrl-C ends this process at once. False: somebody else decides what it does (it
    is ignored, as of a command in the background), or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    return True


@contextlib.contextmanager
def ending_on_ctrl_c() -> Iterator[None]:
    """Ctrl-C within ends this process at once: for imports, which leave nothing behind."""
    is_set = end_on_ctrl_c()
    try:
        yield
    finally:
        if is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class CtrlC:
    """Within `held`, Ctrl-C is noted, and raised behind it; a second one is raised at once.

    with CtrlC() as ctrl_c:
        for lines in source:
            with ctrl_c.held():
                send(lines)

    To be used in the main thread.
    """

    def __init__(self) -> None:
        self.asked = False
        self._is_held = False
        self._before: Any = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_held or self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
