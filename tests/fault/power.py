"""Power cuts of the real broker, one after the other, on the same store.

    with Disk(place, "ext4") as disk:
        campaign = PowerCuts(disk, sync=True, seed=1, logs=place)
        for _ in range(100):
            campaign.cycle()
        campaign.finish()

A cycle starts the broker, compares what is there with what was acknowledged before the last cut,
sends and commits through the front door, and cuts the power at a moment drawn by the seed: under
load, just behind a roll-over, while it starts and recovers, while it ends in order.

What is asked for, by docs/guarantees.md:

    SYNC_FLUSH    every acknowledged message is there
    ASYNC_FLUSH   the youngest may be missing: none that was acknowledged longer ago than the flush
                  interval and one flush, and none that lies before one that is there
    both          a queue has no hole, nothing is there that was not sent, keys are found, topics
                  are there, committed offsets are at most one flushConsumerOffsetInterval old

The power goes when the ioctl begins. What is answered from then on comes from a machine that would
be dark, and is no promise: while ext4 shuts down, an fdatasync under way may return 0 although the
extents it wrote were never converted (its io_end passes over that error when it is shut down).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from family import RunningBroker, pull, send_batch
from fault.disk import Disk
from patience import patient

from cometmq.protocol.commands import (
    BrokerEndpoints,
    CommitOffsets,
    FetchOffsets,
    GroupOffsets,
    ListTopics,
    PullMessages,
    PullStatus,
    QueryMessages,
    QueryResult,
    QueueKey,
    QueueOffset,
    TopicList,
)
from cometmq.protocol.errors import CometError, StoreError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.live.control import Counter
from cometmq.shm.tools.verify import verify_store

TOPIC: Final = "power"
GROUP: Final = "watchers"
QUEUES: Final = 4
WRITERS: Final = 2
BATCH: Final = 4
SEGMENT: Final = 256 << 10
FLUSH_MS: Final = 100
OFFSETS_MS: Final = 500
SLACK_S: Final = 1.0  # for one flush, and for a machine that has other things to do
LOAD_S: Final = 1.0
WHOLE_CHECK_EVERY: Final = 10  # cycles
SETTINGS: Final = {
    "mappedFileSizeCommitLog": SEGMENT,
    "maxMessageSize": SEGMENT // 4,
    "flushIntervalCommitLog": FLUSH_MS,
    "flushCommitLogLeastPages": 0,
    "flushIntervalConsumeQueue": 100,
    "flushConsumeQueueThoroughInterval": 300,
    "flushConsumerOffsetInterval": OFFSETS_MS,
}
MOMENTS: Final = {"load": 5, "roll-over": 3, "start": 2, "end": 2}  # how often each, by weight


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Acknowledged:
    number: int
    batch_at: int  # physical offset of its batch
    when: float  # time.monotonic() of the answer


@dataclass
class QueueBook:
    """What the clients know of one queue."""

    acknowledged: dict[int, Acknowledged] = field(default_factory=dict)  # by queue offset
    sent: int = 0  # messages, whatever became of them; a message's number counts them
    checked: int = 0  # queue offset; what lies below was compared after an earlier cut
    commits: list[tuple[float, int]] = field(default_factory=list)  # when answered, offset
    committing: int = 0  # the highest offset that a commit was ever sent for


def body_of(queue_id: int, number: int) -> bytes:
    """What message `number` of a queue says, of 20 bytes to 6 KiB; it can be told by its head."""
    chance = zlib.crc32(b"%d %d" % (queue_id, number))
    head = b"%d %d %08x " % (queue_id, number, chance)
    return head + (b"%08x" % chance) * (chance % 768)


def number_of(message: Message) -> int:
    queue_id, number = (int(word) for word in message.body.split(b" ", 2)[:2])
    if queue_id != message.queue_id or message.body != body_of(queue_id, number):
        raise Violation(f"queue {message.queue_id} at {message.queue_offset}: a changed body")
    return number


class Traffic:
    """Clients of one broker until it goes away. They live outside of it, and off its disk."""

    def __init__(self, endpoints: BrokerEndpoints, books: list[QueueBook]) -> None:
        self._endpoints = endpoints
        self._books = books
        self.rolled = threading.Event()  # an answer came from a new segment
        self.answered = threading.Event()
        self.over = threading.Event()
        self._segment = -1
        self._threads = [
            threading.Thread(target=self._guard, args=(self._write, number))
            for number in range(WRITERS)
        ]
        self._threads.append(threading.Thread(target=self._guard, args=(self._commit, 0)))
        self.failure: BaseException | None = None

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(patient(30))
        if self.failure is not None:
            raise self.failure

    def _guard(self, run: object, number: int) -> None:
        try:
            run(number)  # type: ignore[operator]
        except CometError as error:
            if not error.retriable:
                self.failure = error
        except BaseException as error:
            self.failure = error

    def _write(self, writer: int) -> None:
        """Each queue has one writer, which never sends anything twice."""
        with Channel(self._endpoints.commitlog) as line:
            while not self.over.is_set():
                for queue_id in range(writer, QUEUES, WRITERS):
                    self._send(line, queue_id)

    def _send(self, line: Channel, queue_id: int) -> None:
        book = self._books[queue_id]
        numbers = range(book.sent, book.sent + BATCH)
        book.sent += BATCH
        bodies = [body_of(queue_id, number) for number in numbers]
        try:
            sent = send_batch(
                line, TOPIC, queue_id, bodies, timeout_s=1, keys=f"{queue_id}-{numbers[0]}"
            )
        except CometError:
            if self.over.is_set():
                return
            raise
        now = time.monotonic()
        for number, one in zip(numbers, sent, strict=True):
            book.acknowledged[one.queue_offset] = Acknowledged(number, one.physical_offset, now)
        segment = sent[0].physical_offset // SEGMENT
        if segment > self._segment >= 0:
            self.rolled.set()
        self._segment = segment
        self.answered.set()

    def _commit(self, _: int) -> None:
        with Channel(self._endpoints.coordinator) as line:
            while not self.over.wait(0.01):
                for queue_id, book in enumerate(self._books):
                    known = max(list(book.acknowledged), default=0)
                    if known <= book.committing:
                        continue
                    book.committing = known
                    command = CommitOffsets(GROUP, [QueueOffset(TOPIC, queue_id, known)])
                    line.ask(command, timeout_s=1)
                    book.commits.append((time.monotonic(), known))


class PowerCuts:
    """One store, and all that its clients were told.

    Args:
        seed: of the moments of the cuts; what the threads do between them is not repeated.
        logs: a folder off the disk, for the broker's log.
    """

    def __init__(self, disk: Disk, *, sync: bool, seed: int, logs: Path) -> None:
        self.disk = disk
        self.sync = sync
        self.seed = seed
        self._chance = random.Random(seed)
        self._store = disk.folder / "store"
        self._log_path = logs / "broker.log"
        self._settings = SETTINGS | {"flushDiskType": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
        self.books = [QueueBook() for _ in range(QUEUES)]
        self._topics: dict[str, float] = {}  # time.monotonic() when each was there
        self._cut_at = 0.0  # time.monotonic() when the power went
        self._flushed = 0  # physical offset; the broker called it durable just before the cut
        self.cycles = 0
        self.moments: list[str] = []
        self.lost = 0  # acknowledged messages, under ASYNC_FLUSH, that went with the power
        self.topics_lost = 0  # likewise
        self.slowest_start_s = 0.0

    @property
    def acknowledged(self) -> int:
        return sum(len(book.acknowledged) for book in self.books) + self.lost

    # --- a cycle ---

    def cycle(self) -> None:
        moment = self._chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if not self.cycles:
            moment = "load"  # there is nothing to recover yet
        self.cycles += 1
        self.moments.append(moment)
        try:
            if moment == "start":
                self._cut_a_start()
            else:
                self._cut_under_load(moment)
        except BaseException as error:
            error.add_note(f"cycle {self.cycles}, cut at {moment}, seed {self.seed}")
            raise
        if self.cycles % WHOLE_CHECK_EVERY == 0:
            self._look_over()

    def _broker(self, *, wait: bool = True) -> RunningBroker:
        broker = RunningBroker(self._store, self._settings, wait=wait, log_path=self._log_path)
        self.slowest_start_s = max(self.slowest_start_s, broker.start_s)
        return broker

    def _traffic(self, broker: RunningBroker) -> Traffic:
        return Traffic(broker.endpoints, self.books)

    def _cut_a_start(self) -> None:
        broker = self._broker(wait=False)
        time.sleep(self._chance.uniform(0.0, 0.5))
        self._cut(broker, keeps_time=True)

    def _cut_under_load(self, moment: str) -> None:
        broker = self._broker()
        try:
            self.check(broker)
            self._create_topic(broker)
            with self._traffic(broker) as traffic:
                traffic.answered.wait(patient(10))
                if moment == "roll-over":
                    traffic.rolled.wait(2)
                else:
                    time.sleep(self._chance.uniform(0.0, LOAD_S))
                if moment == "end":
                    self._flushed = broker.counter(Counter.FLUSHED)
                    assert broker._process.stdin is not None
                    broker._process.stdin.close()
                    time.sleep(self._chance.uniform(0.0, 0.12))
                traffic.over.set()
                self._cut(broker)
        except BaseException:
            broker.kill_all()
            raise

    def _cut(self, broker: RunningBroker, *, keeps_time: bool = False) -> None:
        """keeps_time: nothing was acknowledged since the last cut, whose time still counts."""
        if not keeps_time:
            with contextlib.suppress(StoreError):  # it has ended in order already
                self._flushed = broker.counter(Counter.FLUSHED)
            self._cut_at = time.monotonic()
        self.disk.cut()
        broker.kill_all()
        self.disk.power_on()

    def _create_topic(self, broker: RunningBroker) -> None:
        wanted = {TOPIC: QUEUES}
        if self.cycles % 5 == 0:
            wanted[f"topic-{self.cycles}"] = 1
        for name, queues in wanted.items():
            if name not in self._topics:
                broker.create_topic(name, queues)
                self._topics[name] = time.monotonic()

    def _look_over(self) -> None:
        """An orderly end, and nothing is wrong with any file; then the whole store is read."""
        broker = self._broker()
        with broker:
            for book in self.books:
                book.checked = 0
            self.check(broker)
        if found := verify_store(self._store).findings:
            raise Violation(f"{len(found)} findings, the first: {found[0]}\n{broker.log[-4000:]}")

    def finish(self) -> None:
        self._look_over()
        self.disk.check()

    # --- judging ---

    def check(self, broker: RunningBroker) -> None:
        """Compare what is there with what was told, and forget what may rightly be gone."""
        if not self._topics:
            return
        try:
            self._check_topics(broker)
            if TOPIC not in self._topics:
                self._check_lost([{}] * QUEUES)
                for book in self.books:
                    book.commits, book.committing = [], 0
                return
            stored = [self._check_queue(broker, queue_id) for queue_id in range(QUEUES)]
            self._check_lost(stored)
            self._check_keys(broker)
            self._check_commits(broker)
        except Violation as error:
            error.add_note(broker.log[-4000:])
            raise

    def _check_topics(self, broker: RunningBroker) -> None:
        answer, _ = broker.coordinator.ask(ListTopics(), timeout_s=patient(30))
        assert isinstance(answer, TopicList)
        for missing in self._topics.keys() - {info.topic for info in answer.topics}:
            since = self._cut_at - self._topics[missing]
            if self.sync or since > FLUSH_MS / 1000 + SLACK_S:
                raise Violation(f"topic {missing} is gone, created {since:.3f} s before the cut")
            del self._topics[missing]  # as safe as a message
            self.topics_lost += 1

    def _check_queue(self, broker: RunningBroker, queue_id: int) -> dict[int, Message]:
        """What was not compared before; whatever is acknowledged and there is the same."""
        book = self.books[queue_id]
        stored: dict[int, Message] = {}
        expected, before = book.checked, -1
        for message in read_from(broker.reader, queue_id, book.checked):
            where = f"queue {queue_id} at {message.queue_offset}"
            if message.queue_offset != expected:
                raise Violation(f"{where}: {expected} was expected, the queue has a hole")
            number = number_of(message)
            told = book.acknowledged.get(expected)
            if told is not None and told.number != number:
                raise Violation(f"{where}: message {number}, acknowledged was {told.number}")
            if not before < number < book.sent:
                raise Violation(f"{where}: message {number} behind {before}")
            stored[expected] = message
            expected, before = expected + 1, number
        return stored

    def _may_be_lost(self, told: Acknowledged) -> bool:
        if told.when >= self._cut_at:  # it was heard from a machine without power
            return True
        young = told.when > self._cut_at - FLUSH_MS / 1000 - SLACK_S
        return not self.sync and young and told.batch_at >= self._flushed

    def _check_lost(self, stored: list[dict[int, Message]]) -> None:
        for queue_id, (book, found) in enumerate(zip(self.books, stored, strict=True)):
            lost = {
                at: told
                for at, told in book.acknowledged.items()
                if at >= book.checked and at not in found
            }
            for at, told in lost.items():
                if not self._may_be_lost(told):
                    raise Violation(
                        f"queue {queue_id} at {at}, physical offset {told.batch_at}, is lost with "
                        f"{len(lost) - 1} others: acknowledged {self._cut_at - told.when:.3f} s "
                        f"before the cut, flushed was up to {self._flushed}"
                    )
                del book.acknowledged[at]
                self.lost += 1
            book.checked = max(found, default=book.checked - 1) + 1

    def _check_keys(self, broker: RunningBroker) -> None:
        """The first message of an acknowledged batch is found by its key; a few of them are."""
        for queue_id, book in enumerate(self.books):
            batches = [t for t in list(book.acknowledged.values())[-200:] if t.number % BATCH == 0]
            for told in self._chance.sample(batches, min(3, len(batches))):
                found = query(broker.reader, f"{queue_id}-{told.number}")
                numbers = [number_of(message) for message in found]
                if told.number not in numbers:
                    raise Violation(f"queue {queue_id}: {told.number} is not found by its key")

    def _check_commits(self, broker: RunningBroker) -> None:
        keys = [QueueKey(TOPIC, queue_id) for queue_id in range(QUEUES)]
        answer, _ = broker.coordinator.ask(FetchOffsets(GROUP, keys), timeout_s=patient(30))
        assert isinstance(answer, GroupOffsets)
        # Under SYNC_FLUSH the ledger is on the disk before a commit is answered.
        oldest = self._cut_at - (0 if self.sync else OFFSETS_MS / 1000 + SLACK_S)
        for book, kept in zip(self.books, answer.offsets, strict=True):
            due = max((offset for when, offset in book.commits if when < oldest), default=-1)
            where = f"queue {kept.queue_id}: committed {kept.queue_offset}"
            if kept.queue_offset < min(due, book.checked):
                raise Violation(f"{where}, {due} was long synced")
            if kept.queue_offset > book.committing:
                raise Violation(f"{where}, never more than {book.committing} was asked for")
            if kept.queue_offset > book.checked:
                raise Violation(
                    f"{where}, but the queue ends at {book.checked}: what comes next is skipped"
                )
            book.committing = max(0, kept.queue_offset)
            book.commits = [(0.0, kept.queue_offset)]


# --- reading --------------------------------------------------------------------------------------


def read_from(line: Channel, queue_id: int, queue_offset: int) -> Iterator[Message]:
    """A queue's messages from an offset to its end, in the order they are served."""
    while True:
        answer, messages = pull(line, PullMessages(TOPIC, queue_id, queue_offset, 4096, 1 << 20, 0))
        yield from messages
        queue_offset = answer.next_queue_offset
        if answer.status != PullStatus.FOUND:
            return


def query(line: Channel, key: str) -> list[Message]:
    """All that a key finds, once the index has reached the log's end."""
    deadline = time.monotonic() + patient(60)
    while True:
        answer, payload = line.ask(QueryMessages(TOPIC, key), timeout_s=patient(30))
        assert isinstance(answer, QueryResult)
        if answer.count or answer.indexed_physical_offset >= answer.end_physical_offset:
            return decode(payload[0].buffer) if payload else []
        if time.monotonic() > deadline:
            raise Violation(f"the index does not reach the log's end: {answer}")


def cut_power(place: Path, kind: str, *, sync: bool, cuts: int, seed: int) -> PowerCuts:
    """A whole campaign on a disk of its own."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(Disk(place, kind))
        campaign = PowerCuts(disk, sync=sync, seed=seed, logs=place)
        while disk.cuts < cuts:
            campaign.cycle()
        campaign.finish()
    return campaign
