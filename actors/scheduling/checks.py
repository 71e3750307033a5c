"""Checks: what nobody has ended is asked of its producers, as often as RocketMQ asks."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Final

import msgspec

from cometmq.actors.runtime import meters
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.held import HeldRequest, TimedRequests
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.scheduling.delays import read_clocks
from cometmq.actors.scheduling.half_view import ASK_S, HalfView
from cometmq.actors.tables.transactions import (
    Ended,
    Outcome,
    Rules,
    Verdict,
    check_times,
    first_of,
    judge_until,
)
from cometmq.protocol.commands import (
    CHECK_WAIT_MS_MAX,
    AwaitChecks,
    HalvesPassed,
    PassedHalf,
    PassHalves,
    TransactionCheck,
    TransactionChecks,
    TransactionPart,
)
from cometmq.protocol.errors import CometError, MessageIllegal
from cometmq.protocol.names import check_group
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import Message
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

WRITE_COUNT: Final = 256  # halves that one write is about
ANSWER_COUNT: Final = 64  # checks in one answer
ANSWER_BYTES: Final = 1_048_576
WAITING_MAX: Final = 4_096  # producers
OUTBOX_MAX: Final = 4_096  # checks of a group that wait for a producer; the next round has others
HOUR_MS: Final = 3_600_000
PAUSE_S_MIN: Final = 0.05  # between two rounds, when messages become due one by one


class _Due(msgspec.Struct, frozen=True):
    """A half that a write is about."""

    message: Message
    verdict: Verdict
    first: int
    times: int


class _Check(msgspec.Struct, frozen=True):
    """A question, and the record that it is about."""

    check: TransactionCheck
    record: bytes


class Checks:
    """Rounds of checks, and the producers that wait for them."""

    def __init__(
        self, actor: ServiceActor, family: Family, commitlog: Channel, store: StoreReader
    ) -> None:
        settings = family.settings
        self.interval_s = settings.transaction_check_interval_ms / 1000
        # No message that arrives just after a round is due earlier than this.
        self._pause_s = min(self.interval_s, settings.transaction_time_out_ms / 1000)
        self._next_s = 0.0  # of the current round: when the next message is due
        self._write_s = ASK_S + max(settings.sync_flush_timeout_ms / 1000, settings.slave_wait_s)
        self._commitlog = commitlog
        self._view = HalfView(family, store)
        self._actor = actor
        self._rules = Rules(
            settings.transaction_time_out_ms,
            settings.transaction_check_max,
            settings.file_reserved_time_hours * HOUR_MS,
            settings.transaction_check_interval_ms,
        )
        self._bytes_max = min(ANSWER_BYTES, settings.mapped_file_size_commit_log_bytes // 4)
        self._round: Iterator[Message | None] | None = None
        # By group. All of them come from the coordinator.
        self._waiting: TimedRequests[str, HeldRequest[str]] = TimedRequests(
            actor, "producers", WAITING_MAX, lambda _held: TransactionChecks([]), WAITING_MAX
        )
        self._outbox: dict[str, deque[_Check]] = defaultdict(deque)
        self._checked = 0  # by this process
        self._given_up = 0

    def end(self, error: CometError) -> None:
        """Answer the producers that wait with an error."""
        self._waiting.fail_all(error)

    def close(self) -> None:
        self._view.close()

    # --- rounds ---

    def begin(self) -> None:
        """Schedule rounds, each when the first message is due that the previous round left."""
        self._actor.after(self._pause_s, self._begin_round)

    def _begin_round(self) -> None:
        """Start a round over all messages that are pending now."""
        if not self._view.is_needed:
            self._actor.after(self._pause_s, self._begin_round)
            return
        for group, checks in list(self._outbox.items()):  # drop superseded and ended checks
            left = [each for each in checks if self._is_pending(each)]
            self._outbox[group] = deque(left)
            if not left:
                del self._outbox[group]
        self._next_s = self._pause_s
        self._round = self._view.pending()
        self._go_on()

    def _is_pending(self, each: _Check) -> bool:
        return self._view.halves.is_pending(each.check.parts[0].queue_offset)

    def _go_on(self) -> None:
        """A part of the round; others are heard before the next."""
        assert self._round is not None
        due: list[_Due] = []
        size = 0
        is_over = True
        try:
            for message in self._round:
                if message is not None:
                    if due and size + len(message.record) > self._bytes_max:
                        self._round = chain((message,), self._round)  # alone it fits
                        message = None
                    elif (each := self._judge(message)).verdict is not Verdict.WAIT:
                        due.append(each)
                        size += len(message.record)
                if message is None or len(due) >= WRITE_COUNT:
                    is_over = False
                    break
            if due:
                self._carry_out(due)
        except Exception as caught:
            error = explained(caught, "a look at the transactions that are pending")
            log.warning("transactions are checked again in %.0f s: %s", self.interval_s, error)
            self._next_s = self.interval_s
            is_over = True
        if is_over:
            self._round = None
            self._actor.after(max(PAUSE_S_MIN, self._next_s), self._begin_round)
            self._view.tell_offsets()
        else:
            self._actor.call_soon(self._go_on)

    def _judge(self, message: Message) -> _Due:
        properties = message.properties
        verdict, wait_ms = judge_until(
            properties,
            message.born_timestamp_ms,
            message.store_timestamp_ms,
            read_clocks(),
            self._rules,
        )
        if verdict is Verdict.WAIT:
            self._next_s = min(self._next_s, wait_ms / 1000)
        times = check_times(properties) + (verdict is Verdict.CHECK)
        return _Due(message, verdict, first_of(properties, message.queue_offset), times)

    def _carry_out(self, due: list[_Due]) -> None:
        """Have copies stored in their stead, and ask for those; or have them given up. Raises what
        asking raises."""
        command = PassHalves(
            [
                PassedHalf(
                    each.message.queue_offset,
                    each.message.physical_offset,
                    each.times,
                    each.verdict is Verdict.GIVE_UP,
                )
                for each in due
            ]
        )
        try:
            answer, _ = self._commitlog.ask(command, timeout_s=self._write_s)
        except MessageIllegal:
            if len(due) == 1:
                raise
            middle = len(due) // 2  # the log takes no copy of one of them, who hinders all
            self._carry_out(due[:middle])
            self._carry_out(due[middle:])
            return
        assert isinstance(answer, HalvesPassed)
        asked: list[tuple[_Due, int, int]] = []
        ended: list[Ended] = []
        for each, copy, is_given_up in zip(due, answer.copies, answer.given_up, strict=True):
            if is_given_up:
                self._given_up += 1
                ended.append((each.message.queue_offset, Outcome.GIVEN_UP))
            elif copy[0] >= 0:
                if copy[0] != each.message.queue_offset:  # else it goes on itself
                    ended.append((each.message.queue_offset, Outcome.COPIED))
                if each.verdict is Verdict.CHECK:
                    asked.append((each, *copy))
        self._view.halves.take(ended)  # the op that says so may not be dispatched yet
        self._ask(asked)

    def _ask(self, asked: list[tuple[_Due, int, int]]) -> None:
        """One question for all messages of a transaction."""
        parts: dict[tuple[str, str], list[tuple[_Due, TransactionPart]]] = defaultdict(list)
        for each, queue_offset, physical_offset in asked:
            properties = each.message.properties
            name = properties.get("__transactionId__") or properties.get("UNIQ_KEY", "")
            part = TransactionPart(properties.get("REAL_TOPIC", ""), queue_offset, physical_offset)
            parts[properties.get("PGROUP", ""), name].append((each, part))
        for (group, name), found in parts.items():
            first = found[0][0]
            check = TransactionCheck(name, first.times, [part for _, part in found])
            if len(self._outbox[group]) < OUTBOX_MAX:
                self._outbox[group].append(_Check(check, bytes(first.message.record)))
            self._checked += 1
        for group in {group for group, _ in parts}:
            self._hand_out(group)

    # --- producers ---

    def on_await_checks(self, command: AwaitChecks, request: Request) -> None:
        check_group(command.group)
        wait_s = min(max(command.wait_ms, 0), CHECK_WAIT_MS_MAX) / 1000
        self._waiting.add(HeldRequest(command.group, request, time.monotonic() + wait_s))
        self._hand_out(command.group)

    def _hand_out(self, group: str) -> None:
        """To whoever waits longest."""
        checks = self._outbox.get(group)
        while checks and (waiting := self._waiting.of(group)):
            taken: list[_Check] = []
            size = 0
            while checks and len(taken) < ANSWER_COUNT and size < ANSWER_BYTES:
                each = checks.popleft()
                if self._is_pending(each):
                    taken.append(each)
                    size += len(each.record)
            if taken:
                self._waiting.release(waiting[0]).reply(
                    TransactionChecks([each.check for each in taken]),
                    [each.record for each in taken],
                )

    def statistics(self) -> meters.Figures:
        return {
            meters.TRANSACTIONS_CHECKED: self._checked,
            meters.TRANSACTIONS_GIVEN_UP: self._given_up,
        }
