"""Transactions at the desk: what their producers say of them is carried out, once.

A commit lays down the messages where they are meant for, and an op with them; a rollback an op
alone. So does a half message that nobody has ended in time: its copy, or what it has become in the
topic of those that are given up, and an op.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from cometmq.actors.books.delays import destination
from cometmq.actors.books.transactions import (
    WORDS,
    Outcome,
    copy_properties,
    first_of,
)
from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Request
from cometmq.actors.runtime.uptime import stored_now
from cometmq.actors.writer.batches import Stored
from cometmq.actors.writer.half_book import HalfBook
from cometmq.protocol.commands import (
    ENDS_MAX,
    PARTS_MAX,
    EndTransactions,
    HalvesPassed,
    PassedHalf,
    PassHalves,
    TransactionEnd,
    TransactionPart,
    TransactionsEnded,
)
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageNotFound,
    MessageTooLarge,
    ShuttingDown,
    StoreDamaged,
    SystemBusy,
    TransactionFinished,
    TransactionUnknown,
)
from cometmq.protocol.frames import failed
from cometmq.protocol.names import GIVEN_UP_TOPIC, HALF_TOPIC, check_group
from cometmq.shm.kernel._kernel import HalfEnds, Message, RecordDamaged, RecordTooLarge

log = logging.getLogger(__name__)

WRITE_BYTES_MAX: Final = 4_194_304  # of one write, which has to fit into a segment
WRITE_ENDS_MAX: Final = 2_048  # halves that end by one write
RECORD_MORE: Final = 256  # bytes that a copy may have more than its half
SYS_TRANSACTION: Final = 0xC  # bits of a record's flags
SYS_COMMIT: Final = 0x8
HELD_MAX: Final = 1_024  # commands that wait until it is known what is pending
NO_COPY: Final = (-1, -1)
_WORDS_OF_ENDS: Final = (Outcome.ROLLED_BACK, Outcome.COMMITTED)

Enders = EndTransactions | PassHalves


class Transactions:
    """Part of the desk.

    Args:
        segment_bytes: of the log, that a write has to fit into.
        cover: that the answers wait for, also that of an end which was there before.
        check_admitted: raises why nothing is stored now.
        store: has the desk store commands that were held.
    """

    def __init__(
        self,
        book: HalfBook,
        *,
        segment_bytes: int,
        cover: int,
        check_admitted: Callable[[], None],
        store: Callable[[list[Request]], None],
    ) -> None:
        self._book = book
        self._cover = cover
        self._check_admitted = check_admitted
        self._store = store
        self._bytes_max = min(WRITE_BYTES_MAX, segment_bytes // 4)
        self._held: deque[Request] = deque()
        self.committed = 0  # messages, by this process
        self.rolled_back = 0

    def close(self) -> None:
        """Nothing is stored any more: commands that were held are told so."""
        self._fail_held(ShuttingDown("the broker is shutting down"))
        self._book.close()

    # --- until it is known what is pending ---

    def must_wait(self, command: object) -> bool:
        return not self._book.is_ready and isinstance(command, Enders)

    def go_on(self) -> None:
        """The dispatcher may have moved."""
        self._book.go_on()

    def let_go_of_deleted(self) -> None:
        """To be called every now and then."""
        self._book.reader.let_go_of_deleted()

    def hold(self, request: Request) -> None:
        """Store it once that is known. Raises SystemBusy."""
        if len(self._held) >= HELD_MAX:
            raise SystemBusy(
                f"{HELD_MAX} commands wait until it is known which transactions are pending"
            )
        self._held.append(request)
        self._book.begin()

    def is_ready(self, error: CometError | None) -> None:
        if error is not None:
            log.warning("it is not known which transactions are pending: %s", error)
            self._fail_held(SystemBusy(f"what is pending is not known: {error}"))
            return
        held, self._held = list(self._held), deque()
        self._store(held)

    def _fail_held(self, error: CometError) -> None:
        while self._held:
            self._held.popleft().fail(error)

    # --- commands ---

    def take(self, command: Enders) -> Stored:
        """Carry it out, or say why not."""
        try:
            if isinstance(command, PassHalves):
                return Stored(self._pass(command.halves), self._cover)
            return Stored(self._end_all(command), self._cover)
        except Exception as caught:
            error = explained(caught, "%s failed at the desk", type(command).__name__)
            return Stored(failed(error))

    def _end_all(self, command: EndTransactions) -> TransactionsEnded:
        check_group(command.group)
        count = len(command.transactions)
        parts = max(command.counts, default=0)
        if count > ENDS_MAX or parts > PARTS_MAX:
            raise ArgumentIllegal(
                f"{count} ends of up to {parts} messages, at most {ENDS_MAX} of {PARTS_MAX}"
            )
        try:
            ends = HalfEnds(
                command.group, command.transactions, command.commits, command.counts,
                command.topics, command.topic_of, command.queue_offsets, command.physical_offsets,
            )  # fmt: skip
        except ValueError as error:
            raise ArgumentIllegal(f"ends whose columns do not fit together: {error}") from None
        results: list[CometError | None] = [None] * count
        writing = _Writing(self._bytes_max)
        rows = [*accumulate(command.counts, initial=0)]
        index = 0
        while index < count:
            index = self._end_plain(writing, command, ends, index, rows[index])
            if index < count:
                end = command.end_at(index, rows[index])
                try:
                    self._end(writing, command.group, end, index, results)
                except CometError as error:
                    results[index] = error
                index += 1
        self._write(writing, results)
        if not any(results):
            return TransactionsEnded([0] * count, [""] * count)
        return TransactionsEnded(
            [error.code if error else 0 for error in results],
            [str(error) if error else "" for error in results],
        )

    def _end_plain(
        self, writing: _Writing, command: EndTransactions, ends: HalfEnds, index: int, row: int
    ) -> int:
        """Put ends into the write as long as each is as most are: of one message, that was never
        copied, and is pending. The index of the first that is another."""
        if row >= len(command.physical_offsets):
            return index
        physical_offset = command.physical_offsets[row]
        place = self._book.reader.place_of(physical_offset)
        if place is None:
            return index
        segment, at, limit = place
        outcomes, base = self._book.halves.known
        stop = ends.store(
            index, row, segment, physical_offset - at, limit, writing.records.encoder,
            writing.queue_of, outcomes, base, writing.ended, _WORDS_OF_ENDS, self._bytes_max,
            WRITE_ENDS_MAX,
        )  # fmt: skip
        writing.has_plain(range(index, stop), sum(command.commits[index:stop]))
        return stop

    def _end(
        self,
        writing: _Writing,
        group: str,
        end: TransactionEnd,
        index: int,
        results: list[CometError | None],
    ) -> None:
        """Put one end into the write. Raises what became of it, where that is something else."""
        halves = self._halves(writing, group, end, results)
        outcome = Outcome.COMMITTED if end.commit else Outcome.ROLLED_BACK
        size = sum(len(half.record) + RECORD_MORE for half in halves)
        if len(halves) > 1 and size > self._bytes_max and end.commit:
            raise MessageTooLarge(
                f"transaction {end.transaction_id}: {len(halves)} messages of {size} bytes, "
                f"which are stored in one piece of at most {self._bytes_max}"
            )
        if halves and not writing.has_room(size):
            self._write(writing, results)
        writing.add(halves, outcome, index)

    def _halves(
        self,
        writing: _Writing,
        group: str,
        end: TransactionEnd,
        results: list[CometError | None],
    ) -> list[_Half]:
        """Those of its halves that are pending, none twice."""
        named = [self._named(group, end, part) for part in end.parts]
        if any(each.current in writing.ended for each in named):
            self._write(writing, results)  # the end of it that came first counts
            named = [self._named(group, end, part) for part in end.parts]
        wanted = Outcome.COMMITTED if end.commit else Outcome.ROLLED_BACK
        for each in named:
            if each.outcome not in (Outcome.PENDING, wanted):
                raise TransactionFinished(
                    f"transaction {end.transaction_id} was to be "
                    f"{'committed' if end.commit else 'rolled back'}, but {WORDS[each.outcome]}"
                )
        pending = {each.current: each for each in named if each.outcome is Outcome.PENDING}
        return [_half_of(each) for each in pending.values()]

    def _named(self, group: str, end: TransactionEnd, part: TransactionPart) -> _Named:
        """Raises TransactionUnknown for what is no half message of that transaction."""
        try:
            message = self._book.reader.record_at(part.physical_offset)
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
            there = f"one of group {owner!r:.80}, transaction {named!r:.80}, for topic {real!r:.80}"
            raise _unknown(group, end, part, f"{there} lies there")
        return self._as_it_is(message)

    def _as_it_is(self, message: Message) -> _Named:
        """A half message, and what has become of it."""
        halves = self._book.halves
        first = first_of(message.properties, message.queue_offset)
        current, outcome = message.queue_offset, halves.find(message.queue_offset)
        if outcome is Outcome.COPIED:
            current = halves.copies.get(first, -1)
            outcome = Outcome.PENDING if current >= 0 else halves.find(first)
        if outcome is Outcome.COPIED:
            outcome = Outcome.ENDED
        return _Named(message, first, current, outcome)

    def _write(self, writing: _Writing, results: list[CometError | None]) -> None:
        """Have it laid down; it is empty then. What became of its ends is in `results`."""
        if not writing.ended:
            return
        try:
            self._check_admitted()
            self._book.write(writing.records, list(writing.ended.items()))
        except CometError as error:
            for index in writing.asked:
                results[index] = error
        else:
            self.committed += writing.committed
            self.rolled_back += writing.rolled_back
            for first in writing.firsts:
                self._book.halves.copies.pop(first, None)
        writing.clear()

    # --- what nobody has ended in time ---

    def _pass(self, halves: Sequence[PassedHalf]) -> HalvesPassed:
        """Store copies in their stead, or have them given up. Raises why nothing is done."""
        self._check_admitted()
        records = InnerRecords(size_max=1 << 40)
        ended: dict[int, Outcome] = {}
        copied: list[tuple[int, int]] = []  # index, and the first of all
        given_up: list[tuple[int, int]] = []
        # A transaction's messages that are given up stand behind the copies: see the places.
        for index in sorted(range(len(halves)), key=lambda index: halves[index].give_up):
            message = self._still_pending(halves[index], ended)
            if message is None:
                continue
            first = first_of(message.properties, message.queue_offset)
            if _store_passed(records, message, halves[index], first):
                copied.append((index, first))
                ended[message.queue_offset] = Outcome.COPIED
            else:
                given_up.append((index, first))
                ended[first] = ended[message.queue_offset] = Outcome.GIVEN_UP
        copies, gone = [NO_COPY] * len(halves), [False] * len(halves)
        if ended:
            places = self._book.write(records, list(ended.items()))
            for at, (index, first) in enumerate(copied):
                copies[index] = places[2 * at], places[2 * at + 1]
                self._book.halves.copies[first] = places[2 * at]
            for index, first in given_up:
                gone[index] = True
                self._book.halves.copies.pop(first, None)
        return HalvesPassed(copies, gone)

    def _still_pending(self, half: PassedHalf, ended: dict[int, Outcome]) -> Message | None:
        """None: it has ended meanwhile, or is none."""
        if half.queue_offset in ended or not self._book.halves.is_pending(half.queue_offset):
            return None
        try:
            message = self._book.reader.record_at(half.physical_offset)
        except MessageNotFound:
            return None
        is_it = (message.stored_topic, message.queue_offset) == (HALF_TOPIC, half.queue_offset)
        return message if is_it else None


class _Named(NamedTuple):
    """A half message that an end names."""

    message: Message
    first: int  # queue offsets: of the first of all, which it may be a copy of,
    current: int  # and of the copy that goes on in its stead
    outcome: Outcome


class _Half(NamedTuple):
    """A half message that ends now."""

    record: bytes | memoryview
    flags: int
    physical_offset: int
    queue: tuple[str, int]  # that it is meant for
    named: int  # queue offsets: of the one that its producer names,
    first: int  # of the first of all,
    current: int  # and of the one that is pending


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
        self.ended: dict[int, Outcome] = {}  # by queue offset
        self.asked: list[int] = []  # which ends
        self.firsts: list[int] = []  # halves that may have a copy
        self.committed = 0
        self.rolled_back = 0

    def has_room(self, size: int) -> bool:
        filled = self.records.encoder.size
        return len(self.ended) < WRITE_ENDS_MAX and (not filled or filled + size < self._bytes_max)

    def queue_of(self, topic: str, queue_id: int) -> int:
        """The number that the encoder has for it. Raises NameIllegal, MessageIllegal."""
        return self.records.queue(*_queue_of(topic, queue_id))

    def has_plain(self, indexes: range, committed: int) -> None:
        """These ends are in it, of one message each."""
        self.asked += indexes
        self.committed += committed
        self.rolled_back += len(indexes) - committed

    def add(self, halves: Sequence[_Half], outcome: Outcome, index: int) -> None:
        """All of a transaction, or nothing. Raises StoreDamaged."""
        if not halves:
            return
        encoder = self.records.encoder
        if outcome is Outcome.COMMITTED:
            before = encoder.size, encoder.count
            for half in halves:
                try:
                    encoder.add_stored(
                        self.records.queue(*half.queue),
                        half.record,
                        sys_flag=half.flags & ~SYS_TRANSACTION | SYS_COMMIT,
                        prepared_offset=half.physical_offset,
                    )
                except (RecordTooLarge, RecordDamaged) as error:
                    encoder.cut(*before)
                    raise StoreDamaged(
                        f"the half message at physical offset {half.physical_offset}: {error}"
                    ) from None
            self.committed += len(halves)
        else:
            self.rolled_back += len(halves)
        for half in halves:
            self.ended[half.first] = self.ended[half.named] = self.ended[half.current] = outcome
            self.firsts.append(half.first)
        self.asked.append(index)


def _half_of(named: _Named) -> _Half:
    """Raises MessageIllegal, NameIllegal where it is meant for no queue."""
    message = named.message
    return _Half(
        message.record,
        message.sys_flag,
        message.physical_offset,
        destination(message.properties),
        message.queue_offset,
        named.first,
        named.current,
    )


@lru_cache(maxsize=4096)
def _queue_of(topic: str, queue_id: int) -> tuple[str, int]:
    return destination({"REAL_TOPIC": topic, "REAL_QID": str(queue_id)})


def _store_passed(records: InnerRecords, message: Message, half: PassedHalf, first: int) -> bool:
    """Whether a copy goes on; else it is given up."""
    try:
        if not half.give_up:
            properties = copy_properties(
                message.raw_properties, message.properties, first, half.times, stored_now()
            )
            queue = records.queue(HALF_TOPIC, 0)
            records.encoder.add_stored(queue, message.record, properties)
            return True
        records.encoder.add_stored(records.queue(GIVEN_UP_TOPIC, 0), message.record)
    except (RecordTooLarge, RecordDamaged) as error:
        log.error("half message %d is given up: %s", message.queue_offset, error)
    log.error("transaction of half message %d is given up after %d checks; see topic %s",
              first, half.times, GIVEN_UP_TOPIC)  # fmt: skip
    return False


def _unknown(group: str, end: TransactionEnd, part: TransactionPart, there: str) -> CometError:
    return TransactionUnknown(
        f"no half message of group {group}, transaction {end.transaction_id:.80}, for topic "
        f"{part.topic:.80} is number {part.queue_offset} at physical offset "
        f"{part.physical_offset}: {there}"
    )
