"""A supervised thread: it goes on whatever happens in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cometmq.protocol.retry import pause_s

log = logging.getLogger(__name__)


class Steady:
    """Calls `turn` in a daemon thread of its own until that returns False.

    A turn that raises is logged and followed by the next, after a pause of up to 0.5 s. A thread
    that is ended by force (by an exception which is no `Exception`) is replaced by another.
    """

    def __init__(self, name: str, turn: Callable[[], bool]) -> None:
        self.name = name
        self._turn = turn
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = False

    def start(self) -> None:
        """Does nothing if it runs already, or has come to its end."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._over:
                    thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                    thread.start()
                    self._thread = thread

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False if it has not come in time. True at once in the thread itself."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    if not self._turn():
                        self._over = True
                        return
                    failures = 0
                except Exception:
                    failures += 1
                    if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th ... in a row
                        log.exception("%s: failed %d times in a row", self.name, failures)
                    time.sleep(pause_s(failures))
        finally:
            if not self._over:
                self._thread = None
                log.error("%s: its thread was ended by force; another takes its place", self.name)
                self.start()
