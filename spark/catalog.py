"""What there is to read, behind one face: a store directory, or the brokers of a name server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from cometmq.client.routes import Routes
from cometmq.protocol.commands import (
    BrokerEndpoints,
    Command,
    CommitOffsets,
    DescribeQueues,
    Done,
    FetchOffsets,
    FoundOffset,
    GroupOffsets,
    ListTopics,
    MeasureQueue,
    PullMessages,
    QueueKey,
    QueueOffset,
    QueueParts,
    QueueRanges,
    SearchOffset,
    TopicList,
)
from cometmq.protocol.errors import CometError, StoreNotOurs
from cometmq.protocol.retry import pause_s, spread
from cometmq.protocol.topics import fetch_topics
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.columns import QueueSpans
from cometmq.shm.live.queue_table import QueueRange
from cometmq.shm.os.files import ABORT_FILE, COMMITLOG_DIR
from cometmq.shm.reading.column_reader import (
    ClosedPositions,
    ColumnReader,
    Served,
    is_served,
    log_end,
)
from cometmq.shm.reading.positions import file_sizes
from cometmq.shm.reading.resuming import committed_offsets
from cometmq.shm.state.identity import read_identity
from cometmq.spark.offsets import Queue
from cometmq.spark.options import Isolation, OptionError, ReadOptions, Transport

log = logging.getLogger(__name__)

DEFAULT_BROKER: Final = "broker"
COUNT_MAX: Final = (1 << 62) - 1
QUEUES_ASKED: Final = 1_024  # in one question
PAUSE_S: Final = 0.05  # before the second attempt; doubled after each
PAUSE_S_MAX: Final = 2.0
DISPATCH_S: Final = 5.0  # that a dispatcher which is behind is waited for
BATCH_QUEUES_DIR: Final = "batchconsumequeue"

Answer = TypeVar("Answer", bound=Command)


class Catalog(Protocol):
    """Everything that planning asks. One thread uses it."""

    def topics(self) -> Mapping[str, Sequence[Queue]]: ...
    def store_ids(self) -> dict[str, str]: ...
    def ranges(self, queues: Collection[Queue]) -> dict[Queue, QueueRange]:
        """(min, max) queue offset, as far as the isolation lets one see."""

    def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """The first message stored at the time or later, the maximum if there is none."""

    def parts(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[list[int], int]:
        """(where the second, third ... part begins, bytes of all)."""

    def first_part(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[int, int]:
        """(where the first part ends, its bytes)."""

    def committed(self, group: str, queues: Collection[Queue]) -> dict[Queue, int]:
        """The group's progress; -1 where it has none."""

    def store_time(self, queue: Queue, offset: int) -> int | None:
        """When that message was stored, in ms."""

    def close(self) -> None: ...


def open_catalog(options: ReadOptions) -> LocalStore | RemoteBrokers:
    """Raises StoreError, NotReachable."""
    if options.transport_used is Transport.FILE:
        return LocalStore(options)
    return RemoteBrokers(options)


class LocalStore:
    """A store directory, served by a broker on this machine or by nobody.

    A store that nobody serves and that was not closed, or whose queues have lost something, has
    queues that cannot be trusted until a broker, or `cometmq store repair`, has recovered it. Its
    log can be read as it is: then `distrust` says why, and ranges are what a walk over the whole
    log has seen.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.path = Path(options.store).absolute()
        if not (self.path / COMMITLOG_DIR).is_dir():
            raise StoreNotOurs(f"{self.path} is no store: there is no {COMMITLOG_DIR}/ in it")
        identity = read_identity(self.path)
        self.broker = options.broker_name or identity.broker or DEFAULT_BROKER
        self._store_id = identity.store_id
        self._durable = options.isolation is Isolation.DURABLE
        self._by_broker = RemoteBrokers(options) if options.namesrv else None
        self._served = Served(self.path) if is_served(self.path) else None
        self.distrust = ""
        self._closed: ClosedPositions | None = None
        self._surveyed: dict[tuple[str, int], QueueRange] | None = None
        if self._served is not None:
            self.reader = ColumnReader.at(self.path, self._served.positions)
        else:
            self.distrust = self._look_at_queues()
            if self.distrust:
                self.reader = ColumnReader.up_to(self.path, log_end(self.path))
                self.survey()
            else:
                assert self._closed is not None
                self.reader = ColumnReader.at(self.path, self._closed)

    def _look_at_queues(self) -> str:
        """Why they are of no use; "" if they are."""
        if (self.path / ABORT_FILE).exists():
            return f"{self.path} was not closed: its queues may not fit its log"
        if (self.path / BATCH_QUEUES_DIR).is_dir():
            return f"{self.path} has queues of another kind ({BATCH_QUEUES_DIR})"
        self._closed = ClosedPositions(self.path, *file_sizes(self.path))
        return self._closed.distrust and f"{self.path} is damaged: {self._closed.distrust}"

    @property
    def served(self) -> bool:
        return self._served is not None

    def log_range(self) -> tuple[int, int]:
        """(first byte, one past the last byte) that tasks may read."""
        low, high = self.reader.positions.log_range()
        if self._served is not None and self._durable:
            high = min(high, self._served.flushed)
        return low, high

    def survey(self) -> None:
        """Take the ranges from the log: for a walk over it, also where queues are of no use."""
        if self._surveyed is None:
            self._surveyed = _ranges_of(self.reader.survey(self.log_range()[1]))

    def _wait_dispatched(self) -> None:
        """Whoever was told that a message is stored finds it in its queue (see actors/reading/
        questions.py): what is in the log now gets its entry first."""
        if self._served is None or self._surveyed is not None:
            return
        end = self.log_range()[1]
        if not self._served.wait_dispatched(end, DISPATCH_S):
            behind = end - self._served.dispatched
            log.warning("%s: what is in no queue yet is not read: %d bytes", self.path, behind)

    def topics(self) -> dict[str, list[Queue]]:
        self._wait_dispatched()
        found: dict[str, list[Queue]] = {}
        for topic, queue_id in sorted(self._queue_names()):
            found.setdefault(topic, []).append(Queue(self.broker, topic, queue_id))
        return found

    def _queue_names(self) -> list[tuple[str, int]]:
        if self._surveyed is not None:
            return list(self._surveyed)
        if self._served is not None:
            return list(self._served.table.queues())
        assert self._closed is not None
        return list(self._closed.queues())

    def store_ids(self) -> dict[str, str]:
        return {self.broker: self._store_id}

    def ranges(self, queues: Collection[Queue]) -> dict[Queue, QueueRange]:
        self._wait_dispatched()
        return {queue: self._range(queue) for queue in queues}

    def _range(self, queue: Queue) -> QueueRange:
        key = (queue.topic, queue.queue_id)
        if self._surveyed is not None:
            return self._surveyed.get(key, QueueRange(0, 0))
        low, high = self.reader.positions.queue_range(*key) or QueueRange(0, 0)
        if self._served is not None and self._durable and high > low:
            high = max(low, self.reader.end_below(*key, self._served.flushed))
        return QueueRange(low, high)

    def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        return self.reader.offset_by_time(queue.topic, queue.queue_id, timestamp_ms)

    def parts(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[list[int], int]:
        return _all_parts(
            lambda at: self.reader.parts(
                queue.topic, queue.queue_id, at, end, bytes_max=bytes_max, count_max=count_max
            ),
            begin,
            end,
        )

    def first_part(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[int, int]:
        found = self.reader.parts(
            queue.topic, queue.queue_id, begin, end,
            bytes_max=bytes_max, count_max=count_max, marks_max=1,
        )  # fmt: skip
        return (found.marks[0] if found.marks else found.reached), found.size_bytes

    def committed(self, group: str, queues: Collection[Queue]) -> dict[Queue, int]:
        if self._by_broker is not None:
            return self._by_broker.committed(group, queues)
        if self._served is not None:
            raise OptionError("startingOffsets = group of a store that is served needs namesrv")
        table = committed_offsets(self.path)
        return {
            queue: table.get(f"{queue.topic}@{group}", {}).get(queue.queue_id, -1)
            for queue in queues
        }

    def store_time(self, queue: Queue, offset: int) -> int | None:
        found = self.reader.get_message(queue.topic, queue.queue_id, offset, 1)
        if not found.payload:
            return None
        return decode(found.payload, None, False)[0].store_timestamp_ms

    def close(self) -> None:
        self.reader.close()
        if self._by_broker is not None:
            self._by_broker.close()


def _ranges_of(spans: QueueSpans) -> dict[tuple[str, int], QueueRange]:
    return {
        (topic, queue_id): QueueRange(low, high) for topic, queue_id, low, high in spans.items()
    }


def _all_parts(measure: Callable[[int], QueueParts], begin: int, end: int) -> tuple[list[int], int]:
    """Of as many measurings as it takes."""
    marks: list[int] = []
    total = 0
    at = begin
    while at < end:
        found = measure(at)
        if found.reached <= at:
            break
        marks += found.marks
        total += found.size_bytes
        at = found.reached
        if at < end:
            marks.append(at)
    return marks, total


class RemoteBrokers:
    """All brokers that a name server knows, asked over ZeroMQ."""

    def __init__(self, options: ReadOptions) -> None:
        self._routes = Routes(options.namesrv)
        self._timeout_s = options.timeout_ms / 1000
        self._retries = options.retries
        self._durable = options.isolation is Isolation.DURABLE
        self._closed = threading.Event()
        self._masters: dict[str, BrokerEndpoints] = {}
        self._segment_bytes: dict[str, int] = {}
        self.learn_brokers()

    def learn_brokers(self) -> None:
        masters = self._patiently(lambda: self._routes.masters(self._timeout_s))
        self._masters = {each.broker: each for each in masters}

    def endpoints(self, broker: str) -> BrokerEndpoints:
        if broker not in self._masters:
            self.learn_brokers()
        if broker not in self._masters:
            raise OptionError(f"no broker {broker!r}: there are {', '.join(sorted(self._masters))}")
        return self._masters[broker]

    def segment_bytes(self, broker: str) -> int:
        return self._segment_bytes.get(broker, 0)

    def topics(self) -> dict[str, list[Queue]]:
        found: dict[str, list[Queue]] = {}
        for name in sorted(self._masters):
            known = fetch_topics(partial(self._ask_topics, name))
            for info in known.topics.values():
                count = max(info.read_queues, info.write_queues)
                found.setdefault(info.topic, []).extend(
                    Queue(name, info.topic, queue_id) for queue_id in range(count)
                )
        return found

    def _ask_topics(self, broker: str, question: ListTopics) -> TopicList:
        return self._ask(broker, "coordinator", question, TopicList)

    def store_ids(self) -> dict[str, str]:
        return {name: self._describe(name, []).store_id for name in sorted(self._masters)}

    def _describe(self, broker: str, queues: Sequence[Queue]) -> QueueRanges:
        keys = [QueueKey(queue.topic, queue.queue_id) for queue in queues]
        found = self._ask(broker, "reader", DescribeQueues(keys, self._durable), QueueRanges)
        self._segment_bytes[broker] = found.segment_bytes
        return found

    def ranges(self, queues: Collection[Queue]) -> dict[Queue, QueueRange]:
        found: dict[Queue, QueueRange] = {}
        for broker in sorted({queue.broker for queue in queues}):
            mine = [queue for queue in queues if queue.broker == broker]
            for asked in _in_questions(mine):
                ranges = self._describe(broker, asked).ranges
                found |= {
                    queue: QueueRange(each.min_queue_offset, each.max_queue_offset)
                    for queue, each in zip(asked, ranges, strict=True)
                }
        return found

    def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        command = SearchOffset(queue.topic, queue.queue_id, timestamp_ms)
        return self._ask(queue.broker, "reader", command, FoundOffset).queue_offset

    def parts(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[list[int], int]:
        def measure(at: int) -> QueueParts:
            command = MeasureQueue(queue.topic, queue.queue_id, at, end, bytes_max, count_max)
            return self._ask(queue.broker, "reader", command, QueueParts)

        return _all_parts(measure, begin, end)

    def first_part(
        self, queue: Queue, begin: int, end: int, bytes_max: int, count_max: int = COUNT_MAX
    ) -> tuple[int, int]:
        command = MeasureQueue(queue.topic, queue.queue_id, begin, end, bytes_max, count_max, 1)
        found = self._ask(queue.broker, "reader", command, QueueParts)
        return (found.marks[0] if found.marks else found.reached), found.size_bytes

    def committed(self, group: str, queues: Collection[Queue]) -> dict[Queue, int]:
        found: dict[Queue, int] = dict.fromkeys(queues, -1)
        for broker in sorted({queue.broker for queue in queues}):
            keys = [QueueKey(q.topic, q.queue_id) for q in queues if q.broker == broker]
            for asked in _in_questions(keys):
                answer = self._ask(broker, "coordinator", FetchOffsets(group, asked), GroupOffsets)
                for each in answer.offsets:
                    found[Queue(broker, each.topic, each.queue_id)] = each.queue_offset
        return found

    def commit(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Move the group's progress there, where it is not there yet. It never goes back."""
        known = self.committed(group, list(offsets))
        for broker in sorted({queue.broker for queue in offsets}):
            mine = [
                QueueOffset(queue.topic, queue.queue_id, offset)
                for queue, offset in offsets.items()
                if queue.broker == broker and offset > known[queue]
            ]
            for asked in _in_questions(mine):
                self._ask(broker, "coordinator", CommitOffsets(group, asked), Done)

    def store_time(self, queue: Queue, offset: int) -> int | None:
        channel = self._routes.channel(self.endpoints(queue.broker).readers[0])
        command = PullMessages(queue.topic, queue.queue_id, offset, 1)
        _, payload = channel.ask(command, timeout_s=self._timeout_s)
        return decode(payload[0].buffer)[0].store_timestamp_ms if payload else None

    def _ask(self, broker: str, role: str, command: Command, kind: type[Answer]) -> Answer:
        def ask() -> Answer:
            endpoints = self.endpoints(broker)
            address = endpoints.coordinator if role == "coordinator" else endpoints.readers[0]
            name = f"the {role} of {broker}"
            try:
                return self._routes.ask(address, command, kind, self._timeout_s, name=name)
            except CometError as error:
                if error.retriable:
                    self._masters.pop(broker, None)  # it may have moved
                raise

        return self._patiently(ask)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Again and again while it may help, with pauses that grow and differ."""
        for attempt in range(self._retries + 1):
            try:
                return ask()
            except CometError as error:
                if not error.retriable or attempt == self._retries or self._closed.is_set():
                    raise
                log.warning("%s; attempt %d of %d", error, attempt + 2, self._retries + 1)
                pause = pause_s(attempt + 1, first_s=PAUSE_S, most_s=PAUSE_S_MAX)
                self._closed.wait(spread(pause))
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        self._closed.set()
        self._routes.close()


T = TypeVar("T")


def _in_questions(things: list[T]) -> Iterator[list[T]]:
    """The same, in lists of which each fits into one command."""
    for begin in range(0, len(things), QUEUES_ASKED):
        yield things[begin : begin + QUEUES_ASKED]
