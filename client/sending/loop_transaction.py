"""Transactions for asyncio. Those that begin in one turn of the event loop with a body alone, as
most do, share a batch, and so do their ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from cometmq.client.sending.in_loop import LoopSends
from cometmq.client.sending.loop_ends import LoopEnding, LoopEnds
from cometmq.client.sending.outgoing import Alike, Body, Outgoing, Target
from cometmq.client.sending.pending import Checker, PendingTransaction
from cometmq.client.sending.receipt import Batch, Receipt
from cometmq.client.sending.transaction import OLDER, Parts, Transactions
from cometmq.protocol.commands import TransactionPart
from cometmq.protocol.errors import CometError, NotConfirmed, again

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

Start = Callable[[Target, Outgoing], Awaitable[asyncio.Future[Receipt]]]


class LoopChecker:
    """A checker that is a coroutine function, called from the thread of the checks."""

    def __init__(self, checker: Checker | None) -> None:
        self._checker = checker
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """The running loop is the one to call it in."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()

    def check(self, pending: PendingTransaction) -> object:
        if self._loop is None or self._loop.is_closed() or self._checker is None:
            return None
        return asyncio.run_coroutine_threadsafe(self._checker(pending), self._loop).result()


class LoopTransactions:
    """What the transactions of one AsyncProducer share.

    Args:
        start: sends a message, after whatever could block.
        is_ready: whether a message to that topic would block nothing now.
    """

    def __init__(
        self,
        transactions: Transactions,
        sends: LoopSends,
        start: Start,
        is_ready: Callable[[str], bool],
    ) -> None:
        self.transactions = transactions
        self.start = start
        self._sends = sends
        self._is_ready = is_ready
        self.ends: LoopEnds  # of the loop that was used last
        self._loop: asyncio.AbstractEventLoop | None = None
        self._body_max = sends.alike_bytes_max
        self._beginning: dict[str, list[_Beginning]] = {}  # in this turn, by topic

    def use_loop(self) -> None:
        """Transactions begin in the loop that runs. Asked once a turn: it costs a system call."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self.ends = LoopEnds(self.transactions.ends, loop)

    def is_plain(self, topic: str, body: Body) -> bool:
        """Whether it may begin together with others, if it has no options."""
        return (
            body.__class__ is bytes
            and 0 < len(body) <= self._body_max
            and topic.__class__ is str
            and (topic in self._beginning or self._is_ready(topic))
        )

    def begin(self, transaction: AsyncTransaction, topic: str, body: bytes) -> asyncio.Future[None]:
        """A plain one; at the end of this turn."""
        beginning = self._beginning
        if not beginning:
            self.use_loop()
            self._sends.at_the_end(self.ends.loop, self._begin_all)
        future: asyncio.Future[None] = self.ends.loop.create_future()
        some = beginning.get(topic)
        if some is None:
            beginning[topic] = [(future, transaction, body)]
        else:
            some.append((future, transaction, body))
        return future

    def _begin_all(self) -> None:
        beginning, self._beginning = self._beginning, {}
        for topic, some in beginning.items():
            alike = Alike(
                b"", None, None, None, 0, True, 0, 0, self.transactions.name,
                [body for _, _, body in some],
            )  # fmt: skip
            try:
                self._sends.send_alike(Target(topic, None, None), alike, partial(_Halves, some))
            except Exception as error:
                for future, _, _ in some[alike.next :]:
                    if not future.done():
                        future.set_exception(_own(error))


_Beginning = tuple["asyncio.Future[None]", "AsyncTransaction", bytes]


class _Halves:
    """Transactions whose first messages stand one after the other in a batch, from `index` on.

    Args:
        some: of which these are `count`, from `first` on.
    """

    def __init__(self, some: list[_Beginning], index: int, first: int, count: int) -> None:
        self._some = some[first : first + count]
        self._index = index

    def stored(self, batch: Batch) -> None:
        place = batch.result
        assert place is not None
        offsets = place.physical_offsets
        if not offsets:
            self.failed(NotConfirmed(OLDER))
            return
        ids, broker, topic = batch.ids(), batch.broker, batch.topic
        for index, (future, transaction, body) in enumerate(self._some, self._index):
            if not future.done():  # else it was cancelled
                part = TransactionPart(topic, place.queue_offset + index, offsets[index])
                transaction._has_first(ids[index], broker, part, len(body))
                future.set_result(None)

    def failed(self, error: CometError) -> None:
        for future, _, _ in self._some:
            if not future.done():
                future.set_exception(again(error))


class AsyncTransaction(Parts):
    """`Transaction` for asyncio; see `AsyncProducer.transaction`."""

    __slots__ = ("_plain", "_shared")

    def __init__(
        self, shared: LoopTransactions, topic: str, body: Body, options: TransactionOptions
    ) -> None:
        super().__init__(shared.transactions)
        self._shared = shared
        self._plain: tuple[str, bytes] | None = None
        if not options and shared.is_plain(topic, body):
            self._plain = topic, body  # type: ignore[assignment]
        else:
            self._first = self._compose(topic, body, options)

    async def __aenter__(self) -> Self:
        plain, self._plain = self._plain, None
        if plain is not None:
            await self._shared.begin(self, *plain)
            # Here, and not where the answer is heard: a task may be cancelled in between.
            self._transactions.open.add(self._id)
            return self
        if self._first is None:
            raise RuntimeError("a transaction is entered once")
        (target, message), self._first = self._first, None
        self._shared.use_loop()
        self._has(await (await self._shared.start(target, message)), message)
        return self

    async def send(self, topic: str, body: Body, **options: Unpack[TransactionOptions]) -> Receipt:
        """See `Transaction.send`."""
        target, message = self._next(topic, body, options)
        self._failed = True  # also where the task is cancelled
        receipt = await (await self._shared.start(target, message))
        self._has(receipt, message)
        self._failed = False
        return receipt

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        await self._end(commit=True)

    async def rollback(self) -> None:
        """See `Transaction.rollback`."""
        await self._end(commit=False)

    def _end(self, *, commit: bool) -> Awaitable[None]:
        """A task that is cancelled no longer waits; its end is sent all the same."""
        if not self._check_end(commit):
            return _nothing()
        ends = self._shared.ends
        ending = LoopEnding(*self._end_said, self._transactions.timeout_s, ends, self._is_over)
        ends.send(ending)
        return ending.done

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Awaitable[None]:
        if self._ended is not None:
            return _nothing()
        if error is None and not self._failed:
            return self._end(commit=True)
        return self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        try:
            await self._end(commit=False)
        except CometError as late:
            log.warning("%s", late)
        if error is None:
            raise self._incomplete()


async def _nothing() -> None:
    """There is nothing to wait for."""


def _own(error: Exception) -> Exception:
    """Of several tasks that are told the same."""
    return again(error) if isinstance(error, CometError) else error
