"""Ending a run when a signal handler raises an exception."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from cometmq.protocol.wire.uninterrupted import call_uninterrupted


class Interrupted(Protocol):
    """A run that can be interrupted."""

    def interrupt(self) -> None: ...


class Interruption:
    """Request to end a run, which may come before the run begins."""

    def __init__(self) -> None:
        self._run: Interrupted | None = None
        self._came = False

    def watch(self, run: Interrupted) -> None:
        """Set the run to interrupt; interrupt it now if the request came before."""
        self._run = run
        if self._came:
            run.interrupt()

    def come(self) -> None:
        """Interrupt the run: a signal handler has raised."""
        self._came = True
        if self._run is not None:
            self._run.interrupt()


def run_uninterrupted(work: Callable[[Interruption], None]) -> None:
    """Run `work` to its end where no signal handler interrupts it. If a handler raises, the run
    ends in order before the exception propagates."""
    interruption = Interruption()
    call_uninterrupted(partial(work, interruption), abandon=interruption.come, finish=True)
