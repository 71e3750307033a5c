"""What this replica has: its log's offsets and its promises. All parts of the core share one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cometmq.actors.replication.core.actions import (
    Action,
    Append,
    Confirmed,
    Keep,
    LogView,
    Refuse,
    StartOver,
    Stop,
    Truncate,
    Why,
)
from cometmq.actors.replication.core.promises import Promises, within
from cometmq.actors.replication.core.record import INT64_MAX, Life, Member
from cometmq.actors.replication.core.settings import Settings

_NONCE_BITS: Final = 32


class Local:
    """At every instant:  begin <= flushed <= end,  confirm <= end.

    Args:
        begin, end: of the log, which holds in between: physical offsets.
        flushed: what of it is on the disk.
    """

    def __init__(
        self,
        settings: Settings,
        promises: Promises,
        log: LogView,
        *,
        begin: int,
        end: int,
        flushed: int,
    ) -> None:
        self.settings = settings
        self.me = settings.replica
        self.promises = promises
        self.log = log
        self.begin = begin
        self.end = end
        self.flushed = flushed
        self.confirm = min(promises.confirm_offset, end)
        self.now = 0.0
        self.stopped = False
        self.actions: list[Action] = []
        self._sessions = 0
        self._keep_at = 0.0

    @property
    def life(self) -> Life:
        return (self.settings.replica, self.promises.store_uuid, self.promises.incarnation)

    @property
    def member(self) -> Member:
        return Member(self.settings.address, self.promises.store_uuid, self.promises.incarnation)

    @property
    def is_new(self) -> bool:
        """Whether this store has never followed or led."""
        return not self.promises.promised_epoch

    def held(self) -> int:
        """What this replica may say to have (rules 5 and 6)."""
        return self.flushed if self.settings.sync_flush else self.end

    def new_nonce(self) -> int:
        """Higher than any before it, of earlier lives of the store too."""
        self._sessions += 1
        return (self.promises.incarnation << _NONCE_BITS | self._sessions) & INT64_MAX

    # --- acting ---

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def taken(self) -> list[Action]:
        """All that is to be done since the last time."""
        actions, self.actions = self.actions, []
        return actions

    def refuse(self, sender: str, what: str, why: Why, here: int = 0, there: int = 0) -> None:
        self.actions.append(Refuse(sender, what, why, here, there))

    def stop(self, why: str) -> None:
        """Nothing comes after it."""
        self.stopped = True
        self.actions.append(Stop(why))

    def keep(self, **changes: Any) -> None:
        """Change promises, durably before the next action."""
        self.promises = msgspec.structs.replace(
            self.promises, confirm_offset=self._sure_confirm(), **changes
        )
        self.actions.append(Keep(self.promises))

    def keep_confirm(self) -> None:
        """From time to time: the further this lags, the less of a damaged tail is recognized."""
        if self.now >= self._keep_at and self._sure_confirm() > self.promises.confirm_offset:
            self._keep_at = self.now + self.settings.keep_s
            self.keep(epochs=within(self.promises.epochs, self.begin, INT64_MAX))

    def _sure_confirm(self) -> int:
        """What is confirmed and on this disk. A log that ends before it has lost something."""
        return max(self.promises.confirm_offset, min(self.confirm, self.flushed))

    def append(self, length: int) -> None:
        self.actions.append(Append(self.end, length))
        self.end += length

    def confirm_to(self, offset: int) -> None:
        """Never back, and never beyond what is here."""
        offset = min(offset, self.end)
        if offset > self.confirm:
            self.confirm = offset
            self.actions.append(Confirmed(offset))

    def cut(self, to: int) -> None:
        self.actions.append(Truncate(to))
        self.end = to
        self.flushed = min(self.flushed, to)

    def start_over(self, at: int) -> None:
        self.actions.append(StartOver(at))
        self.begin = self.end = self.flushed = self.confirm = at
        self.promises = msgspec.structs.replace(self.promises, confirm_offset=at)
