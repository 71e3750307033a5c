"""The replica's side of the coordination engine: the latest record, one change at a time."""

from __future__ import annotations

from collections.abc import Collection

from cometmq.actors.replication.core.actions import Cas, Get
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.record import GroupRecord, Life


class EngineLink:
    """What is known of the engine.

    A version that is learned only grows: an older record is an old answer, and says nothing. Each
    change is made of the latest record, and names its version. So, once a later version is known,
    every change that was sent before is either in it or will never be.
    """

    def __init__(self, local: Local) -> None:
        self._local = local
        self.version = 0
        self.record: GroupRecord | None = None
        self.alive: frozenset[Life] = frozenset()  # who has a session
        self.until = 0.0  # our own session holds at least so long
        self.expired = False  # the engine has said that ours is over, or what followed is not read
        self._reads = 0
        self._decisive = 0  # the read that tells what has happened meanwhile
        self._ticket = 0
        self._sent: GroupRecord | None = None  # its outcome is awaited
        self._retry_at = 0.0
        self._poll_at = 0.0

    # --- the session ---

    def session(self, until: float | None) -> None:
        """Ours holds until then; None: the engine has ended it."""
        if until is None:
            self.expired, self._decisive, self.until = True, 0, 0.0
            return
        self.until = max(until, self.until)
        if self.expired and not self._decisive:
            self.get()
            self._decisive = self._reads  # whoever became master meanwhile is in the record

    def is_sure(self) -> bool:
        """Whether our session holds, so that nobody else can have been elected."""
        return not self.expired and self._local.now < self.until

    def is_alive(self, replica: str) -> bool:
        return self.record is not None and self.record.life(replica) in self.alive

    # --- the record ---

    def get(self) -> None:
        self._poll_at = self._local.now + self._local.settings.poll_s
        self._reads += 1
        self._local.do(Get(self._reads))

    def poll(self) -> None:
        if self._local.now >= self._poll_at:
            self.get()

    def read(self, number: int) -> None:
        """The answer to a read is there."""
        if self._decisive and number >= self._decisive:
            self.expired, self._decisive = False, 0

    def learn(self, version: int, record: GroupRecord | None) -> bool:
        """Whether it is news."""
        if version <= self.version or record is None:
            return False
        self.version, self.record = version, record
        return True

    # --- changing it ---

    @property
    def is_busy(self) -> bool:
        """Whether a change has to wait for the outcome of the last one."""
        return self._sent is not None or self._local.now < self._retry_at

    def propose(self, record: GroupRecord) -> None:
        self._ticket += 1
        self._sent = record
        self._local.do(Cas(self._ticket, self.version, record))

    def applied(self, ticket: int, version: int) -> bool:
        """Whether it is news."""
        record = self._answered(ticket)
        return record is not None and self.learn(version, record)

    def refused(self, ticket: int) -> None:
        self._answered(ticket)

    def unknown(self, ticket: int) -> None:
        """It may have been applied, or will be."""
        if self._answered(ticket) is not None:
            self._retry_at = self._local.now + self._local.settings.retry_s
            self.get()

    def _answered(self, ticket: int) -> GroupRecord | None:
        if ticket != self._ticket:
            return None
        record, self._sent = self._sent, None
        return record


def names(lives: Collection[Life], record: GroupRecord) -> set[str]:
    """Which replicas of the record those are."""
    return {each for each in record.replicas if record.life(each) in lives}
