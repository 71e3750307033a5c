"""What a port is told of again and again, said in the log at a bounded rate."""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger("cometmq.actors.replication.slaves.ha")

AGAIN_S: Final = 60.0
TROUBLE_S: Final = 3.0  # it is told again and again while it lasts
KEYS_MAX: Final = 256


class EventLog:
    """Says each thing once a minute, and then how often it was not said."""

    def __init__(self) -> None:
        self._last: dict[object, float] = {}
        self._unsaid: dict[object, int] = {}

    def warn(self, key: object, text: str, *arguments: object) -> None:
        """Args: key: what is the same thing."""
        now = time.monotonic()
        if key in self._last and now < self._last[key] + AGAIN_S:
            self._unsaid[key] = self._unsaid.get(key, 0) + 1
            return
        if key not in self._last and len(self._last) >= KEYS_MAX:
            key = None  # those that there is no room for are the same thing
            if key in self._last and now < self._last[key] + AGAIN_S:
                self._unsaid[key] = self._unsaid.get(key, 0) + 1
                return
        self._last[key] = now
        count = self._unsaid.pop(key, 0)
        more = f" (and {count} more like this since it was said last)" if count else ""
        log.warning(text + "%s", *arguments, more)


class Troubles:
    """Why other replicas say that they are away from the group."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[str, float]] = {}

    def heard(self, replica: str, why: str) -> None:
        self._heard[replica] = why, time.monotonic()

    def of(self, replica: str) -> str:
        """ "" where it has said nothing lately."""
        why, at = self._heard.get(replica, ("", 0.0))
        return why if time.monotonic() < at + TROUBLE_S else ""
