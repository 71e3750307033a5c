"""Ownership of queues within a consumer group: who reads which. No I/O, and time is handed in.

A topic's queues are shared among the members that subscribe to it, by RocketMQ's AVG rule. A queue
that moves is handed over in two steps: its owner learns that it must give the queue up (a share
without it), and the queue goes on only when the owner has seen that share and names the queue in
`owned` no longer, or has left, or was silent for the session time. So there is never a moment at
which two members may work on one queue:

    state of a queue        owner   heir    in whose share
    free                    -       -       nobody's: no member subscribes to its topic
    owned                   A       A       A's
    being given up          A       B or -  nobody's; A may still work on it and commit

Each ownership has an *epoch*, which stands in the owner's share and comes back with its commits. No
two ownerships of a queue have the same, and a later one has a higher one, also across restarts of
the coordinator. So a member that was stopped for so long that its queue went to another one, and
perhaps came back to it, cannot commit by what it knew before: it has to take the queue on anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cometmq.actors.tables.allocation import allocate
from cometmq.actors.tables.differences import Subscriptions
from cometmq.protocol.commands import GroupShare, QueueKey, Subscription
from cometmq.protocol.errors import NotOwner
from cometmq.protocol.tags import split


class GroupRecord(msgspec.Struct, kw_only=True, rename="camel"):
    """What must be known of a group to go on with it in another process."""

    version: int = 0
    # member -> topic -> tags and SQL92, as protocol/tags.py joins them
    members: dict[str, dict[str, str]] = {}
    owners: dict[str, dict[int, str]] = {}  # topic -> queue id -> member
    epochs: dict[str, dict[int, int]] = {}  # topic -> queue id -> epoch of that ownership


class _Member:
    __slots__ = ("share", "version")

    def __init__(self) -> None:
        self.share: dict[QueueKey, int] = {}  # -> epoch
        self.version = -1  # of the share, as the member is to know it


class ConsumerGroup:
    """One group: its members, and the one owner of each queue.

    Args:
        name: for the log.
        queue_counts: topic -> readable queues. Looked into whenever shares are worked out; call
            `topics_changed` when it has changed.
        session_timeout_s: how long a member may be silent.
        record: a group to go on with; its members count as seen at `now`.
        first_version: below the first version and epoch that are given out. Those of an earlier
            life of the group should lie below it.
    """

    def __init__(
        self,
        name: str,
        queue_counts: Mapping[str, int],
        *,
        session_timeout_s: float,
        record: GroupRecord | None = None,
        first_version: int = 0,
        now: float = 0,
    ) -> None:
        self.name = name
        self.version = first_version  # the highest one given out
        self._queue_counts = queue_counts
        self._session_timeout_s = session_timeout_s
        self._members: dict[str, _Member] = {}
        self._heirs: dict[QueueKey, str] = {}  # who is to have a queue, by AVG
        self._owners: dict[QueueKey, str] = {}
        self._epochs: dict[QueueKey, int] = {}  # of these ownerships
        self._seen: dict[str, float] = {}  # member -> time.monotonic() of its last sign of life
        self._revoked: dict[QueueKey, int] = {}  # owned, but not by its heir: since this version
        self.subscribed = Subscriptions(name)
        self.reads_from, self.reads_far_from = 0, 1  # ids of replicas; RocketMQ's defaults
        if record is not None:
            self._go_on_with(record, now)

    # --- what members do ---

    def join(
        self,
        member: str,
        subscriptions: Mapping[str, str],
        owned: Iterable[QueueKey],
        *,
        version: int,
        now: float,
    ) -> None:
        """Take the member in, or note that it is there, what it wants and what it works on.

        Args:
            subscriptions: topic -> tags and SQL92, as protocol/tags.py joins them.
            owned: every queue that it may be working on.
            version: of the last share it has seen, -1 for none. A member that has seen none and
                works on nothing begins anew: another process may have had its name before, and
                may still be there.
        """
        entry = self._members.get(member)
        subscribed = self.subscribed.asked.get(member) != subscriptions
        if subscribed:
            self.subscribed.put(member, subscriptions)
        if entry is None:
            entry = self._members[member] = _Member()
        self._seen[member] = now
        still_owned = frozenset(owned)
        # A version that was never given out comes from an earlier life, and proves nothing.
        seen_version = version if version <= self.version else -1
        freed = self._take_back(member, still_owned, seen_version)
        if version < 0 and not still_owned:
            self.renew(queue for queue, owner in self._owners.items() if owner == member)
        if subscribed:
            self._choose_heirs()
            # A member that works on a queue which nobody owns owns it: we are the ones who forgot.
            for queue in still_owned:
                if queue in self._heirs and queue not in self._owners:
                    self._own(queue, member, self.version + 1)
            self.subscribed.warn(member)
        if subscribed or freed:
            self._hand_out(told=self._members if entry.version < 0 else ())

    def leave(self, member: str) -> bool:
        """Whether it was a member. Its queues are free at once."""
        return self._remove([member])

    def expire(self, now: float) -> list[str]:
        """Remove the members that were silent for the session time; who they were."""
        silent = [
            name for name, seen in self._seen.items() if now - seen >= self._session_timeout_s
        ]
        self._remove(silent)
        return silent

    def attend_again(self, now: float) -> None:
        """Nobody listened for a while: no member's silence counts before now."""
        for name, seen in self._seen.items():
            self._seen[name] = max(seen, now)

    def touch(self, member: str, now: float) -> bool:
        """Note another sign of life of a member; False if it is none of the group."""
        if member not in self._seen:
            return False
        self._seen[member] = now
        return True

    def topics_changed(self) -> None:
        """Some topic has other queues than before."""
        self._choose_heirs()
        self._hand_out()

    def renew(self, queues: Iterable[QueueKey]) -> bool:
        """Begin a new epoch of these ownerships: their owners have to take the queues on anew, and
        what they commit until then is refused. Whether any of them has an owner."""
        renewed = [queue for queue in queues if queue in self._owners]
        if renewed:
            self._epochs.update(dict.fromkeys(renewed, self.version + 1))
            self._hand_out()
            self.version = max(self.version, self._epochs[renewed[0]])
        return bool(renewed)

    # --- what anybody may know ---

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def version_of(self, member: str) -> int:
        """The version of the share that the member ought to know."""
        return self._members[member].version

    def share_of(self, member: str) -> GroupShare:
        """The member's answer; an empty share for one that is none."""
        entry = self._members.get(member)
        share = entry.share if entry else {}
        queues = sorted(share, key=lambda queue: (queue.topic, queue.queue_id))
        return GroupShare(
            version=entry.version if entry else self.version,
            queues=queues,
            members=len(self._members),
            session_timeout_ms=round(self._session_timeout_s * 1000),
            epochs=[share[queue] for queue in queues],
            reads_from=self.reads_from,
            reads_far_from=self.reads_far_from,
        )

    def owner_of(self, queue: QueueKey) -> str:
        """Who may work on a queue and commit its offsets; empty: nobody."""
        return self._owners.get(queue, "")

    def check_commit(self, member: str, queue: QueueKey, epoch: int) -> None:
        """Raises NotOwner unless this member owns the queue, in this very epoch.

        Args:
            epoch: 0 from a client that knows of none: then it is not compared.
        """
        owner = self._owners.get(queue, "")
        if owner == member and epoch in (0, self._epochs[queue]):
            return
        named = f"queue {queue.queue_id} of {queue.topic}"
        if owner != member:
            raise NotOwner(f"{named} belongs to {owner or 'nobody'}, not to {member}")
        raise NotOwner(
            f"{named} has changed hands since {member} took it on "
            f"(epoch {epoch}, now {self._epochs[queue]})"
        )

    def subscriptions(self) -> list[Subscription]:
        """What the members subscribe to; a topic stands there once for each expression."""
        pairs = {pair for asked in self.subscribed.asked.values() for pair in asked.items()}
        return [Subscription(topic, *split(subscribed)) for topic, subscribed in sorted(pairs)]

    def topics(self) -> list[str]:
        return sorted({topic for asked in self.subscribed.asked.values() for topic in asked})

    def record(self) -> GroupRecord:
        owners: dict[str, dict[int, str]] = {}
        epochs: dict[str, dict[int, int]] = {}
        for queue, owner in self._owners.items():
            owners.setdefault(queue.topic, {})[queue.queue_id] = owner
            epochs.setdefault(queue.topic, {})[queue.queue_id] = self._epochs[queue]
        members = {name: dict(self.subscribed.asked[name]) for name in self._members}
        return GroupRecord(version=self.version, members=members, owners=owners, epochs=epochs)

    # --- the sharing ---

    def _go_on_with(self, record: GroupRecord, now: float) -> None:
        self.version = max(self.version, record.version)
        for name, subscriptions in record.members.items():
            self._members[name] = _Member()
            self._seen[name] = now
            self.subscribed.put(name, subscriptions)
        for topic, owners in record.owners.items():
            epochs = record.epochs.get(topic, {})
            for queue_id, owner in owners.items():
                if owner in self._members:
                    known = epochs.get(queue_id, self.version + 1)
                    self._own(QueueKey(topic, queue_id), owner, known)
        self._choose_heirs()
        self._hand_out(told=self._members)

    def _choose_heirs(self) -> None:
        self._heirs = allocate(self.subscribed.asked, self._queue_counts)

    def _take_back(self, member: str, owned: frozenset[QueueKey], seen_version: int) -> bool:
        """Free the queues that the member was told to give up and has given up; whether any."""
        freed = [
            queue
            for queue, since in self._revoked.items()
            if self._owners[queue] == member and queue not in owned and seen_version >= since
        ]
        self._free(freed)
        return bool(freed)

    def _own(self, queue: QueueKey, owner: str, epoch: int) -> None:
        self._owners[queue] = owner
        self._epochs[queue] = epoch

    def _free(self, queues: Iterable[QueueKey]) -> None:
        for queue in queues:
            del self._owners[queue], self._epochs[queue]
            self._revoked.pop(queue, None)

    def _hand_out(self, told: Iterable[str] = ()) -> None:
        """Give every free queue to its heir, and a new version to whose share has changed.

        `told` get one in any case: the number of members is in every share.
        """
        next_version = self.version + 1
        told_anyway = set(told)
        for queue, owner in self._owners.items():
            if self._heirs.get(queue) == owner:
                self._revoked.pop(queue, None)
            elif queue not in self._revoked:
                self._revoked[queue] = next_version
                told_anyway.add(owner)  # it can only prove to have seen what it is told
        shares: dict[str, dict[QueueKey, int]] = {}
        for queue, heir in self._heirs.items():
            if queue not in self._owners:
                self._own(queue, heir, next_version)
            if self._owners[queue] == heir:
                shares.setdefault(heir, {})[queue] = self._epochs[queue]
        for name, entry in self._members.items():
            share = shares.get(name, {})
            if share != entry.share or name in told_anyway:
                entry.share, entry.version = share, next_version
                self.version = next_version

    def _remove(self, names: Iterable[str]) -> bool:
        gone = {name for name in names if self._members.pop(name, None) is not None}
        for name in gone:
            del self._seen[name]
            self.subscribed.remove(name)
        if not gone:
            return False
        self.version += 1  # also where nobody is left to be told: the record has changed
        self._free([queue for queue, owner in self._owners.items() if owner in gone])
        self._choose_heirs()
        self._hand_out(told=self._members)
        return True
