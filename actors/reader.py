"""Messages out."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar, Final

from cometmq.actors.family import Family
from cometmq.actors.indexing import index_shape
from cometmq.actors.local_clients import LocalClients
from cometmq.actors.service import Request, ServiceActor, Timer
from cometmq.protocol.channel import Channel
from cometmq.protocol.commands import (
    AttendQueues,
    Command,
    DescribeQueues,
    FoundOffset,
    GetLocal,
    GetMessageAt,
    GetQueueRange,
    MeasureQueue,
    PullMessages,
    PullResult,
    PullStatus,
    QueryMessages,
    QueryResult,
    QueueKey,
    QueueRange,
    QueueRanges,
    QueueReach,
    RebuildIndex,
    SearchOffset,
)
from cometmq.protocol.errors import (
    BadRequest,
    MessageNotFound,
    NoPermission,
    OffsetIllegal,
    ShuttingDown,
    SubscriptionIllegal,
    SystemBusy,
)
from cometmq.protocol.tags import parse_tags
from cometmq.shm._kernel import ReadCell
from cometmq.shm.control import Counter, Doorbell, Phase
from cometmq.shm.identity import read_identity
from cometmq.shm.index_file import IndexReader, carries
from cometmq.shm.mapped_reader import PULL_STATUS
from cometmq.shm.queue_table import APPENDED_FILE, AppendedTable
from cometmq.shm.store_reader import (
    MARKS_MAX,
    GetResult,
    GetStatus,
    LivePositions,
    ReadLimits,
    StoreReader,
)

log = logging.getLogger(__name__)

COUNT_MAX: Final = 65_536  # messages in one answer, whatever was asked for
BYTES_MAX: Final = 4 * 1_048_576
SUSPEND_MS_MAX: Final = 60_000
ROUNDS_MAX: Final = 64  # stretches of a queue looked through for one filtered pull
HELD_MAX: Final = 100_000
TAGS_MAX: Final = 32  # as many as the kernel compares
QUERY_COUNT_MAX: Final = 1024
QUERY_LOOKED_AT_MAX: Final = 65_536  # entries of one hash, for one query
QUEUES_MAX: Final = 65_536  # in one question
# With more of them it is better that the dispatcher looks at each message once:
TAIL_HELD_MAX: Final = 64  # held pulls
UNTOLD_MAX: Final = 4  # of these, at queues that the writer does not tell of
DEFER_S: Final = 0.5  # a question waits for the dispatcher
DEFERRED_MAX: Final = 1_024
QUESTIONS: Final = (GetQueueRange, SearchOffset, DescribeQueues, MeasureQueue)


@dataclass(slots=True)
class Held:
    """A pull that waits for a message."""

    request: Request
    command: PullMessages
    queue_offset: int  # everything below was looked through
    deadline: float  # time.monotonic()


@dataclass(slots=True)
class Deferred:
    """A question about queues, and the end of the log when it came."""

    request: Request
    wrote: int
    deadline: float  # time.monotonic()


class ReaderActor(ServiceActor):
    """Answers pulls and questions about the store; holds pulls until there is something for them.

    Writes, alone: nothing.
    Wakes on: PullMessages and queries; while a pull is held `wrote`, or `dispatched` where the
    log's tail is not looked at (shm/tail.py), and a timer for its end; `min_offset`, to let go of
    what is deleted.
    Dies of nothing that matters to others: clients pull again.
    """

    role = "reader"
    answered_later: ClassVar[tuple[type[Command], ...]] = (
        PullMessages,
        GetMessageAt,
        QueryMessages,
        AttendQueues,
        *QUESTIONS,
    )

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._family = family
        settings = family.settings
        self._table = family.queue_table()
        self._appended = AppendedTable.open(family.store / APPENDED_FILE)
        self._told: dict[tuple[str, int], ReadCell] = {}  # words of queues, by (topic, queue id)
        self._untold = 0  # pulls held at other queues, as far as was looked
        positions = LivePositions(family.control, self._table)
        self._dispatched = family.control.sleep_on(Counter.DISPATCHED, family.doorbell)
        self._wrote = family.control.sleep_on(Counter.WROTE, family.doorbell)
        self._min = family.control.sleep_on(Counter.MIN_OFFSET, family.doorbell)
        self._store = StoreReader(
            family.store,
            segment_bytes=settings.mapped_file_size_commit_log_bytes,
            queue_segment_bytes=settings.mapped_file_size_consume_queue_bytes,
            positions=positions,
            limits=ReadLimits(
                hot_bytes=BYTES_MAX,
                hot_count=COUNT_MAX,
                cold_bytes=BYTES_MAX,
                cold_count=COUNT_MAX,
                scan_bytes=settings.max_filter_message_size,
                skip_removed=False,  # one unreadable entry hides no others
            ),
        )
        if family.shows_tail:
            self._store.read_tail(family.control)
        self._tail_is_stuck = False  # somebody waits for what only the dispatcher can tell
        self._index = IndexReader(family.store, index_shape(family))
        self._indexed = family.control.read(Counter.INDEXED)
        self._flushed = family.control.read(Counter.FLUSHED)
        self._store_id = read_identity(family.store).store_id
        self._dispatcher = Channel(family.addresses["dispatcher"], "dispatcher")
        self._local = LocalClients(self, family, self._dispatcher)
        self._napping = family.control.read(Counter.NAPPING)
        self._wait_ms_max = SUSPEND_MS_MAX if settings.long_polling_enable else 0
        self._held: list[Held] = []
        self._end_timer: Timer | None = None  # for the first of them whose time is up
        self._deferred: deque[Deferred] = deque()  # as they came, and so as they are due
        self._log_min = 0  # what lies below is not mapped any more
        self._answered = 0

    def on_start(self) -> None:
        self._family.wait_for(Counter.PHASE, Phase.SERVING)
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._let_go_of_deleted()

    # --- pulls ---

    def on_pull_messages(self, command: PullMessages, request: Request) -> Command | None:
        """Answers through the request: the records travel behind the answer."""
        status, result = self._read(command, command.queue_offset)
        waits = status in (PullStatus.NO_NEW_MESSAGE, PullStatus.NO_MATCHED_MESSAGE)
        at_end = result.next_queue_offset >= result.max_queue_offset
        if self._wait_ms_max and command.suspend_ms > 0 and waits and at_end:
            wait_s = min(command.suspend_ms, self._wait_ms_max) / 1000
            self._hold(Held(request, command, result.next_queue_offset, time.monotonic() + wait_s))
            return None
        self._answer_pull(request, status, result)
        return None

    def _answer_pull(self, request: Request, status: int, result: GetResult) -> None:
        answer = PullResult(
            status,
            result.next_queue_offset,
            result.min_queue_offset,
            result.max_queue_offset,
            result.count,
        )
        self._answered += result.count
        request.reply(answer, () if result.payload is None else (result.payload,))

    def _read(self, command: PullMessages, queue_offset: int) -> tuple[int, GetResult]:
        """Look from `queue_offset` on until something matches, for a bounded number of rounds."""
        tags = filter_of(command.tags)
        for _ in range(ROUNDS_MAX):
            result = self._store.get_message(
                command.topic,
                command.queue_id,
                queue_offset,
                min(max(command.max_count, 1), COUNT_MAX),
                max_bytes=min(max(command.max_bytes, 1), BYTES_MAX),
                tags=tags,
                check_crc=command.check_crc,
            )
            if result.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                empty = PullStatus.OFFSET_MOVED if queue_offset else PullStatus.NO_NEW_MESSAGE
                return empty, result
            status = PULL_STATUS[result.status]
            moved_on = result.next_queue_offset > queue_offset
            if status != PullStatus.NO_MATCHED_MESSAGE or not moved_on:
                return status, result
            if result.next_queue_offset >= result.max_queue_offset:
                return status, result
            queue_offset = result.next_queue_offset
        return PullStatus.NO_MATCHED_MESSAGE, result

    # --- held pulls ---

    def _hold(self, held: Held) -> None:
        if len(self._held) >= HELD_MAX:
            raise SystemBusy(f"{HELD_MAX} pulls are held already")
        self._held.append(held)
        if self._end_timer is None or held.deadline < self._end_timer.due:
            self._set_end_timer(held.deadline)
        was_stuck = self._tail_is_stuck
        self._arm()
        # It came between looking and arming; or it takes the dispatcher to tell.
        if self._has_news(held) or self._tail_is_stuck != was_stuck:
            self._serve_held()

    def _arm(self) -> None:
        """Sleep on `wrote`; or on `dispatched`, and end the dispatcher's nap: somebody waits."""
        if self._looks_at_tail and not self._tail_is_stuck:
            self._wrote.arm()
            return
        self._arm_dispatched()

    def _arm_dispatched(self) -> None:
        self._dispatched.arm()
        if self._napping.value:
            os.eventfd_write(self._family.doorbells[Doorbell.DISPATCHER], 1)

    @property
    def _looks_at_tail(self) -> bool:
        return self._store.tail is not None and len(self._held) <= TAIL_HELD_MAX

    def _has_news(self, held: Held) -> bool:
        topic, queue_id = held.command.topic, held.command.queue_id
        found = self._store.positions.queue_range(topic, queue_id)
        if found is not None and found.max_queue_offset > held.queue_offset:
            return True
        return self._looks_at_tail and self._tail_has_news(topic, queue_id, held.queue_offset)

    def _tail_has_news(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Looks through the log only where the writer tells that something has come, or does not
        tell of the queue at all."""
        assert self._store.tail is not None
        word = self._word_of(topic, queue_id)
        if word is not None and word.value <= queue_offset:
            return False
        self._untold += word is None
        if self._untold > UNTOLD_MAX:
            self._tail_is_stuck = True
            return False
        tail = self._store.tail.of(topic, queue_id)
        self._tail_is_stuck = self._tail_is_stuck or tail.is_stuck
        return tail.end > queue_offset

    def _word_of(self, topic: str, queue_id: int) -> ReadCell | None:
        key = topic, queue_id
        word = self._told.get(key)
        if word is None:
            word = self._appended.told(self._table.slot_of(topic, queue_id))
            if word is not None:
                self._told[key] = word
        return word

    def on_doorbell(self) -> None:
        self._let_go_of_deleted()
        self._serve_held()
        self._answer_deferred()

    def _let_go_of_deleted(self) -> None:
        """Armed first: what is deleted while we look wakes us again."""
        self._min.arm()
        if self._min.value > self._log_min:
            self._log_min = self._min.value
            self._store.let_go_of_deleted()
            self._local.tell_of_deleted(self._log_min)

    def _serve_held(self) -> None:
        """Answer who has something now, and sleep on the rest. Armed first: nothing is missed."""
        if not self._held:
            return
        was_stuck = self._tail_is_stuck
        self._arm()
        self._tail_is_stuck, self._untold = False, 0  # it is found out again
        still = []
        for held in self._held:
            if self._has_news(held):
                status, result = self._read(held.command, held.queue_offset)
                held.queue_offset = result.next_queue_offset
                if status not in (PullStatus.NO_NEW_MESSAGE, PullStatus.NO_MATCHED_MESSAGE):
                    self._answer_pull(held.request, status, result)
                    continue
            still.append(held)
        self._held = still
        if not still:
            self._wrote.disarm()
            if not self._deferred:
                self._dispatched.disarm()
        if self._tail_is_stuck and not was_stuck:
            self.call_soon(self._serve_held)  # which then sleeps on the dispatcher

    def _set_end_timer(self, due: float) -> None:
        """One timer for all of them: most pulls are answered long before their time is up."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self.after(max(0.0, due - time.monotonic()), self._end_overdue)

    def _end_overdue(self) -> None:
        """Time is up: the client learns how far was looked, and asks again."""
        self._end_timer = None
        now = time.monotonic()
        overdue = [held for held in self._held if held.deadline <= now]
        self._held = [held for held in self._held if held.deadline > now]
        if self._held:
            self._set_end_timer(min(held.deadline for held in self._held))
        for held in overdue:
            status, result = self._read(held.command, held.queue_offset)
            self._answer_pull(held.request, status, result)

    # --- who reads by himself ---

    def on_get_local(self, command: GetLocal, _request: Request) -> Command:
        return self._local.describe(command)

    def on_attend_queues(self, command: AttendQueues, request: Request) -> Command | None:
        self._local.attend(command, request)
        return None

    # --- questions ---

    def handle(self, request: Request) -> None:
        """Who has got a message, or was told that it is stored, sees it counted: what is asked of
        queues waits until all is dispatched that was written when it was asked; not for long."""
        wrote = self._wrote.value
        behind = self._store.tail is not None and self._dispatched.value < wrote
        waits = behind and isinstance(request.command, QUESTIONS)
        if not waits or len(self._deferred) >= DEFERRED_MAX:
            super().handle(request)
            return
        self._deferred.append(Deferred(request, wrote, time.monotonic() + DEFER_S))
        if len(self._deferred) == 1:
            self.after(DEFER_S, self._answer_deferred)
        self._answer_deferred()  # it may be there meanwhile

    def _answer_deferred(self) -> None:
        if not self._deferred:
            return
        self._arm_dispatched()
        dispatched, now, answered = self._dispatched.value, time.monotonic(), False
        while self._deferred:
            first = self._deferred[0]
            if first.wrote > dispatched and first.deadline > now:
                break
            super().handle(self._deferred.popleft().request)
            answered = True
        if self._deferred and answered:
            self.after(max(0.0, self._deferred[0].deadline - now), self._answer_deferred)

    def on_get_queue_range(self, command: GetQueueRange, _request: Request) -> Command:
        found = self._store.positions.queue_range(command.topic, command.queue_id)
        return QueueRange(*(found or (0, 0)))

    def on_search_offset(self, command: SearchOffset, _request: Request) -> Command:
        return FoundOffset(
            self._store.offset_by_time(
                command.topic, command.queue_id, command.timestamp_ms, upper=command.upper
            )
        )

    def on_get_message_at(self, command: GetMessageAt, request: Request) -> Command | None:
        message = self._store.record_at(command.physical_offset)
        next_offset = message.queue_offset + 1
        answer = PullResult(PullStatus.FOUND, next_offset, message.queue_offset, next_offset, 1)
        request.reply(answer, (message.record,))
        return None

    def on_describe_queues(self, command: DescribeQueues, _request: Request) -> Command:
        if len(command.queues) > QUEUES_MAX:
            raise BadRequest(f"{len(command.queues)} queues in one question, at most {QUEUES_MAX}")
        flushed = self._flushed.value if command.durable else None
        ranges = [self._queue_range(key, flushed) for key in command.queues]
        segment_bytes = self._family.settings.mapped_file_size_commit_log_bytes
        return QueueRanges(self._store_id, ranges, segment_bytes)

    def _queue_range(self, key: QueueKey, flushed: int | None) -> QueueReach:
        low, high = self._store.positions.queue_range(key.topic, key.queue_id) or (0, 0)
        if flushed is not None and high > low:
            high = max(low, self._store.end_below(key.topic, key.queue_id, flushed))
        return QueueReach(low, high)

    def on_measure_queue(self, command: MeasureQueue, _request: Request) -> Command:
        low, high = self._store.positions.queue_range(command.topic, command.queue_id) or (0, 0)
        if not low <= command.begin <= command.end <= high:
            raise OffsetIllegal(
                f"[{command.begin}, {command.end}) of {command.topic}/{command.queue_id} is "
                f"outside [{low}, {high})"
            )
        return self._store.parts(
            command.topic,
            command.queue_id,
            command.begin,
            command.end,
            bytes_max=max(1, command.bytes_max),
            count_max=max(1, command.count_max),
            marks_max=min(max(1, command.marks_max), MARKS_MAX),
        )

    # --- queries by key ---

    def on_query_messages(self, command: QueryMessages, request: Request) -> Command | None:
        if not self._family.settings.message_index_enable:
            raise NoPermission("messageIndexEnable is off: messages cannot be found by key")
        indexed = self._indexed.value  # before looking: what is said to be indexed was seen
        records = self._find(command)
        self._report_damage()
        answer = QueryResult(len(records), indexed, self._store.positions.log_range()[1])
        request.reply(answer, (b"".join(reversed(records)),) if records else ())
        return None

    def _find(self, command: QueryMessages) -> list[bytes]:
        """Records with the key, the newest first, as many as one answer may hold."""
        wanted = min(max(command.max_count, 1), QUERY_COUNT_MAX)
        found: dict[int, bytes] = {}
        total_bytes = 0
        offsets = self._index.offsets(
            command.topic, command.key, command.begin_ms, command.end_ms, exact=True
        )
        for offset in islice(offsets, QUERY_LOOKED_AT_MAX):
            if len(found) == wanted:
                break
            if offset in found:
                continue
            record = self._matching(offset, command)
            if record is None:
                continue
            total_bytes += len(record)
            if found and total_bytes > BYTES_MAX:
                break
            found[offset] = record
        return [found[offset] for offset in sorted(found, reverse=True)]

    def _matching(self, offset: int, command: QueryMessages) -> bytes | None:
        """The record, unless it is gone, has another key of the same hash, or another time."""
        try:
            message = self._store.record_at(offset)
        except MessageNotFound:
            return None
        if not command.begin_ms <= message.store_timestamp_ms <= command.end_ms:
            return None
        same = carries(message, command.topic, command.key, unique=command.unique)
        return message.record if same else None

    def _report_damage(self) -> None:
        """The dispatcher builds damaged index files again."""
        while self._index.damaged:
            name = self._index.damaged.pop()
            log.error("index file %s is damaged", name)
            self._dispatcher.tell(RebuildIndex(name))

    def settle(self) -> None:
        """Let go of held pulls: their clients are told to come again."""
        for held in self._held:
            held.request.fail(ShuttingDown("the broker is shutting down"))
        self._held.clear()
        for each in self._deferred:
            each.request.fail(ShuttingDown("the broker is shutting down"))
        self._deferred.clear()
        self._local.settle()
        self._dispatcher.close()
        self._appended.close()

    def statistics(self) -> dict[str, Any]:
        return {"held_pulls": len(self._held), "messages_out": self._answered}


@lru_cache(maxsize=4096)
def filter_of(expression: str) -> frozenset[str] | None:
    """The tags of an expression, None for all. Raises SubscriptionIllegal."""
    tags = parse_tags(expression)
    if tags is not None and len(tags) > TAGS_MAX:
        raise SubscriptionIllegal(f"{len(tags)} tags in one expression, at most {TAGS_MAX}")
    return tags
