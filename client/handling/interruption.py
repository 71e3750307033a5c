"""The end of a run by an exception that a signal's handler raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from cometmq.protocol.wire.uninterrupted import call_uninterrupted


class Interrupted(Protocol):
    """A run."""

    def interrupt(self) -> None: ...


class Interruption:
    """Ends a run, which may not have begun yet."""

    def __init__(self) -> None:
        self._run: Interrupted | None = None
        self._came = False

    def watch(self, run: Interrupted) -> None:
        """That run is to be ended."""
        self._run = run
        if self._came:
            run.interrupt()

    def come(self) -> None:
        """A signal's handler has raised."""
        self._came = True
        if self._run is not None:
            self._run.interrupt()


def run_uninterrupted(work: Callable[[Interruption], None]) -> None:
    """A run until its end, where no signal's handler interrupts it. If one raises, the run ends in
    order before that exception goes on."""
    interruption = Interruption()
    call_uninterrupted(partial(work, interruption), abandon=interruption.come, finish=True)
