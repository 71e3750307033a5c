"""Stages, and how they become messages: all of them, once.

What makes it exact: an epoch enters the log by derived writes, each with the mark of how far it is.
What fits into one write is there with it, or not at all. Of more, the first write says in its note
what was decided, so that whoever comes after a kill goes on from there, and finishes it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol

from cometmq.actors.tables.sinks import check_epoch, is_begun_anew
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.actors.writer.staged_epoch import ALL, EpochWrites, Plan, give_up, read_plan
from cometmq.protocol.commands import (
    CloseStage,
    CommitStages,
    DropStages,
    Position,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.derived import Known
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    MessageIllegal,
    MessageNotFound,
    OffsetIllegal,
    ServiceNotAvailable,
    StoreDamaged,
    SystemBusy,
)
from cometmq.protocol.names import check_staging_name
from cometmq.shm.state.staging import OpenStage, SinkRecord, StagedHead, StageFiles, tail_of

log = logging.getLogger(__name__)

OPEN_STAGES_MAX: Final = 512
SINK_KEPT_S: Final = 30 * 86_400  # how long it is known which epoch a sink committed last
FLUSHED_THREADS: Final = 2
WRITE_BYTES: Final = 4_194_304  # of one derived write, about
DERIVER: Final = "sink."  # and the sink's name


class Log(Protocol):
    """What the desk lets stages do."""

    blocked: ServiceNotAvailable | None  # nothing else is stored meanwhile
    derived: DerivedWrites

    def check_staged(self, section: Section, batch: memoryview, born_host: bytes) -> None:
        """Raises what would be raised if it were sent."""

    def next_queue_offset(self, topic: str, queue_id: int) -> int: ...

    def publish_and_wake(self) -> None:
        """Whatever was appended may be seen."""

    def wait_covered(self) -> None:
        """Until disk and slaves have it, where the settings promise that. Raises NotConfirmed."""


class Staging:
    """The commitlog process's stages.

    `blocked` is set while a decision of an older release waits to be carried out: how much of that
    there is, only the ends of the queues tell.

    Args:
        bytes_max: of all stages that wait.
        segment_bytes: of the log; a write lies in one segment.
    """

    def __init__(
        self, store: Path, target: Log, *, bytes_max: int, lease_ms: int, segment_bytes: int
    ) -> None:
        self.files = StageFiles(store)
        self.committed = 0  # messages
        self._log = target
        self._bytes_max = bytes_max
        self._lease_s = lease_ms / 1000
        # Records are larger than what they come of, small ones several times.
        self._write_bytes = min(WRITE_BYTES, segment_bytes // 16)
        self._unfinished: list[str] = []  # sinks with an epoch that is decided
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
        opened = self._open(command.sink, command.epoch, command.stage)
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

    def _open(self, sink: str, epoch: int, stage: str) -> OpenStage:
        if self.files.open_count >= OPEN_STAGES_MAX:
            self.sweep()
            if self.files.open_count >= OPEN_STAGES_MAX:
                raise SystemBusy(f"{self.files.open_count} stages are open: try again")
        return self.files.open(sink, epoch, stage)

    def close_stage(self, command: CloseStage, done: Callable[[Callable[[], None]], None]) -> None:
        """Have it synced, by another thread. `done` gets what is to be called in the actor's own:
        it returns, or raises why not. None of this if the stage is closed already."""
        sink, epoch, stage = command.sink, command.epoch, command.stage
        _check(sink, epoch, [stage])
        if self.files.is_closed(sink, epoch, stage):
            done(lambda: None)
            return
        opened = self.files.find(sink, epoch, stage)
        if opened is None and not command.batches:
            opened = self._open(sink, epoch, stage)  # a task without messages
        if opened is None or opened.batches != command.batches:
            batches = opened.batches if opened is not None else 0
            raise OffsetIllegal(f"stage {stage} has {batches} batches, not {command.batches}")
        if opened.syncing:
            raise SystemBusy(f"stage {stage} is being closed: try again")
        opened.syncing = True

        def sync() -> None:
            error: OSError | None = None
            try:
                opened.make_durable()
            except OSError as caught:
                error = caught
            done(lambda: self.files.synced(opened, error))

        self._syncer.submit(sync)

    # --- committing ---

    def commit(self, command: CommitStages) -> StagesCommitted:
        """Killed at any line, the next call with the same epoch ends the same."""
        sink, epoch, stages = command.sink, command.epoch, command.stages
        _check(sink, epoch, stages)
        if len(set(stages)) != len(stages):
            raise BadRequest("a stage is named twice")
        self.finish()
        position = self._position(sink)
        if stages and is_begun_anew(epoch, position.epoch, _now_ms()):
            position = self._begin_anew(sink, epoch, stages, position)
        if Position(epoch, ALL) <= position:
            self._log.wait_covered()  # it may be younger than what the disk has confirmed
            self.files.drop(sink, epoch, stages)
            return StagesCommitted(already=True)
        counts = self._count(sink, epoch, stages)
        # Behind what was given up of this epoch, if anything was.
        base = position.number + 1 if position.epoch == epoch else 1
        self._carry_out(sink, epoch, Plan(stages, base))
        self._settle(sink)
        return StagesCommitted(already=False, messages=sum(counts.values()))

    def _begin_anew(self, sink: str, epoch: int, stages: list[str], position: Position) -> Position:
        """Forget how far the sink has come; where it is then.

        Only where these stages are there: they were closed since the later epoch was committed,
        which has dropped all others. After a kill at any line, a repeated commit resumes.
        """
        self._count(sink, epoch, stages)
        log.warning("sink %s begins anew with epoch %d: it had committed epoch %d, of which this "
                    "is too far below to be a repeat", sink, epoch, position.epoch)  # fmt: skip
        if self.files.record(sink).epoch >= 0:
            self.files.save(sink, SinkRecord())
        self._log.derived.forget(DERIVER + sink)
        return self._position(sink)

    def finish(self) -> None:
        """Carry out what is decided, also by a process before this one. Raises why it cannot be
        done now."""
        for sink in list(self._unfinished):
            try:
                decided = self._decided(sink)
                if decided is not None:
                    self._carry_out(sink, *decided)
            except (StoreDamaged, MessageNotFound, MessageIllegal) as error:
                self._give_up(sink, error)
            self._settle(sink)
        self._log.blocked = None

    def start(self) -> None:
        """Once the log is open, before anybody is served: finish what a kill has left."""
        names = [known.deriver for known in self._log.derived.book if known.note]
        by_marks = [name.removeprefix(DERIVER) for name in names if name.startswith(DERIVER)]
        by_older = [sink for sink in self.files.decided() if self._is_undone(sink)]
        self._unfinished = sorted({*by_marks, *by_older})
        if by_older:
            self._log.blocked = ServiceNotAvailable("stages wait to be committed: try again")
        self.try_to_finish()

    @property
    def is_unfinished(self) -> bool:
        """Whether something is to be finished."""
        return bool(self._unfinished)

    def try_to_finish(self) -> None:
        try:
            self.finish()
        except CometError as error:
            log.warning("a commit of stages cannot be finished yet: %s", error)

    def _carry_out(self, sink: str, epoch: int, plan: Plan) -> None:
        """From where the log says that it is. Once any of it is there it is not given back."""
        position = self._position(sink)
        writes = EpochWrites(
            self._log.derived, DERIVER + sink, epoch, plan, position, self._write_bytes
        )
        try:
            self._write(writes, sink, epoch, plan)
        finally:
            self.committed += writes.stored
            if writes.is_begun and sink not in self._unfinished:
                self._unfinished.append(sink)
            self._log.publish_and_wake()

    def _settle(self, sink: str) -> None:
        """Once the disk has it, nobody needs the stages."""
        self._log.wait_covered()
        position = self._position(sink)
        if self.files.is_decided(sink):
            # As the older release would have left it: a power cut may take the marks.
            self.files.save(sink, SinkRecord(position.epoch))
        if sink in self._unfinished:
            self._unfinished.remove(sink)
        if position.number == ALL:
            self.files.drop_up_to(sink, position.epoch)

    def _write(self, writes: EpochWrites, sink: str, epoch: int, plan: Plan) -> None:
        there = {(topic, queue_id): count for topic, queue_id, count in plan.there}
        with closing(self.files.batches(sink, epoch, plan.stages)) as batches:
            for head, batch in batches:
                older = min(there.get((head.topic, head.queue_id), 0), head.count)
                if older:
                    there[head.topic, head.queue_id] -= older
                skip = older + writes.skip(head.count - older)
                if skip < head.count:
                    with tail_of(batch, skip) as rest:
                        writes.add(head, rest)
        writes.finish()

    def _give_up(self, sink: str, error: CometError) -> None:
        """What is there of it stays; the epoch may be committed again, of other stages."""
        known = self._known(sink)
        if known is not None and known.note:
            epoch = known.position.epoch
            give_up(self._log.derived, known)
            self._log.publish_and_wake()
        else:
            record = self.files.record(sink)
            epoch = record.decision.epoch if record.decision is not None else record.epoch
            self.files.save(sink, SinkRecord(record.epoch))
        log.critical("epoch %d of sink %s is given up: %s", epoch, sink, error)

    # --- where a sink is ---

    def _known(self, sink: str) -> Known | None:
        return self._log.derived.find(DERIVER + sink)

    def _position(self, sink: str) -> Position:
        """By its marks; of a sink that has committed with an older release only, by its record."""
        known = self._known(sink)
        return Position(self.files.record(sink).epoch, ALL) if known is None else known.position

    def _decided(self, sink: str) -> tuple[int, Plan] | None:
        """The epoch that is to be finished; None where it only has to reach the disk."""
        known = self._known(sink)
        if known is not None and known.note:
            return known.position.epoch, read_plan(known.note)
        if not self._is_undone(sink):
            return None
        decision = self.files.record(sink).decision
        assert decision is not None
        counts = self._count(sink, decision.epoch, decision.stages)
        there = []
        for queue in decision.queues:
            key = queue.topic, queue.queue_id
            there.append((*key, queue.there(self._log.next_queue_offset(*key), counts[key])))
        return decision.epoch, Plan(decision.stages, there=there)

    def _is_undone(self, sink: str) -> bool:
        """Whether an older release has decided something of which there are no marks yet."""
        decision = self.files.record(sink).decision if self.files.is_decided(sink) else None
        return decision is not None and self._position(sink) < Position(decision.epoch, 1)

    def _count(self, sink: str, epoch: int, stages: list[str]) -> dict[tuple[str, int], int]:
        """Messages of each queue; every stage is read and checked for it."""
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for head, _ in self.files.batches(sink, epoch, stages):
            counts[head.topic, head.queue_id] += head.count
        return counts

    # --- cleaning ---

    def drop(self, command: DropStages) -> None:
        # Of any epoch: an older release may have taken them.
        _check_names(command.sink, command.stages)
        self.finish()  # what is decided is not dropped
        self.files.drop(command.sink, command.epoch, command.stages)

    def sweep(self) -> None:
        kept_s = max(SINK_KEPT_S, self._lease_s)
        removed = self.files.sweep(self._lease_s, kept_s, self._unfinished)
        if removed:
            log.info("%d stages were dropped: their lease had run out", removed)
        self._forget_sinks(time.time() - kept_s)

    def _forget_sinks(self, before_s: float) -> None:
        """Those that have committed nothing since, and have no stages."""
        for known in list(self._log.derived.book):
            sink = known.deriver.removeprefix(DERIVER)
            if known.deriver == sink or known.note or known.at_ms > before_s * 1000:
                continue
            if not self.files.has_stages(sink):
                self._log.derived.forget(known.deriver)
                self._log.publish_and_wake()

    @property
    def sweep_interval_s(self) -> float:
        return min(60.0, self._lease_s / 4)

    def close(self) -> None:
        self._syncer.shutdown()
        self.files.close()


def _check(sink: str, epoch: int, stages: list[str]) -> None:
    _check_names(sink, stages)
    check_epoch(sink, epoch, _now_ms())


def _check_names(sink: str, stages: list[str]) -> None:
    """Names before paths."""
    check_staging_name("sink", sink)
    for stage in stages:
        check_staging_name("stage", stage)


def _now_ms() -> int:
    return int(time.time() * 1000)
