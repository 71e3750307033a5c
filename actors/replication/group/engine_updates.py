"""What the engine tells a replica, handed on to its core, and whom it has lines to then."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cometmq.actors.replication.core.actions import Service
from cometmq.actors.replication.core.frames import TROUBLE_MAX, Trouble
from cometmq.actors.replication.core.link import names
from cometmq.actors.replication.core.record import GroupRecord, Life, new_record
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.group.driver import Driver
from cometmq.actors.replication.group.engine_calls import EngineCalls
from cometmq.actors.replication.group.free_space import FreeSpace
from cometmq.actors.replication.group.terms import Runs
from cometmq.actors.replication.peers.peers import Peers
from cometmq.conf import BrokerSettings

log = logging.getLogger(__name__)


class EngineUpdates:
    """What EngineCalls tells; `begin` before it can tell anything."""

    _driver: Driver
    _engine: EngineCalls

    def __init__(self, core: Replica, peers: Peers, runs: Runs, settings: BrokerSettings) -> None:
        self._core = core
        self._runs = runs
        self._peers = peers
        self._settings = settings
        self._connected: GroupRecord | None = None  # whose replicas there are lines to

    def begin(self, driver: Driver, engine: EngineCalls) -> None:
        self._driver = driver
        self._engine = engine

    def connect(self) -> None:
        """To the replicas that the record names; and to the engine as the life that it has."""
        self._engine.live_as(self._core.local.life)
        record = self._core.record
        if record is not None and record is not self._connected:
            self._connected = record
            self._peers.replace({name: each.address for name, each in record.replicas.items()})

    # --- as EngineCalls tells it ---

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> None:
        if record is None:
            self._found_group()
        self._driver.event(self._core.learned, version, record, number)
        self.connect()

    def cas_applied(self, ticket: int, version: int) -> None:
        self._driver.event(self._core.cas_applied, ticket, version)
        self.connect()

    def cas_refused(self, ticket: int, version: int, record: GroupRecord) -> None:
        self._driver.event(self._core.cas_refused, ticket, version, record)
        self.connect()

    def cas_unknown(self, ticket: int) -> None:
        self._driver.event(self._core.cas_unknown, ticket)

    def look_at_room(self, room: FreeSpace) -> None:
        """Whoever has no room leaves the group to the others, and says why."""
        is_away = bool(room.why) and self._is_dispensable()
        if is_away and not self._engine.is_away:
            if room.is_stuck and self._core.leads:
                self._runs.now.serve(Service.DEPOSED)  # the core is in the middle of an event
            self._engine.leave()
        elif self._engine.is_away and not is_away:
            self._engine.come_back()
        self._tell_trouble(room.why)

    def _is_dispensable(self) -> bool:
        """Whether a master would be followed by another one. If not, it is better to be read from
        than nothing."""
        record, me = self._engine.record, self._core.local.me
        if not self._core.leads or record is None:
            return True
        others = names(self._engine.alive, record) - {me}
        return len(others) >= record.min_iss and not others.isdisjoint((*record.iss, *record.elr))

    def _tell_trouble(self, why: str) -> None:
        """To the master, for who looks at the group from there."""
        record, local = self._engine.record, self._core.local
        if why and record is not None and record.master not in ("", local.me):
            epoch = local.promises.promised_epoch
            self._peers.send(record.master, Trouble(record.group, epoch, 0, why[:TROUBLE_MAX]))

    def session(self, until: float | None) -> None:
        self._runs.now.sure_until(until or 0.0)
        if until is not None and self._driver.is_busy:
            return  # it is said again at the next tick; an action may take hours, on a full disk
        self._driver.event(self._core.session, until)

    def sessions(self, alive: Iterable[Life]) -> None:
        self._driver.event(self._core.sessions, alive)

    def _found_group(self) -> None:
        """The first replica makes the record of a new group, and nobody else ever does. A store
        that was in a group before knows that a record was lost, and that there was one."""
        settings = self._settings
        peers = settings.group_peers
        if settings.own_peer == peers[0] and self._core.local.is_new:
            log.info("making the record of the new group %s", settings.group_name)
            self._engine.make(new_record(settings.group_name, peers, min_iss=settings.min_iss))
