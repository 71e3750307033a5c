"""Becoming the master (rules 1, 2 and 13): whether, when, and by which change of the record."""

from __future__ import annotations

from cometmq.actors.replication.core.actions import Send
from cometmq.actors.replication.core.frames import Bid
from cometmq.actors.replication.core.link import EngineLink, names
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.promises import within
from cometmq.actors.replication.core.record import GroupRecord, elected

_Standing = tuple[int, int, str]  # last epoch, end of the log, replica

_PATIENCE = 3  # for a replica that should go first, in election times


class Electing:
    """A vacancy, and the bids for it."""

    def __init__(self, local: Local, link: EngineLink) -> None:
        self._local = local
        self._link = link
        self._vacant_at: float | None = None
        self._bids: dict[str, _Standing] = {}
        self.has_resigned = False  # this vacancy is ours: others go first

    def reset(self) -> None:
        self.has_resigned = False
        self._vacant_at = None
        self._bids.clear()

    def tick(self) -> None:
        """Of a replica that has registered and does not lead."""
        record, local = self._link.record, self._local
        assert record is not None
        if not self.is_vacant(record):
            self.reset()
        elif self.may_lead(record) and not self._link.is_busy:
            if self._vacant_at is None:
                self._vacant_at = local.now
                self._bid(record)
            waits = self.has_resigned or self._is_behind(record)
            patience = local.settings.election_s * (_PATIENCE if waits else 1)
            if local.now >= self._vacant_at + patience:
                self._link.propose(elected(record, local.me, names(self._link.alive, record)))

    def is_vacant(self, record: GroupRecord) -> bool:
        return not record.master or not self._link.is_alive(record.master)

    def may_lead(self, record: GroupRecord) -> bool:
        """Whether this replica has all that was ever confirmed; never any other (rule 1)."""
        local, link = self._local, self._link
        if not link.is_sure() or record.epoch < local.promises.promised_epoch:
            return False
        if local.me in record.iss:
            return True
        return local.me in record.elr and not any(link.is_alive(each) for each in record.iss)

    # --- bids: who has the longest log goes first, so that less is cut; nothing depends on it ---

    def _standing(self) -> _Standing:
        local = self._local
        epochs = within(local.promises.epochs, local.begin, local.end)
        return (epochs[-1].epoch if epochs else 0, local.end, local.me)

    def _bid(self, record: GroupRecord) -> None:
        local = self._local
        epoch, end, _ = self._standing()
        bid = Bid(record.group, local.promises.promised_epoch, local.new_nonce(), epoch, end)
        for replica in (*record.iss, *record.elr):
            if replica != local.me:
                local.do(Send(replica, bid))

    def on_bid(self, sender: str, frame: Bid) -> None:
        record = self._link.record
        if record is not None and sender in record.replicas:
            self._bids[sender] = (frame.last_epoch, frame.end, sender)

    def _is_behind(self, record: GroupRecord) -> bool:
        own = self._standing()
        return any(
            bid > own and replica in record.iss and self._link.is_alive(replica)
            for replica, bid in self._bids.items()
        )
