"""Questions about queues: where they begin and end, offsets by time, how many bytes lie between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.protocol.commands import (
    Command,
    DescribeQueues,
    FoundOffset,
    FoundOffsets,
    GetMessageAt,
    GetQueueRange,
    HeldQueue,
    ListQueues,
    MeasureQueue,
    PullResult,
    PullStatus,
    QueueKey,
    QueueList,
    QueueRange,
    QueueRanges,
    QueueReach,
    SearchOffset,
    SearchOffsets,
)
from cometmq.protocol.errors import BadRequest, CometError, MessageNotFound, OffsetIllegal
from cometmq.protocol.names import HIDDEN_TOPICS
from cometmq.shm.live.control import Counter
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.reading.store_reader import MARKS_MAX, StoreReader
from cometmq.shm.state.identity import read_identity

QUEUES_MAX: Final = 65_536  # in one question
SEARCHES_MAX: Final = 1_024  # likewise; each is a binary search
LISTED_MAX: Final = 1_024  # queues in one answer to ListQueues
DEFER_S: Final = 0.5  # a question waits for the dispatcher
DEFERRED_MAX: Final = 1_024
OF_QUEUES: Final = frozenset(
    (GetQueueRange, SearchOffset, SearchOffsets, DescribeQueues, MeasureQueue, ListQueues)
)


class Deferred(HeldRequest[None]):
    """A question about queues, and the end of the log when it came."""

    __slots__ = ("wrote",)

    def __init__(self, request: Request, wrote: int) -> None:
        super().__init__(None, request, time.monotonic() + DEFER_S)
        self.wrote = wrote


class Questions:
    """Whoever has got a message, or was told that it is stored, sees it counted: what is asked of
    queues waits until all is dispatched that was written when it was asked; not for long.

    Args:
        handle: answers one now.
    """

    def __init__(
        self,
        actor: ServiceActor,
        family: Family,
        table: QueueTable,
        store: StoreReader,
        dispatched: Dispatched,
        handle: Callable[[Request], None],
    ) -> None:
        self._store = store
        self._dispatched = dispatched
        self._handle = handle
        self._table = table
        self._cover = family.control.read(family.cover)
        self._flushed = family.control.read(Counter.FLUSHED)
        self._store_id = read_identity(family.store).store_id
        self._segment_bytes = family.settings.mapped_file_size_commit_log_bytes
        self._deferred: TimedRequests[None, Deferred] = TimedRequests(
            actor, "questions", DEFERRED_MAX, lambda held: handle(held.request), DEFERRED_MAX
        )

    # --- waiting for the dispatcher ---

    def defers(self, request: Request) -> bool:
        """Whether it has to wait, which is seen to then."""
        wrote = self._cover.value
        if self._dispatched.value >= wrote or not self._deferred.has_room(request):
            return False
        self._deferred.add(Deferred(request, wrote))
        self.answer_deferred()  # it may be there meanwhile
        return True

    def answer_deferred(self) -> None:
        if not self._deferred:
            return
        self._dispatched.arm()
        dispatched = self._dispatched.value
        while (first := self._deferred.first) is not None and first.wrote <= dispatched:
            self._handle(self._deferred.release(first))

    def settle(self, error: CometError) -> None:
        self._deferred.fail_all(error)

    # --- answers ---

    def on_get_queue_range(self, command: GetQueueRange, _request: Request) -> Command:
        found = self._store.positions.queue_range(command.topic, command.queue_id)
        return QueueRange(*(found or (0, 0)))

    def on_search_offset(self, command: SearchOffset, _request: Request) -> Command:
        return FoundOffset(
            self._store.offset_by_time(
                command.topic, command.queue_id, command.timestamp_ms, upper=command.upper
            )
        )

    def on_search_offsets(self, command: SearchOffsets, _request: Request) -> Command:
        _check_count(command.queues, SEARCHES_MAX)
        return FoundOffsets(
            [
                self._store.offset_by_time(
                    key.topic, key.queue_id, command.timestamp_ms, upper=command.upper
                )
                for key in command.queues
            ]
        )

    def on_get_message_at(self, command: GetMessageAt, request: Request) -> Command | None:
        message = self._store.record_at(command.physical_offset)
        if message.topic in HIDDEN_TOPICS:  # which is the broker's own
            raise MessageNotFound(f"no message begins at {command.physical_offset}")
        next_offset = message.queue_offset + 1
        answer = PullResult(PullStatus.FOUND, next_offset, message.queue_offset, next_offset, 1)
        request.reply(answer, (message.record,))
        return None

    def on_describe_queues(self, command: DescribeQueues, _request: Request) -> Command:
        _check_count(command.queues, QUEUES_MAX)
        flushed = self._flushed.value if command.durable else None
        ranges = [self._queue_range(key, flushed) for key in command.queues]
        return QueueRanges(self._store_id, ranges, self._segment_bytes)

    def on_list_queues(self, command: ListQueues, _request: Request) -> Command:
        if command.topic:
            ids = sorted(self._table.ranges_of(command.topic))
            queues = [(command.topic, queue_id) for queue_id in ids]
        else:
            queues = [key for key in self._table.queues() if key[0] not in HIDDEN_TOPICS]  # by age
        begin = max(0, command.after)
        found = []
        for topic, queue_id in queues[begin : begin + LISTED_MAX]:
            reach = self._queue_range(QueueKey(topic, queue_id), None)
            low, high = reach.min_queue_offset, reach.max_queue_offset
            found.append(HeldQueue(topic, queue_id, low, high))
        end = begin + len(found)
        return QueueList(found, end if end < len(queues) else 0)

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


def _check_count(queues: Sequence[QueueKey], count_max: int) -> None:
    if len(queues) > count_max:
        raise BadRequest(f"{len(queues)} queues in one question, at most {count_max}")
