"""Transactions: what their producers say of them is carried out, once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from cometmq.actors.books.delays import destination
from cometmq.actors.books.transactions import WORDS, Ended, Outcome, first_of
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Request
from cometmq.actors.semantics.transaction_log import TransactionLog, Unsure
from cometmq.protocol.commands import (
    ENDS_MAX,
    PARTS_MAX,
    EndTransactions,
    TransactionEnd,
    TransactionPart,
    TransactionsEnded,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageNotFound,
    MessageTooLarge,
    Refused,
    StoreDamaged,
    TransactionFinished,
    TransactionUnknown,
)
from cometmq.protocol.names import HALF_TOPIC
from cometmq.protocol.retry import pause_s
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel._kernel import Message, RecordDamaged, RecordTooLarge
from cometmq.shm.reading.store_reader import StoreReader

log = logging.getLogger(__name__)

WRITE_BYTES_MAX: Final = 4_194_304  # of one write, which has to fit into a segment
WRITE_ENDS_MAX: Final = 2_048  # halves that end by one write
RECORD_MORE: Final = 256  # bytes that a copy may have more than its half
SYS_TRANSACTION: Final = 0xC  # bits of a record's flags
SYS_COMMIT: Final = 0x8


class Transactions:
    """Ends transactions: a commit stores the messages where they are meant for, and an op with
    them; a rollback an op alone.

    Args:
        dispatched: how far the dispatcher has come.
        await_dispatched: has `go_on` called when it has moved.
        call_soon, after: the actor's.
    """

    def __init__(
        self,
        family: Family,
        commitlog: Channel,
        store: StoreReader,
        dispatched: Callable[[], int],
        await_dispatched: Callable[[], object],
        call_soon: Callable[[Callable[[], None]], object],
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self.log = TransactionLog(family, commitlog, store)
        self._store = store
        self._dispatched = dispatched
        self._await_dispatched = await_dispatched
        self._call_soon = call_soon
        self._after = after
        self._bytes_max = min(
            WRITE_BYTES_MAX, family.settings.mapped_file_size_commit_log_bytes // 4
        )
        self._asks: deque[_Ask] = deque()
        self._is_due = False  # `_end_all` is called soon
        self._has_begun = False
        self._loading: Iterator[int] | None = None
        self._dispatched_to = 0  # what loading waits for
        self._failures = 0
        self.committed = 0  # messages, by this process
        self.rolled_back = 0

    def close(self) -> None:
        self.log.close()

    # --- the beginning, and whenever nobody knows what has become of a write ---

    def begin_if_needed(self) -> None:
        """A store that has no half message is not written to."""
        if not self._has_begun and self.log.range_of(HALF_TOPIC)[1]:
            self.begin()

    def begin(self) -> None:
        self._has_begun = True
        self._loading = self.log.load()
        self._load()

    @property
    def waits(self) -> bool:
        """For the dispatcher."""
        return self._loading is not None and self._dispatched() < self._dispatched_to

    def go_on(self) -> None:
        """The dispatcher has moved."""
        if self._loading is not None and self._dispatched_to and not self.waits:
            self._dispatched_to = 0
            self._call_soon(self._load)

    def _load(self) -> None:
        """One step; others are heard before the next."""
        if self._loading is None:
            return
        try:
            self._dispatched_to = next(self._loading)
        except StopIteration:
            self._loading = None
            self._failures = 0
            self._end_soon()
        except CometError as error:
            self._loading = None
            self._failures += 1
            wait_s = pause_s(self._failures)
            say = log.warning if self._failures == 1 else log.debug
            say("transactions go on in %.1f s: %s", wait_s, error)
            self._after(wait_s, self.begin)
        else:
            if self.waits:
                self._await_dispatched()
            else:
                self._dispatched_to = 0
                self._call_soon(self._load)

    def begin_anew(self, why: Unsure) -> None:
        log.warning("what has become of transactions is read again: %s", why)
        if self._loading is None:
            self._call_soon(self.begin)

    # --- ends ---

    def on_end_transactions(self, command: EndTransactions, request: Request) -> None:
        count = len(command.ends)
        parts = max((len(end.parts) for end in command.ends), default=0)
        if count > ENDS_MAX or parts > PARTS_MAX:
            raise ArgumentIllegal(
                f"{count} ends of up to {parts} messages, at most {ENDS_MAX} of {PARTS_MAX}"
            )
        self._asks.append(_Ask(command, request))
        if not self._has_begun:
            self.begin()

    def finish_round(self) -> None:
        """All ends that have come are written together."""
        if self._asks:
            self._end_all()

    def _end_soon(self) -> None:
        """What has come before."""
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._end_all)

    def _end_all(self) -> None:
        self._is_due = False
        if not self.log.is_ready:
            return  # loading ends with this
        writing = _Writing(self._bytes_max)
        try:
            for ask in self._asks:
                for index in range(len(ask.command.ends)):
                    if index not in ask.results:
                        self._end(writing, ask, index)
            self._write(writing)
        except Unsure as error:
            self.begin_anew(error)  # those without a result stay, and are looked at again
        except _Spoilt:
            self._end_soon()
        while self._asks and self._asks[0].is_done:
            self._asks.popleft().answer()

    def _end(self, writing: _Writing, ask: _Ask, index: int) -> None:
        """Put one end into the write, or say what became of it."""
        end = ask.command.ends[index]
        try:
            halves = [self._half(ask.command.group, end, part) for part in end.parts]
            if any(half.current in writing.halves for half in halves):
                self._write(writing)  # the end of it that came first counts
                halves = [self._half(ask.command.group, end, part) for part in end.parts]
            pending = _pending(end, halves)
            if not pending:
                ask.results[index] = None
                return
            size = sum(len(half.message.record) + RECORD_MORE for half in pending)
            if len(pending) > 1 and size > self._bytes_max and end.commit:
                raise MessageTooLarge(
                    f"transaction {end.transaction_id}: {len(pending)} messages of {size} bytes, "
                    f"which are stored in one piece of at most {self._bytes_max}"
                )
            queues = [destination(half.message.properties) for half in pending]
        except CometError as error:
            ask.results[index] = error
            return
        if not writing.has_room(size):
            self._write(writing)
        outcome = Outcome.COMMITTED if end.commit else Outcome.ROLLED_BACK
        for half, queue in zip(pending, queues, strict=True):
            try:
                writing.add(half, outcome, queue)
            except (RecordTooLarge, RecordDamaged) as error:
                ask.results[index] = StoreDamaged(
                    f"the half message at physical offset {half.message.physical_offset}: {error}"
                )
                raise _Spoilt from None  # others of it may be in the write: begin that again
        writing.asked.append((ask, index))

    def _half(self, group: str, end: TransactionEnd, part: TransactionPart) -> _Half:
        """Raises TransactionUnknown for what is no half message of that transaction."""
        try:
            message = self._store.record_at(part.physical_offset)
        except MessageNotFound as error:
            raise _unknown(group, end, part, str(error)) from None
        properties = message.properties
        if message.stored_topic != HALF_TOPIC or message.queue_offset != part.queue_offset:
            there = f"message {message.queue_offset} of {message.stored_topic}"
            raise _unknown(group, end, part, f"{there} lies there")
        real = properties.get("REAL_TOPIC", "")
        owner = properties.get("PGROUP", "")
        named = properties.get("__transactionId__") or properties.get("UNIQ_KEY", "")
        if (owner, named, real) != (group, end.transaction_id, part.topic):
            raise _unknown(group, end, part, f"one of group {owner!r}, transaction {named!r}, for "
                           f"topic {real!r} lies there")  # fmt: skip
        first = first_of(properties, message.queue_offset)
        outcome = self.log.halves.find(message.queue_offset)
        current = message.queue_offset
        if outcome is Outcome.COPIED:
            current = self.log.halves.copies.get(first, -1)
            outcome = Outcome.PENDING if current >= 0 else self.log.halves.find(first)
        if outcome is Outcome.COPIED:
            outcome = Outcome.ENDED
        return _Half(message, first, current, outcome)

    def _write(self, writing: _Writing) -> None:
        """Have it stored; it is empty then. Raises Unsure, and has said nothing then."""
        if not writing.asked:
            return
        refusal: CometError | None = None
        try:
            _, refusal = self.log.write(writing.records, writing.ended)
        except CometError as error:
            refusal = error
        for ask, index in writing.asked:
            ask.results[index] = refusal
        if not isinstance(refusal, Refused):
            self.committed += writing.count_of(Outcome.COMMITTED)
            self.rolled_back += writing.count_of(Outcome.ROLLED_BACK)
            for half, _ in writing.halves.values():
                self.log.halves.copies.pop(half.first, None)
        writing.clear()

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "transactions_committed": self.committed,
            "transactions_rolled_back": self.rolled_back,
        }


class _Half(NamedTuple):
    """A half message that an end names."""

    message: Message
    first: int  # queue offsets: of the first of all, which it may be a copy of,
    current: int  # and of the copy that goes on in its stead
    outcome: Outcome


class _Spoilt(Exception):
    """A write has a part of a transaction that cannot be in it."""


class _Ask(msgspec.Struct, eq=False):
    """A command, and what became of its ends, as far as that is known; None: as it was wanted."""

    command: EndTransactions
    request: Request
    results: dict[int, CometError | None] = msgspec.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.command.ends)

    def answer(self) -> None:
        errors = [self.results[index] for index in range(len(self.results))]
        codes = [error.code if error else 0 for error in errors]
        texts = [str(error) if error else "" for error in errors]
        self.request.reply(TransactionsEnded(codes, texts))


class _Writing:
    """Transactions that end by one write.

    Args:
        bytes_max: of it; one transaction alone may have more.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.clear()

    def clear(self) -> None:
        self.records = InnerRecords(size_max=1 << 40)
        self.halves: dict[int, tuple[_Half, Outcome]] = {}  # by the queue offset of what goes on
        self.ended: list[Ended] = []
        self.asked: list[tuple[_Ask, int]] = []

    def has_room(self, size: int) -> bool:
        filled = self.records.encoder.size
        return len(self.ended) < WRITE_ENDS_MAX and (not filled or filled + size < self._bytes_max)

    def add(self, half: _Half, outcome: Outcome, queue: tuple[str, int]) -> None:
        message = half.message
        if outcome is Outcome.COMMITTED:
            self.records.encoder.add_stored(
                self.records.queue(*queue),
                message.record,
                sys_flag=message.sys_flag & ~SYS_TRANSACTION | SYS_COMMIT,
                prepared_offset=message.physical_offset,
            )
        self.halves[half.current] = half, outcome
        self.ended += [
            (offset, outcome) for offset in {half.first, message.queue_offset, half.current}
        ]

    def count_of(self, outcome: Outcome) -> int:
        return sum(each is outcome for _, each in self.halves.values())


def _pending(end: TransactionEnd, halves: list[_Half]) -> list[_Half]:
    """Those that are still to end, none twice. Raises TransactionFinished where one has ended
    otherwise."""
    wanted = Outcome.COMMITTED if end.commit else Outcome.ROLLED_BACK
    for half in halves:
        if half.outcome not in (Outcome.PENDING, wanted):
            raise TransactionFinished(
                f"transaction {end.transaction_id} was to be "
                f"{'committed' if end.commit else 'rolled back'}, but {WORDS[half.outcome]}"
            )
    pending = {half.current: half for half in halves if half.outcome is Outcome.PENDING}
    return list(pending.values())


def _unknown(group: str, end: TransactionEnd, part: TransactionPart, there: str) -> CometError:
    return TransactionUnknown(
        f"no half message of group {group}, transaction {end.transaction_id}, for topic "
        f"{part.topic} is number {part.queue_offset} at physical offset {part.physical_offset}: "
        f"{there}"
    )
