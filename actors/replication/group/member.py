"""A replica of a group that elects its master: the process that speaks with the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from cometmq.actors.replication.core.frames import AnyFrame, Trouble
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.core.settings import Settings
from cometmq.actors.replication.engines.engine import now_s
from cometmq.actors.replication.engines.opening import open_engine, opener_of
from cometmq.actors.replication.group.action_runner import ActionRunner
from cometmq.actors.replication.group.driver import Driver
from cometmq.actors.replication.group.engine_calls import EngineCalls
from cometmq.actors.replication.group.engine_updates import EngineUpdates
from cometmq.actors.replication.group.free_space import FreeSpace
from cometmq.actors.replication.group.log_feed import LogFeed
from cometmq.actors.replication.group.log_view import GroupLog
from cometmq.actors.replication.group.promises_file import PromisesFile
from cometmq.actors.replication.group.state_transfer import StateTransfer
from cometmq.actors.replication.group.terms import Pace, Runs, WholeFlushed
from cometmq.actors.replication.peers.peers import Peers, content_bytes_max
from cometmq.actors.replication.peers.secret import load_secret
from cometmq.actors.replication.peers.waiting_frames import WaitingFrames
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.event_log import EventLog, Troubles
from cometmq.actors.runtime.family import EXIT_FATAL, EXIT_UNSETTLED, Family
from cometmq.actors.runtime.service import ServiceActor
from cometmq.conf import BrokerSettings, FlushDiskType
from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.os.libc import keep_freed
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

# Pieces of the log come in memory of their size, again and again.
OWN_MAPPING_BYTES: Final = 8 << 20
FREED_BYTES: Final = 32 << 20


class MemberActor(ServiceActor):
    """Hosts the core of this replica: hands it what happens, and has done what it says.

    Writes, alone: `replicated` (what is confirmed), `confirm_known`, `service`, `sure_until`,
    `slaves_from`; cometmq.promises; books on their way to the store (shm/state/laid_books.py).
    Wakes on: frames of the other replicas; `wrote`, `flushed` and `phase` of the run that is under
    way; the line to its commitlog process; the engine's watch; a timer.
    Dies of: a promise that cannot be kept, but for want of room; a record of the log that does not
    hold, a log that is not the group's: then the whole broker ends. Killed, it has the supervisor
    begin another run, as a follower; the next process registers as another life of the store.
    """

    role = "ha"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._peer = settings.own_peer
        self._group = settings.group_name
        self._settings = Settings(
            group=self._group,
            replica=self._peer.replica,
            address=self._peer.address,
            sync_flush=settings.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        )
        self._secret = load_secret(Path(settings.group_secret_file))
        # One that can never be opened is not tried for ever.
        opener_of(settings.group_engine, settings.engine_access)
        self._said = EventLog()
        self._flushed = WholeFlushed()
        self._troubles = Troubles()
        self._pace = Pace()

    # --- start ---

    def on_start(self) -> None:
        family, settings = self._family, self._family.settings
        keep_freed(OWN_MAPPING_BYTES, FREED_BYTES)
        family.wait_for(Counter.PHASE, Phase.RECOVERED)
        self._runs = Runs(
            family, call_soon=self.call_soon, on_begun=self._on_run, on_failed=self._end
        )
        self._log = GroupLog(family.store, settings.mapped_file_size_commit_log_bytes)
        promises = PromisesFile(family.store)
        self._core = self._make_core(promises)
        self._frames = WaitingFrames(self._may_append, self._said)
        self._peers = Peers(
            group=self._group,
            own=self._peer.replica,
            secret=self._secret,
            bind=_bind_address(settings),
            on_frame=self._take_frame,
            said=self._said,
            content_bytes_max=content_bytes_max(settings),
        )
        self._peers.replace(dict(settings.group_peers))
        self._books = StateTransfer(
            family.store,
            self._group,
            send=self._peers.send,
            call_soon=self.call_soon,
            after=self.after,
            master=lambda: self._core.record.master if self._core.record else "",
            on_failed=self._begin_again,
        )
        self._log_line = LogFeed(
            family.log_source, self._runs.now.wrote_cell, self._on_laid_down_later
        )
        self._news = EngineUpdates(self._core, self._peers, self._runs, settings)
        self._engine = self._make_engine(settings)
        self._room = FreeSpace(
            family.store,
            promises,
            on_kept=lambda: self._driver.go_on(),
        )
        self._deeds = ActionRunner(
            self._group,
            peers=self._peers,
            books=self._books,
            log_view=self._log,
            log_line=self._log_line,
            engine=self._engine,
            room=self._room,
            runs=self._runs,
            said=self._said,
            log_end=lambda: self._core.local.end,
            call_soon=self.call_soon,
            on_laid_down=self._flushed.laid_down,
            on_stop=self._end,
        )
        self._driver = Driver(self._core, self._deeds.do, self._on_idle, self._end)
        self._news.begin(self._driver, self._engine)
        self.inbox.listen_to_doorbell(family.doorbell_fd)
        for source in (self._peers.fileno(), self._log_line.fileno()):
            self.inbox.listen_to(source)
        self._driver.event(self._core.start, now_s())
        self._engine.open(self._core.local.life)
        self.every(self._settings.beat_s, self._tick)
        self._look()

    def _make_core(self, promises: PromisesFile) -> Replica:
        begin, run = self._log.begins_at(), self._runs.now
        return Replica(
            self._settings,
            promises.load(self._group, self._peer.replica),
            self._log,
            begin=begin,
            end=max(begin, run.wrote),
            flushed=min(run.wrote, max(begin, run.flushed)),
            known_end=0,  # the commitlog process has looked at the counters of a killed run
            boot_id=boot_id(),
        )

    def _make_engine(self, settings: BrokerSettings) -> EngineCalls:
        return EngineCalls(
            self._group,
            settings.group_session_timeout_ms / 1000,
            lambda: open_engine(settings.group_engine, access=settings.engine_access),
            self._news,
            call_soon=self.call_soon,
            after=self.after,
            listen_to=self.inbox.listen_to,
        )

    # --- the others ---

    def on_readable(self, source: Any) -> None:
        if self.settled:
            return
        if source == self._peers.fileno():
            if self._peers.receive():
                self.call_soon(lambda: self.on_readable(source))
        elif source == self._log_line.fileno():
            self._log_line.on_readable()
        elif source == self._engine.watched_fd:
            self._engine.look()
        self._take_frames()

    def _take_frame(self, sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        if isinstance(frame, Trouble):
            self._troubles.heard(sender, frame.why)
        elif not self._books.take(sender, frame, content):
            self._frames.put(sender, frame, content)

    def _take_frames(self) -> None:
        is_longer = False
        while not self._driver.is_busy and (come := self._frames.next()) is not None:
            self._deeds.content = come.content
            self._driver.event(self._core.frame, come.sender, come.frame, come.length, come.crc)
            is_longer |= come.content is not None
        # Here it may be flushed already, and what was confirmed may make room for more.
        if (is_longer and self._settings.sync_flush) or self._pace.is_full:
            self._look()

    def _may_append(self) -> bool:
        """A master refuses bytes, at once."""
        return self._log_line.is_ready or self._runs.now.epoch > 0

    # --- time ---

    def _tick(self) -> None:
        if self.settled:
            return
        self._peers.tend()
        self._engine.tick()
        self._books.tick()
        self._room.look(self._runs.now.disk_is_full)
        self._news.look_at_room(self._room)
        if self._driver.is_busy:
            return
        self._driver.event(self._core.tick, now_s())
        if self._pace.is_full:
            self._look_at_all()
        run, local = self._runs.now, self._core.local
        if not self._driver.is_busy and local.begin < run.begin <= local.confirm:
            self._driver.event(self._core.cleaned, run.begin)
        needed = [each.held for each in self._core.followers() if each.sent]
        run.keep_from(min(needed, default=None))
        self._log.keep([each for each in (local.end, *needed) if each >= local.begin])

    # --- the log of the run that is under way ---

    def on_doorbell(self) -> None:
        if self.settled:
            return
        self._log_line.look()
        self._look()
        self._take_frames()

    def _on_idle(self) -> None:
        self._look()
        self._news.connect()
        self._take_frames()

    def _look(self) -> None:
        """Tell the core how far the log is written and flushed."""
        run, core = self._runs.now, self._core
        run.arm()
        if self._driver.is_busy or not run.is_recovered:
            return
        run.confirm(core.local.confirm)
        self._send_on()
        # What is sent on may be flushed already, and what is flushed may make room for more.
        while not self._driver.is_busy and (flushed := self._flushed.news(run, core.local.end)):
            self._driver.event(core.flushed, flushed)
            self._send_on()

    def _look_at_all(self) -> None:
        """However much is under way."""
        self._pace.forget()
        self._look()

    def _send_on(self) -> None:
        """What has come to a master's log, and sleep on it where everything is sent."""
        cell, core = self._runs.now.wrote_cell, self._core
        while core.leads and not self._driver.is_busy and self._pace.may_send(core.local.confirm):
            if cell.value <= core.local.end:
                cell.arm()
                if cell.value <= core.local.end:
                    return
            end = cell.value
            self._pace.sent(end)
            self._driver.event(core.appended, end)

    def _on_laid_down_later(self, end: int) -> None:
        """The commitlog process has laid down what it was given."""
        self._flushed.laid_down(end)
        self._driver.go_on()

    def _on_run(self, stopped_at: int | None) -> None:
        """Another run has begun."""
        self._log_line.begin_run(self._runs.now.wrote_cell)
        self._log.forget_from(0)
        self._flushed.begin_run()
        self._pace.forget()
        if stopped_at is not None:
            self._driver.event_first(self._core.stopped, stopped_at)
        self._driver.go_on()

    # --- end ---

    def settle(self) -> None:
        """All is on the disk; others may take over at once."""
        self._look_at_all()
        core, run = self._core, self._runs.now
        if not self._driver.is_busy and run.is_recovered and run.flushed == core.local.end:
            self._driver.event(core.ending)
        self._deeds.backlog.finish()
        for source in (self._peers.fileno(), self._log_line.fileno(), self._engine.watched_fd):
            self.inbox.forget(source)  # it is still looked at until the actor has stopped
        self._engine.close()
        self._runs.close()
        self._peers.close()
        self._log_line.close()
        self._log.close()

    def statistics(self) -> meters.Figures:
        core, record = self._core, self._core.record
        found: meters.Figures = {
            meters.GROUP: self._group,
            meters.REPLICA: self._peer.replica,
            meters.REPLICA_ROLE: "master" if core.leads else "follower",
            meters.EPOCH: record.epoch if record else 0,
            meters.MASTER: record.master if record else "",
            meters.IN_SYNC: ",".join(record.iss) if record else "",
            meters.END: core.local.end,
            meters.REPLICATED: core.local.confirm,
            meters.PID: os.getpid(),
            meters.TROUBLE: self._room.why,
            **self._peers.statistics(),
        }
        for number, each in enumerate(core.followers()):
            found |= {
                meters.FOLLOWER_REPLICA.of(number): each.replica,
                meters.FOLLOWER_HELD.of(number): each.held,
                meters.FOLLOWER_LAG_BYTES.of(number): max(0, core.local.end - each.held),
                meters.FOLLOWER_IN_SYNC.of(number): int(each.in_sync),
                meters.FOLLOWER_WHY.of(number): each.why,
                meters.FOLLOWER_TROUBLE.of(number): self._troubles.of(each.replica),
            }
        return found

    def _begin_again(self, why: str) -> NoReturn:
        """What is under way has no end here: another life of this replica begins."""
        log.error("this process ends, and another one follows: %s", why)
        logging.shutdown()
        os._exit(EXIT_UNSETTLED)

    def _end(self, why: str) -> NoReturn:
        """This replica must not go on; its files stay."""
        if not self.started.is_set():
            raise StoreDamaged(why)
        log.critical("this replica ends: %s", why)
        logging.shutdown()
        os._exit(EXIT_FATAL)


def _bind_address(settings: BrokerSettings) -> str:
    """Where the other replicas come to: at our port of dLegerPeers, on bindAddress."""
    host = settings.bind_address.strip("[]")
    port = settings.own_peer.address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
