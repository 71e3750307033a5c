"""What becomes of a replica whose disk is full: it waits for room, away from its group.

It can promise nothing then, and take nothing more of the log; so nobody may count on it, and it
must not be master. It gives up its session with the engine: the others leave it out, and elect one
of themselves if it was the master. Once there is room it does what was to be done, and comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cometmq.actors.replication.core.promises import Promises
from cometmq.actors.replication.group.promises_file import PromisesFile
from cometmq.protocol.errors import DiskFull
from cometmq.shm.os.ballast import free_bytes

log = logging.getLogger("cometmq.actors.replication.slaves.ha")

RETRY_S: Final = 1.0


class FreeSpace:
    """Keeps promises; one that there is no room for is kept once there is.

    Args:
        on_kept: a promise that had to wait is kept.
    """

    def __init__(self, store: Path, promises: PromisesFile, *, on_kept: Callable[[], None]) -> None:
        self._store = store
        self._file = promises
        self._on_kept = on_kept
        self._waiting: Promises | None = None
        self._again_at = 0.0  # time.monotonic()
        self.why = ""  # there is none, in words

    @property
    def is_stuck(self) -> bool:
        """Whether a promise waits; the core is in the middle of an event then."""
        return self._waiting is not None

    def keep(self, promises: Promises) -> bool:
        """False: it waits for room. Raises OSError."""
        try:
            self._file.keep(promises)
        except DiskFull as error:
            self._waiting = promises
            self._again_at = time.monotonic() + RETRY_S
            self._lack(str(error))
            return False
        return True

    def look(self, is_full: bool | None) -> None:
        """Again and again.

        Args:
            is_full: the log has no room to go on; None: that is not known now.
        """
        if self._waiting is not None and time.monotonic() >= self._again_at:
            promises, self._waiting = self._waiting, None
            if self.keep(promises):
                self._on_kept()
        if is_full:
            self._lack(f"{self._store}: the log has no room to go on")
        elif is_full is False and self.why and self._waiting is None:
            self.why = ""
            log.warning("there is room on the disk again: this replica is back in its group")

    def _lack(self, what: str) -> None:
        if not self.why:
            self.why = f"its disk is full: {what} ({free_bytes(self._store)} bytes are free)"
            log.error("%s. This replica is away from its group until there is room", self.why)
