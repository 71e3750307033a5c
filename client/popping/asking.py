"""Which threads of a pop consumer ask brokers now."""

from __future__ import annotations

import threading
import time


class Asking:
    """Who asks brokers now."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    def wait(self, timeout_s: float) -> None:
        """Until nobody does."""
        deadline = time.monotonic() + timeout_s
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.005)

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(threading.get_ident())
