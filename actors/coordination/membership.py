"""Membership: who is in which group, of which kind, by which connection, and until when.

Members that share queues and consumers that take messages one by one are counted for each
connection alike, so that no client fills groups alone, and are known to have ended alike: by the
process that they live in, if that is one of this machine.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from typing import Final

import msgspec

from cometmq.protocol.errors import SystemBusy
from cometmq.shm.os.processes import NAME_MAX, has_ended

MEMBERS_MAX: Final = 10_000  # of one group
MEMBERS_OF_SENDER_MAX: Final = 1_000  # of one connection, of each kind
LOOK_S: Final = 0.1  # between two looks at processes


class Kind(enum.Enum):
    SHARES = "shares queues"
    POPS = "takes messages one by one"


class Member(msgspec.Struct, frozen=True):
    """A member; a pop consumer is one for each topic.

    `sender`: its connection; b"" after a restart, until it is heard of.
    `until`: time.monotonic() at which it is a member no more; infinite where its sessions are kept
    elsewhere (ConsumerGroup).
    """

    kind: Kind
    group: str
    name: str
    sender: bytes = b""
    process: str = ""
    topic: str = ""
    until: float = math.inf


class Membership:
    """See the module."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Kind, str], dict[tuple[str, str], Member]] = {}
        self._counts: Counter[tuple[Kind, bytes]] = Counter()
        self._look_again_at = 0.0
        self._ended: set[str] = set()  # processes, at the last look
        self._unseen: set[Kind] = set()  # whose members of these are not taken yet

    def note(self, member: Member) -> None:
        """Add or update a member. Raises SystemBusy."""
        place = member.topic, member.name
        there = self._groups.get((member.kind, member.group), {})
        before = there.get(place)
        if before is None and len(there) >= MEMBERS_MAX:
            raise SystemBusy(f"group {member.group} has {MEMBERS_MAX} members, and takes no more")
        if before is None or before.sender != member.sender:
            if member.sender and self._counts[member.kind, member.sender] >= MEMBERS_OF_SENDER_MAX:
                raise SystemBusy(
                    f"member {member.name} of group {member.group}: its connection has "
                    f"{MEMBERS_OF_SENDER_MAX} members already, and takes no more"
                )
            self._counts[member.kind, member.sender] += 1
            if before is not None:
                self._uncount(before)
        if not 0 < len(member.process) <= NAME_MAX:
            process = "" if before is None else before.process
            member = msgspec.structs.replace(member, process=process)
        self._groups.setdefault((member.kind, member.group), {})[place] = member

    def forget(self, kind: Kind, group: str, name: str, topic: str = "") -> None:
        """It is no member any more."""
        there = self._groups.get((kind, group), {})
        member = there.pop((topic, name), None)
        if member is not None:
            self._uncount(member)
            if not there:
                del self._groups[kind, group]

    def of(self, kind: Kind, group: str) -> list[Member]:
        return list(self._groups.get((kind, group), {}).values())

    def names(self, kind: Kind, group: str) -> list[str]:
        """Return the members that are there, but those that are known to have ended."""
        self._look()
        now = time.monotonic()
        return sorted(
            {
                each.name
                for each in self.of(kind, group)
                if each.until > now and each.process not in self._ended
            }
        )

    def take_expired(self, kind: Kind) -> list[Member]:
        """Forget the members whose time is over, and return them."""
        now = time.monotonic()
        return self._take([each for each in self._all(kind) if each.until <= now])

    def take_ended(self, kind: Kind) -> list[Member]:
        """Forget the members whose process has ended, and return them."""
        self._look()
        if kind not in self._unseen:
            return []
        self._unseen.discard(kind)
        return self._take([each for each in self._all(kind) if each.process in self._ended])

    def _look(self) -> None:
        """See which processes have ended; not again before some time has gone by: it may be asked
        for with each command."""
        now = time.monotonic()
        if now >= self._look_again_at:
            self._look_again_at = now + LOOK_S
            processes = {each.process for kind in Kind for each in self._all(kind)}
            self._ended = {each for each in processes if each and has_ended(each)}
            self._unseen = set(Kind) if self._ended else set()

    def _all(self, kind: Kind) -> list[Member]:
        return [
            member
            for (kind_of_group, _), there in self._groups.items()
            if kind_of_group is kind
            for member in there.values()
        ]

    def _take(self, members: list[Member]) -> list[Member]:
        for each in members:
            self.forget(each.kind, each.group, each.name, each.topic)
        return members

    def _uncount(self, member: Member) -> None:
        key = member.kind, member.sender
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
