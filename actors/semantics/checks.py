"""Checks: what nobody has ended is asked of its producers, as often as RocketMQ asks."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import msgspec

from cometmq.actors.books.transactions import (
    Ended,
    Outcome,
    Rules,
    Verdict,
    check_times,
    copy_properties,
    first_of,
    judge,
)
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Request
from cometmq.actors.semantics.delays import now_ms
from cometmq.actors.semantics.transaction_log import Unsure
from cometmq.actors.semantics.transactions import Transactions
from cometmq.protocol.commands import (
    CHECK_WAIT_MS_MAX,
    AwaitChecks,
    TransactionCheck,
    TransactionChecks,
    TransactionPart,
)
from cometmq.protocol.errors import CometError, SystemBusy
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, check_group
from cometmq.shm.kernel._kernel import Message, RecordDamaged, RecordTooLarge

log = logging.getLogger(__name__)

WRITE_COUNT: Final = 256  # halves that one write is about
ANSWER_COUNT: Final = 64  # checks in one answer
ANSWER_BYTES: Final = 1_048_576
WAITING_MAX: Final = 4_096  # producers
OUTBOX_MAX: Final = 4_096  # checks of a group that wait for a producer; the next round has others
HOUR_MS: Final = 3_600_000


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
    """Rounds of checks, and the producers that wait for them.

    Args:
        call_soon, after: the actor's.
    """

    def __init__(
        self,
        family: Family,
        transactions: Transactions,
        call_soon: Callable[[Callable[[], None]], object],
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        settings = family.settings
        self.interval_s = settings.transaction_check_interval_ms / 1000
        self._transactions = transactions
        self._log = transactions.log
        self._call_soon = call_soon
        self._after = after
        self._rules = Rules(
            settings.transaction_time_out_ms,
            settings.transaction_check_max,
            settings.file_reserved_time_hours * HOUR_MS,
            settings.transaction_check_interval_ms,
        )
        self._bytes_max = min(ANSWER_BYTES, settings.mapped_file_size_commit_log_bytes // 4)
        self._round: Iterator[Message | None] | None = None
        self._waiting: dict[str, deque[Request]] = defaultdict(deque)  # by group
        self._waiting_count = 0
        self._outbox: dict[str, deque[_Check]] = defaultdict(deque)
        self._checked = 0  # by this process
        self._given_up = 0

    # --- rounds ---

    def begin_round(self) -> None:
        """Look at all that is pending now. One that goes on still goes on."""
        self._transactions.begin_if_needed()
        if self._round is not None or not self._log.is_ready:
            return
        self._outbox.clear()  # what nobody has taken is asked anew
        begin, end = self._log.range_of(HALF_TOPIC)
        halves = self._log.halves
        halves.take((gone, Outcome.GIVEN_UP) for gone in range(halves.low, min(begin, end)))
        self._round = self._log.read(HALF_TOPIC, halves.low, end, halves)
        self._go_on()

    def _go_on(self) -> None:
        """A part of the round; others are heard before the next."""
        if self._round is None or not self._log.is_ready:
            self._round = None
            return
        due: list[_Due] = []
        size = 0
        is_over = True
        for message in self._round:
            if message is not None:
                each = self._judge(message)
                if each.verdict is not Verdict.WAIT:
                    due.append(each)
                    size += len(message.record)
            if message is None or len(due) >= WRITE_COUNT or size >= self._bytes_max:
                is_over = False
                break
        try:
            if due:
                self._carry_out(due)
        except Unsure as error:
            self._transactions.begin_anew(error)
            is_over = True
        except CometError as error:
            log.warning("transactions are checked again in %.0f s: %s", self.interval_s, error)
            is_over = True
        if is_over:
            self._round = None
            self._log.tell_offsets()
        else:
            self._call_soon(self._go_on)

    def _judge(self, message: Message) -> _Due:
        properties = message.properties
        verdict = judge(
            properties,
            message.born_timestamp_ms,
            message.store_timestamp_ms,
            now_ms(),
            self._rules,
        )
        times = check_times(properties) + (verdict is Verdict.CHECK)
        return _Due(message, verdict, first_of(properties, message.queue_offset), times)

    def _carry_out(self, due: list[_Due]) -> None:
        """Store copies in their stead, and ask for those; or what nobody is asked for any more."""
        records = InnerRecords(size_max=1 << 40)
        ended: list[Ended] = []
        copied: list[_Due] = []
        given_up: list[_Due] = []
        due = [each for each in due if not self._log.halves.find(each.message.queue_offset)]
        for each in sorted(due, key=lambda each: each.verdict is Verdict.GIVE_UP):
            message = each.message
            outcome = Outcome.COPIED
            try:
                if each.verdict is Verdict.GIVE_UP:
                    outcome = Outcome.GIVEN_UP
                    records.encoder.add_stored(records.queue(GIVEN_UP_TOPIC, 0), message.record)
                    given_up.append(each)
                else:
                    properties = copy_properties(message.raw_properties, each.first, each.times)
                    queue = records.queue(HALF_TOPIC, 0)
                    records.encoder.add_stored(queue, message.record, properties)
                    copied.append(each)
            except (RecordTooLarge, RecordDamaged) as error:
                log.error("half message %d is given up: %s", message.queue_offset, error)
                outcome = Outcome.GIVEN_UP
            ended += [(offset, outcome) for offset in _offsets(each, outcome)]
        places, _ = self._log.write(records, ended)
        copies = self._log.halves.copies
        for each in given_up:
            copies.pop(each.first, None)
            log.error("transaction of half message %d is given up after %d checks; see topic %s",
                      each.first, each.times, GIVEN_UP_TOPIC)  # fmt: skip
        self._given_up += len(given_up)
        asked: list[tuple[_Due, int, int]] = []
        for index, each in enumerate(copied):
            queue_offset, physical_offset = places[2 * index], places[2 * index + 1]
            copies[each.first] = queue_offset
            if each.verdict is Verdict.CHECK:
                asked.append((each, queue_offset, physical_offset))
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
        if self._waiting_count >= WAITING_MAX:
            raise SystemBusy(
                f"{WAITING_MAX} producers wait for checks, and one of group {command.group} would "
                "be one more"
            )
        self._waiting[command.group].append(request)
        self._waiting_count += 1
        wait_ms = min(max(command.wait_ms, 0), CHECK_WAIT_MS_MAX)
        self._after(wait_ms / 1000, partial(self._let_go, command.group, request))
        self._hand_out(command.group)

    def _hand_out(self, group: str) -> None:
        """To whoever waits longest."""
        checks = self._outbox.get(group)
        while checks and self._waiting.get(group):
            taken: list[_Check] = []
            size = 0
            while checks and len(taken) < ANSWER_COUNT and size < ANSWER_BYTES:
                each = checks.popleft()
                if not self._log.halves.find(each.check.parts[0].queue_offset):
                    taken.append(each)
                    size += len(each.record)
            if taken:
                self._take_one(group).reply(
                    TransactionChecks([each.check for each in taken]),
                    [each.record for each in taken],
                )

    def _take_one(self, group: str) -> Request:
        self._waiting_count -= 1
        request = self._waiting[group].popleft()
        if not self._waiting[group]:
            del self._waiting[group]
        return request

    def _let_go(self, group: str, request: Request) -> None:
        """Its time is up, if it still waits."""
        waiting = self._waiting.get(group)
        if waiting and request in waiting:
            waiting.remove(request)
            self._waiting_count -= 1
            if not waiting:
                del self._waiting[group]
            request.reply(TransactionChecks([]))

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "transactions_checked": self._checked,
            "transactions_given_up": self._given_up,
        }


def _offsets(each: _Due, outcome: Outcome) -> set[int]:
    """Which halves end by that: also the first of all, once it is over."""
    own = {each.message.queue_offset}
    return own if outcome is Outcome.COPIED else own | {each.first}
