"""What an operator decides about a group: forming it, another master, a replica more or less.

Each is one change of the group's record, by compare-and-set: it is made of the record as it was
read, or not at all. No replica needs to run for it, but a master's successor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from cometmq.actors.replication.core.record import (
    GroupRecord,
    added,
    decode_record,
    elected,
    encode_record,
    new_record,
    removed,
)
from cometmq.actors.replication.engines.engine import Applied, Engine, Unknown
from cometmq.actors.replication.engines.errors import EngineUnreachable
from cometmq.actors.replication.group.sessions import alive_in
from cometmq.cluster.looking import GroupStatus, Looker
from cometmq.protocol.errors import CometError, ConfigError, NotReachable
from cometmq.protocol.retry import pause_s

CHANGE_S: Final = 30.0
SERVE_S: Final = 60.0
_LOOK_S: Final = 0.02  # nothing tells when a new master serves


def change(
    engine: Engine, group: str, edit: Callable[[GroupRecord], GroupRecord]
) -> tuple[GroupRecord, int]:
    """Have the record changed once; the record and its version then.

    Args:
        edit: makes the new record of the present one, or raises why it cannot be.

    Raises ConfigError where there is no record, EngineUnreachable where it is not known what became
    of the change.
    """
    deadline = time.monotonic() + CHANGE_S
    failures = 0
    sent: tuple[int, GroupRecord] | None = None  # a change whose answer was lost
    while True:
        stored = engine.get(group)
        if stored is None:
            raise ConfigError(f"{engine.where}: there is no record of a group {group}")
        record = decode_record(stored.record)
        if sent is not None and stored.version > sent[0] and record == sent[1]:
            return record, stored.version
        # While the version is the one that the lost change expected, the same is sent again: at
        # most one of them is made. Behind it the lost one is not on its way any more.
        again = sent is not None and stored.version == sent[0]
        wanted = sent[1] if sent is not None and again else edit(record)
        outcome = engine.cas(group, stored.version, encode_record(wanted))
        if isinstance(outcome, Applied):
            return wanted, outcome.version
        sent = (stored.version, wanted) if isinstance(outcome, Unknown) or again else None
        if time.monotonic() > deadline:
            why = outcome.why if isinstance(outcome, Unknown) else "others change the record"
            raise EngineUnreachable(f"{engine.where}: group {group}: {why}; look before you repeat")
        failures += 1
        time.sleep(pause_s(failures))


def form(
    engine: Engine, group: str, replicas: Sequence[tuple[str, str]], min_iss: int
) -> GroupRecord:
    """Make the record of a new group; the one that is there, if it has these replicas.

    Raises ConfigError where it has others, or cannot be.
    """
    wanted = new_record(group, replicas, min_iss=min_iss)
    deadline = time.monotonic() + CHANGE_S
    failures = 0
    while (stored := engine.get(group)) is None:
        outcome = engine.cas(group, None, encode_record(wanted))
        if isinstance(outcome, Applied):
            return wanted
        if time.monotonic() > deadline:
            raise EngineUnreachable(f"{engine.where}: the record of {group} could not be made")
        failures += 1
        time.sleep(pause_s(failures))
    found = decode_record(stored.record)
    known = {name: member.address for name, member in found.replicas.items()}
    if known != dict(replicas):
        theirs = ", ".join(f"{name} at {address}" for name, address in known.items())
        raise ConfigError(
            f"{engine.where} has a group {group} already, of {theirs}: choose another name "
            "(--group), or another engine"
        )
    return found


def add(engine: Engine, group: str, replica: str, address: str) -> tuple[GroupRecord, int]:
    """One more replica; it begins with an empty store, and joins once it has everything."""
    return change(engine, group, lambda record: added(record, replica, address))


def remove(engine: Engine, group: str, replica: str) -> tuple[GroupRecord, int]:
    """One replica less. Raises ConfigError where the others may lack what it has."""
    return change(engine, group, lambda record: removed(record, replica))


class FailOver:
    """One change of the master, as an operator wants it.

    Raises ConfigError, with the reason, where there is nobody who can take over.
    """

    def __init__(self, engine: Engine, looker: Looker, to: str | None) -> None:
        self._looker = looker
        before = looker.look()
        self.was = before.master
        self.to = to or longest(before)

        def named(record: GroupRecord) -> GroupRecord:
            alive = alive_in(record, engine.alive(record.group))
            problem = unfit(record, self.to, alive)
            if problem:
                raise ConfigError(problem)
            return elected(record, self.to, alive)

        self._began = time.monotonic()
        record, _ = change(engine, before.group, named)
        self.epoch = record.epoch

    def wait_served(self, timeout_s: float = SERVE_S) -> float:
        """Until the new master serves, and the former one, where it can be seen, knows that it is
        none; for how long nobody served, in seconds, or a little less.

        Raises NotReachable when the time is over, CometError where yet another one was elected.
        """
        deadline = self._began + timeout_s
        away_s = self._until_served(deadline, timeout_s)
        if self.was is not None:
            wait_heard(self._looker, self.was, deadline - time.monotonic())
        return away_s

    def _until_served(self, deadline: float, timeout_s: float) -> float:
        while True:
            status = self._looker.look()
            if status.epoch > self.epoch:
                raise CometError(
                    f"{self.to} was named, but then {status.master or 'nobody'} was elected, of "
                    f"epoch {status.epoch}"
                )
            if status.serves and status.master == self.to:
                return time.monotonic() - self._began
            if time.monotonic() > deadline:
                raise NotReachable(
                    f"{self.to} is the master of epoch {self.epoch}, and takes no messages after "
                    f"{timeout_s:g} s: {status.why}"
                )
            time.sleep(_LOOK_S)


def wait_heard(looker: Looker, replica: str, timeout_s: float = SERVE_S) -> None:
    """Until that replica, if it runs on this machine, has heard of the present master. One that was
    master before stores nothing any more, whatever it knows; but it may tell members that queues
    are theirs. Raises NotReachable when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        status = looker.look()
        found = status.replica(replica)
        if found is None or found.epoch is None or found.epoch >= status.epoch:
            return
        if time.monotonic() > deadline:
            raise NotReachable(
                f"{replica} has not heard yet that it is the master no more, of epoch "
                f"{status.epoch}: can it reach the engine? Else end its broker"
            )
        time.sleep(_LOOK_S)


def unfit(record: GroupRecord, replica: str, alive: frozenset[str]) -> str:
    """Why a replica cannot be named master; "" if it can. Rule 1 of docs/replication.md: whoever is
    in the in-sync set has all that is confirmed, and nobody else may be."""
    if replica not in record.replicas:
        return f"{record.group} has no replica {replica}, but {', '.join(record.replicas)}"
    if replica == record.master and replica in alive:
        return f"{replica} is the master already"
    if replica not in alive:
        return f"{replica} has no session with the engine: it does not run, or cannot reach it"
    if replica not in record.iss:
        return f"{replica} is not in sync, and may lack acknowledged messages"
    return ""


def longest(status: GroupStatus) -> str:
    """Whom to name: a replica in sync with the longest log, as far as that is known. Raises
    ConfigError where there is none but the master."""
    able = [each for each in status.replicas if each.in_sync and each.name != status.master]
    if not able:
        away = "; ".join(f"{each.name}: {each.why}" for each in status.replicas if each.why)
        raise ConfigError(f"nobody but the master is in sync: {away or status.why}")
    return min(able, key=lambda each: (each.lag_bytes is None, each.lag_bytes or 0, each.name)).name
