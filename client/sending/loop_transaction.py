"""Transactions for asyncio. Ends of tasks share a command while the one before is on its way."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from cometmq.client.sending.attempts import typed
from cometmq.client.sending.ends import ATTEMPT_S, Ending, pause_until, take_some, told, words_of
from cometmq.client.sending.in_loop import RunningLoop, call_home
from cometmq.client.sending.outgoing import Body, Outgoing, Target
from cometmq.client.sending.pending import Checker, PendingTransaction
from cometmq.client.sending.receipt import Receipt
from cometmq.client.sending.transaction import Parts, Transactions
from cometmq.protocol.commands import EndTransactions
from cometmq.protocol.errors import CometError, again
from cometmq.protocol.wire.pending import Pending

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

CHECK_S: Final = 30.0  # time limit of one decision of a checker

Send = Callable[[Target, Outgoing], Awaitable[Receipt]]


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


class LoopTransactions:
    """Transactions of one AsyncProducer, and their ends on the way to brokers.

    Used in one event loop at a time. An end is sent, and sent again, until its outcome is known or
    its time is up, also if the task that waits for it is cancelled.

    Args:
        send: sends a message, after whatever could block; its receipt is awaited.
    """

    def __init__(self, transactions: Transactions, send: Send) -> None:
        self.transactions = transactions
        self.send = send
        self._running = RunningLoop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: defaultdict[str, deque[Ending]] = defaultdict(deque)  # by broker
        self._busy: set[str] = set()  # brokers that a task sends commands to
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them

    def use_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. If the last one was closed, no task of it goes on."""
        loop = self._running.loop
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_closed():
                self.transactions.open.clear()
            self._loop = loop
            for gone in (self._waiting, self._busy, self._tasks):
                gone.clear()
        return loop

    def end(self, ending: Ending) -> asyncio.Future[None]:
        """Have it sent. The future gets the outcome: done, or the error."""
        future = ending.awaited_in(self.use_loop())
        self._put(ending)
        return future

    def _put(self, ending: Ending) -> None:
        ending.attempts += 1
        self._waiting[ending.broker].append(ending)
        if ending.broker not in self._busy:
            self._busy.add(ending.broker)
            self._keep(asyncio.create_task(self._send_all(ending.broker)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, broker: str) -> None:
        """Send ends, one command at a time, until none waits."""
        waiting = self._waiting[broker]
        try:
            while waiting:
                await self._send(broker, take_some(waiting))
        finally:
            self._busy.discard(broker)

    async def _send(self, broker: str, some: list[Ending]) -> None:
        errors: dict[int, CometError]
        try:
            errors = words_of(await self._ask(broker, some), len(some))
        except Exception as error:
            errors = dict.fromkeys(range(len(some)), typed(error))
        for index, ending in enumerate(some):
            self._has_ended(ending, errors.get(index))

    async def _ask(self, broker: str, some: list[Ending]) -> Pending:
        """Return the answered command."""
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def receive() -> None:
            if not answered.done():
                answered.set_result(None)

        ends = self.transactions.ends
        command = EndTransactions.of(ends.group, [each.end for each in some])
        pending, channel = ends.send(
            broker, some[0].topic, command, lambda _: call_home(loop, receive)
        )
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await answered
        except TimeoutError:
            raise channel.give_up(pending, "EndTransactions", ATTEMPT_S) from None
        return pending

    def _has_ended(self, ending: Ending, error: CometError | None) -> None:
        """Give the outcome of an attempt to its task, or try again."""
        if error is not None:
            wait_s = pause_until(ending.deadline, ending.attempts, error)
            if wait_s is not None:
                self._keep(asyncio.create_task(self._try_again(ending, wait_s)))
                return
        self.transactions.open.discard(ending.end.transaction_id)
        if ending.future.done():
            return  # cancelled
        if error is None:
            ending.future.set_result(None)
        else:
            error = told(error, ending.end.transaction_id, ending.end.commit)
            ending.future.set_exception(again(error))

    async def _try_again(self, ending: Ending, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await asyncio.to_thread(self.transactions.ends.find_anew, ending.broker, ending.topic)
        self._put(ending)


class AsyncTransaction(Parts):
    """`Transaction` for asyncio; see `AsyncProducer.transaction`."""

    __slots__ = ("_shared",)

    def __init__(
        self, shared: LoopTransactions, topic: str, body: Body, options: TransactionOptions
    ) -> None:
        super().__init__(shared.transactions, topic, body, options)
        self._shared = shared

    async def __aenter__(self) -> Self:
        target, message = self._begin()
        self._shared.use_loop()
        self._has(await self._shared.send(target, message), message)
        return self

    async def send(self, topic: str, body: Body, **options: Unpack[TransactionOptions]) -> Receipt:
        """See `Transaction.send`."""
        target, message = self._next(topic, body, options)
        self._failed = True  # also where the task is cancelled
        receipt = await self._shared.send(target, message)
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
        ending = self._ending(commit)
        return _nothing() if ending is None else self._shared.end(ending)

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
        return self._give_up(error)

    async def _give_up(self, error: BaseException | None) -> None:
        try:
            await self._end(commit=False)
        except CometError as late:  # the first exception is the one to be seen
            log.warning("%s", late)
        if error is None:
            raise self._incomplete()


async def _nothing() -> None: ...
