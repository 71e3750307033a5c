"""What the benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cometmq.shm.control import CONTROL_FILE, ControlFile, Counter

Report = Callable[[str, float, str], None]  # takes a figure: what, how much, unit


class Counters:
    """What a running broker's control file says, for who waits for it without being its sleeper."""

    def __init__(self, store: Path) -> None:
        control = ControlFile.open(store / CONTROL_FILE, writable=False)
        self.wrote = control.read(Counter.WROTE)
        self.dispatched = control.read(Counter.DISPATCHED)

    def wait_dispatched(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.dispatched.value < self.wrote.value:
            assert time.monotonic() < deadline, "not dispatched"
            time.sleep(0.0005)  # a bystander has no doorbell
