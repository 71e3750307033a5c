"""Revival: what a RocketMQ broker had popped of this store, and nobody acknowledged, comes again.

Groups without queues keep what is out in the ledger here. A store that comes from RocketMQ has it
in that broker's own records, which the timers bring to its revive topic when the time is over
(`actors/tables/check_points.py`). A copy of what is left goes to the group's retry topic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import ServiceActor
from cometmq.actors.tables.check_points import CheckPoint, ReviveQueue
from cometmq.protocol.commands import (
    Command,
    CommitOffsets,
    FetchOffsets,
    GiveBackMessages,
    GivenBack,
    GroupOffsets,
    MessagesGivenBack,
    QueueKey,
    QueueOffset,
)
from cometmq.protocol.errors import CometError, MessageNotFound, MessageTooLarge
from cometmq.protocol.wire.channel import Channel, Pending
from cometmq.shm.kernel.codec import decode
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"  # RocketMQ's; its offset is that of the last record done
LOOK_S: Final = 1.0
ABSENT_S: Final = 5.0  # between two looks for a topic that does not exist
ASK_S: Final = 10.0
SETTLED_MS: Final = 5_000  # after the end of its time: acknowledgements are there by then
AGAIN_LEVEL: Final = 1
READ_COUNT: Final = 1_024  # of a queue, at a look
READ_BYTES: Final = 1_048_576
NOT_AGAIN: Final = MessageNotFound.code, MessageTooLarge.code  # the latter has been said


class Revival:
    """See the module. In a store without that topic it waits for it."""

    def __init__(
        self, actor: ServiceActor, family: Family, table: QueueTable, store: StoreReader
    ) -> None:
        self._actor = actor
        self._topic = REVIVE_PREFIX + family.settings.broker_cluster_name
        self._address = family.addresses["coordinator"]
        self._coordinator: Channel | None = None
        self._table = table
        self._store = store
        self._queues: dict[int, ReviveQueue] = {}
        self._told: dict[int, int] = {}  # what was committed, by queue
        self._waits = 0  # questions that are not answered
        self._revived = 0

    def begin(self) -> None:
        self._look()

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()

    def statistics(self) -> meters.Figures:
        return {meters.REVIVED: self._revived}

    # --- one look a second, once there is something ---

    def _look(self) -> None:
        ranges = self._table.ranges_of(self._topic)
        if not ranges:  # the timers may bring check points to it
            self._actor.after(ABSENT_S, self._look)
            return
        self._actor.after(LOOK_S, self._look)
        if self._coordinator is None:
            log.info("what a RocketMQ broker had popped is looked for in %s", self._topic)
            self._coordinator = Channel(self._address, "the coordinator")
        if self._waits:
            return
        unknown = sorted(queue_id for queue_id in ranges if queue_id not in self._queues)
        if unknown:
            keys = [QueueKey(self._topic, queue_id) for queue_id in unknown]
            self._ask(FetchOffsets(GROUP, keys), self._begin_queues)
            return
        now_ms = time.time_ns() // 1_000_000
        for queue_id, queue in self._queues.items():
            self._read(queue_id, queue, ranges[queue_id].max_queue_offset)
            if queue.position >= ranges[queue_id].max_queue_offset:
                for point in queue.due(now_ms - SETTLED_MS):
                    self._revive(queue, point)
        self._tell()

    def _begin_queues(self, answer: object) -> None:
        assert isinstance(answer, GroupOffsets)
        for each in answer.offsets:
            first = self._table.ranges_of(self._topic)[each.queue_id].min_queue_offset
            self._queues[each.queue_id] = ReviveQueue(max(each.queue_offset + 1, first))
            self._told[each.queue_id] = each.queue_offset

    def _read(self, queue_id: int, queue: ReviveQueue, end: int) -> None:
        if queue.position >= end:
            return
        count = min(READ_COUNT, end - queue.position)
        found = self._store.get_message(
            self._topic, queue_id, queue.position, count, max_bytes=READ_BYTES
        )
        for message in decode(found.payload) if found.payload is not None else ():
            if not queue.take(message.queue_offset, message.tags, message.body):
                text = "%s/%d offset %d is passed over: neither check point nor acknowledgement"
                log.warning(text, self._topic, queue_id, message.queue_offset)
        queue.position = max(queue.position, found.next_queue_offset)

    # --- reviving ---

    def _revive(self, queue: ReviveQueue, point: CheckPoint) -> None:
        given = [
            GivenBack(point.topic, point.queue_id, offset, place, AGAIN_LEVEL)
            for offset in sorted(point.left)
            if (place := self._place_of(point, offset)) is not None
        ]
        if not given:
            queue.settle(point)
            return
        command = GiveBackMessages(point.group, given, popped=True)
        self._ask(command, partial(self._is_revived, queue, point))

    def _place_of(self, point: CheckPoint, offset: int) -> int | None:
        """The message's physical offset; None: it has expired."""
        found = self._store.get_message(
            point.topic, point.queue_id, offset, 1, max_bytes=READ_BYTES
        )
        for message in decode(found.payload) if found.payload is not None else ():
            if message.queue_offset == offset:
                return message.physical_offset
        return None

    def _is_revived(self, queue: ReviveQueue, point: CheckPoint, answer: object) -> None:
        assert isinstance(answer, MessagesGivenBack)
        if all(code in (0, *NOT_AGAIN) for code in answer.codes):
            self._revived += len(answer.codes)
            queue.settle(point)
        else:
            text = "group %s: what RocketMQ had popped is not given back yet: codes %s"
            log.warning(text, point.group, sorted({*answer.codes}))

    def _tell(self) -> None:
        """How far it has come, as RocketMQ counts that."""
        moved = {
            queue_id: queue.done - 1
            for queue_id, queue in self._queues.items()
            if queue.done - 1 > self._told[queue_id]
        }
        if moved:
            offsets = [QueueOffset(self._topic, each, offset) for each, offset in moved.items()]
            self._ask(CommitOffsets(GROUP, offsets), lambda _answer: self._told.update(moved))

    # --- asking ---

    def _ask(
        self,
        command: Command,
        then: Callable[[object], None],
    ) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        self._waits += 1

        def hear(done: Pending) -> None:
            self._waits -= 1
            try:
                answer, _ = done.result()
            except CometError as error:
                self._again(command, error)
            else:
                then(answer)

        coordinator.request(
            command,
            on_done=lambda done: self._actor.call_soon(partial(hear, done)),
            timeout_s=ASK_S,
        )

    @staticmethod
    def _again(command: Command, error: CometError) -> None:
        name = type(command).__name__
        log.warning("the coordinator has not taken %s, it is said again: %s", name, error)
