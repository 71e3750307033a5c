"""Stages, and how they become messages: all of them, once.

What makes it exact: a decision is written down, durably, before the first message enters the log,
and from then on until the record says that it is done nothing else enters. So whoever comes after a
kill sees from the queues' ends how far it was, and goes on from there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol

from cometmq.protocol.commands import (
    CloseStage,
    CommitStages,
    DropStages,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    MessageIllegal,
    MessageNotFound,
    OffsetIllegal,
    ServiceNotAvailable,
    StoreDamaged,
    StoreError,
    SystemBusy,
)
from cometmq.protocol.names import check_staging_name
from cometmq.shm.staging import (
    Decision,
    OpenStage,
    QueueProgress,
    SinkRecord,
    StagedHead,
    StageFiles,
    tail_of,
)

log = logging.getLogger(__name__)

OPEN_STAGES_MAX: Final = 512
EPOCH_MAX: Final = (1 << 63) - 1
SINK_KEPT_S: Final = 30 * 86_400  # how long it is known which epoch a sink committed last
FLUSHED_THREADS: Final = 2


class Log(Protocol):
    """What the holder of the put lock lets stages do."""

    def check_staged(self, section: Section, batch: memoryview, born_host: bytes) -> None:
        """Raises what would be raised if it were sent."""

    def next_queue_offset(self, topic: str, queue_id: int) -> int: ...

    def append_staged(self, head: StagedHead, batch: memoryview, count: int) -> None:
        """Raises DiskFull, ServiceNotAvailable; MessageIllegal if settings have changed since."""

    def publish_staged(self) -> None:
        """Whatever was appended may be seen."""

    def wait_flushed(self) -> None:
        """Until the disk has it, where the flush mode promises that. Raises NotConfirmed."""


class Staging:
    """The commitlog process's stages. `blocked` is set while a decision waits to be carried out."""

    def __init__(self, store: Path, target: Log, *, bytes_max: int, lease_ms: int) -> None:
        self.files = StageFiles(store)
        self.blocked: ServiceNotAvailable | None = None
        self.committed = 0  # messages
        self._log = target
        self._bytes_max = bytes_max
        self._lease_s = lease_ms / 1000
        self._waiting: list[str] = []  # sinks with a decision
        self._syncing: set[OpenStage] = set()
        self._syncer = ThreadPoolExecutor(FLUSHED_THREADS, "cometmq staging")

    # --- filling ---

    def stage(
        self, command: StageMessages, batches: Sequence[memoryview], born_host: bytes
    ) -> None:
        _check(command.sink, command.epoch, [command.stage])
        if len(command.sections) != len(batches):
            raise BadRequest(f"{len(command.sections)} sections, {len(batches)} payload frames")
        for section, batch in zip(command.sections, batches, strict=True):
            self._log.check_staged(section, batch, born_host)
        added = sum(len(batch) for batch in batches)
        if self.files.size + added > self._bytes_max:
            raise SystemBusy(
                f"{self.files.size} bytes are staged, with {added} more there would be more than "
                f"{self._bytes_max} (maxStagedBytes): try again when others have committed"
            )
        if self.files.open_count >= OPEN_STAGES_MAX:
            self.sweep()
            if self.files.open_count >= OPEN_STAGES_MAX:
                raise SystemBusy(f"{self.files.open_count} stages are open: try again")
        opened = self.files.open(command.sink, command.epoch, command.stage)
        if opened in self._syncing:
            raise MessageNotFound(f"stage {command.stage} is closed")
        if not 0 <= command.first <= opened.batches:
            raise OffsetIllegal(
                f"stage {command.stage} has {opened.batches} batches, the next is not "
                f"number {command.first}"
            )
        known = opened.batches - command.first
        for section, batch in list(zip(command.sections, batches, strict=True))[known:]:
            head = StagedHead(
                section.topic, section.queue_id, section.count, section.sys_flag,
                command.born_timestamp_ms, born_host,
            )  # fmt: skip
            self.files.size += opened.append(head, batch)

    def close_stage(self, command: CloseStage, done: Callable[[Callable[[], None]], None]) -> None:
        """Have it synced, by another thread. `done` gets what is to be called in the actor's own:
        it returns, or raises why not. None of this if the stage is closed already."""
        sink, epoch, stage = command.sink, command.epoch, command.stage
        _check(sink, epoch, [stage])
        if self.files.is_closed(sink, epoch, stage):
            done(lambda: None)
            return
        opened = self.files.open(sink, epoch, stage)
        if opened.batches != command.batches:
            raise OffsetIllegal(
                f"stage {stage} has {opened.batches} batches, not {command.batches}"
            )
        if opened in self._syncing:
            raise SystemBusy(f"stage {stage} is being closed: try again")
        self._syncing.add(opened)

        def sync() -> None:
            error: OSError | None = None
            try:
                opened.make_durable()
            except OSError as caught:
                error = caught
            done(lambda: self._synced(opened, error))

        self._syncer.submit(sync)

    def _synced(self, opened: OpenStage, error: OSError | None) -> None:
        self._syncing.discard(opened)
        self.files.let_go(opened)
        if error is not None:
            raise StoreError(f"{opened.path}: {error.strerror}")

    # --- committing ---

    def commit(self, command: CommitStages) -> StagesCommitted:
        """Killed at any line, the next call with the same epoch ends the same."""
        sink, epoch, stages = command.sink, command.epoch, command.stages
        _check(sink, epoch, stages)
        if len(set(stages)) != len(stages):
            raise BadRequest("a stage is named twice")
        self.finish()
        record = self.files.record(sink)
        if epoch <= record.epoch:
            self.files.drop(sink, epoch, stages)
            return StagesCommitted(already=True)
        counts = self._count(sink, epoch, stages)
        queues = [QueueProgress(*queue, 0, self._log.next_queue_offset(*queue)) for queue in counts]
        self.blocked = ServiceNotAvailable("stages are being committed: try again")
        self._waiting = [sink]
        self.files.save(sink, SinkRecord(record.epoch, Decision(epoch, stages, queues)))
        self.finish()
        if self.files.record(sink).epoch != epoch:
            raise StoreDamaged(f"epoch {epoch} of sink {sink} was given up: see the broker's log")
        return StagesCommitted(already=False, messages=sum(counts.values()))

    def finish(self) -> None:
        """Carry out what is decided, also by a process before this one. Raises why it cannot be
        done now; until then nothing else is stored."""
        while self._waiting:
            sink = self._waiting[0]
            decision = self.files.record(sink).decision
            if decision is not None:  # else it could not be written down
                try:
                    self._carry_out(sink, decision)
                except (StoreDamaged, MessageNotFound, MessageIllegal) as error:
                    log.critical("epoch %d of sink %s is given up: %s", decision.epoch, sink, error)
                    self.files.save(sink, SinkRecord(self.files.record(sink).epoch))
            self._waiting.pop(0)
        self.blocked = None

    def start(self) -> None:
        """Once the log is open, before anybody is served: finish what a kill has left."""
        self._waiting = self.files.decided()
        self.blocked = ServiceNotAvailable("stages wait to be committed: try again")
        self.try_to_finish()

    def try_to_finish(self) -> None:
        try:
            self.finish()
        except CometError as error:
            log.warning("a commit of stages cannot be finished yet, sends have to wait: %s", error)

    def _carry_out(self, sink: str, decision: Decision) -> None:
        self._log.publish_staged()  # what an attempt that failed has appended: it counts as there
        left = self._left_over(sink, decision)
        with closing(self.files.batches(sink, decision.epoch, decision.stages)) as batches:
            for head, batch in batches:
                skip = min(left[head.topic, head.queue_id], head.count)
                left[head.topic, head.queue_id] -= skip
                if skip < head.count:
                    with tail_of(batch, skip) as rest:
                        self._log.append_staged(head, rest, head.count - skip)
                        self.committed += head.count - skip
        self._log.publish_staged()
        self._log.wait_flushed()
        self.files.save(sink, SinkRecord(decision.epoch))
        self.files.drop_up_to(sink, decision.epoch)

    def _left_over(self, sink: str, decision: Decision) -> dict[tuple[str, int], int]:
        """How many messages each queue has of it already. What has moved is written down before
        more is stored."""
        counts = self._count(sink, decision.epoch, decision.stages)
        moved = False
        for queue in decision.queues:
            key = queue.topic, queue.queue_id
            moved |= queue.look(self._log.next_queue_offset(*key), counts[key])
        if moved:
            self.files.save(sink, SinkRecord(self.files.record(sink).epoch, decision))
        return {(queue.topic, queue.queue_id): queue.done for queue in decision.queues}

    def _count(self, sink: str, epoch: int, stages: list[str]) -> dict[tuple[str, int], int]:
        """Messages of each queue; every stage is read and checked for it."""
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for head, _ in self.files.batches(sink, epoch, stages):
            counts[head.topic, head.queue_id] += head.count
        return counts

    # --- cleaning ---

    def drop(self, command: DropStages) -> None:
        _check(command.sink, command.epoch, command.stages)
        self.finish()  # what is decided is not dropped
        self.files.drop(command.sink, command.epoch, command.stages)

    def sweep(self) -> None:
        removed = self.files.sweep(self._lease_s, max(SINK_KEPT_S, self._lease_s))
        if removed:
            log.info("%d stages were dropped: their lease had run out", removed)

    @property
    def sweep_interval_s(self) -> float:
        return min(60.0, self._lease_s / 4)

    def close(self) -> None:
        self._syncer.shutdown()
        self.files.close()


def _check(sink: str, epoch: int, stages: list[str]) -> None:
    """Names before paths."""
    check_staging_name("sink", sink)
    for stage in stages:
        check_staging_name("stage", stage)
    if not 0 <= epoch <= EPOCH_MAX:
        raise BadRequest(f"epoch {epoch}: 0 to {EPOCH_MAX} are allowed")
