"""Transactions for asyncio. Those that begin together with a body alone, as most do, share a batch,
and so do their ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Self, Unpack

from cometmq.client.sending.in_loop import LoopSends
from cometmq.client.sending.loop_ends import LoopEnds
from cometmq.client.sending.outgoing import Alike, Body, Outgoing, Target
from cometmq.client.sending.pending import Checker, PendingTransaction
from cometmq.client.sending.receipt import Batch, Receipt
from cometmq.client.sending.transaction import OLDER, Parts, Transactions
from cometmq.protocol.commands import TransactionPart
from cometmq.protocol.errors import CometError, NotConfirmed, again
from cometmq.shm.kernel._kernel import (
    TaskTransaction,
    TaskTransactions,
    bodies_of,
    have_begun,
    let_go_on,
)

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

CHECK_S: Final = 30.0  # time limit of one decision of a checker

Start = Callable[[Target, Outgoing], Awaitable[asyncio.Future[Receipt]]]


class LoopChecker:
    """A checker that is a coroutine function, called from the thread of the checks."""

    def __init__(self, checker: Checker | None) -> None:
        self._checker = checker
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """The running loop is the one to call it in."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()

    def check(self, pending: PendingTransaction) -> object:
        """Return the checker's decision. Cancel it after `CHECK_S`, since no other transaction is
        checked meanwhile; the broker asks again in its next round. Raises the checker's errors,
        TimeoutError."""
        loop = self._loop
        if loop is None or loop.is_closed() or self._checker is None:
            return None
        deciding = asyncio.run_coroutine_threadsafe(self._checker(pending), loop)
        try:
            return deciding.result(CHECK_S)
        except TimeoutError:
            if deciding.done() and not deciding.cancelled():
                raise  # raised by the checker
            deciding.cancel()
            raise TimeoutError(
                f"the checker has not decided within {CHECK_S:g} s, or its event loop stands still"
            ) from None


class LoopTransactions(TaskTransactions):
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
        bytes_max = sends.alike_bytes_max if transactions.name else 0
        super().__init__(transactions.open, TransactionPart, bytes_max, transactions.timeout_s)
        self.transactions = transactions
        self.start = start
        self._sends = sends
        self._is_ready = is_ready
        self._ends = LoopEnds(transactions.ends, self)

    def is_ready(self, topic: str) -> bool:
        return self._is_ready(topic)

    def use_loop(self) -> None:
        """Transactions begin in the loop that runs. Asked once a turn: it costs a system call."""
        loop = asyncio.get_running_loop()
        if self.loop is loop:
            return
        if self.loop is not None and self.loop.is_closed():
            self.forget()
        self.loop = loop
        self._ends.forget()

    def send_soon(self) -> None:
        self.use_loop()
        self._sends.at_the_end(self.loop, self._send)

    def _send(self) -> None:
        """Whatever begins and ends now."""
        if self.loop is None or self.loop.is_closed():  # another one has come to this
            self.forget()
            return
        beginning = self.take_beginning()
        self._ends.send()
        for topic, some in beginning.items():
            alike = Alike(
                b"", None, None, None, 0, True, 0, 0, self.transactions.name, bodies_of(some)
            )
            try:
                self._sends.send_alike(
                    Target(topic, None, None), alike, partial(_Halves, self, some)
                )
            except Exception as error:
                self.fail(some[alike.next :], error)

    def go_on(self, some: list[TaskTransaction]) -> None:
        """Their tasks go on. All of them before anything is sent: portions, with which the broker
        would be at work meanwhile, cost more commands than that is worth."""
        is_held = self._sends.hold(self.loop)
        try:
            let_go_on(some, 0, len(some))
        except BaseException:  # which ends the loop; those that were told are passed over
            self.loop.call_soon(self.go_on, some)
            if is_held:
                self._sends.let_go_soon(self.loop)
            raise
        if self.gathered and self.gathered >= self.waiting:  # nobody else will send in this turn
            self._sends.let_go()
        elif is_held:
            self._sends.let_go_soon(self.loop)

    def fail(self, some: list[TaskTransaction], error: Exception) -> None:
        """Of several tasks each has an error of its own."""
        for index in range(len(some)):
            own = again(error) if isinstance(error, CometError) else error
            let_go_on(some, index, index + 1, own)


class _Halves:
    """Transactions whose first messages stand one after the other in a batch, from `index` on.

    Args:
        some: of which these are `count`, from `first` on.
    """

    def __init__(
        self,
        shared: LoopTransactions,
        some: list[TaskTransaction],
        index: int,
        first: int,
        count: int,
    ) -> None:
        self._shared = shared
        self._some = some[first : first + count]
        self._index = index

    def stored(self, batch: Batch) -> None:
        place = batch.result
        assert place is not None
        if len(place.physical_offsets) != batch.count:
            self.failed(NotConfirmed(OLDER))
            return
        have_begun(
            self._some, batch.ids(), self._index, batch.broker, batch.topic, place.queue_offset,
            place.physical_offsets,
        )  # fmt: skip
        self._shared.go_on(self._some)

    def failed(self, error: CometError) -> None:
        self._shared.fail(self._some, error)


class AsyncTransaction(Parts, TaskTransaction):
    """`Transaction` for asyncio; see `AsyncProducer.transaction`."""

    __slots__ = ()

    _shared: LoopTransactions

    @property
    def _transactions(self) -> Transactions:
        return self._shared.transactions

    def _begin_apart(self, topic: str, body: Body, options: TransactionOptions) -> None:
        self._first = self._compose(topic, body, options)

    async def _enter(self) -> Self:
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
        if self._check_end(commit=True):
            await self._end_now(True)

    async def rollback(self) -> None:
        """See `Transaction.rollback`."""
        if self._check_end(commit=False):
            await self._end_now(False)

    async def _leave(self, error: BaseException | None) -> None:
        if self._ended is not None:
            return
        if error is None and not self._failed:
            await self.commit()
            return
        try:
            await self.rollback()
        except CometError as late:
            log.warning("%s", late)
        if error is None:
            raise self._incomplete()
