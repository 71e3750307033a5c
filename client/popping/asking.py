"""Which threads of a pop consumer ask brokers now."""

from __future__ import annotations

import threading
import time


class Asking:
    """Who asks brokers now. A signal's handler may look, whatever it has interrupted."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    @property
    def is_here(self) -> bool:
        return threading.get_ident() in self._threads

    def wait(self, timeout_s: float) -> None:
        """Until nobody does."""
        deadline = time.monotonic() + timeout_s
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.005)  # a signal's handler looks as well, so there is no lock to wait on

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(threading.get_ident())
