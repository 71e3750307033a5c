"""The roles of a broker, each declared once: its actor, how many, where, what it alone writes.

What lists roles elsewhere (who is started, ports, doorbells, the order of the end, who may write a
counter) is derived from here. They stand in the order in which they come to their end, so that
each finds the work of those before it complete.

A role is called by its name; where there are several, followed by a number: reader-0.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import msgspec

from cometmq.conf import BrokerSettings
from cometmq.shm.live.control import Counter, Doorbell


def _one(_settings: BrokerSettings) -> int:
    return 1


def _one_on_a_master(settings: BrokerSettings) -> int:
    return 0 if settings.is_slave else 1


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """One of the broker's processes.

    Args:
        actor: "module:Class" of the ServiceActor that plays it.
        slave_actor: on a slave, if it is another one there.
        group_actor: in a group that elects its master, if it is another one there.
        doorbell: the number of its eventfd; the first one's, where there are several.
        count: how many there are with these settings.
        numbered: there may be several; then each has a number, also where there is one.
        port: how far behind the name server's it listens to clients; None: it has none.
        owns: the counters that it alone writes; of TWO_WRITERS the first word.
        owns_second: the counters of which it writes the second word.
    """

    name: str
    actor: str
    slave_actor: str = ""
    group_actor: str = ""
    doorbell: Doorbell
    count: Callable[[BrokerSettings], int] = _one
    numbered: bool = False
    port: int | None = None
    owns: frozenset[Counter] = frozenset()
    owns_second: frozenset[Counter] = frozenset()

    def load(self, settings: BrokerSettings) -> Any:
        """The actor's class in a run with these settings; imports it."""
        actor = (settings.is_slave and self.slave_actor) or self.actor
        actor = (settings.is_in_group and self.group_actor) or actor
        module, _, name = actor.partition(":")
        return getattr(import_module(module), name)

    def load_all(self, settings: BrokerSettings) -> None:
        """Import what it is with these settings: in a group, all that it may be in any run."""
        if settings.is_in_group:
            for actor in filter(None, (self.actor, self.slave_actor, self.group_actor)):
                import_module(actor.partition(":")[0])
        elif self.names(settings):
            self.load(settings)

    def names(self, settings: BrokerSettings) -> list[str]:
        count = self.count(settings)
        if self.numbered:
            return [f"{self.name}-{number}" for number in range(count)]
        return [self.name] * count


ROLES: Final = (
    Role(
        name="scheduler",
        actor="cometmq.actors.scheduling.scheduler:SchedulerActor",
        doorbell=Doorbell.SCHEDULER,
        count=_one_on_a_master,
    ),
    Role(
        name="commitlog",
        actor="cometmq.actors.writer.commitlog:CommitLogActor",
        slave_actor="cometmq.actors.replication.slaves.follower:FollowerActor",
        doorbell=Doorbell.COMMITLOG,
        port=1,
        owns=frozenset({
            Counter.WROTE, Counter.WROTE_TIMESTAMP, Counter.MESSAGES, Counter.RECOVERED_FROM,
            Counter.PHASE, Counter.STEPS, Counter.CONTINUED, Counter.SYNC_WANTED, Counter.SYNCS,
            Counter.SPACE_WANTED, Counter.MARKS_FROM,
        }),
        owns_second=frozenset({Counter.FLUSHED, Counter.FLUSH_ERRNO}),
    ),
    Role(
        name="dispatcher",
        actor="cometmq.actors.maintenance.dispatcher:DispatcherActor",
        doorbell=Doorbell.DISPATCHER,
        owns=frozenset({
            Counter.DISPATCHED, Counter.DISPATCHED_TIMESTAMP, Counter.QUEUES, Counter.NAPPING,
            Counter.INDEXED, Counter.INDEX_FILES_FULL, Counter.QUEUES_RECOVERED,
        }),
    ),
    Role(
        name="flush",
        actor="cometmq.actors.maintenance.flush:FlushActor",
        doorbell=Doorbell.FLUSH,
        owns=frozenset({Counter.FLUSHED, Counter.FLUSHES, Counter.FLUSH_ERRNO}),
    ),
    # Behind what it sends: at an orderly end its slaves are given all of it.
    Role(
        name="ha",
        actor="cometmq.actors.replication.slaves.ha:HaActor",
        group_actor="cometmq.actors.replication.group.member:MemberActor",
        doorbell=Doorbell.HA,
        count=lambda settings: 1 if settings.is_in_group or settings.ha_port is not None else 0,
        owns=frozenset({
            Counter.REPLICATED, Counter.SLAVES, Counter.SLAVES_FROM, Counter.SERVICE,
            Counter.CONFIRM_KNOWN, Counter.SURE_UNTIL,
        }),
    ),
    Role(
        name="allocator",
        actor="cometmq.actors.maintenance.allocator:AllocatorActor",
        doorbell=Doorbell.ALLOCATOR,
        owns=frozenset({Counter.ALLOCATED, Counter.LOCKED_BYTES, Counter.ALLOCATE_ERRNO}),
    ),
    Role(
        name="cleaner",
        actor="cometmq.actors.maintenance.cleaner:CleanerActor",
        doorbell=Doorbell.CLEANER,
        owns=frozenset({Counter.MIN_OFFSET, Counter.DISK_STATE}),
    ),
    Role(
        name="reader",
        actor="cometmq.actors.reading.reader:ReaderActor",
        doorbell=Doorbell.READER,
        count=lambda settings: settings.reader_count,
        numbered=True,
        port=3,
    ),
    Role(
        name="coordinator",
        actor="cometmq.actors.coordination.coordinator:CoordinatorActor",
        slave_actor="cometmq.actors.replication.slaves.coordinator:SlaveCoordinatorActor",
        doorbell=Doorbell.COORDINATOR,
        port=2,
    ),
    Role(
        name="namesrv",
        actor="cometmq.actors.coordination.namesrv:NameServerActor",
        doorbell=Doorbell.NAMESRV,
        count=lambda settings: 0 if settings.name_servers else 1,
        port=0,
    ),
)  # fmt: skip
BY_NAME: Final = {role.name: role for role in ROLES}


def role_of(name: str) -> Role:
    """The declaration behind a name such as "reader-0"."""
    return BY_NAME[name.partition("-")[0]]


def number_of(name: str) -> int:
    return int(name.partition("-")[2] or 0)


def roles_of(settings: BrokerSettings) -> list[str]:
    """The names of all that a broker with these settings has, in the order of its end."""
    return [name for role in ROLES for name in role.names(settings)]


def doorbell_of(name: str) -> int:
    return role_of(name).doorbell + number_of(name)


def doorbell_count(settings: BrokerSettings) -> int:
    return max(doorbell_of(name) for name in roles_of(settings)) + 1


def port_of(name: str, base: int) -> int | None:
    """Where it listens if the name server listens at `base`; 0: at any that is free."""
    behind = role_of(name).port
    if behind is None:
        return None
    return base + behind + number_of(name) if base else 0
