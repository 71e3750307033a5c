"""Pulls: answered at once, or held until there is something for them (RocketMQ's long polling)."""

from __future__ import annotations

import struct
import time
from typing import Final

import msgspec

from cometmq.actors.reading.held_pulls import HeldPull, HeldPulls, Key
from cometmq.actors.reading.room import PullsWithoutRoom
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.dispatched import Dispatched
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import SLICE_S, Request, ServiceActor
from cometmq.protocol.commands import Command, PullMessages, PullResult, PullStatus
from cometmq.protocol.errors import CometError, SubscriptionIllegal
from cometmq.protocol.filters import check_filters_on
from cometmq.shm.kernel.layout import RECORD_HEAD
from cometmq.shm.kernel.live import SleepCell
from cometmq.shm.live.control import Counter, Phase, run_number
from cometmq.shm.live.queue_table import QueueTable
from cometmq.shm.os.memory import memory_of
from cometmq.shm.reading.mapped_reader import PULL_STATUS
from cometmq.shm.reading.selection import Selection, selection_of
from cometmq.shm.reading.store_reader import GetResult, GetStatus, StoreReader

_I64: Final = struct.Struct(">q")
COUNT_MAX: Final = 65_536  # messages in one answer, whatever was asked for
BYTES_MAX: Final = 4 * 1_048_576
SUSPEND_MS_MAX: Final = 60_000
ROUNDS_MAX: Final = 64  # stretches of a queue looked through for one filtered pull
SERVED_QUEUES_MAX: Final = 256  # at once; who asks meanwhile is heard in between
TAGS_MAX: Final = 32  # as many as the kernel compares


class Pulls:
    """What a reader is asked for messages of a queue.

    While a pull is held it is the stripe of its queue that wakes the reader (or `queues`, if that
    is a new one), and a timer for its end; while there is something for it that may not be shown
    yet, `flushed` or `dispatched` (shm/reading/tail.py).

    Args:
        store: reads its tail.
    """

    def __init__(
        self,
        actor: ServiceActor,
        family: Family,
        table: QueueTable,
        store: StoreReader,
        dispatched: Dispatched,
    ) -> None:
        self._actor = actor
        self._store = store
        self._dispatched = dispatched
        self._cover = family.control.sleep_on(family.cover, family.doorbell)
        self._stripes = family.control.sleep_on_stripes(family.doorbell)
        self._queues = family.control.sleep_on(Counter.QUEUES, family.doorbell)
        self._wait_ms_max = SUSPEND_MS_MAX if family.settings.long_polling_enable else 0
        self._held = HeldPulls(actor, table, self._stripes, self._end)
        # Queues with something that may not be shown yet: before which counter moves, from where.
        self._blocked: dict[Key, tuple[SleepCell | Dispatched, int]] = {}
        self._late: list[Key] = []  # queues with news that there was no time for
        self._cramped = PullsWithoutRoom(actor, self._pull)
        self._serves_soon = False  # there was no time to look at all of them
        self._answered = 0
        self._filters_on = family.settings.enable_property_filter
        self._wrote = family.control.read(Counter.WROTE)
        self._phase = family.control.read(Counter.PHASE)
        self._run = run_number(family.control.meta.get("nonce"))
        self._in_group = family.settings.is_in_group
        self._far_bytes = 0  # behind the log's end; 0: no slave is advised
        if family.settings.slave_read_enable:
            ratio = family.settings.access_message_in_memory_max_ratio_percent
            self._far_bytes = memory_of("MemTotal") * ratio // 100

    def on_pull_messages(self, command: PullMessages, request: Request) -> Command | None:
        """Answers through the request: the records travel behind the answer."""
        if command.sql:
            check_filters_on(self._filters_on)
        if not self._cramped.take(command, request):
            self._pull(command, request)
        return None

    def _pull(self, command: PullMessages, request: Request) -> None:
        status, result = self._read(command, command.queue_offset)
        waits = status in (PullStatus.NO_NEW_MESSAGE, PullStatus.NO_MATCHED_MESSAGE)
        at_end = result.next_queue_offset >= result.max_queue_offset
        if self._wait_ms_max and command.suspend_ms > 0 and waits and at_end:
            deadline = time.monotonic() + min(command.suspend_ms, self._wait_ms_max) / 1000
            self._hold(HeldPull(request, command, result.next_queue_offset, deadline))
            return
        self._answer_pull(request, status, result)

    def _answer_pull(self, request: Request, status: int, result: GetResult) -> None:
        answer = PullResult(
            status, result.next_queue_offset, result.min_queue_offset, result.max_queue_offset,
            result.count, self._is_far_behind(result), self._run,
        )  # fmt: skip
        self._answered += result.count
        request.reply(answer, () if result.payload is None else (result.payload,))

    def _is_far_behind(self, result: GetResult) -> bool:
        """Whether a slave had better be asked. RocketMQ DefaultMessageStore, getMessage."""
        if not self._far_bytes or result.payload is None:
            return False
        (physical_offset,) = _I64.unpack_from(result.payload, RECORD_HEAD.at["physical_offset"])
        return bool(self._wrote.value - physical_offset > self._far_bytes)

    def _read(self, command: PullMessages, queue_offset: int) -> tuple[int, GetResult]:
        status, result = self._look_from(command, queue_offset)
        is_ahead = queue_offset > result.max_queue_offset and status == PullStatus.OFFSET_MOVED
        if is_ahead and self._in_group and self._phase.value < Phase.SERVING:
            # This is to be the master of a group, which has that message and cannot show it yet.
            status = PullStatus.NO_NEW_MESSAGE
            result = msgspec.structs.replace(result, next_queue_offset=queue_offset)
        return status, result

    def _look_from(self, command: PullMessages, queue_offset: int) -> tuple[int, GetResult]:
        """Look from `queue_offset` on until something matches, for a bounded number of rounds."""
        tags, filter = _selected(command)
        for _ in range(ROUNDS_MAX):
            result = self._store.get_message(
                command.topic,
                command.queue_id,
                queue_offset,
                min(max(command.max_count, 1), COUNT_MAX),
                max_bytes=min(max(command.max_bytes, 1), BYTES_MAX),
                tags=tags,
                filter=filter,
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

    def _hold(self, held: HeldPull) -> None:
        self._held.add(held)
        self._sleep_on(self._held.stripes(held.key))
        self._serve_news()  # it came between looking and arming

    def _sleep_on(self, stripes: list[int]) -> None:
        for number in stripes:
            (self._queues if number < 0 else self._stripes[number]).arm()

    def hear(self) -> None:
        """Something has moved: answer what has waited for it."""
        if self._held:
            self._sleep_on(self._held.stripes())  # first: nothing is missed
            self._serve_news()

    def _serve_news(self) -> None:
        """Answer the pulls of queues with news, for a slice of time; then the others first."""
        gone_by = time.monotonic() + SLICE_S
        news = self._held.with_news(SERVED_QUEUES_MAX)
        keys = self._late + news + self._unblocked()
        self._late = []
        for number, key in enumerate(keys, 1):
            self._serve_queue(key)
            if time.monotonic() > gone_by:
                self._late = keys[number:]
                break
        if self._late or len(news) >= SERVED_QUEUES_MAX or self._is_unblocked():
            self._serve_soon()

    def _serve_queue(self, key: Key) -> None:
        cover, dispatched = self._cover.value, self._dispatched.value  # before it is looked
        for held in self._held.of(key):
            self._serve(held)
        if not self._held.is_behind(key):
            self._held.looked(key)
            if self._held.of(key):
                self._sleep_on(self._held.stripes(key))  # its place in the table may be new
                if self._held.is_behind(key):
                    self._serve_soon()
            return
        assert self._store.tail is not None
        if self._store.tail.of(*key, 0, 0).is_stuck:
            self._blocked[key] = self._dispatched, dispatched
        else:
            self._blocked[key] = self._cover, cover

    def _serve_soon(self) -> None:
        if not self._serves_soon:
            self._serves_soon = True
            self._actor.call_soon(self._go_on_serving)  # the others first

    def _go_on_serving(self) -> None:
        self._serves_soon = False
        self._serve_news()

    def _unblocked(self) -> list[Key]:
        """Queues of which more may be shown now."""
        keys = [key for key, (cell, seen) in self._blocked.items() if cell.value != seen]
        for key in keys:
            del self._blocked[key]
        return keys

    def _is_unblocked(self) -> bool:
        """Sleep on what the others wait for; whether it has moved already."""
        for cell in {cell for cell, _ in self._blocked.values()}:
            cell.arm()
        return any(cell.value != seen for cell, seen in self._blocked.values())

    def _serve(self, held: HeldPull) -> None:
        """Answer a pull if there is something for it; also with what goes wrong, which concerns
        no other pull."""

        def read() -> None:
            if self._cramped.take(held.command, held.request):
                self._held.release(held)
                return
            status, result = self._read(held.command, held.queue_offset)
            held.queue_offset = result.next_queue_offset
            if status in (PullStatus.NO_NEW_MESSAGE, PullStatus.NO_MATCHED_MESSAGE):
                return
            self._held.release(held)
            self._answer_pull(held.request, status, result)

        if not self._actor.carry_out(held.request, read) and self._held.holds(held):
            self._held.release(held)

    def _end(self, held: HeldPull) -> None:
        """Time is up: the client learns how far was looked, and asks again."""
        if self._cramped.take(held.command, held.request):
            return
        status, result = self._read(held.command, held.queue_offset)
        self._answer_pull(held.request, status, result)

    # --- the end ---

    def settle(self, error: CometError) -> None:
        """Let go of what is held: the clients are told to come again."""
        self._held.fail_all(error)
        self._cramped.fail_all(error)

    def statistics(self) -> meters.Figures:
        return {
            meters.HELD_PULLS: len(self._held),
            meters.PULLS_WITHOUT_ROOM: len(self._cramped),
            meters.MESSAGES_OUT: self._answered,
        }


def _selected(command: PullMessages) -> Selection:
    """What is pulled of the queue. Raises SubscriptionIllegal, FilterIllegal."""
    selection = selection_of(command.tags, command.sql)
    if selection.tags is not None and len(selection.tags) > TAGS_MAX:
        count = len(selection.tags)
        raise SubscriptionIllegal(f"{count} tags in one expression, at most {TAGS_MAX}")
    return selection
