"""Transactions at the desk: what their producers say of them is carried out, once.

A commit lays down the messages where they are meant for, and an op with them; a rollback an op
alone. So does a half message that nobody has ended in time: its copy, or what it has become in the
topic of those that are given up, and an op.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from cometmq.actors.runtime.guard import explained
from cometmq.actors.runtime.held import NEVER, HeldRequest, HeldRequests
from cometmq.actors.runtime.inner import InnerRecords
from cometmq.actors.runtime.service import Request
from cometmq.actors.tables.transactions import (
    WORDS,
    Outcome,
    first_of,
)
from cometmq.actors.writer.batches import Stored
from cometmq.actors.writer.half_book import HalfBook
from cometmq.actors.writer.half_writes import (
    Half,
    HalfWrite,
    Named,
    half_of,
    records_of,
    store_passed,
)
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
    MessageIllegal,
    MessageNotFound,
    MessageTooLarge,
    ShuttingDown,
    SystemBusy,
    TransactionFinished,
    TransactionUnknown,
)
from cometmq.protocol.frames import failed
from cometmq.protocol.names import HALF_TOPIC, check_group
from cometmq.shm.kernel.codec import Message
from cometmq.shm.kernel.store import HalfEnds

log = logging.getLogger(__name__)

WRITE_BYTES_MAX: Final = 4_194_304  # of one write, which has to fit into a segment
RECORD_MORE: Final = 256  # bytes that a copy may have more than its half
HELD_MAX: Final = 1_024  # commands that wait until it is known what is pending
NO_COPY: Final = (-1, -1)

Enders = EndTransactions | PassHalves


class Transactions:
    """Part of the desk.

    Args:
        segment_bytes: of the log, that a write has to fit into.
        properties_max: of a record.
        cover: that the answers wait for, also that of an end which was there before.
        check_admitted: raises why nothing is stored now.
        store: has the desk store commands that were held.
    """

    def __init__(
        self,
        book: HalfBook,
        *,
        segment_bytes: int,
        properties_max: int,
        cover: int,
        check_admitted: Callable[[], None],
        store: Callable[[list[Request]], None],
    ) -> None:
        self._book = book
        self._cover = cover
        self._check_admitted = check_admitted
        self._store = store
        self._bytes_max = min(WRITE_BYTES_MAX, segment_bytes // 4)
        self._properties_max = properties_max
        self._held = HeldRequests[None, HeldRequest[None]](
            "ends of transactions", HELD_MAX, HELD_MAX
        )
        self.committed = 0  # messages, by this process
        self.rolled_back = 0

    def close(self) -> None:
        """Nothing is stored any more: commands that were held are told so."""
        self._held.fail_all(ShuttingDown("the broker is shutting down"))
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
        self._held.add(HeldRequest(None, request, NEVER))
        self._book.begin()

    def is_ready(self, error: CometError | None) -> None:
        if error is not None:
            log.warning("it is not known which transactions are pending: %s", error)
            self._held.fail_all(SystemBusy(f"what is pending is not known: {error}"))
            return
        self._store([held.request for held in self._held.release_key(None)])

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
        if self._end_whole(command, ends):
            return TransactionsEnded([0] * count, [""] * count)
        results: list[CometError | None] = [None] * count
        writing = HalfWrite(self._bytes_max, self._properties_max)
        rows = [*accumulate(command.counts, initial=0)]
        for index in range(count):
            end = command.end_at(index, rows[index])
            self._end_one(writing, command.group, end, index, results)
        self._write(writing, results)
        while writing.apart:
            index = writing.apart.pop()
            end = command.end_at(index, rows[index])
            self._end_one(writing, command.group, end, index, results)
            self._write(writing, results)
        if not any(results):
            return TransactionsEnded([0] * count, [""] * count)
        return TransactionsEnded(
            [error.code if error else 0 for error in results],
            [str(error) if error else "" for error in results],
        )

    def _end_whole(self, command: EndTransactions, ends: HalfEnds) -> bool:
        """Store them by one native write, if all are as most are. Where something is refused, it is
        found out of which of them, one after the other."""
        if not command.physical_offsets:
            return False
        physical_offset = command.physical_offsets[0]
        place = self._book.reader.place_of(physical_offset)
        if place is None:
            return False
        segment, at, limit = place
        start = physical_offset - at
        if not ends.pick(segment, start, limit, *self._book.halves.known, self._bytes_max):
            return False
        try:
            self._check_admitted()
            self._book.write_ends(ends)
        except CometError:
            return False
        self.committed += ends.committed
        self.rolled_back += ends.count - ends.committed
        return True

    def _end_one(
        self,
        writing: HalfWrite,
        group: str,
        end: TransactionEnd,
        index: int,
        results: list[CometError | None],
    ) -> None:
        """Put one end into the write, or note what became of it."""
        try:
            self._end(writing, group, end, index, results)
        except CometError as error:
            results[index] = error

    def _end(
        self,
        writing: HalfWrite,
        group: str,
        end: TransactionEnd,
        index: int,
        results: list[CometError | None],
    ) -> None:
        """Put one end into the write. Raises what became of it, where that is something else."""
        halves = self._halves(writing, group, end, results)
        outcome = Outcome.COMMITTED if end.commit else Outcome.ROLLED_BACK
        size = sum(len(half.message.record) + RECORD_MORE for half in halves)
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
        writing: HalfWrite,
        group: str,
        end: TransactionEnd,
        results: list[CometError | None],
    ) -> list[Half]:
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
        return [half_of(each) for each in pending.values()]

    def _named(self, group: str, end: TransactionEnd, part: TransactionPart) -> Named:
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

    def _as_it_is(self, message: Message) -> Named:
        """A half message, and what has become of it."""
        halves = self._book.halves
        first = first_of(message.properties, message.queue_offset)
        current, outcome = message.queue_offset, halves.find(message.queue_offset)
        if outcome is Outcome.COPIED:
            current = halves.copies.get(first, -1)
            outcome = Outcome.PENDING if current >= 0 else halves.find(first)
        if outcome is Outcome.COPIED:
            outcome = Outcome.ENDED
        return Named(message, first, current, outcome)

    def _write(self, writing: HalfWrite, results: list[CometError | None]) -> None:
        """Have it laid down; it is empty then. What became of its ends is in `results`."""
        if not writing.ended:
            return
        try:
            self._check_admitted()
            self._book.write(writing.records, list(writing.ended.items()))
        except CometError as error:
            if isinstance(error, MessageIllegal) and len(writing.asked) > 1:
                writing.apart += writing.asked  # the others have no part in that
            else:
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
        records = records_of(self._properties_max)
        ended: dict[int, Outcome] = {}
        copied: list[tuple[int, int]] = []  # index, and the first of all
        given_up: list[tuple[int, int]] = []
        copies, gone = [NO_COPY] * len(halves), [False] * len(halves)
        # A transaction's messages that are given up stand behind the copies: see the places.
        for index in sorted(range(len(halves)), key=lambda index: halves[index].give_up):
            message = self._still_pending(halves[index], ended)
            if message is None:
                continue
            first = first_of(message.properties, message.queue_offset)
            outcome = store_passed(records, message, halves[index], first)
            if outcome is Outcome.PENDING:
                copies[index] = message.queue_offset, message.physical_offset
                continue
            ended[message.queue_offset] = outcome
            if outcome is Outcome.COPIED:
                copied.append((index, first))
            else:
                given_up.append((index, first))
                ended[first] = outcome
        if ended:
            try:
                places = self._book.write(records, list(ended.items()))
            except MessageIllegal as error:
                return self._pass_refused(halves, ended, error)
            for at, (index, first) in enumerate(copied):
                copies[index] = places[2 * at], places[2 * at + 1]
                self._book.halves.copies[first] = places[2 * at]
            for index, first in given_up:
                gone[index] = True
                self._book.halves.copies.pop(first, None)
        return HalvesPassed(copies, gone)

    def _pass_refused(
        self, halves: Sequence[PassedHalf], ended: dict[int, Outcome], error: MessageIllegal
    ) -> HalvesPassed:
        """The log takes no copy of one of these. Raises that, unless it is alone."""
        if len(halves) > 1:
            raise error
        (half,) = halves
        if not half.give_up:
            log.warning("half message %d goes on where it is: %s", half.queue_offset, error)
            return HalvesPassed([(half.queue_offset, half.physical_offset)], [False])
        log.error("half message %d is given up, and stays where it is, at physical offset %d: %s",
                  half.queue_offset, half.physical_offset, error)  # fmt: skip
        self._book.write(InnerRecords(), list(ended.items()))
        for first in ended:
            self._book.halves.copies.pop(first, None)
        return HalvesPassed([NO_COPY], [True])

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


def _unknown(group: str, end: TransactionEnd, part: TransactionPart, there: str) -> CometError:
    return TransactionUnknown(
        f"no half message of group {group}, transaction {end.transaction_id:.80}, for topic "
        f"{part.topic:.80} is number {part.queue_offset} at physical offset "
        f"{part.physical_offset}: {there}"
    )
