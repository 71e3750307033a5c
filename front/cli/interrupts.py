"""Ctrl-C, kept away from work that it would tear apart."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


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
