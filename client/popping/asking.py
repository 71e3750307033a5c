"""Threads of a pop consumer that are asking brokers now."""

from __future__ import annotations

import threading
import time


class Asking:
    """Set of the threads that are asking brokers now."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    def wait(self, timeout_s: float) -> None:
        """Wait until no thread is asking, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.005)

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(threading.get_ident())
