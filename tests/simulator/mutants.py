"""Planted bugs: each takes one rule of the protocol away. The simulator must notice every one.

They judge the simulator, and live here alone: production code has no switches. Some rules stand
behind each other; a bug then takes away both, and says so.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from cometmq.actors.replication.core.actions import Lead, Service
from cometmq.actors.replication.core.electing import Electing
from cometmq.actors.replication.core.following import Following, Stage
from cometmq.actors.replication.core.frames import Ack, Agreed, Bytes, Mark, Welcome
from cometmq.actors.replication.core.leading import Follower, Leading
from cometmq.actors.replication.core.link import EngineLink
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.record import GroupRecord, Member
from cometmq.actors.replication.core.registering import Registering
from cometmq.actors.replication.core.replica import Replica

# --- B: a joining member is not counted before the change is sent (apache/rocketmq#5663) ----------


class _LeadingB(Leading):
    def counted(self) -> set[str]:
        return set(self.record.iss)


class B(Replica):
    """A joining member does not count until the engine's answer is there."""

    leading_type: ClassVar = _LeadingB


# --- C: no fencing --------------------------------------------------------------------------------


class _FollowingC(Following):
    def on_bytes(self, sender: str, frame: Bytes, length: int, crc: int) -> None:
        fits = frame.offset == self._local.end and (length, crc) == (frame.length, frame.crc)
        if fits and frame.nonce != self._nonce:
            self._local.append(length)
            self._other = (sender, frame)
        else:
            super().on_bytes(sender, frame, length, crc)

    _other: tuple[str, Bytes] | None = None

    def flushed(self) -> None:
        super().flushed()
        if self._other is not None:
            (sender, frame), self._other = self._other, None
            ack = Ack(frame.group, frame.epoch, frame.nonce, self._local.held(), 0)
            self._master, master = sender, self._master
            self._send(ack)
            self._master = master


class C(Replica):
    """A follower takes bytes of any epoch and session that fit its end."""

    following_type: ClassVar = _FollowingC


# --- D: unclean election --------------------------------------------------------------------------


class _ElectingD(Electing):
    def may_lead(self, record: GroupRecord) -> bool:
        return True


class D(Replica):
    """Any replica may be elected."""

    electing_type: ClassVar = _ElectingD


# --- E: truncation to the confirm offset (before KIP-101) -----------------------------------------


class _FollowingE(Following):
    def _marks(self, welcome: Welcome) -> tuple[Mark, ...]:
        local = self._local
        mark = local.log.last_record(min(local.confirm, welcome.end))
        return () if mark is None else (mark,)

    def _is_current(self) -> bool:
        return False


class E(Replica):
    """A follower cuts its log to its own confirm offset, not by epochs."""

    following_type: ClassVar = _FollowingE


# --- F: a master keeps its epoch over a restart (rule 2) ------------------------------------------


class _RegisteringF(Registering):
    def _propose(self, record: GroupRecord, *, stays: bool) -> None:
        link = self._link
        if record.master == self._local.me and stays and not link.is_busy:
            members = {**record.replicas, self._local.me: self._local.member}
            link.propose(msgspec.structs.replace(record, replicas=members))
        else:
            super()._propose(record, stays=stays)


class F(Replica):
    """A master that starts anew goes on in the epoch that it had."""

    registering_type: ClassVar = _RegisteringF

    def _settle(self) -> None:
        record, local = self._link.record, self._local
        was_master = (
            record is not None
            and not self._leading
            and not self._registering.is_done
            and record.master == local.me
            and record.epoch == local.promises.promised_epoch
        )
        super()._settle()
        if was_master and self._registering.is_done and not self._leading and record:
            local.do(Lead(record.epoch, local.end))
            self._leading = self.leading_type(local, self._link, record)
            self._leading.serve()


# --- G: acknowledged before it is flushed (NATS, DLedger's timer) ---------------------------------


class _LocalG(Local):
    def held(self) -> int:
        return self.end


class _FollowingG(Following):
    def on_bytes(self, sender: str, frame: Bytes, length: int, crc: int) -> None:
        super().on_bytes(sender, frame, length, crc)
        self.flushed()


class G(Replica):
    """What is not flushed counts as held, and nobody leaves the set after a cut of power."""

    local_type: ClassVar = _LocalG
    following_type: ClassVar = _FollowingG


# --- H: a new master truncates itself to its confirm offset (apache/rocketmq#7689) ----------------


class H(Replica):
    """A new master cuts its log to its own confirm offset."""

    def _lead(self, record: GroupRecord) -> None:
        if self._local.confirm < self._local.end:
            self._local.cut(self._local.confirm)
        super()._lead(record)


# --- I: an unknown change counts as not made, after a read ----------------------------------------


class I(Replica):  # noqa: E742
    """A read that shows the old set ends the counting of a member whose joining is unknown."""

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> list[Any]:
        leading = self._leading
        if leading and version == self._link.version and self._link._sent is None:
            leading._joining.clear()
        return super().learned(version, record, number)


# --- J: an old handshake may cut the current epoch ------------------------------------------------


class _FollowingJ(Following):
    """Two rules guard each other here: the nonce of a session, and that bytes of the present epoch
    are never cut. Without either one nothing is lost (see test_mutants.py); this has neither."""

    def on_agreed(self, sender: str, frame: Agreed) -> None:
        if frame.epoch == self._epoch and sender == self._master and self._stage is Stage.STREAM:
            if self._local.begin <= frame.offset < self._local.end:
                self._local.cut(frame.offset)
            return
        super().on_agreed(sender, frame)


class J(Replica):
    """An Agreed that comes late, or twice, cuts what was taken since."""

    following_type: ClassVar = _FollowingJ


# --- beyond those of the specification ------------------------------------------------------------


class _RegisteringK(Registering):
    def __init__(self, local: Local, link: EngineLink, boot_id: str) -> None:
        super().__init__(local, link, boot_id)
        self._is_sure = True


class K(Replica):
    """After a cut of power under asynchronous flush a replica keeps its place (rule 9)."""

    registering_type: ClassVar = _RegisteringK


class _RegisteringL(Registering):
    def _propose_as_new(self, record: GroupRecord, predecessor: Member) -> None:
        self._propose(record, stays=True)


class L(Replica):
    """An empty store takes the place of its predecessor in the in-sync set."""

    registering_type: ClassVar = _RegisteringL


class _RegisteringM(Registering):
    def begin(self, known_end: int) -> bool:
        self._local.promises = msgspec.structs.replace(self._local.promises, confirm_offset=0)
        return super().begin(0)


class M(Replica):
    """A log that ends below what it is known to have had is as good as any."""

    registering_type: ClassVar = _RegisteringM


class _LeadingN(Leading):
    def may_join(self, follower: Follower) -> bool:
        return follower.is_streaming


class N(Replica):
    """Whoever is connected joins the in-sync set, caught up or not (rule 7)."""

    leading_type: ClassVar = _LeadingN


class _LeadingO(Leading):
    def _judge(self) -> Service:
        service = super()._judge()
        return Service.OPEN if service is Service.SHORT else service


class O(Replica):  # noqa: E742
    """Acknowledged however small the in-sync set is, and who has left may be elected (KIP-966)."""

    leading_type: ClassVar = _LeadingO


class _LinkQ(EngineLink):
    def learn(self, version: int, record: GroupRecord | None) -> bool:
        if record is None or (version, record) == (self.version, self.record):
            return False
        self.version, self.record = version, record
        return True


class Q(Replica):
    """An old answer of the engine counts as the latest."""

    link_type: ClassVar = _LinkQ


MUTANTS: Final[dict[str, type[Replica]]] = {
    each.__name__: each for each in (B, C, D, E, F, G, H, I, J, K, L, M, N, O, Q)
}
