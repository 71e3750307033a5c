"""How a master's replicas keep up with it, and which of them it reaches (rules 8 and 13)."""

from __future__ import annotations

from collections.abc import Iterable

from cometmq.actors.replication.core.local import Local


class Contact:
    """When each replica had caught up, and when it was last heard to have heard its master.

    A replica that begins a session shows only that it can speak to us: that counts once, so that it
    has the time for a handshake. What it sends after our welcome shows both directions.
    """

    def __init__(self, local: Local, replicas: Iterable[str], alive: set[str]) -> None:
        self._local = local
        self._since = local.now  # nobody could be heard before
        self._alive = alive
        self._heard_at: dict[str, float] = {}
        self._caught_up_at = dict.fromkeys(replicas, local.now)

    def know(self, replicas: Iterable[str]) -> None:
        """Those of the record; who is new has just caught up."""
        self._caught_up_at = dict.fromkeys(replicas, self._local.now) | self._caught_up_at

    def pardon(self) -> None:
        """It was this process that did not get on: nobody else is to blame."""
        self._since = self._local.now
        self._caught_up_at = dict.fromkeys(self._caught_up_at, self._local.now)

    def see(self, alive: set[str]) -> None:
        """Who has a session now: one that has just come is given the time to begin."""
        for replica in alive - self._alive:
            self.heard(replica)
        self._alive = alive

    def begun(self, replica: str) -> None:
        self._heard_at.setdefault(replica, self._local.now)

    def heard(self, replica: str) -> None:
        self._heard_at[replica] = self._local.now

    def caught_up(self, replica: str, at: float) -> None:
        """It holds what the log had at that time."""
        self._caught_up_at[replica] = at

    def lags(self, replica: str, *, is_alive: bool) -> bool:
        """Whether it has not caught up for too long; less is allowed to one without a session."""
        settings = self._local.settings
        patience = settings.lag_s if is_alive else settings.silence_s
        return self._local.now >= self._caught_up_at[replica] + patience

    def is_silent(self, replica: str) -> bool:
        """Whether it has heard nothing of us, or we nothing of it, for `contact_s`."""
        heard_at = max(self._since, self._heard_at.get(replica, self._since))
        return self._local.now >= heard_at + self._local.settings.contact_s
