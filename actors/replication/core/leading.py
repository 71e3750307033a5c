"""A master: its followers, what is confirmed, and the in-sync set (rules 5 to 8, 11 and 13)."""

from __future__ import annotations

from typing import NamedTuple

from cometmq.actors.replication.core.actions import Send, Serve, Service, Ship, Why
from cometmq.actors.replication.core.contact import Contact
from cometmq.actors.replication.core.frames import (
    Ack,
    Agreed,
    AnyFrame,
    Apart,
    Beat,
    Hello,
    Mark,
    Marks,
    Refused,
    Welcome,
)
from cometmq.actors.replication.core.link import EngineLink, names
from cometmq.actors.replication.core.local import Local
from cometmq.actors.replication.core.record import GroupRecord, Member, changed, resigned


class Follower:
    """A session of one follower, as the master has it."""

    __slots__ = (
        "agreed", "beat", "goal", "goal_at", "held", "is_streaming", "member", "next", "nonce",
    )  # fmt: skip

    def __init__(self, member: Member, nonce: int, now: float) -> None:
        self.member = member  # the life of its store
        self.nonce = nonce
        self.is_streaming = False
        self.agreed = 0  # where its bytes begin
        self.next = 0  # the first byte that was not sent
        self.held = 0  # acknowledged in this session
        self.beat = 0  # the latest that it has heard
        self.goal = 0  # once this is held it has caught up
        self.goal_at = now


class Standing(NamedTuple):
    """How a follower stands, for who looks at the group."""

    replica: str
    held: int
    sent: int  # the end of what it was sent
    in_sync: bool
    why: str  # it is not in sync; "" where it is


class Leading:
    """The mastership of one epoch.

    An acknowledgement to a client rests on this alone: every member of the in-sync set, and every
    replica that might become one, has said *in this epoch* that it holds the message. Whoever is
    elected later is one of them, and has promised a higher epoch first.
    """

    def __init__(self, local: Local, link: EngineLink, record: GroupRecord) -> None:
        self._local = local
        self._link = link
        self.record = record
        self.epoch = record.epoch
        self.start = local.end
        self._followers: dict[str, Follower] = {}
        # Added by a change that was sent and may still be applied: they count from before that, and
        # until the engine's version has passed the one that the change expected (rule 7).
        self._joining: set[str] = set()
        self._contact = Contact(local, record.replicas, names(link.alive, record))
        # That we give up the mastership was sent, and may be applied at any time (rule 13).
        self.is_resigning = False
        self._service: Service | None = None
        self._number = 0  # of the last beat
        self._proof = 0  # acknowledgements count from this beat on
        self._beat_at = self._ticked_at = local.now

    # --- events ---

    def tick(self) -> None:
        now = self._local.now
        self.serve()
        if now >= self._ticked_at + self._local.settings.silence_s:
            self._contact.pardon()
        self._ticked_at = now
        if now >= self._beat_at:
            self._beat()
        if not (self._link.is_busy or self._link.expired):
            self._change_record()

    def learned(self, record: GroupRecord) -> None:
        """A later record, with this mastership in it."""
        self.record = record
        self._joining.clear()
        self.is_resigning = False  # this change came first, so that one never will
        self._contact.know(record.replicas)
        for replica, follower in list(self._followers.items()):
            if record.replicas.get(replica) != follower.member:
                del self._followers[replica]  # a session of an earlier life, or of another store
        self.serve()
        self._advance()

    def appended(self) -> None:
        for replica, follower in list(self._followers.items()):
            if follower.is_streaming:
                self._stream(replica, follower)
        if not self._local.settings.sync_flush:
            self._advance()

    def flushed(self) -> None:
        self._advance()

    # --- what clients get ---

    def serve(self) -> None:
        """Say what is served, if that has changed."""
        service = self._judge()
        if service is self._service:
            return
        if service in (Service.UNSURE, Service.DEPOSED) or self._service is Service.DEPOSED:
            # What lies in our sockets may be older: who followed us then need not any more.
            self._proof = self._number + 1
        self._service = service
        self._local.do(Serve(self.epoch, service))

    def _judge(self) -> Service:
        if self._link.expired:
            return Service.DEPOSED
        if len(self.record.iss) < self.record.min_iss:
            return Service.SHORT
        sure = self._link.is_sure() and not self.is_resigning
        return Service.OPEN if sure else Service.UNSURE

    def standings(self) -> list[Standing]:
        """Of all other replicas."""
        return [self._standing(each) for each in self.record.replicas if each != self._local.me]

    def _standing(self, replica: str) -> Standing:
        follower, in_sync = self._followers.get(replica), replica in self.record.iss
        if follower is None or not follower.is_streaming:
            why = "" if in_sync else "it does not follow"
            return Standing(replica, 0, 0, in_sync, why)
        why = ""
        if not in_sync:
            behind = max(self._local.confirm, self.start) - follower.held
            alive = self._link.is_alive(replica)
            why = f"{behind} bytes behind" if behind > 0 else "it is about to join"
            why = why if alive else "it has no session with the engine"
        return Standing(replica, follower.held, follower.next, in_sync, why)

    # --- sessions of followers ---

    def on_hello(self, sender: str, frame: Hello) -> None:
        member = self.record.replicas.get(sender)
        if member is None or (member.store_uuid, member.incarnation) != (
            frame.store_uuid,
            frame.incarnation,
        ):
            self._refuse(sender, frame, Why.UNKNOWN_REPLICA, self._link.version, frame.incarnation)
            self._send(sender, Refused(frame.group, self.epoch, frame.nonce))
            self._link.get()
            return
        known = self._followers.get(sender)
        if known is None or known.nonce < frame.nonce:
            self._followers[sender] = Follower(member, frame.nonce, self._local.now)
            self._contact.begun(sender)
        elif known.nonce > frame.nonce or known.is_streaming:
            self._refuse(sender, frame, Why.OTHER_SESSION, known.nonce, frame.nonce)
            return
        local = self._local
        epochs = local.promises.epochs
        self._send(
            sender,
            Welcome(frame.group, self.epoch, frame.nonce, epochs, local.begin, local.end),
        )

    def on_marks(self, sender: str, frame: Marks) -> None:
        follower = self._session(sender, frame)
        if follower is None or follower.is_streaming:
            return
        self._contact.heard(sender)
        same = [mark.end for mark in frame.marks if self._has(mark)]
        offset = same[0] if same else self._local.begin
        follower.agreed = follower.next = offset
        follower.is_streaming = True
        follower.goal, follower.goal_at = self._local.end, self._local.now
        kind = Agreed if same else Apart
        self._send(sender, kind(frame.group, self.epoch, frame.nonce, offset))
        self._stream(sender, follower)

    def _has(self, mark: Mark) -> bool:
        """Whether this log has that very record there, and all that follows it."""
        local = self._local
        if mark.start == mark.end:  # an empty log begins there
            return local.begin <= mark.end <= local.end
        return local.begin < mark.end <= local.end and local.log.last_record(mark.end) == mark

    def on_ack(self, sender: str, frame: Ack) -> None:
        follower = self._session(sender, frame)
        if follower is None or not follower.is_streaming:
            return
        local = self._local
        if frame.held > local.end:
            self._refuse(sender, frame, Why.BEYOND_END, local.end, frame.held)
            return
        self._contact.heard(sender)
        follower.held = max(follower.held, frame.held)
        follower.beat = max(follower.beat, min(frame.number, self._number))
        if follower.held >= follower.goal:
            self._contact.caught_up(sender, follower.goal_at)
            follower.goal, follower.goal_at = local.end, local.now
        self._stream(sender, follower)
        self._advance()

    def _session(self, sender: str, frame: AnyFrame) -> Follower | None:
        """Whose session a frame belongs to; if to none of this epoch, that is said."""
        follower = self._followers.get(sender)
        if frame.epoch < self.epoch:
            self._refuse(sender, frame, Why.OLD_EPOCH, self.epoch, frame.epoch)
            return None
        if follower is None or follower.nonce != frame.nonce:
            nonce = 0 if follower is None else follower.nonce
            self._refuse(sender, frame, Why.OTHER_SESSION, nonce, frame.nonce)
            return None
        return follower

    def _refuse(self, sender: str, frame: AnyFrame, why: Why, here: int, there: int) -> None:
        self._local.refuse(sender, type(frame).__name__, why, here, there)

    def _send(self, to: str, frame: AnyFrame) -> None:
        self._local.do(Send(to, frame))

    # --- the stream ---

    def _stream(self, replica: str, follower: Follower) -> None:
        local = self._local
        settings = local.settings
        if follower.next < local.begin:  # what was not sent yet is deleted: it has to begin anew
            del self._followers[replica]
            return
        while follower.next < local.end:
            under_way = follower.next - max(follower.held, follower.agreed)
            if under_way >= settings.window_bytes:
                return
            stop = local.log.whole_records(follower.next, local.end, settings.frame_bytes)
            length = stop - follower.next
            local.do(
                Ship(replica, self.epoch, follower.nonce, follower.next, length, local.confirm)
            )
            follower.next = stop

    def _beat(self) -> None:
        local = self._local
        self._beat_at = local.now + local.settings.beat_s
        self._number += 1
        group = local.promises.group
        for replica, follower in self._followers.items():
            if follower.is_streaming:
                beat = Beat(
                    group, self.epoch, follower.nonce, follower.next, local.confirm, self._number
                )
                local.do(Send(replica, beat))

    # --- what is confirmed, and by whom ---

    def counted(self) -> set[str]:
        """Whose word is needed: the set as the engine has confirmed it, and whoever may have
        been added (rules 6 to 8)."""
        return self._joining.union(self.record.iss)

    def _advance(self) -> None:
        """Raise the confirm offset to what all who count hold.

        Not while the in-sync set is too small: then nothing is acknowledged, and whoever has just
        left the set still has all that ever was (KIP-966).
        """
        local = self._local
        if self._service in (Service.SHORT, Service.DEPOSED):
            return
        offset = local.held()
        for replica in self.counted():
            if replica == local.me:
                continue
            follower = self._followers.get(replica)
            if follower is None or follower.beat < self._proof:
                return
            offset = min(offset, follower.held)
        local.confirm_to(offset)

    # --- changes of the record ---

    def _change_record(self) -> None:
        alive = names(self._link.alive, self.record)
        self._contact.see(alive)
        if self.is_resigning or self._is_alone(alive):
            self.is_resigning = True  # before it is sent
            self._link.propose(resigned(self.record))
            self.serve()
        else:
            self._change_set(alive)

    def _is_alone(self, alive: set[str]) -> bool:
        """Whether nothing can be confirmed here, but could be by others (rule 13): they are alive,
        are enough, and one of them may lead."""
        record, me = self.record, self._local.me
        reached = {each for each in record.replicas if not self._contact.is_silent(each)} | {me}
        others = alive - reached
        enough = len(others) >= record.min_iss > len(reached & (alive | {me}))
        return enough and not others.isdisjoint((*record.iss, *record.elr))

    def _change_set(self, alive: set[str]) -> None:
        """Have the engine add who has caught up, and leave out who has not."""
        record, contact = self.record, self._contact
        join = {
            replica
            for replica, follower in self._followers.items()
            if replica not in record.iss
            and replica in alive
            and not contact.is_silent(replica)
            and self.may_join(follower)
        }
        others = set(record.iss) - {self._local.me}
        leave = {each for each in others if contact.lags(each, is_alive=each in alive)}
        silent = {each for each in others if contact.is_silent(each)}
        if len((join | set(record.iss)) - leave - silent) >= record.min_iss:
            leave |= silent
        if join or leave:
            self._joining |= join  # before it is sent
            self._link.propose(changed(record, join, leave))

    def may_join(self, follower: Follower) -> bool:
        """It has all that is confirmed, and all of earlier epochs (rule 7)."""
        needed = max(self._local.confirm, self.start)
        return follower.is_streaming and follower.held >= needed
