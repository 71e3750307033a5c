"""Progress of commands that take long, on standard error.

A line is rewritten on a terminal; in a pipe there is a new one every five seconds, for a log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from cometmq.protocol import progress as told
from cometmq.protocol.progress import EVERY_S, MIB

Progress = Callable[[int, int], None]  # done, in all (0: not known); of the same unit

TERMINAL_S: Final = 0.2  # between two lines


class Line(told.Progress):
    """What is said of a job; see there."""

    def __init__(
        self, what: str, unit: str, per: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = False
        every_s = TERMINAL_S if self._is_terminal else EVERY_S
        super().__init__(what, self._print, unit, per, every_s, now)

    def _print(self, text: str) -> None:
        self._shown = True
        if self._is_terminal:
            click.echo(f"\r{text}\x1b[K", err=True, nl=False)
        else:
            click.echo(text, err=True)

    def clear(self) -> None:
        """Off the terminal again."""
        if self._shown and self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


@contextmanager
def progress(what: str, unit: str = "MiB", per: int = MIB) -> Iterator[Progress]:
    """`with progress("repairing") as show: show(done, total)`"""
    line = Line(what, unit, per)
    try:
        yield line.show
    finally:
        line.clear()
