"""Liveness of processes that are to end: whether they have ended, and whether they still move."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

from cometmq.shm.live.control import ControlFile
from cometmq.shm.os.processes import processor_s


class SignsOfLife:
    """Whether what is waited for moves: a counter, or the process that is asked.

    A process that syncs a large file moves no counter for a long time, but uses the processor.
    """

    def __init__(self, control: ControlFile) -> None:
        self._control = control
        self._seen: tuple[dict[str, int], int | None, float] | None = None
        self._since = time.monotonic()

    def silent_s(self, pid: int | None) -> float:
        """How long there was no sign. `pid`: the process; None if it tells nothing."""
        seen = self._control.values(), pid, _processor_s(pid)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since


def _processor_s(pid: int | None) -> float:
    """In steps of 10 ms: to look at a clock now and then is no sign of life."""
    if pid is None:
        return 0.0
    return processor_s(pid)


def end_now(pids: Iterable[int], timeout_s: float) -> None:
    """kill -9, and see them gone."""
    victims = list(pids)
    for pid in victims:
        send_signal(pid, signal.SIGKILL)
    for pid in victims:
        has_ended(pid, timeout_s)


def has_ended(pid: int, timeout_s: float = 0) -> bool:
    """Also one that nobody has buried yet: once the zygote is dead that is left to init, which may
    take its time, or in a container never do it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(descriptor)


def send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
