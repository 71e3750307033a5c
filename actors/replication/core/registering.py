"""Being a replica of the group: a start, and how it is told to the group (rules 2, 9 and 12)."""

from __future__ import annotations

import msgspec

from cometmq.actors.replication.core.link import EngineLink
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.promises import within
from cometmq.actors.replication.core.record import GroupRecord, Member, registered


class Registering:
    """A replica does nothing in its group until the record has this very life of this store.

    What the record then says of it is true: a store that may lack confirmed bytes has left `iss`
    and `elr` by the same change, and so has a store that replaces another one.

    A life is kept when the record allows it, right before it is proposed, and not sooner: the last
    life that was kept is one that the group may know of. So an older copy of a store is one whose
    last life is behind the record's, however often it is started in vain.
    """

    def __init__(self, local: Local, link: EngineLink, boot_id: str) -> None:
        self._local = local
        self._link = link
        self._boot_id = boot_id
        self.is_done = False
        self._is_kept = False  # this life
        promises = local.promises
        # False: bytes that this replica has acknowledged may be gone (rule 9).
        self._is_sure = promises.sync_flush or promises.clean or promises.boot_id == boot_id

    def begin(self, known_end: int) -> bool:
        """A new life of this store; False if its log lacks what it had."""
        local = self._local
        known = max(local.promises.confirm_offset, known_end)
        if local.end < known:
            local.stop(
                f"the log holds up to {local.end}, but it had all up to {known}: it is damaged. "
                "Replace this store by an empty one; the group has what is missing"
            )
            return False
        epochs = within(local.promises.epochs, local.begin, local.end)
        local.promises = msgspec.structs.replace(
            local.promises, incarnation=local.promises.incarnation + 1, epochs=epochs, clean=False
        )
        return True

    def end(self) -> None:
        """An orderly end."""
        if self._is_sure and self._is_kept:
            self._local.keep(clean=True)
        self._local.stopped = True

    def settle(self, record: GroupRecord) -> bool:
        """Whether the record has this life; if not, it is registered."""
        local = self._local
        known = record.replicas.get(local.me)
        if known is None:
            local.stop(f"the group {record.group} has no replica {local.me}")
        elif known.store_uuid == local.promises.store_uuid:
            return self._settle_known(record, known.incarnation)
        elif self.is_done:
            local.stop(f"another store, {known.store_uuid}, has taken the place of this one")
        else:
            self._propose_as_new(record, known)
        return False

    def _settle_known(self, record: GroupRecord, incarnation: int) -> bool:
        local = self._local
        own = local.promises.incarnation
        last = own if self._is_kept else own - 1
        if incarnation > last:
            local.stop(
                f"this store was started {last} times before, the group knows of {incarnation}: "
                "another copy of it is or was at work, and has what this one lacks. Keep that one; "
                "in place of this one an empty store may be started"
            )
        elif incarnation < own:
            self._propose(record, stays=self._is_sure)
        elif not self.is_done:
            self.is_done = True
            if not self._is_sure:
                self._vouch()
        return self.is_done and not local.stopped

    def _propose_as_new(self, record: GroupRecord, predecessor: Member) -> None:
        """A store that the group has not seen.

        Its lives are numbered behind those of its predecessor: what was said in a session of that
        one, and comes late, is of no session of this one.
        """
        local = self._local
        is_first = not predecessor.store_uuid and local.me in record.iss
        if local.end > local.begin and not is_first:
            local.stop(
                f"this store has bytes from {local.begin} to {local.end} and is new to the group "
                f"{record.group}: a replica begins with an empty store"
            )
            return
        if local.promises.incarnation <= predecessor.incarnation:
            local.promises = msgspec.structs.replace(
                local.promises, incarnation=predecessor.incarnation + 1
            )
            self._is_kept = False
        self._propose(record, stays=is_first)

    def _propose(self, record: GroupRecord, *, stays: bool) -> None:
        local, link = self._local, self._link
        changed = registered(record, local.me, local.member, stays=stays)
        if not changed.iss and not changed.elr:
            local.stop(
                f"of all replicas only {local.me} had every confirmed byte, and its store is a new "
                "one or has lost power while messages were acknowledged before they were flushed"
            )
        elif not link.is_busy:
            self._keep_life()
            link.propose(changed)

    def _keep_life(self) -> None:
        if self._is_kept:
            return
        self._is_kept = True
        if self._is_sure:
            self._vouch()
        else:
            self._local.keep()

    def _vouch(self) -> None:
        """From here on the log of this store is as good as the record says."""
        self._is_sure = True
        sync_flush = self._local.settings.sync_flush
        self._local.keep(boot_id=self._boot_id, sync_flush=sync_flush)
