"""What has changed between two looks at a group, in lines that people read."""

from __future__ import annotations

from collections.abc import Iterator

from cometmq.cluster.looking import AWAY, GroupStatus, ReplicaStatus


def changes(before: GroupStatus | None, now: GroupStatus) -> Iterator[str]:
    """In the order in which they matter; nothing where lags alone differ."""
    if before is None:
        yield summary(now)
        yield from (f"{each.name}: {each.why}" for each in now.replicas if each.why)
        return
    if (before.master, before.epoch) != (now.master, now.epoch):
        yield _of_master(before, now)
    for each in now.replicas:
        was = before.replica(each.name)
        if was is None:
            yield f"{each.name} was added at {each.address}"
        else:
            yield from _of_replica(was, each)
    left = {each.name for each in now.replicas}
    yield from (f"{each.name} was removed" for each in before.replicas if each.name not in left)
    if now.serves and not before.serves:
        yield f"messages are taken: {summary(now)}"
    elif before.serves and not now.serves:
        yield f"no messages are taken: {now.why}"


def summary(status: GroupStatus) -> str:
    """One line."""
    if not status.version:
        return f"group {status.group}: {status.why}"
    master = f"{status.master} is master" if status.master else "there is no master"
    in_sync = ", ".join(status.in_sync) or "nobody"
    return f"group {status.group}, epoch {status.epoch}: {master}; in sync: {in_sync}" + (
        "" if status.serves else f" ({status.why})"
    )


def _of_master(before: GroupStatus, now: GroupStatus) -> str:
    if now.master is None:
        return f"there is no master; it was {before.master}" if before.master else now.why
    was = f", it was {before.master}" if before.master not in (None, now.master) else ""
    return f"{now.master} is the master of epoch {now.epoch}{was}"


def _of_replica(was: ReplicaStatus, now: ReplicaStatus) -> Iterator[str]:
    if was.address != now.address:
        yield f"{now.name} is now at {now.address}"
    if now.in_sync and not was.in_sync:
        yield f"{now.name} is in sync"
    elif now.role == AWAY and was.role != AWAY:
        yield f"{now.name} is away: {now.why}"
    elif now.role != AWAY and was.role == AWAY:
        yield f"{now.name} is there: {now.why or 'in sync'}"
    elif was.in_sync and not now.in_sync:
        yield f"{now.name} is no longer in sync: {now.why}"
