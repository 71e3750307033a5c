"""Presence: whether a broker answers a client, and the two lines of the log that say so."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable
from typing import Final

from cometmq.protocol.errors import CometError, NotConfirmed, NotReachable, ShuttingDown

log = logging.getLogger(__name__)

AWAY_S: Final = 1.0  # a coordinator that was started again is back before
STEADY_S: Final = 5.0  # until the other processes of a broker that is back answer as well
AWAY: Final = (NotConfirmed, NotReachable, ShuttingDown)  # errors of a broker that is not there


def unique_name() -> str:
    """By which a group knows a consumer that has no name of its own: it says where it runs."""
    return f"{socket.gethostname()[:60]}@{os.getpid()}@{uuid.uuid4().hex[:12]}"


class Presence:
    """One line when the broker goes, and one when it is back; nothing in between.

    Args:
        whose: for the log: "group billing", "a producer".
    """

    def __init__(self, whose: str, broker: str) -> None:
        self.connected = False  # until it has answered
        self._whose = whose
        self._broker = broker
        self._since: float | None = None  # time.monotonic(): it does not answer
        self._why = ""
        self._told = False
        self._answers_since = math.inf

    def answered(self) -> None:
        if self.connected:
            return
        now = self._answers_since = time.monotonic()
        self.connected = True
        since, self._since = self._since, None
        if self._told and since is not None:
            self._told = False
            text = "%s: broker %s is back after %.1f s"
            log.info(text, self._whose, self._broker, now - since)

    def missed(self, why: str) -> None:
        """It has not answered, or the connection broke."""
        self.connected = False
        if self._since is None:
            self._since, self._why = time.monotonic(), why
        self.check()

    @property
    def due(self) -> float:
        """When to `check` again: time.monotonic()."""
        return math.inf if self._since is None or self._told else self._since + AWAY_S

    def check(self) -> None:
        """Say that it is away, if it has been for long enough."""
        if time.monotonic() >= self.due:
            self._told = True
            text = "%s: broker %s is away (%s); trying again until it is back"
            log.warning(text, self._whose, self._broker, self._why)

    @property
    def is_steady(self) -> bool:
        """It has answered for a while: a process of it that does not answer is in trouble."""
        return self.connected and time.monotonic() - self._answers_since >= STEADY_S


class Presences:
    """Of all brokers that one client speaks with, by name. Used by one thread at a time."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._known: dict[str, Presence] = {}

    def heard(self, broker: str, error: CometError | None) -> None:
        """What came of asking it last."""
        known = self._known.get(broker)
        if known is None:
            known = self._known[broker] = Presence(self._whose, broker)
        if isinstance(error, AWAY):
            known.missed(str(error))
        else:
            known.answered()

    def all_connected(self, brokers: Iterable[str]) -> bool:
        """Whether each of them has answered last time; False if there is none."""
        found = [self._known.get(broker) for broker in brokers]
        return bool(found) and all(each is not None and each.connected for each in found)
