"""A broker in this process, on real sockets, that does as it is told. No tests here."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import Any, TypeVar

import pykka
import zmq
from patience import patient

from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    AckPopped,
    BeginGroup,
    BrokerEndpoints,
    BrokerList,
    BrokerRoute,
    Command,
    CommitOffsets,
    DescribeQueues,
    Done,
    EndTransactions,
    EnsureTopic,
    FetchOffsets,
    FoundOffset,
    FoundOffsets,
    GetQueueRange,
    GetRoute,
    GroupOffsets,
    GroupShare,
    HeldQueue,
    JoinGroup,
    LeaveGroup,
    ListBrokers,
    ListQueues,
    OffsetsReset,
    PopMessages,
    Popped,
    PoppedMessages,
    PopsSettled,
    PullMessages,
    PullResult,
    PullStatus,
    QueueKey,
    QueueList,
    QueueOffset,
    QueueRange,
    QueueRanges,
    QueueReach,
    ResetOffsets,
    ResetQueue,
    SearchOffset,
    SearchOffsets,
    SectionResult,
    SendMessages,
    SendResult,
    Subscription,
    TopicInfo,
    TopicRoute,
    TransactionEnd,
    TransactionsEnded,
)
from cometmq.protocol.errors import CometError, NotOwner, TopicNotExist
from cometmq.protocol.tags import parse_tags
from cometmq.shm.kernel.codec import decode
from cometmq.shm.kernel.live import QueueCursor
from cometmq.shm.kernel.store import LogAppender

ANYWHERE = "tcp://127.0.0.1:*"
LOCALHOST = bytes([127, 0, 0, 1])
SEGMENT_BYTES = 64 * 1024 * 1024

CommandT = TypeVar("CommandT", bound=Command)
Key = tuple[str, int]


class FakeBroker(ServiceActor):
    """Name server, commitlog, reader and coordinator at one address.

    Tests set the public fields: from their own thread, which is fine for what they are.
    """

    role = "fake"

    def __init__(
        self,
        address: str = ANYWHERE,
        *,
        queues: int = 4,
        create: bool = True,
        name: str = "b",
        port: int = 10911,
        broker_id: int = 0,
        faults: Sequence[Any] = (),
        topics: Iterable[str] = (),
    ) -> None:
        super().__init__(bind=[(address, False)])
        self.me = self
        self.heard = threading.Condition()  # notified after every command
        self.address = self.addresses[0]
        self.queues = queues
        self.create = create
        self.name = name
        self.broker_id = broker_id
        self.far_behind = False  # what it says of what it answers
        self.reads = 0, 1  # the replicas that a group reads from
        self.topics = {topic: TopicInfo(topic, queues, queues) for topic in topics}
        self.commands: list[Command] = []  # everything that was asked, in order
        self.batches: dict[Key, list[list[bytes]]] = defaultdict(list)  # bodies, as they came
        self.records: dict[Key, list[bytes]] = defaultdict(list)
        self.cursors: dict[Key, QueueCursor] = {}
        self.faults: list[Any] = list(
            faults
        )  # one a SendMessages: an error, a code, "silent", or None
        self.ends: list[TransactionEnd] = []
        self.tells_ends = True
        self.hold = threading.Event()  # cleared: SendMessages wait unanswered
        self.hold.set()
        self.held: list[tuple[Request, Command]] = []
        self.pulls: list[tuple[PullMessages, Request]] = []  # parked until something comes
        self.popped: dict[Key, int] = defaultdict(int)  # how many of a queue
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.share: list[QueueKey] | None = None  # None: everything that is subscribed
        self.share_version = 1
        self.epochs: dict[Key, int] = {}  # 1 where nothing stands
        self.subscriptions: list[Subscription] = []
        self.joins: list[tuple[JoinGroup, Request]] = []
        self.commit_error: CometError | None = None
        self.join_error: CometError | None = None
        self.moved_to: str | None = None  # the route names this address
        self.peers: list[FakeBroker] = []  # other brokers that this one, as name server, knows
        self._appender = LogAppender(LOCALHOST + port.to_bytes(4, "big"), 4 * 1_048_576)
        self._log = memoryview(mmap(-1, SEGMENT_BYTES))  # no memory before it is written
        self._appender.attach(self._log, 0, 0)

    def handle(self, request: Request) -> None:
        with self.heard:  # nobody looks between the answer and the note of it
            super().handle(request)
            self.commands.append(request.command)
            self.heard.notify_all()

    # --- routes ---

    @property
    def endpoints(self) -> BrokerEndpoints:
        at = self.moved_to or self.address
        return BrokerEndpoints("c", self.name, self.broker_id, at, [at], at)

    def on_list_brokers(self, _command: ListBrokers, _request: Request) -> Command:
        return BrokerList([each.endpoints for each in (self, *self.peers)])

    def on_get_route(self, command: GetRoute, _request: Request) -> Command:
        routes = [
            BrokerRoute(each.endpoints, each.topics[command.topic])
            for each in (self, *self.peers)
            if command.topic in each.topics
        ]
        if not routes:
            raise TopicNotExist(f"topic {command.topic} is unknown")
        return TopicRoute(command.topic, routes)

    def on_ensure_topic(self, command: EnsureTopic, request: Request) -> Command:
        if command.topic not in self.topics:
            if not self.create:
                raise TopicNotExist(f"topic {command.topic} may not be created")
            self.topics[command.topic] = TopicInfo(command.topic, self.queues, self.queues)
        return self.on_get_route(GetRoute(command.topic), request)

    # --- sending ---

    def on_send_messages(self, command: SendMessages, request: Request) -> Command | None:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "silent":
            return None
        if isinstance(fault, CometError):
            raise fault
        if isinstance(fault, int) and fault != 10:
            return SendResult([SectionResult(fault, text=f"fault {fault}")] * len(command.sections))
        results = []
        for section, frame in zip(command.sections, request.payload, strict=True):
            first = self._store((section.topic, section.queue_id), frame.buffer, section.count)
            places = (
                [first + each for each in range(section.count)] if section.producer_group else []
            )
            results.append(SectionResult(fault or 0, first, 0, physical_offsets=[*places]))
        answer = SendResult(results, 1_700_000_000_000, "127.0.0.1:10911")
        self._serve_parked()
        if command.oneway:
            return None
        if fault == "lost":  # stored, but nobody hears of it
            return None
        if not self.hold.is_set():
            self.held.append((request, answer))
            return None
        return answer

    def on_end_transactions(self, command: EndTransactions, _request: Request) -> Command | None:
        self.ends += command.ends
        count = len(command.ends)
        return TransactionsEnded([0] * count, [""] * count) if self.tells_ends else None

    def release(self) -> None:
        """Answer what was held; called through the actor's own thread."""
        self.hold.set()
        held, self.held = self.held, []
        for request, answer in held:
            request.reply(answer)

    def _store(self, key: Key, batch: memoryview, count: int) -> int:
        cursor = self.cursors.get(key)
        if cursor is None:
            cursor = self.cursors[key] = QueueCursor(key[0], key[1], 0)
        first = int(cursor.next_offset)
        at = self._appender.append_batch(cursor, batch, count)
        end = int(self._appender.physical_offset)
        messages = decode(bytes(self._log[at:end]))
        self.batches[key].append([message.body for message in messages])
        self.records[key] += [message.record for message in messages]
        return first

    def bodies(self, topic: str, queue_id: int) -> list[bytes]:
        return [body for batch in self.batches[topic, queue_id] for body in batch]

    # --- reading ---

    def on_pull_messages(self, command: PullMessages, request: Request) -> Command | None:
        answered = self._answer_pull(command, request)
        if not answered:
            self.pulls.append((command, request))
        return None

    def _answer_pull(self, command: PullMessages, request: Request) -> bool:
        records = self.records[command.topic, command.queue_id]
        start, end = command.queue_offset, len(records)
        if not 0 <= start <= end:
            moved = max(0, min(start, end))
            request.reply(PullResult(PullStatus.OFFSET_MOVED, moved, 0, end))
            return True
        if start == end:
            if command.suspend_ms:
                return False
            request.reply(PullResult(PullStatus.NO_NEW_MESSAGE, start, 0, end))
            return True
        tags = parse_tags(command.tags)
        found: list[bytes] = []
        size = 0
        index = start
        while index < end and len(found) < command.max_count:
            record = records[index]
            if tags is None or decode(record, tags, False):
                if found and size + len(record) > command.max_bytes:
                    break
                found.append(record)
                size += len(record)
            index += 1
        if found:
            result = PullResult(PullStatus.FOUND, index, 0, end, len(found), self.far_behind)
            request.reply(result, [b"".join(found)])
        else:
            request.reply(PullResult(PullStatus.NO_MATCHED_MESSAGE, index, 0, end))
        return True

    def _serve_parked(self) -> None:
        parked, self.pulls = self.pulls, []
        self.pulls += [pair for pair in parked if not self._answer_pull(*pair)]

    def on_get_queue_range(self, command: GetQueueRange, _request: Request) -> Command:
        return QueueRange(0, len(self.records[command.topic, command.queue_id]))

    def on_describe_queues(self, command: DescribeQueues, _request: Request) -> Command:
        ends = [len(self.records[key.topic, key.queue_id]) for key in command.queues]
        return QueueRanges("-", [QueueReach(0, end) for end in ends])

    def on_list_queues(self, command: ListQueues, _request: Request) -> Command:
        return QueueList(
            [
                HeldQueue(topic, queue_id, 0, len(records))
                for (topic, queue_id), records in self.records.items()
                if command.topic in ("", topic)
            ]
        )

    def on_search_offset(self, command: SearchOffset, _request: Request) -> Command:
        return FoundOffset(self._offset_at(command.topic, command.queue_id, command.timestamp_ms))

    def on_search_offsets(self, command: SearchOffsets, _request: Request) -> Command:
        return FoundOffsets(
            [
                self._offset_at(key.topic, key.queue_id, command.timestamp_ms)
                for key in command.queues
            ]
        )

    def _offset_at(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        messages = decode(b"".join(self.records[topic, queue_id]))
        return sum(message.store_timestamp_ms < timestamp_ms for message in messages)

    # --- the group ---

    def on_join_group(self, command: JoinGroup, request: Request) -> Command | None:
        if self.join_error is not None:
            raise self.join_error
        if command.subscriptions != self.subscriptions:
            self.subscriptions = command.subscriptions
            self.share_version += 1
        if command.version == self.share_version and command.wait_ms:
            self.joins.append((command, request))
            return None
        return self._share_of(command)

    def _share_of(self, command: JoinGroup) -> GroupShare:
        queues = self.share
        if queues is None:
            queues = [
                QueueKey(each.topic, queue_id)
                for each in command.subscriptions
                if each.topic in self.topics
                for queue_id in range(self.topics[each.topic].read_queues)
            ]
        epochs = [self.epochs.get((key.topic, key.queue_id), 1) for key in queues]
        return GroupShare(self.share_version, queues, 1, 30_000, epochs, *self.reads)

    def give(self, queues: list[QueueKey] | None) -> None:
        """A new share; waiting members hear of it."""
        self.share = queues
        self.share_version += 1
        joins, self.joins = self.joins, []
        for command, request in joins:
            request.reply(self._share_of(command))

    def on_leave_group(self, _command: LeaveGroup, _request: Request) -> Command:
        return Done()

    def on_commit_offsets(self, command: CommitOffsets, _request: Request) -> Command:
        if self.commit_error is not None and command.member:
            raise self.commit_error
        for each in command.offsets:
            if command.member and each.epoch != self.epochs.get((each.topic, each.queue_id), 1):
                raise NotOwner(f"epoch {each.epoch} of {each.topic}/{each.queue_id} has ended")
        for each in command.offsets:
            key = (command.group, each.topic, each.queue_id)
            moves = command.seek or not command.member
            if moves or each.queue_offset > self.offsets.get(key, -1):
                self.offsets[key] = each.queue_offset
        return Done()

    def on_begin_group(self, command: BeginGroup, _request: Request) -> Command:
        known = {topic for group, topic, _ in self.offsets if group == command.group}
        for each in command.offsets:
            if each.topic not in known:
                self.offsets[command.group, each.topic, each.queue_id] = each.queue_offset
        return Done()

    def on_reset_offsets(self, command: ResetOffsets, _request: Request) -> Command:
        moved = []
        for each in command.queues:
            key = (command.group, each.topic, each.queue_id)
            before = self.offsets.get(key, -1)
            wanted = before + each.queue_offset if command.shift else each.queue_offset
            self.offsets[key] = max(each.min_queue_offset, min(wanted, each.max_queue_offset))
            moved.append(ResetQueue(each.topic, each.queue_id, before, wanted, self.offsets[key]))
        return OffsetsReset(moved)

    def on_fetch_offsets(self, command: FetchOffsets, _request: Request) -> Command:
        return GroupOffsets(
            [
                QueueOffset(
                    queue.topic,
                    queue.queue_id,
                    self.offsets.get((command.group, queue.topic, queue.queue_id), -1),
                )
                for queue in command.queues
            ]
        )

    # --- without queues ---

    def on_pop_messages(self, command: PopMessages, request: Request) -> Command | None:
        """The next one of the topic that nobody has popped; where there is none, no answer."""
        for (topic, queue_id), records in self.records.items():
            at = self.popped[topic, queue_id]
            if topic == command.topic and at < len(records):
                self.popped[topic, queue_id] = at + 1
                until_ms = round(time.time() * 1000) + command.invisible_ms
                return PoppedMessages([Popped(topic, queue_id, at, 1, at + 1, until_ms)])
        return None

    def on_ack_popped(self, command: AckPopped, _request: Request) -> Command:
        return PopsSettled([0] * len(command.acks))


class Handle:
    """A fake broker and the way to have it do something in its own thread."""

    def __init__(self, ref: pykka.ActorRef[FakeBroker]) -> None:
        self.ref = ref
        self.broker: FakeBroker = ref.proxy().me.get()
        self.address = self.broker.address

    def do(self, action: Callable[[FakeBroker], Any]) -> None:
        """Run it in the broker's thread and wait for that."""
        done = threading.Event()

        def run() -> None:
            try:
                action(self.broker)
            finally:
                done.set()

        self.broker.call_soon(run)
        assert done.wait(patient(60))

    def wait_for(self, predicate: Callable[[FakeBroker], Any]) -> None:
        """Until it holds; looked at after every command."""
        with self.broker.heard:
            assert self.broker.heard.wait_for(lambda: predicate(self.broker), patient(10))

    def asked(self, kind: type[CommandT]) -> list[CommandT]:
        """The commands of that kind, in the order in which they were answered."""
        with self.broker.heard:
            return [command for command in self.broker.commands if isinstance(command, kind)]

    def stop(self) -> None:
        self.ref.stop(timeout=patient(10))


def start_broker(address: str = ANYWHERE, **options: Any) -> Handle:
    """At an address that another has just left, it may take a moment until it is free."""
    deadline = time.monotonic() + patient(60)
    while True:
        try:
            return Handle(FakeBroker.start(address, **options))
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def fake_broker(address: str = ANYWHERE, **options: Any) -> Iterator[Handle]:
    handle = start_broker(address, **options)
    try:
        yield handle
    finally:
        handle.stop()
