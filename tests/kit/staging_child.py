"""A commitlog process in small, for test_staging: stages and a log, killed at any line."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dying
from dying import Line
from family import encode_batch

from cometmq.actors.tables.derivers import Derivers
from cometmq.actors.writer import derived, staged_epoch
from cometmq.actors.writer import staging as actor
from cometmq.actors.writer.derived import DerivedWrites
from cometmq.actors.writer.staging import Staging
from cometmq.protocol.commands import (
    CloseStage,
    CommitStages,
    QueueKey,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.derived import DERIVED_TOPIC, read_mark
from cometmq.protocol.errors import MessageNotFound, ServiceNotAvailable
from cometmq.protocol.names import HIDDEN_TOPICS
from cometmq.shm.kernel import codec
from cometmq.shm.kernel.codec import Message
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.log.commit_log import CommitLog
from cometmq.shm.log.recovery import LogEnd, zero_behind
from cometmq.shm.log.torn import without_torn_write
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, map_segment, segment_name
from cometmq.shm.reading.derived_log import StoredMark
from cometmq.shm.state import staging as files

SEGMENT = 4096
BODY_MAX = 600
WATCHED = frozenset(
    {*(str(each.__file__) for each in (actor, derived, files, staged_epoch)), __file__}
)
SINK, EPOCH = "sink", 3
WROTE = struct.Struct("<q")


class Inline:
    """An executor without threads, so that every line is seen."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def shutdown(self) -> None:
        pass


class Writer:
    """What the commitlog process does with its log, as far as stages go. `wrote` is in a file."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.blocked: ServiceNotAvailable | None = None
        (store / COMMITLOG_DIR).mkdir(parents=True, exist_ok=True)
        self._wrote = os.open(store / "wrote", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        zero_behind(store, SEGMENT, self.wrote, BODY_MAX)
        self.cursors: dict[tuple[str, int], QueueCursor] = {}
        for message in self.records():
            cursor = self.cursor(message.topic, message.queue_id)
            cursor.next_offset = message.queue_offset + 1
        self._log = CommitLog(
            store, segment_bytes=SEGMENT, physical_offset=self.wrote, store_host=bytes(8),
            max_message_bytes=BODY_MAX, ready=self._ready,
        )  # fmt: skip
        self._log.open_segment()
        self.derived = DerivedWrites(
            Derivers(2_000),
            self.append_records,
            segment_start=lambda: self._log.appender.segment_start,
            flushed=lambda: self.wrote,
            tell_needed=lambda _offset: None,
        )
        self.derived.load(
            StoredMark(read_mark(each.body), each.store_timestamp_ms, each.physical_offset)
            for each in self.records()
            if each.topic == DERIVED_TOPIC
        )
        self.staging = Staging(
            store, self, bytes_max=1 << 20, lease_ms=60_000, segment_bytes=SEGMENT
        )
        self.staging._syncer = Inline()  # type: ignore[assignment]
        self.staging.start()

    @property
    def wrote(self) -> int:
        raw = os.pread(self._wrote, WROTE.size, 0)
        return int(WROTE.unpack(raw)[0]) if raw else 0

    @wrote.setter
    def wrote(self, physical_offset: int) -> None:
        os.pwrite(self._wrote, WROTE.pack(physical_offset), 0)

    def _ready(self, end: int) -> int:
        """Like the actor, which has to say how far it has come before it gets a segment."""
        if end > SEGMENT and self._log.physical_offset > self.wrote:
            self.wrote = self._log.physical_offset
        return self._log._make_segment(end)

    def cursor(self, topic: str, queue_id: int) -> QueueCursor:
        return self.cursors.setdefault((topic, queue_id), QueueCursor(topic, queue_id, 0))

    def messages(self) -> list[Message]:
        """All that clients may see."""
        return [each for each in self.records() if each.topic not in HIDDEN_TOPICS]

    def records(self) -> list[Message]:
        """All that may be seen."""
        found = []
        for start in list_segments(self.store / COMMITLOG_DIR, SEGMENT):
            stop = min(self.wrote, start + SEGMENT)
            if stop > start:
                path = self.store / COMMITLOG_DIR / segment_name(start)
                with map_segment(path, SEGMENT, writable=False) as memory:
                    reached = codec.scan(memory, start, start, stop, True)[0]
                    found += codec.decode(bytes(memory[: reached - start]))
        return found

    # --- as Staging wants it ---

    def check_staged(self, section: Section, batch: memoryview, born_host: bytes) -> None:
        queue = self.cursor(section.topic, section.queue_id)
        self._log.check_batch(queue, batch, section.count, born_host, beside=1_024)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        return self.cursor(topic, queue_id).next_offset

    def append_records(self, queues: Sequence[QueueKey], payload: bytes, count: int) -> bytes:
        cursors = [self.cursor(key.topic, key.queue_id) for key in queues]
        return self._log.append_inner(cursors, payload, count)

    def publish_and_wake(self) -> None:
        self.wrote = self._log.physical_offset

    def wait_covered(self) -> None:
        """As under SYNC_FLUSH: no power cut takes it any more."""
        os.pwrite(self._wrote, WROTE.pack(self.wrote), WROTE.size)

    # --- what is done to it ---

    def send(self, queue_id: int, bodies: list[bytes]) -> None:
        self._log.append_batch(self.cursor("t", queue_id), encode_batch(bodies), len(bodies))
        self.publish_and_wake()

    def task(self, name: str, number: int) -> None:
        """One task's stage, as the client fills it."""
        batches = content(number)
        for index, (queue_id, bodies) in enumerate(batches):
            command = StageMessages(
                SINK, EPOCH, name, index, [Section("t", queue_id, len(bodies))], 1
            )
            self.staging.stage(command, [memoryview(encode_batch(bodies))], bytes(8))
        self.staging.close_stage(CloseStage(SINK, EPOCH, name, len(batches)), lambda call: call())

    def commit(self, names: list[str]) -> StagesCommitted:
        return self.staging.commit(CommitStages(SINK, EPOCH, names))

    def close(self) -> None:
        self.staging.close()
        self._log.close()
        os.close(self._wrote)


def content(number: int) -> list[tuple[int, list[bytes]]]:
    """What the tasks send: their batches by queue."""
    return [
        (index % 2, [b"%d.%d.%d " % (number, index, each) + b"x" * 300 for each in range(3)])
        for index in range(4)
    ]


def before(store: Path) -> None:
    writer = Writer(store)
    for queue_id in (0, 1, 2):
        writer.send(queue_id, [b"before %d" % queue_id] * 3)
    writer.close()


def epoch(store: Path) -> None:
    """Two tasks and a commit."""
    writer = Writer(store)
    writer.task("first-0", 0)
    writer.task("first-1", 1)
    writer.commit(["first-0", "first-1"])
    writer.close()


def again(store: Path) -> Writer:
    """What the driver does when it gets no answer; and the tasks, where nothing was decided."""
    writer = Writer(store)
    try:
        writer.commit(["first-0", "first-1"])
    except MessageNotFound:
        second = [f"by-{os.getpid()}-{number}" for number in (0, 1)]  # another attempt's are there
        for number, name in enumerate(second):
            writer.task(name, number)
        writer.commit(second)
    return writer


def before_marks(store: Path, done: int) -> None:
    """A store in which a release without derived writes was killed: an epoch is decided, and the
    first `done` messages of it are in the log."""
    writer = Writer(store)
    writer.task("first-0", 0)
    writer.task("first-1", 1)
    queues = [
        f'["t",{queue_id},0,{writer.cursor("t", queue_id).next_offset}]' for queue_id in (0, 1)
    ]
    decision = f'{{"epoch":{EPOCH},"stages":["first-0","first-1"],"queues":[{",".join(queues)}]}}'
    record = store / files.STAGES_DIR / SINK / files.RECORD
    record.write_text(f'{{"epoch":2,"decision":{decision}}}')
    for number in (0, 1):
        for queue_id, bodies in content(number):
            some = bodies[:done]
            done -= len(some)
            if some:
                writer.send(queue_id, some)
    writer.close()


def lines_of_an_epoch(store: Path) -> Counter[Line]:
    return dying.lines_of(partial(epoch, store), WATCHED)


def die_at(store: Path, line: Line, nth: int, work: Callable[[Path], Any] = epoch) -> int:
    """Do it in a child that ends, as if killed, at the nth pass of a line; its exit status."""
    return dying.die_at(partial(work, store), WATCHED, line, nth)


def cut_power(store: Path, seed: int) -> bool:
    """What a loss of power may do to the log: it ends at some record behind what was flushed. Then
    it is recovered, as a start does it. Whether it is shorter."""
    writer = Writer.__new__(Writer)
    writer.store = store
    writer._wrote = os.open(store / "wrote", os.O_RDWR | os.O_CLOEXEC)
    raw = os.pread(writer._wrote, WROTE.size, WROTE.size)
    flushed = int(WROTE.unpack(raw)[0]) if raw else 0
    ends = [0] + [each.physical_offset + each.size for each in writer.records()]
    ends = [each for each in ends if each >= flushed]
    end = LogEnd(0, random.Random(seed).choice(ends), "cut", 0, 0)
    before = writer.wrote
    writer.wrote = without_torn_write(store, SEGMENT, end).physical_offset
    shorter = writer.wrote < before
    os.close(writer._wrote)
    return shorter
