"""A read task: records out of files or from a reader, into Arrow batches."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cometmq.protocol.commands import (
    MeasureQueue,
    PullMessages,
    PullResult,
    PullStatus,
    QueueParts,
)
from cometmq.protocol.errors import (
    CometError,
    NotConfirmed,
    OffsetIllegal,
    StoreDamaged,
    SubscriptionIllegal,
)
from cometmq.protocol.retry import pause_s
from cometmq.protocol.tags import ALL_TAGS, TAG_SEPARATOR, parse_tags
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.kernel.columns import (
    COLUMNS_DAMAGED,
    COLUMNS_DONE,
    COLUMNS_FULL,
    COLUMNS_GONE,
    COLUMNS_HOLE,
    Columns,
    QueueSpans,
)
from cometmq.shm.os.files import COMMITLOG_DIR, segment_name
from cometmq.shm.reading.column_reader import ColumnReader
from cometmq.shm.reading.selection import filter_of
from cometmq.spark.arrow import take_batch
from cometmq.spark.offsets import MessagesMissing, Queue
from cometmq.spark.options import OnCorrupt, OnMissing
from cometmq.spark.planning import LogSpan, Span

log = logging.getLogger(__name__)

PULL_BYTES: Final = 2 << 20  # a reader answers with 4 MiB at most
PULL_COUNT: Final = 32_768
PULLS_AHEAD: Final = 4
TAGS_MAX: Final = 32  # in one pull
MS_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Wanted:
    """What of the records that a task meets, and how they are delivered."""

    names: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    where: str = ""
    begin_ms: int = -1
    end_ms: int = MS_MAX
    decompress: bool = True
    verify_crc: bool = True
    batch_rows: int = 16_384
    batch_bytes: int = 1 << 20
    on_corrupt: OnCorrupt = OnCorrupt.FAIL
    on_missing: OnMissing = OnMissing.FAIL

    def columns(self, broker: str) -> Columns:
        return Columns(
            self.names,
            broker,
            rows_max=self.batch_rows,
            bytes_max=self.batch_bytes,
            check_crc=self.verify_crc,
            decompress=self.decompress,
            null_body=self.on_corrupt is OnCorrupt.NULL_BODY,
            tags=self.tags,
            keys=self.keys,
            begin_ms=self.begin_ms,
            end_ms=self.end_ms,
            filter=filter_of(self.where),
        )


@dataclass(frozen=True)
class FileTask:
    """Stretches of queues of a store whose files can be opened where the task runs."""

    broker: str
    store: str
    log_max: int  # everything below is whole
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class LogTask:
    """A stretch of a log, and which of the records in it."""

    store: str
    span: LogSpan
    queues: tuple[tuple[str, int, int, int], ...]  # topic, queue id, begin, end


@dataclass(frozen=True)
class RpcTask:
    """Stretches of queues that a broker's readers are asked for."""

    broker: str
    readers: tuple[str, ...]
    segment_bytes: int
    spans: tuple[Span, ...]
    timeout_ms: int = 10_000
    retries: int = 5


Task = FileTask | LogTask | RpcTask


def read_task(task: Task, wanted: Wanted, schema: Any) -> Iterator[Any]:
    """The task's messages as pyarrow.RecordBatch of that pyarrow.Schema.

    Raises StoreDamaged, MessagesMissing; NotReachable, NotConfirmed with RpcTask.
    """
    if isinstance(task, FileTask):
        reading: _Reading = _FileReading(task, wanted)
    elif isinstance(task, LogTask):
        reading = _LogReading(task, wanted)
    else:
        reading = _RpcReading(task, wanted)
    try:
        for _ in reading.steps():
            yield take_batch(reading.columns, schema)
        if reading.columns.rows:
            yield take_batch(reading.columns, schema)
    finally:
        reading.close()
        reading.trouble.report()


@dataclass
class _Trouble:
    """What does not hold or is not there: an error, or passed over and said."""

    wanted: Wanted
    corrupt: int = 0
    missing: int = 0
    shown: list[str] = field(default_factory=list)

    def damaged(self, where: str, columns: Columns) -> None:
        reason, _, _, said, has, details = columns.damage
        text = f"{where}: {reason}"
        if details:
            text += f": {details}"
        if said >= 0:
            text += f": expected {said:#010x}, it has {has:#010x}"
        self._corrupt(text)

    def hole(self, where: str) -> None:
        self._corrupt(f"{where}: there is no record of that queue offset")

    def _corrupt(self, text: str) -> None:
        if self.wanted.on_corrupt is not OnCorrupt.SKIP:
            raise StoreDamaged(f"{text} (onCorrupt = skip reads on)")
        self.corrupt += 1
        if len(self.shown) < 10:
            self.shown.append(text)
            log.error("%s; it is left out", text)

    def gone(self, queue: Queue, begin: int, end: int) -> None:
        text = f"{queue}: messages [{begin}, {end}) have expired"
        if self.wanted.on_missing is OnMissing.FAIL:
            raise MessagesMissing(f"{text} (onMissing = skip reads on behind them)")
        self.missing += end - begin
        log.error("%s; they are left out", text)

    def report(self) -> None:
        if self.corrupt:
            log.error("%d records that do not hold were left out", self.corrupt)


class _Reading:
    """One task's reading. `steps` yields when a batch is full and is to be taken."""

    def __init__(self, broker: str, wanted: Wanted) -> None:
        self.columns = wanted.columns(broker)
        self.trouble = _Trouble(wanted)
        self.wanted = wanted

    def steps(self) -> Iterator[None]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and lines."""


class _FileReading(_Reading):
    def __init__(self, task: FileTask, wanted: Wanted) -> None:
        super().__init__(task.broker, wanted)
        self._task = task
        self._reader = ColumnReader.up_to(Path(task.store), task.log_max)

    def steps(self) -> Iterator[None]:
        for span in self._task.spans:
            at, queue = span.begin, span.queue
            while at < span.end:
                reason, at = self._reader.gather_columns(
                    self.columns, queue.topic, queue.queue_id, at, span.end
                )
                if reason == COLUMNS_FULL:
                    yield
                elif reason == COLUMNS_GONE:
                    kept = self._reader.first_kept(queue.topic, queue.queue_id, at + 1, span.end)
                    self.trouble.gone(queue, at, kept)
                    at = kept
                elif reason != COLUMNS_DONE:
                    self._pass_over(reason, queue, at)
                    at += 1

    def _pass_over(self, reason: int, queue: Queue, at: int) -> None:
        if reason == COLUMNS_HOLE:
            self.trouble.hole(f"{queue} offset {at} in {self._task.store}")
            return
        physical_offset = self.columns.damage[2]
        file = self._reader.file_of(physical_offset)
        self.trouble.damaged(
            f"{queue} offset {at}: {file}, physical offset {physical_offset}", self.columns
        )

    def close(self) -> None:
        self._reader.close()


class _LogReading(_Reading):
    def __init__(self, task: LogTask, wanted: Wanted) -> None:
        super().__init__(task.span.broker, wanted)
        self._task = task
        self._reader = ColumnReader.up_to(Path(task.store), task.span.end)

    def steps(self) -> Iterator[None]:
        spans = QueueSpans()
        for each in self._task.queues:
            spans.add(*each)
        at, end = self._task.span.begin, self._task.span.end
        while at < end:
            reason, at = self._reader.scan_columns(self.columns, at, end, spans)
            if reason == COLUMNS_FULL:
                yield
            elif reason == COLUMNS_GONE:
                raise MessagesMissing(f"{self._reader.file_of(at)} has been deleted")
            elif reason == COLUMNS_DAMAGED:
                where = f"{self._reader.file_of(at)}, physical offset {at}"
                self.trouble.damaged(where, self.columns)
                at = self._reader.after_damage(at, end)

    def close(self) -> None:
        self._reader.close()


def _tags_of(wanted: Wanted) -> str:
    """Return the tag expression for a pull; that for all tags if none selects exactly these."""
    tags = wanted.tags or ()
    text = f" {TAG_SEPARATOR} ".join(tags)
    try:
        is_exact = 0 < len(tags) <= TAGS_MAX and parse_tags(text) == frozenset(tags)
    except SubscriptionIllegal:
        is_exact = False
    return text if is_exact else ALL_TAGS


class _RpcReading(_Reading):
    """Pulls ahead of what is being decoded, but only few: readers serve consumers too."""

    def __init__(self, task: RpcTask, wanted: Wanted) -> None:
        super().__init__(task.broker, wanted)
        self._task = task
        self._channels: dict[str, Channel] = {}
        self._tags = _tags_of(wanted)
        self._gaps = self._tags != ALL_TAGS or bool(wanted.where)
        self._timeout_s = task.timeout_ms / 1000
        self._pause = threading.Event()

    def steps(self) -> Iterator[None]:
        for span in self._task.spans:
            ahead: deque[tuple[int, int, Pending]] = deque()
            edges = self._edges(span)
            stretches = itertools.pairwise(edges)
            while True:
                while len(ahead) < PULLS_AHEAD and (next_one := next(stretches, None)):
                    ahead.append((*next_one, self._pull(span.queue, *next_one)))
                if not ahead:
                    break
                yield from self._stretch(span.queue, *ahead.popleft())

    def _edges(self, span: Span) -> Sequence[int]:
        queue = span.queue
        begin, edges = span.begin, [span.begin]
        while begin < span.end:
            command = MeasureQueue(
                queue.topic, queue.queue_id, begin, span.end, PULL_BYTES, PULL_COUNT
            )
            try:
                answer, _ = self._ask(queue, command)
            except OffsetIllegal:  # expired: the pulls will say so
                edges += range(begin + PULL_COUNT, span.end, PULL_COUNT)
                break
            assert isinstance(answer, QueueParts), answer
            edges += answer.marks
            if answer.reached <= begin:
                break
            begin = answer.reached
            if begin < span.end:
                edges.append(begin)
        return [*edges, span.end]

    def _stretch(self, queue: Queue, at: int, end: int, pending: Pending) -> Iterator[None]:
        """Take [at, end): what was pulled ahead, and again for what the answer left over."""
        answer, payload = self._settle(queue, at, end, pending)
        while True:
            at = yield from self._take(queue, at, end, answer, payload)
            if at >= end:
                return
            answer, payload = self._settle(queue, at, end, self._pull(queue, at, end))

    def _take(
        self, queue: Queue, at: int, end: int, answer: PullResult, payload: Sequence[Any]
    ) -> Generator[None, None, int]:
        """Returns the queue offset that was reached."""
        if answer.min_queue_offset > at:
            kept = min(end, answer.min_queue_offset)
            self.trouble.gone(queue, at, kept)
            at = kept
            if answer.status == PullStatus.OFFSET_MOVED:
                return at
        elif answer.status in (PullStatus.OFFSET_MOVED, PullStatus.NO_NEW_MESSAGE):
            raise StoreDamaged(
                f"{queue} ends at {answer.max_queue_offset}; offset {at} had been there"
            )
        if payload:
            at = yield from self._decode(queue, at, end, payload[0].buffer)
        reached = min(end, answer.next_queue_offset)
        if reached <= at and not payload:
            raise StoreDamaged(f"{queue} offset {at}: an answer that leads nowhere: {answer}")
        while at < reached and not self._gaps:
            self.trouble.hole(f"{queue} offset {at}")
            at += 1
        return max(at, reached)

    def _decode(
        self, queue: Queue, at: int, end: int, buffer: memoryview
    ) -> Generator[None, None, int]:
        name = queue.topic.encode()
        position = 0
        while True:
            reason, position, at = self.columns.decode_run(
                buffer, position, name, queue.queue_id, at, end, self._gaps
            )
            if reason == COLUMNS_DONE:
                return at
            if reason == COLUMNS_FULL:
                yield
                continue
            if reason == COLUMNS_HOLE:
                self.trouble.hole(f"{queue} offset {at}")
            else:
                self.trouble.damaged(self._where(queue, at), self.columns)
                position += int.from_bytes(buffer[position : position + 4], "big")
            at += 1

    def _where(self, queue: Queue, at: int) -> str:
        physical_offset, size = self.columns.damage[2], self._task.segment_bytes
        file = segment_name(physical_offset // size * size) if size else "?"
        return f"{queue} offset {at}: {COMMITLOG_DIR}/{file}, physical offset {physical_offset}"

    # --- asking ---

    def _pull(self, queue: Queue, at: int, end: int) -> Pending:
        command = PullMessages(
            queue.topic, queue.queue_id, at, end - at, 2 * PULL_BYTES, 0, self._tags, False,
            self.wanted.where,
        )  # fmt: skip
        return self._channel(queue).request(command)

    def _settle(
        self, queue: Queue, at: int, end: int, pending: Pending
    ) -> tuple[PullResult, Sequence[Any]]:
        for attempt in range(self._task.retries + 1):
            try:
                answer, payload = self._wait(pending)
            except CometError as error:
                if not error.retriable or attempt == self._task.retries:
                    raise
                log.warning("%s offset %d: %s; pulled again", queue, at, error)
                self._pause.wait(pause_s(attempt + 1, first_s=0.05, most_s=2))
                pending = self._pull(queue, at, end)
            else:
                if not isinstance(answer, PullResult):
                    raise StoreDamaged(f"a pull was answered by {type(answer).__name__}")
                return answer, payload
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, pending: Pending) -> tuple[Any, Sequence[Any]]:
        if not pending.channel.wait(pending, self._timeout_s):
            raise NotConfirmed(
                f"no answer from {pending.channel.name} within {self._timeout_s:g} s"
            )
        return pending.result()

    def _ask(self, queue: Queue, command: MeasureQueue) -> tuple[Any, Sequence[Any]]:
        for attempt in range(self._task.retries + 1):
            try:
                return self._channel(queue).ask(command, timeout_s=self._timeout_s)
            except CometError as error:
                if not error.retriable or attempt == self._task.retries:
                    raise
                self._pause.wait(pause_s(attempt + 1, first_s=0.05, most_s=2))
        raise AssertionError("the last attempt returns or raises")

    def _channel(self, queue: Queue) -> Channel:
        readers = self._task.readers
        address = readers[queue.queue_id % len(readers)]
        channel = self._channels.get(address)
        if channel is None:
            name = f"a reader of {self._task.broker} at {address}"
            channel = self._channels[address] = Channel(address, name)
        return channel

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
