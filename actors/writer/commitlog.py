"""The single writer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import ClassVar, Final

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family, out_of_service
from cometmq.actors.runtime.gate import Gate
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.listeners.connections import ConnectionLimits
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.writer.admission import Admission
from cometmq.actors.writer.answers import Answers, Confirming, Slaves
from cometmq.actors.writer.batches import NOTHING_FOUND, Found, host_bytes
from cometmq.actors.writer.cursors import Cursors
from cometmq.actors.writer.derived import SNAPSHOT_LOOK_S
from cometmq.actors.writer.desk import STORED, Desk
from cometmq.actors.writer.ends import Ends
from cometmq.actors.writer.opening import (
    ask_topics,
    begin_log,
    open_log,
    tell_of_step_back,
)
from cometmq.actors.writer.repeats import Repeats, is_repeat
from cometmq.actors.writer.replies import REPLYING, RepliesPart
from cometmq.actors.writer.segments import SegmentWait
from cometmq.actors.writer.staging import Staging
from cometmq.conf import FlushDiskType
from cometmq.protocol.commands import (
    CloseStage,
    Command,
    CommitStages,
    Cover,
    DerivedPosition,
    DiskState,
    Done,
    DropStages,
    GetDerived,
    GetLine,
    Position,
    SendMessages,
    StageMessages,
    TopicsChanged,
)
from cometmq.protocol.errors import (
    CometError,
    DiskFull,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    NotConfirmed,
    ServiceNotAvailable,
    ShuttingDown,
)
from cometmq.shm.kernel.store import Sleepers
from cometmq.shm.live.control import Counter, Doorbell, Phase
from cometmq.shm.os.locks import StoreLock
from cometmq.shm.reading.derived_log import last_marks

log = logging.getLogger(__name__)

BLOCKED_RETRY_S: Final = 1.0  # while a commit of stages waits, for a disk with room say


class CommitLogActor(ServiceActor):
    """Appends messages to the CommitLog; holder of the put lock.

    A loop over four parts: the desk appends, the cursors know the next offset of each queue,
    admission says who may append what now, and the answers wait for the cover that was asked for.

    Writes, alone: commitlog/ content, `wrote` and the counters beside it, `phase`, `sync_wanted`,
    `marks_from`; `flushed` in a word of its own; the ends of queues and their stripes.
    Wakes on: SendMessages, AppendRecords, OpenProducer, EndTransactions, PassHalves; SendReply and
    AwaitReplies, and a timer while there are requesters; `flushed` while an answer waits for it, a
    timer for one that waits too long; `queues`, to tell how far new ones reach; `dispatched`, while
    what is there has to be looked for.
    Under SYNC_FLUSH it syncs a small group itself, so that nobody has to be woken between append
    and answer; what is more, or comes while the flush process is at work, is that one's.
    Dies of: a broken invariant. What was acknowledged lies below `wrote`, which outlives the
    process in the control file; the next process goes on there and zeroes what lies behind.
    """

    role = "commitlog"
    part_types: ClassVar[tuple[type, ...]] = (RepliesPart,)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        self._settings = family.settings
        self._gate = Gate.of(family)
        self._replies = RepliesPart(self, self._settings, self._gate)
        super().__init__(bind=bind, limits=ConnectionLimits.of(family.settings))
        self._family = family
        control = family.control
        self._wrote = control.own(Counter.WROTE)
        self._phase = control.own(Counter.PHASE)
        self._sleepers = Sleepers(family.doorbells[Doorbell.APPENDERS])
        self._segments = SegmentWait(family, self._sleepers)
        self._flushed = control.sleep_on(Counter.FLUSHED, family.doorbell)
        self._replicated = control.sleep_on(Counter.REPLICATED, family.doorbell)
        self._synced = control.own_second(Counter.FLUSHED)
        self._errno = control.own_second(Counter.FLUSH_ERRNO)
        self._flush_timeout_s = family.settings.sync_flush_timeout_ms / 1000
        self._sync = family.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._cursors = Cursors(family.settings)
        self._admission = Admission(family.settings, self._gate)
        self._slave_timeout_s = family.settings.slave_timeout_ms / 1000
        self._slaves: Slaves | None = None
        if family.settings.slaves_wanted:
            self._slaves = Slaves(control.read(Counter.SLAVES), family.settings.slaves_wanted)
        confirming = {
            Cover.FLUSHED: Confirming(self._flushed, self._flush_timeout_s, FlushDiskTimeout)
        }
        policy = Cover.FLUSHED if self._sync else Cover.WRITTEN
        if self._slaves is not None:
            confirming[Cover.REPLICATED] = Confirming(
                self._replicated, self._slave_timeout_s, FlushSlaveTimeout
            )
            policy |= Cover.REPLICATED
        # Whoever confirms has it on this disk, where that is promised. What is late may still be
        # cut: nobody is to take it for stored, as what a slave is late with.
        if self._gate is not None:
            confirming[Cover.REPLICATED] = Confirming(
                self._replicated, self._slave_timeout_s, NotConfirmed, by_group=True
            )
            policy = Cover.REPLICATED
        self._answers = Answers(self, confirming, policy=policy, slaves=self._slaves)

    def parts(self) -> Sequence[object]:
        return (self._replies,)

    # --- start ---

    def on_start(self) -> None:
        self._lock = StoreLock(self._family.store, 0)
        begin_log(self._family)
        self._log = open_log(self._family, self._flushed, self._wait_for_space)
        if self._sync:
            self._log.appender.want()  # what the one before us may not have come to ask for
        self._family.wait_recovered()
        self._cursors.load(self._family.queue_table())
        self._ends = Ends(self._family, self._log.appender)
        self._ends.add(self._cursors)  # the one before us may not have told of all
        self._cursors.on_new = self._ends.add
        self._desk = self._make_desk()
        self._repeats = Repeats(
            self,
            self._family,
            self._desk.batches,
            lambda: self._log.physical_offset,
            self._store_all,
        )
        with closing(self._family.store_reader()) as reader:
            self._desk.derived.load(last_marks(reader))
        self._desk.producers.load()
        self._staging = Staging(
            self._family.store,
            self._desk,
            bytes_max=self._settings.max_staged_bytes,
            lease_ms=self._settings.staged_lease_ms,
            segment_bytes=self._settings.mapped_file_size_commit_log_bytes,
        )
        self._open_segment()
        self._cursors.begin(ask_topics(self._family))
        with self._desk.alone():
            self._staging.start()
        self.every(self._staging.sweep_interval_s, self._staging.sweep)
        self.every(BLOCKED_RETRY_S, self._try_to_finish_stages)
        self.every(SNAPSHOT_LOOK_S, self._keep_positions)
        self._replies.begin()
        self._phase.reset(Phase.SERVING)  # lower after one that was told to stop
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self.listen_for_lines(self._family.addresses[self.role])

    def _make_desk(self) -> Desk:
        return Desk(
            self,
            self._family,
            self._log,
            self._cursors,
            self._admission,
            self._answers,
            flushed=self._flushed,
            synced=self._synced,
            on_failed_sync=self.take_out_of_service,
            store=self._store_all,
        )

    def _open_segment(self) -> None:
        """Without room for one the broker serves who reads; who sends is told."""
        try:
            self._log.open_segment()
        except (DiskFull, ServiceNotAvailable) as error:
            log.error("nothing can be stored yet: %s", error)

    def _wait_for_space(self, end: int) -> int:
        """Until file space is ready up to there; up to where it is."""
        return self._segments.need(end, self._log)

    # --- what is stored ---

    def on_requests(self, requests: list[Request]) -> None:
        """All sends as one group; but what comes before another command is settled before it.
        Replies are handed out first, since somebody waits for nothing else, and stored with the
        group."""
        group: list[Request] = []
        for request in requests:
            if isinstance(request.command, STORED):
                if is_repeat(request.command):
                    self.carry_out(request, self._repeats.take, request)
                elif self._desk.transactions.must_wait(request.command):
                    self.carry_out(request, self._desk.transactions.hold, request)
                else:
                    group.append(request)
            elif isinstance(request.command, REPLYING):
                self.handle(request)
            else:
                self._store_all(group)
                group = []
                self.handle(request)
        self._replies.hand_out()
        self._store_all(group + self._replies.take_unstored())

    def _store_alone(self, _command: Command, request: Request) -> None:
        self._store_all([request])

    on_send_messages = on_append_records = on_open_producer = _store_alone
    on_end_transactions = on_pass_halves = _store_alone

    def _store_all(self, group: list[Request], founds: Sequence[Found] = ()) -> None:
        """Append the sent messages, publish them once, wake readers, answer, and then wake the
        other broker processes.

        The order matters: a reader is scheduled before an answered sender takes the processor, and
        both before a dispatcher does. The put lock's holder sleeps in the sync: messages that are
        sent meanwhile become the next group.

        Args:
            founds: for each request, the messages that are already stored; empty: none of any.
        """
        try:
            self._store_group(group, founds or [NOTHING_FOUND] * len(group))
        except Exception as caught:
            error = explained(caught, "a group of %d sends failed", len(group))
            for request in group:
                if not _is_oneway(request.command):  # whoever was answered before ignores it
                    request.fail(NotConfirmed(f"{error}: the messages may be stored"))

    def _store_group(self, group: list[Request], founds: Sequence[Found]) -> None:
        before = self._log.physical_offset
        began = time.monotonic()
        self._admission.begin_group(began, self._answers.disk_since)
        stored = [
            self._desk.store(request, found) for request, found in zip(group, founds, strict=True)
        ]
        self._admission.end_group(began, time.monotonic())
        end = self._log.physical_offset
        cover = 0
        for each in stored:
            cover |= each.cover
        if end > before:
            self._desk.publish()
            for_disk = bool(cover & Cover.FLUSHED)
            if (self._sync or for_disk) and self._desk.make_durable(here=self._sync and for_disk):
                cover &= ~Cover.FLUSHED
            self._desk.wake_readers()
        for request, each in zip(group, stored, strict=True):
            if each.cover & cover:
                self._answers.expect(
                    each.cover & cover, (before, end), began, request, each.answer, each.payload
                )
            elif not _is_oneway(request.command):
                request.reply(each.answer, each.payload)
        if end > before:
            self._desk.wake()
        if self._answers:
            self._answers.release()

    def take_out_of_service(self, error: OSError) -> None:
        """What was written is not on the disk, and nobody knows how much of it."""
        out_of_service("the CommitLog could not be flushed", error, self._errno)

    def on_doorbell(self) -> None:
        self._answers.release()
        self._ends.place_new()
        self._repeats.go_on()
        self._desk.transactions.go_on()

    # --- other commands ---

    def on_get_line(self, command: GetLine, _request: Request) -> Command:
        return self.line_for(command)

    def on_topics_changed(self, command: TopicsChanged, _request: Request) -> Command:
        return self._cursors.take(command.topics)

    def on_disk_state(self, command: DiskState, _request: Request) -> Command:
        if command.writable:
            self._admission.open()
        else:
            self._admission.close(DiskFull(command.reason))
        self._desk.bar_if_refused()
        return Done()

    def on_stage_messages(self, command: StageMessages, request: Request) -> Command:
        self._admission.check_alone()
        frames = [frame.buffer for frame in request.payload]
        self._staging.stage(command, frames, host_bytes(command.born_host))
        return Done()

    def on_close_stage(self, command: CloseStage, request: Request) -> None:
        def answer(result: Callable[[], None]) -> None:
            try:
                result()
            except CometError as error:
                request.fail(error)
            else:
                request.reply(Done())

        self._staging.close_stage(command, lambda result: self.call_soon(lambda: answer(result)))

    def on_commit_stages(self, command: CommitStages, _request: Request) -> Command:
        self._admission.check_alone()
        with self._desk.alone():
            return self._staging.commit(command)

    def on_drop_stages(self, command: DropStages, _request: Request) -> Command:
        with self._desk.alone():
            self._staging.drop(command)
        return Done()

    def _try_to_finish_stages(self) -> None:
        if self._staging.is_unfinished:
            with self._desk.alone():
                self._staging.try_to_finish()

    # --- derivers ---

    def on_get_derived(self, command: GetDerived, _request: Request) -> Command:
        known = self._desk.derived.find(command.deriver)
        if known is None:
            return DerivedPosition(False, Position())
        return DerivedPosition(True, known.position, known.note)

    def _keep_positions(self) -> None:
        """Whatever the log is filled with, there is a snapshot of them near its end."""
        tell_of_step_back(self._log)  # also for appends of other threads of this process
        self._desk.keyed.let_go_of_deleted()
        self._desk.transactions.let_go_of_deleted()
        derived = self._desk.derived
        derived.tell_cleaner()
        if self._gate is not None and self._gate.why_not_stored() is not None:
            return
        if derived.is_snapshot_due:
            with self._desk.alone():
                if derived.keep():
                    self._desk.publish_and_wake()

    # --- end ---

    def settle(self) -> None:
        """Take nothing more, and let disk and slaves confirm what is still unanswered."""
        error = ShuttingDown("the broker is shutting down")
        self._admission.close(error)
        self._desk.bar_if_refused()
        self._replies.end(error)
        deadline = time.monotonic() + max(self._flush_timeout_s, self._slave_timeout_s)
        while self._answers and time.monotonic() < deadline and not self._family.gone.is_set():
            bit, end = self._answers.next_wait()
            counter = Counter.FLUSHED if bit == Cover.FLUSHED else Counter.REPLICATED
            with suppress(ServiceNotAvailable):
                self._family.wait_for(counter, end, 1)
            self._answers.release()
        self._staging.close()
        self._repeats.close()
        self._desk.transactions.close()
        self._desk.keyed.close()
        with self._log.gate:  # who has asked, and been let in, comes to its end
            self._phase.advance(Phase.STOPPED)
            self._log.close()

    def statistics(self) -> meters.Figures:
        return {
            meters.MESSAGES: self._log.appender.count - self._desk.own_records,
            meters.WROTE: self._wrote.value,
            meters.QUEUES: len(self._cursors),
            meters.TOPICS: self._cursors.topic_count,
            meters.WAITING_FOR_FLUSH: len(self._answers),
            meters.REPEATS_FOUND: self._repeats.found,
            meters.COPIES_BY_KEY: self._desk.keyed.copies,
            meters.TRANSACTIONS_COMMITTED: self._desk.transactions.committed,
            meters.TRANSACTIONS_ROLLED_BACK: self._desk.transactions.rolled_back,
            meters.SYNCS: self._family.control.read(Counter.SYNCS).value,
            meters.STAGED_BYTES: self._staging.files.size,
            meters.DERIVERS: len(self._desk.derived.book) - len(self._desk.producers),
            meters.NAMED_PRODUCERS: len(self._desk.producers),
            meters.PID: os.getpid(),
        } | self._replies.statistics()


def _is_oneway(command: Command) -> bool:
    return isinstance(command, SendMessages) and command.oneway
