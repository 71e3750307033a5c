"""A replica of a group that elects its master: the process that speaks with the others."""

from __future__ import annotations

import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from cometmq.actors.replication.core.actions import (
    Action,
    Append,
    Cas,
    Confirmed,
    Get,
    Keep,
    Lead,
    Refuse,
    Send,
    Serve,
    Ship,
    StartOver,
    StepDown,
    Stop,
    Truncate,
)
from cometmq.actors.replication.core.frames import AnyFrame, Bytes
from cometmq.actors.replication.core.record import GroupRecord, Life, new_record
from cometmq.actors.replication.core.replica import Replica
from cometmq.actors.replication.core.settings import Settings
from cometmq.actors.replication.engine_calls import EngineCalls
from cometmq.actors.replication.engines.engine import now_s
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.promises_file import PromisesFile
from cometmq.actors.replication.run import Run
from cometmq.actors.replication.said import Said
from cometmq.actors.runtime.family import EXIT_FATAL, Family
from cometmq.actors.runtime.service import ServiceActor
from cometmq.conf import BrokerSettings, FlushDiskType
from cometmq.protocol.commands import BeginRun, RunBegun
from cometmq.protocol.errors import CometError, ShuttingDown, StoreError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments
from cometmq.shm.os.processes import boot_id

log = logging.getLogger(__name__)

WAITING_BYTES_MAX: Final = 64 << 20  # of frames; more than a master sends without a word of ours
WAITING_FRAMES_MAX: Final = 10_000


class MemberActor(ServiceActor):
    """Hosts the core of this replica: hands it what happens, and carries out what it says.

    Writes, alone: `replicated` (what is confirmed), `service`, `slaves_from`; cometmq.promises.
    Wakes on: frames of the other replicas; `wrote`, `flushed` and `phase` of the run that is under
    way; the log's line, from the commitlog process of a follower; the engine's watch; a timer.
    Dies of: a promise that cannot be kept, a record of the log that does not hold, a log that is
    not the group's: then the whole broker ends. When it is killed, the supervisor begins a new run
    as a follower, and the next process registers as a new life of the store.
    """

    role = "ha"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._peer = settings.own_peer
        self._group = settings.group_name
        self._sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._promises = PromisesFile(family.store)
        self._said = Said()
        self._run = Run(family, 0)
        self._content: memoryview | None = None  # behind the Bytes frame that is being handled
        self._frames: deque[tuple[str, AnyFrame, memoryview | None]] = deque()
        self._frames_bytes = 0
        self._ends: deque[int] = deque()  # of frames that were laid down, and maybe not flushed
        self._flushed = 0  # as the core was told
        self._known: GroupRecord | None = None  # whose replicas are connected
        self._shipped: tuple[int, int, int] = (0, 0, 0)  # offset, length, CRC of the last frame
        self._awaits_append = False
        self._awaits_end = False  # of a mastership
        self._deeds: dict[type[Action], Callable[[Any], bool | None]] = {
            Send: self._send, Ship: self._ship, Append: self._append, Keep: self._keep,
            Get: self._get, Cas: self._cas, Confirmed: self._confirmed, Serve: self._serve,
            Refuse: self._refuse, Stop: self._stop, Lead: self._lead, StepDown: self._step_down,
            Truncate: self._truncate, StartOver: self._start_over,
        }  # fmt: skip

    # --- start ---

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.RECOVERED)
        settings = self._family.settings
        self._log = GroupLog(self._family)
        self._core = self._make_core()
        self._driver = Driver(self._core, self._carry_out, self._on_idle, self._end)
        self._peers = Peers(
            group=self._group,
            own=self._peer.replica,
            secret=load_secret(Path(settings.group_secret_file)),
            bind=_bind_address(settings),
            on_frame=self._take_frame,
            said=self._said,
        )
        self._peers.replace(dict(settings.group_peers))
        self._log_line = LogLine(self._family, self._on_laid_down)
        self._engine = EngineCalls(
            self._group,
            settings.group_session_timeout_ms / 1000,
            lambda: open_engine(settings.group_engine),
            self,
            call_soon=self.call_soon,
            after=self.after,
            listen_to=self.inbox.listen_to,
        )
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        for source in (*self._peers.sources, *self._log_line.sources):
            self.inbox.listen_to(source)
        self._driver.event(self._core.start, now_s())
        self._engine.open(self._core.life)
        self.every(self._core_settings().beat_s, self._tick)
        self._look()

    def _make_core(self) -> Replica:
        store, settings = self._family.store, self._family.settings
        starts = list_segments(store / COMMITLOG_DIR, settings.mapped_file_size_commit_log_bytes)
        begin, end = starts[0] if starts else 0, self._run.wrote
        return Replica(
            self._core_settings(),
            self._promises.load(self._group, self._peer.replica),
            self._log,
            begin=begin,
            end=end,
            flushed=min(end, max(begin, self._run.flushed)),
            known_end=0,  # the commitlog process has looked: see begin_log
            boot_id=boot_id(),
        )

    def _core_settings(self) -> Settings:
        return Settings(
            group=self._group,
            replica=self._peer.replica,
            address=self._peer.address,
            sync_flush=self._sync,
        )

    # --- what happens: the others, the engine, the time ---

    def on_readable(self, source: Any) -> None:
        if source in self._peers.sources:
            if self._peers.receive():
                self.call_soon(lambda: self.on_readable(source))
        elif source in self._log_line.sources:
            self._log_line.on_readable(source)
        elif source == self._engine.watched_fd:
            self._engine.look()
        self._take_frames()

    def _take_frame(self, sender: str, frame: AnyFrame, content: memoryview | None) -> None:
        size = 0 if content is None else len(content)
        if self._frames_bytes + size > WAITING_BYTES_MAX or len(self._frames) > WAITING_FRAMES_MAX:
            self._said.warn("full", "frames of %s are dropped: too many wait", sender)
            return
        self._frames.append((sender, frame, content))
        self._frames_bytes += size

    def _take_frames(self) -> None:
        """In their order. Bytes wait until the commitlog process can take them."""
        while self._frames and not self._driver.is_busy:
            sender, frame, content = self._frames[0]
            if content is not None and not (self._log_line.is_ready or self._run.epoch):
                return
            self._frames.popleft()
            self._content, length, crc = content, 0, 0
            if content is not None:
                length, crc = len(content), zlib.crc32(content)
                self._frames_bytes -= length
            self._driver.event(self._core.frame, sender, frame, length, crc)

    def _tick(self) -> None:
        self._engine.tick()
        if self._driver.is_busy:
            return
        self._driver.event(self._core.tick, now_s())
        if not self._driver.is_busy and self._core.begin < self._run.begin <= self._core.confirm:
            self._driver.event(self._core.cleaned, self._run.begin)
        self._run.keep_from(min((each.held for each in self._core.followers()), default=None))

    # --- what the engine tells: see EngineCalls ---

    def learned(self, version: int, record: GroupRecord | None, number: int = 0) -> None:
        if record is None:
            self._found_group()
        self._driver.event(self._core.learned, version, record, number)
        self._connect()

    def cas_applied(self, ticket: int, version: int) -> None:
        self._driver.event(self._core.cas_applied, ticket, version)
        self._connect()

    def cas_refused(self, ticket: int, version: int, record: GroupRecord) -> None:
        self._driver.event(self._core.cas_refused, ticket, version, record)
        self._connect()

    def cas_unknown(self, ticket: int) -> None:
        self._driver.event(self._core.cas_unknown, ticket)

    def session(self, until: float | None) -> None:
        self._driver.event(self._core.session, until)

    def sessions(self, alive: Iterable[Life]) -> None:
        self._driver.event(self._core.sessions, alive)

    def _found_group(self) -> None:
        """The first replica makes the record of a group that is new, and nobody else ever does: a
        record that was lost is no new group."""
        settings = self._family.settings
        if self._peer == settings.group_peers[0] and self._core.is_new:
            log.info("making the record of the new group %s", self._group)
            self._engine.make(
                new_record(self._group, settings.group_peers, min_iss=settings.min_iss)
            )

    def _connect(self) -> None:
        """To the replicas that the record names."""
        record = self._core.record
        if record is not None and record is not self._known:
            self._known = record
            self._peers.replace({name: each.address for name, each in record.replicas.items()})

    # --- the log of the run that is under way ---

    def on_doorbell(self) -> None:
        self._log_line.look()
        self._look()
        self._take_frames()

    def _look(self) -> None:
        """Tell the core how far the log is written and flushed."""
        self._run.arm()
        self._log_line.arm()
        if self._driver.is_busy or not self._run.is_recovered:
            return
        self._run.confirm(self._core.confirm)
        if self._core.leads and self._run.wrote > self._core.end:
            self._driver.event(self._core.appended, self._run.wrote)
        flushed = self._whole_flushed()
        if flushed > self._flushed and not self._driver.is_busy:
            self._flushed = flushed
            self._driver.event(self._core.flushed, flushed)

    def _whole_flushed(self) -> int:
        """What is on the disk, up to the end of a frame: nothing else may ever be confirmed, since a
        derived write is never torn by a frame's end."""
        flushed, whole = self._run.flushed, self._flushed
        if flushed >= self._core.end:
            self._ends.clear()
            return self._core.end
        if self._run.epoch:  # a master's are the ends of what was published in one piece
            return flushed
        while self._ends and self._ends[0] <= flushed:
            whole = self._ends.popleft()
        return whole

    def _on_laid_down(self) -> None:
        """The commitlog process has laid down the bytes that it was given, or can take more."""
        if self._awaits_append:
            self._awaits_append = False
            self._ends.append(self._core.end)
            self._driver.go_on()
        self._take_frames()

    def _on_idle(self) -> None:
        self._look()
        self._connect()
        self._take_frames()

    # --- carrying out ---

    def _carry_out(self, action: Action) -> bool:
        return self._deeds[type(action)](action) is not False

    def _send(self, action: Send) -> None:
        self._peers.send(action.to, action.frame)

    def _ship(self, action: Ship) -> None:
        offset, length = action.offset, action.length
        content = self._log.read(offset, offset + length)
        if self._shipped[:2] != (offset, length):  # the same for each follower
            self._shipped = (offset, length, zlib.crc32(content))
        frame = Bytes(
            self._group, action.epoch, action.nonce, offset, length, self._shipped[2],
            action.confirm,
        )  # fmt: skip
        self._peers.send(action.to, frame, content)

    def _append(self, action: Append) -> bool:
        assert self._content is not None and len(self._content) == action.length, action
        content, self._content = self._content, None
        self._awaits_append = True
        self._log_line.lay_down(action.offset, content)
        return False

    def _keep(self, action: Keep) -> None:
        self._promises.keep(action.promises)

    def _get(self, action: Get) -> None:
        self._engine.get(action)

    def _cas(self, action: Cas) -> None:
        self._engine.cas(action)

    def _confirmed(self, action: Confirmed) -> None:
        self._run.confirm(action.offset)

    def _serve(self, action: Serve) -> None:
        log.info("epoch %d serves %s", action.epoch, action.service.value)
        self._run.serve(action.service)

    def _refuse(self, action: Refuse) -> None:
        self._said.warn((action.sender, action.what, action.why), "%s", action)

    def _stop(self, action: Stop) -> None:
        self._end(action.why)

    # --- runs ---

    def _lead(self, action: Lead) -> bool:
        log.warning("this replica is the master of epoch %d, from %d on", action.epoch, action.start)
        return self._begin_run(BeginRun(action.epoch))

    def _step_down(self, action: StepDown) -> bool:
        log.warning("this replica is no master any more; it was that of epoch %d", action.epoch)
        self._awaits_end = True
        return self._begin_run(BeginRun(0))

    def _truncate(self, action: Truncate) -> bool:
        log.warning("the log is cut to %d: what follows is not the master's", action.to)
        return self._begin_run(BeginRun(0, cut_to=action.to))

    def _start_over(self, action: StartOver) -> bool:
        log.warning("the log begins anew at %d, where the master's begins", action.at)
        return self._begin_run(BeginRun(0, begin_at=action.at))

    def _begin_run(self, command: BeginRun) -> bool:
        self._log.close()
        channel = Channel(self._family.addresses["broker"], "broker")

        def done(pending: Any) -> None:
            self.call_soon(lambda: self._run_begun(command, channel, pending))

        channel.request(command, on_done=done)
        return False

    def _run_begun(self, command: BeginRun, channel: Channel, pending: Any) -> None:
        channel.close()
        try:
            answer = pending.result()
        except ShuttingDown:
            return
        except CometError as error:
            self._end(f"no new run can be begun: {error}")
        assert isinstance(answer, RunBegun)
        settings = self._family.settings.for_run(command.epoch)
        self._family = replace(self._family, settings=settings)
        self._run = Run(self._family, command.epoch)
        self._log_line.follow(self._family)
        self._flushed = 0
        self._ends.clear()
        if self._awaits_end:
            self._awaits_end = False
            self._driver.event_first(self._core.stopped, answer.end)
        self._driver.go_on()

    # --- end ---

    def settle(self) -> None:
        """All is flushed, and others may take over at once."""
        self._look()
        core, run = self._core, self._run
        if not self._driver.is_busy and run.is_recovered and run.flushed == run.wrote == core.end:
            self._driver.event(core.ending)
        self._engine.close()
        self._peers.close()
        self._log_line.close()
        self._log.close()

    def statistics(self) -> dict[str, int | float | str]:
        core, record = self._core, self._core.record
        found: dict[str, int | float | str] = {
            "group": self._group,
            "replica": self._peer.replica,
            "replica_role": "master" if core.leads else "follower",
            "epoch": record.epoch if record else 0,
            "master": record.master if record else "",
            "in_sync": ",".join(record.iss) if record else "",
            "end": core.end,
            "replicated": core.confirm,
            "pid": os.getpid(),
            **self._peers.statistics(),
        }
        for number, each in enumerate(core.followers()):
            found |= {
                f"follower.{number}.replica": each.replica,
                f"follower.{number}.held": each.held,
                f"follower.{number}.lag_bytes": max(0, core.end - each.held),
                f"follower.{number}.in_sync": int(each.in_sync),
                f"follower.{number}.why": each.why,
            }
        return found

    def _end(self, why: str) -> NoReturn:
        """This replica must not go on; its files stay."""
        if not self.started.is_set():
            raise StoreError(why)
        log.critical("this replica ends: %s", why)
        logging.shutdown()
        os._exit(EXIT_FATAL)
