"""The single writer."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from cometmq.actors.admission import Admission
from cometmq.actors.appended import Appended
from cometmq.actors.family import Family, out_of_service
from cometmq.actors.service import Request, ServiceActor, Timer
from cometmq.actors.staging import Staging
from cometmq.conf import FlushDiskType
from cometmq.protocol.channel import Channel
from cometmq.protocol.commands import (
    CloseStage,
    Command,
    CommitStages,
    DiskState,
    Done,
    DropStages,
    Finish,
    GetLine,
    LineAddress,
    ListTopics,
    Section,
    SectionResult,
    SendMessages,
    SendResult,
    StageMessages,
    TopicInfo,
    TopicList,
    TopicsChanged,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    DiskFull,
    FlushDiskTimeout,
    MessageIllegal,
    NoPermission,
    NotLocal,
    ServiceNotAvailable,
    ShuttingDown,
    TopicNotExist,
)
from cometmq.protocol.names import check_writable_topic
from cometmq.shm._kernel import QueueCursor, Sleepers
from cometmq.shm.commit_log import CommitLog
from cometmq.shm.control import HOT_STEP_BYTES, Counter, Doorbell, Phase
from cometmq.shm.files import (
    COMMITLOG_DIR,
    StoreLock,
    forget_tail,
    list_segments,
    segment_name,
)
from cometmq.shm.local import boot_id
from cometmq.shm.recovery import LAST_RUN_ENDED, recover_log, zero_behind
from cometmq.shm.staging import StagedHead

log = logging.getLogger(__name__)

PERM_WRITE = 2
SEGMENT_TIMEOUT_S = 5  # RocketMQ waits as long for its allocator
TOPICS_TIMEOUT_S = 10
BLOCKED_RETRY_S = 1.0  # while a commit of stages waits, for a disk with room say
FLUSHED_LATE = FlushDiskTimeout.code
# Under SYNC_FLUSH: what is synced in the writer's own time, since there is nothing to do meanwhile.
# More than this is faster if the next group is appended while the flush process syncs.
SYNC_HERE_BYTES = 256 * 1024
SLOW_SYNC_S = 0.1  # from there on the flush process syncs, so that who waits is told in time


Send = tuple[Request, SendMessages]


@dataclass(slots=True)
class Unflushed:
    """An answer that waits for the disk."""

    end: int  # physical offset that has to be flushed
    since: float  # time.monotonic()
    request: Request
    answer: SendResult


class CommitLogActor(ServiceActor):
    """Appends messages to the CommitLog; holder of the put lock.

    Writes, alone: commitlog/ content, `wrote` and the counters beside it, `phase`, `sync_wanted`;
    `flushed` in a word of its own.
    Wakes on: SendMessages, `flushed` while somebody waits for it, a timer for who waits too long.
    Under SYNC_FLUSH it syncs a small group itself, so that nobody has to be woken between append
    and answer; what is more, or comes while the flush process is at work, is that one's.
    Dies of: a broken invariant. What was acknowledged lies below `wrote`, which outlives the
    process in the control file; the next process goes on there and zeroes what lies behind.
    """

    role = "commitlog"
    internal_commands: ClassVar[tuple[type[Command], ...]] = (Finish, TopicsChanged, DiskState)
    answered_later: ClassVar[tuple[type[Command], ...]] = (SendMessages, CloseStage)

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        self._settings = family.settings
        control = family.control
        self._wrote = control.own(Counter.WROTE)
        self._timestamp = control.own(Counter.WROTE_TIMESTAMP)
        self._messages = control.own(Counter.MESSAGES)
        self._steps = control.own(Counter.STEPS)
        # A step never spans more than the segments that are ready: the allocator wakes on it.
        self._step_bytes = min(HOT_STEP_BYTES, family.settings.mapped_file_size_commit_log_bytes)
        self._phase = control.own(Counter.PHASE)
        self._sleepers = Sleepers(family.doorbells[Doorbell.APPENDERS])
        self._allocated = control.sleep_on(Counter.ALLOCATED, Doorbell.APPENDERS)
        self._flushed = control.sleep_on(Counter.FLUSHED, family.doorbell)
        self._synced = control.own_second(Counter.FLUSHED)
        self._errno = control.own_second(Counter.FLUSH_ERRNO)
        self._disk_is_slow = False  # as the last answers have shown
        self._flush_timeout_s = family.settings.sync_flush_timeout_ms / 1000
        self._sync = family.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._store_host = host_bytes(
            f"{family.settings.advertised_address}:{family.settings.listen_port}"
        )
        self._topics: dict[str, TopicInfo] = {}
        self._cursors: dict[tuple[str, int], QueueCursor] = {}
        self._unflushed: deque[Unflushed] = deque()
        self._admission = Admission(family.settings)
        self._appended: Appended | None = None
        self._alarm: Timer | None = None
        self._staging = Staging(
            family.store,
            self,
            bytes_max=family.settings.max_staged_bytes,
            lease_ms=family.settings.staged_lease_ms,
        )

    # --- start ---

    def on_start(self) -> None:
        control = self._family.control
        self._lock = StoreLock(self._family.store, 0)
        self._begin_log()
        self._log = CommitLog(
            self._family.store,
            segment_bytes=self._segment_bytes,
            physical_offset=self._wrote.value,
            store_host=self._store_host,
            max_message_bytes=self._settings.max_message_size,
            crc_property=self._settings.enabled_append_prop_crc,
            small_pages=self._sync,
            ready=self._wait_for_segment,
        )
        self._log.appender.publishes(
            self._wrote, self._timestamp, self._messages, self._steps, self._step_bytes,
            self._log.tidy,
        )  # fmt: skip
        self._log.appender.syncs(
            self._flushed,
            control.own(Counter.SYNC_WANTED),
            control.own(Counter.SYNCS),
            SYNC_HERE_BYTES,
        )
        self._want_durable()  # what the one before us may not have come to ask for
        self._load_queue_offsets()
        if self._family.tells_tail:
            self._appended = Appended(self._family)
            self._appended.resume(self._cursors.values())
            self._wrote.wake()  # readers, who look at what was told now
        self._log.open_segment()
        self._load_topics()
        with self._alone():
            self._staging.start()
        self.every(self._staging.sweep_interval_s, self._staging.sweep)
        self.every(BLOCKED_RETRY_S, self._try_to_finish_stages)
        self._phase.reset(Phase.SERVING)  # lower after one that was told to stop
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        address = self._family.addresses[self.role]
        self.inbox.listen_for_lines(address.removeprefix("ipc://@") + "-line")

    @property
    def _segment_bytes(self) -> int:
        return self._settings.mapped_file_size_commit_log_bytes

    def _begin_log(self) -> None:
        """Find the end of the log: by scanning at the start of a run, else `wrote` says it."""
        store = self._family.store
        if self._phase.value != Phase.STARTING:
            dirty = zero_behind(
                store, self._segment_bytes, self._wrote.value, self._settings.max_message_size
            )
            log.info("going on at %d, %d unfinished bytes zeroed", self._wrote.value, dirty)
            return
        end = recover_log(
            store,
            self._segment_bytes,
            clean=self._family.clean,
            check_crc=self._settings.check_crc_on_recover,
            cut_at_damage=self._settings.cut_log_at_damage,
            last_run=self._family.last_run,
        )
        starts = list_segments(store / COMMITLOG_DIR, self._segment_bytes)
        log_min = starts[0] if starts else 0
        redo_from = end.physical_offset if self._family.clean else end.scanned_from
        if self._family.last_run is not None and end.reason == LAST_RUN_ENDED:
            redo_from = self._family.last_run.redo_from
            self._family.control.own(Counter.CONTINUED).reset(1)
        self._family.control.own(Counter.RECOVERED_FROM).reset(max(log_min, redo_from))
        self._timestamp.reset(end.last_store_timestamp)
        self._wrote.reset(end.physical_offset)
        self._steps.reset(end.physical_offset // self._step_bytes)
        self._phase.advance(Phase.RECOVERED)

    def _load_queue_offsets(self) -> None:
        """Once everything is dispatched, the queues say which offsets come next."""
        self._family.wait_for(Counter.DISPATCHED, self._wrote.value)
        table = self._family.queue_table()
        for topic, queue_id in table.queues():
            found = table.range_of(topic, queue_id)
            assert found is not None
            self._cursors[topic, queue_id] = self._cursor(topic, queue_id, found.max_queue_offset)

    def _load_topics(self) -> None:
        """Ask the coordinator; from now on it tells us of every change."""
        with Channel(self._family.addresses["coordinator"], "the coordinator") as channel:
            answer, _ = channel.ask(ListTopics(), timeout_s=TOPICS_TIMEOUT_S)
        assert isinstance(answer, TopicList)
        self._topics = {info.topic: info for info in answer.topics}

    def _cursor(self, topic: str, queue_id: int, next_offset: int) -> QueueCursor:
        long_names = self._settings.auto_message_version_on_topic_len
        return QueueCursor(topic, queue_id, next_offset, long_names)

    def _wait_for_segment(self, start: int) -> None:
        """Until the allocator has the segment ready: normally it has, two segments ahead."""
        end = start + self._segment_bytes
        if self._allocated.value >= end:
            return
        if self._log.physical_offset > self._wrote.value:
            # Or the allocator would not know how far we have come.
            self._log.publish()
            self._log.wake()
        deadline = time.monotonic() + SEGMENT_TIMEOUT_S
        errno_cell = self._family.control.read(Counter.ALLOCATE_ERRNO)
        while True:
            code = errno_cell.value
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskFull(f"no room for the segment at {start}: {os.strerror(code)}")
            if code:
                raise ServiceNotAvailable(f"no segment at {start}: {os.strerror(code)}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ServiceNotAvailable(
                    f"the segment at {start} was not ready within {SEGMENT_TIMEOUT_S} s"
                )
            if self._family.gone.is_set():
                raise ServiceNotAvailable("the broker has ended")
            # Short steps, so that a full disk is noticed although nothing is counted then.
            if self._sleepers.wait(self._allocated, end, min(0.1, left_s)):
                return

    # --- commands ---

    def on_requests(self, requests: list[Request]) -> None:
        """All sends as one group; but what comes before another command is settled before it."""
        sends: list[Send] = []
        for request in requests:
            command = request.command
            if isinstance(command, SendMessages):
                sends.append((request, command))
            else:
                self._store_all(sends)
                sends = []
                self.handle(request)
        self._store_all(sends)

    def _store_all(self, sends: list[Send]) -> None:
        """Append whatever was sent, publish it once, answer, and then wake who waits for it.

        In this order: the answer is on its way before a woken dispatcher takes the processor. And
        the put lock's holder sleeps in the sync: what is sent meanwhile becomes the next group.
        """
        before = self._log.physical_offset
        began = time.monotonic()
        self._admission.begin_group(began, self._unflushed[0].since if self._unflushed else None)
        answers = [self._store(request, command) for request, command in sends]
        self._admission.end_group(began, time.monotonic())
        end = self._log.physical_offset
        durable = not self._sync
        if end > before:
            self._publish()
            durable = durable or self._make_durable(any(wait for _, wait in answers))
        for (request, command), (answer, wait) in zip(sends, answers, strict=True):
            if wait and not durable:
                self._unflushed.append(Unflushed(end, began, request, answer))
            elif not command.oneway:
                request.reply(answer)
        if end > before:
            self._wake()
        if self._unflushed:
            self._release_flushed()

    def _publish(self) -> None:
        self._log.publish()
        if self._appended is not None:
            self._appended.publish()

    def _wake(self) -> None:
        if self._appended is not None:
            self._appended.wake()
        self._synced.wake()
        self._log.wake()

    def _make_durable(self, waited_for: bool) -> bool:
        """Under SYNC_FLUSH: whether what was published is on the disk now; else it will be soon."""
        if waited_for and not self._disk_is_slow:
            began = time.monotonic()
            try:
                end = self._log.sync()
            except OSError as error:
                self.take_out_of_service(error)
                return False
            if end:
                self._disk_is_slow = time.monotonic() - began > SLOW_SYNC_S
                self._synced.raise_to(end)
                return True
        self._want_durable()
        return False

    def _want_durable(self) -> None:
        if self._sync:
            self._log.appender.want()

    def take_out_of_service(self, error: OSError) -> None:
        """What was written is not on the disk, and nobody knows how much of it."""
        out_of_service("the CommitLog could not be flushed", error, self._errno)

    def _store(self, request: Request, command: SendMessages) -> tuple[SendResult, bool]:
        """Append the sections of one command; whether its answer has to wait for the disk."""
        results = []
        wait = False
        if len(command.sections) != len(request.payload):
            error = BadRequest(
                f"{len(command.sections)} sections, {len(request.payload)} payload frames"
            )
            results = [SectionResult(error.code, text=str(error)) for _ in command.sections]
        else:
            for section, frame in zip(command.sections, request.payload, strict=True):
                try:
                    results.append(self._append(section, frame.buffer, command))
                    wait = wait or section.wait
                except CometError as error:
                    results.append(SectionResult(error.code, text=str(error)))
        answer = SendResult(
            results, self._log.last_store_timestamp, self._settings.advertised_address
        )
        return answer, wait

    def _append(self, section: Section, batch: memoryview, command: SendMessages) -> SectionResult:
        self._admission.check(self._waiting_bytes() if self._unflushed else 0)
        if self._staging.blocked is not None:
            raise self._staging.blocked
        queue = self._writable_queue(section.topic, section.queue_id)
        try:
            at = self._log.append_batch(
                queue,
                batch,
                section.count,
                sys_flag=section.sys_flag,
                born_timestamp_ms=command.born_timestamp_ms,
                born_host=host_bytes(command.born_host),
            )
        except OverflowError as error:
            raise BadRequest(f"a number does not fit its field: {error}") from None
        if self._appended is not None:
            self._appended.moved(queue)
        return SectionResult(0, self._log.appender.batch_queue_offset, at)

    def _writable_queue(self, topic: str, queue_id: int) -> QueueCursor:
        queue = self._cursors.get((topic, queue_id))
        if queue is None or topic not in self._topics:
            queue = self._new_queue(topic, queue_id)
        if not self._may_write(topic):
            raise NoPermission(f"topic {topic} is not writable")
        return queue

    def _may_write(self, topic: str) -> bool:
        info = self._topics.get(topic)
        return info is not None and bool(info.perm & PERM_WRITE)

    def _waiting_bytes(self) -> int:
        """Under SYNC_FLUSH: what was appended and is not confirmed by the disk."""
        return self._log.physical_offset - self._flushed.value

    def _new_queue(self, topic: str, queue_id: int) -> QueueCursor:
        """The cursor of a queue that nothing was sent to yet, if it may be sent to."""
        check_writable_topic(topic)
        info = self._topics.get(topic)
        if info is None:
            raise TopicNotExist(f"topic {topic} does not exist on this broker")
        queues = max(info.read_queues, info.write_queues)
        if not 0 <= queue_id < queues:
            raise MessageIllegal(f"queue {queue_id} of {topic}, which has {queues} queues")
        return self._cursor_of(topic, queue_id)

    def _cursor_of(self, topic: str, queue_id: int) -> QueueCursor:
        """There is never a second one of a queue, whichever thread asks."""
        key = topic, queue_id
        if key not in self._cursors:
            self._cursors.setdefault(key, self._cursor(topic, queue_id, 0))
            self._cursors[key].barred = not self._may_write(topic)
        return self._cursors[key]

    def on_get_line(self, command: GetLine, _request: Request) -> Command:
        if not command.boot_id or command.boot_id != boot_id():
            raise NotLocal("the broker is on another machine")
        lines = self.inbox.lines
        if lines is None or not lines.is_open:
            raise NotLocal("the broker takes no more lines")
        return LineAddress(lines.name, os.getuid())

    def on_topics_changed(self, command: TopicsChanged, _request: Request) -> Command:
        self._topics = {info.topic: info for info in command.topics}
        for queue in list(self._cursors.values()):
            queue.barred = not self._may_write(queue.topic)
        return Done()

    def on_disk_state(self, command: DiskState, _request: Request) -> Command:
        if command.writable:
            self._admission.open()
        else:
            self._admission.close(DiskFull(command.reason))
        self._bar_if_refused()
        return Done()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing of another thread enters the log meanwhile."""
        with self._log.gate:
            try:
                yield
            finally:
                self._bar_if_refused()

    def _bar_if_refused(self) -> None:
        """Appenders ask before they append, as long as there is something to be told."""
        self._log.gate.bar(self._admission.is_closed or self._staging.blocked is not None)

    # --- stages ---

    def on_stage_messages(self, command: StageMessages, request: Request) -> Command:
        self._admission.check(0)
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
        self._admission.check(0)
        with self._alone():
            return self._staging.commit(command)

    def on_drop_stages(self, command: DropStages, _request: Request) -> Command:
        with self._alone():
            self._staging.drop(command)
        return Done()

    def _try_to_finish_stages(self) -> None:
        if self._staging.blocked is not None:
            with self._alone():
                self._staging.try_to_finish()

    def check_staged(self, section: Section, batch: memoryview, born_host: bytes) -> None:
        if section.sys_flag:
            raise MessageIllegal(f"staged messages with system flags ({section.sys_flag})")
        queue = self._writable_queue(section.topic, section.queue_id)
        self._log.check_batch(queue, batch, section.count, born_host)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        return self._cursor_of(topic, queue_id).next_offset  # 0: nothing of it has reached the log

    def append_staged(self, head: StagedHead, batch: memoryview, count: int) -> None:
        queue = self._cursors[head.topic, head.queue_id]
        self._log.append_batch(
            queue,
            batch,
            count,
            sys_flag=head.sys_flag,
            born_timestamp_ms=head.born_timestamp_ms,
            born_host=head.born_host,
        )
        if self._appended is not None:
            self._appended.moved(queue)

    def publish_staged(self) -> None:
        self._publish()
        self._want_durable()
        self._wake()

    def wait_flushed(self) -> None:
        """Nobody else is served meanwhile: what they send has to wait for the same disk."""
        if self._sync:
            try:
                self._family.wait_for(
                    Counter.FLUSHED, self._log.physical_offset, self._flush_timeout_s
                )
            except ServiceNotAvailable as error:
                raise FlushDiskTimeout(str(error)) from None
            finally:
                if self._unflushed:
                    self._release_flushed()  # the doorbell rang for them too

    # --- answers that wait for the disk ---

    def on_doorbell(self) -> None:
        self._release_flushed()

    def _release_flushed(self) -> None:
        """Answer everybody whose message is on the disk, and sleep on the rest."""
        while self._unflushed:
            self._flushed.arm()
            flushed = self._flushed.value
            while self._unflushed and self._unflushed[0].end <= flushed:
                waiting = self._unflushed.popleft()
                self._answer_flushed(waiting)
            if not self._unflushed:
                return
            if time.monotonic() < self._unflushed[0].since + self._flush_timeout_s:
                self._set_flush_alarm()
                return
            self._answer_late(self._unflushed.popleft())

    def _set_flush_alarm(self) -> None:
        if self._alarm is None:
            due = self._unflushed[0].since + self._flush_timeout_s
            delay = max(0.0, due - time.monotonic())
            self._alarm = self.after(delay, self._flush_alarm)

    def _flush_alarm(self) -> None:
        self._alarm = None
        self._release_flushed()

    def _answer_flushed(self, waiting: Unflushed) -> None:
        self._disk_is_slow = time.monotonic() - waiting.since > SLOW_SYNC_S
        waiting.request.reply(waiting.answer)

    def _answer_late(self, waiting: Unflushed) -> None:
        """FLUSH_DISK_TIMEOUT: stored, but the disk has not confirmed it in time."""
        text = f"not flushed within {self._settings.sync_flush_timeout_ms} ms"
        results = [
            SectionResult(result.code or FLUSHED_LATE, result.queue_offset, result.physical_offset,
                          result.text or text)
            for result in waiting.answer.results
        ]  # fmt: skip
        waiting.request.reply(
            SendResult(results, waiting.answer.store_timestamp_ms, waiting.answer.store_host)
        )

    # --- end ---

    def settle(self) -> None:
        """Take nothing more, and let the flush process confirm what is still unanswered."""
        self._admission.close(ShuttingDown("the broker is shutting down"))
        self._bar_if_refused()
        deadline = time.monotonic() + self._flush_timeout_s
        while self._unflushed and time.monotonic() < deadline and not self._family.gone.is_set():
            try:
                self._family.wait_for(Counter.FLUSHED, self._unflushed[0].end, 1)
            except ServiceNotAvailable:
                continue
            self._release_flushed()
        self._staging.close()
        if self._appended is not None:
            self._appended.close()
        with self._log.gate:  # who has asked, and been let in, comes to its end
            self._phase.advance(Phase.STOPPED)
            segment = self._log.segment
            self._log.close()
        if segment is not None:
            path = self._family.store / COMMITLOG_DIR / segment_name(segment[1])
            forget_tail(path, self._wrote.value - segment[1])

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "messages": self._log.appender.count,
            "wrote": self._wrote.value,
            "queues": len(self._cursors),
            "topics": len(self._topics),
            "waiting_for_flush": len(self._unflushed),
            "syncs": self._family.control.read(Counter.SYNCS).value,
            "staged_bytes": self._staging.files.size,
            "pid": os.getpid(),
        }


@lru_cache(maxsize=4096)
def host_bytes(host: str) -> bytes:
    """RocketMQ's form of "ip:port", IPv6 in brackets; an unknown host is 0.0.0.0:0."""
    if not host:
        return bytes(8)
    address, _, port = host.rpartition(":")
    try:
        return ipaddress.ip_address(address.strip("[]")).packed + int(port).to_bytes(4, "big")
    except (ValueError, OverflowError):
        raise BadRequest(f"{host[:80]!r} is not an address and a port") from None
