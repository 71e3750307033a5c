"""Transactions, and what a producer needs for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from cometmq.client.sending.checks import Checks
from cometmq.client.sending.ends import ATTEMPT_S, Ending, Ends, words_of
from cometmq.client.sending.outgoing import Body, Outgoing, Target, compose
from cometmq.client.sending.pending import Checker, PendingTransaction
from cometmq.client.sending.receipt import Batch, Receipt
from cometmq.client.sending.sender import Sender
from cometmq.protocol.commands import PARTS_MAX, TransactionEnd, TransactionPart
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageTooLarge,
    NotConfirmed,
    TransactionIncomplete,
)
from cometmq.protocol.names import check_group
from cometmq.protocol.wire.pending import Pending

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

BYTES_MAX: Final = 2_097_152  # bodies of a transaction of several messages: they are stored at once
TRANSACTION_ID: Final = "__transactionId__"


class Transactions:
    """Of one producer: its name, its checker, what is at work now.

    Args:
        name: the producer's; None: it has no transactions.
    """

    def __init__(
        self, name: str | None, checker: Checker | None, sender: Sender, timeout_s: float
    ) -> None:
        if name is not None:
            check_group(name)
        elif checker is not None:
            raise ArgumentIllegal("a checker answers for producers of one name: name= is missing")
        self.name = name or ""
        self.sender = sender
        self.timeout_s = timeout_s
        self.open: set[str] = set()
        self.ends = Ends(self.name, sender.routes)
        self._checks: Checks | None = None
        if checker is not None:
            self._checks = Checks(self.name, sender.routes, checker, self.open.__contains__)

    def close(self) -> None:
        if self._checks is not None:
            self._checks.close()

    def check_named(self) -> None:
        if not self.name:
            raise ArgumentIllegal(
                "a producer with transactions has a name: Producer(..., name='billing'), by which "
                "the broker knows whom to ask when an end is missing"
            )


class _Parts:
    """What both kinds of transaction know: the messages that are stored, and the end."""

    def __init__(
        self,
        transactions: Transactions,
        topic: str,
        body: Body,
        options: TransactionOptions,
    ) -> None:
        transactions.check_named()
        self._transactions = transactions
        self._parts: list[TransactionPart] = []
        self._bytes = 0
        self._broker: str | None = None
        self._id = ""
        self._failed = False  # a message may be missing
        self._ended: bool | None = None  # how, or how it was to be
        self._first: tuple[Target, Outgoing] | None = self._compose(topic, body, options)

    @property
    def id(self) -> str:
        """The transaction's name, to be written down by whoever has to tell later how it ended:
        a checker is shown it."""
        return self._id

    def _compose(
        self, topic: str, body: Body, options: TransactionOptions
    ) -> tuple[Target, Outgoing]:
        properties = options.get("properties")
        if properties is not None and TRANSACTION_ID in properties:
            raise ArgumentIllegal(f"property {TRANSACTION_ID} is the transaction's own")
        target, message = compose(
            topic,
            body,
            options.get("tags"),
            options.get("keys"),
            properties,
            options.get("sharding_key"),
            options.get("queue_id"),
            options.get("flag", 0),
            True,
        )
        message.producer_group = self._transactions.name
        return target, message

    def _next(self, topic: str, body: Body, options: TransactionOptions) -> tuple[Target, Outgoing]:
        """A further message. Raises RuntimeError where there can be none any more."""
        if not self._id or self._ended is not None:
            raise RuntimeError("the transaction is not open: it is a context manager")
        if self._failed:
            raise self._incomplete()
        target, message = self._compose(topic, body, options)
        size = self._bytes + len(message.body)
        if len(self._parts) >= PARTS_MAX or size > BYTES_MAX:
            raise MessageTooLarge(
                f"{len(self._parts) + 1} messages of {size} bytes in one transaction, at most "
                f"{PARTS_MAX} of {BYTES_MAX}"
            )
        message.properties = {**(message.properties or {}), TRANSACTION_ID: self._id}
        target.broker = self._broker
        return target, message

    def _has(self, receipt: Receipt, message: Outgoing) -> None:
        """It is stored."""
        batch: Batch = receipt._batch
        place = batch.answer()
        if not place.physical_offsets:
            raise NotConfirmed("the broker is older, and knows of no transactions")
        self._parts.append(
            TransactionPart(
                batch.topic, receipt.queue_offset, place.physical_offsets[receipt._index]
            )
        )
        self._bytes += len(message.body)
        if not self._id:
            self._broker = receipt.broker
            self._id = receipt.msg_id
            self._transactions.open.add(self._id)

    def _ending(self, commit: bool) -> Ending | None:
        """None: it was ended so before. Raises RuntimeError where that cannot be any more."""
        if not self._id:
            raise RuntimeError("the transaction was not begun: it is a context manager")
        if self._ended is not None and self._ended is not commit:
            raise RuntimeError(
                f"transaction {self._id} is {'committed' if self._ended else 'rolled back'} already"
            )
        if commit and self._failed:
            raise self._incomplete()
        if self._ended is not None:
            return None
        self._ended = commit
        assert self._broker is not None
        end = TransactionEnd(self._id, commit, self._parts)
        return Ending(self._broker, self._parts[0].topic, end, self._transactions.timeout_s)

    def _incomplete(self) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"a message of transaction {self._id} failed: it can be rolled back only, and at the "
            "block's end it is rolled back"
        )

    def _is_over(self) -> None:
        self._transactions.open.discard(self._id)


class Transaction(_Parts):
    """Messages that nobody sees before the block ends well; see `Producer.transaction`.

    Its `id` is to be written down by whoever has to tell later how it ended: a checker is shown it.
    """

    def __enter__(self) -> Self:
        if self._first is None:
            raise RuntimeError("a transaction is entered once")
        (target, message), self._first = self._first, None
        self._has(self._transactions.sender.send_now(target, message).wait(), message)
        return self

    def send(self, topic: str, body: Body, **options: Unpack[TransactionOptions]) -> Receipt:
        """One more message of this transaction; it is stored, and seen once that is committed.

        When it fails, the transaction can be rolled back only. Raises as `Producer.send` does.
        """
        target, message = self._next(topic, body, options)
        try:
            receipt = self._transactions.sender.send_now(target, message).wait()
            self._has(receipt, message)
        except CometError:
            self._failed = True
            raise
        return receipt

    def commit(self) -> None:
        """All messages may be seen; returns once the broker has said so. The block's end does it.

        Raises NotConfirmed when nobody says so in time: then the broker asks the checker.
        """
        self._end(commit=True)

    def rollback(self) -> None:
        """No message is ever seen. An exception that leaves the block does it."""
        self._end(commit=False)

    def _end(self, *, commit: bool) -> None:
        ending = self._ending(commit)
        if ending is None:
            return
        try:
            self._transactions.ends.end(ending)
        finally:
            self._is_over()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended is not None:
            return
        if error is None and not self._failed:
            self._end(commit=True)
            return
        try:
            self._end(commit=False)
        except CometError as late:  # the first exception is the one to be seen
            log.warning("%s", late)
        if error is None:
            raise self._incomplete()


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


_sending: Final[set[asyncio.Task[None]]] = set()  # the loop itself does not keep them
Start = Callable[[Target, Outgoing], Awaitable[asyncio.Future[Receipt]]]


class AsyncTransaction(_Parts):
    """`Transaction` for asyncio; see `AsyncProducer.transaction`."""

    def __init__(
        self,
        transactions: Transactions,
        start: Start,
        topic: str,
        body: Body,
        options: TransactionOptions,
    ) -> None:
        super().__init__(transactions, topic, body, options)
        self._start = start

    async def __aenter__(self) -> Self:
        if self._first is None:
            raise RuntimeError("a transaction is entered once")
        (target, message), self._first = self._first, None
        self._has(await (await self._start(target, message)), message)
        return self

    async def send(self, topic: str, body: Body, **options: Unpack[TransactionOptions]) -> Receipt:
        """See `Transaction.send`."""
        target, message = self._next(topic, body, options)
        self._failed = True  # also where the task is cancelled
        receipt = await (await self._start(target, message))
        self._has(receipt, message)
        self._failed = False
        return receipt

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        await self._end(commit=True)

    async def rollback(self) -> None:
        """See `Transaction.rollback`."""
        await self._end(commit=False)

    async def _end(self, *, commit: bool) -> None:
        """A task that is cancelled no longer waits; its end is sent all the same."""
        ending = self._ending(commit)
        if ending is None:
            return
        ends = self._transactions.ends
        loop = asyncio.get_running_loop()
        try:
            while True:
                word: asyncio.Future[CometError | None] = loop.create_future()
                ending.begin(word)
                if ends.put(ending):
                    task = loop.create_task(_send_all(ends, ending.broker))
                    _sending.add(task)
                    task.add_done_callback(_sending.discard)
                error = await word
                if error is None:
                    return
                wait_s = ending.pause_s(error)
                if wait_s is None:
                    raise ending.told(error)
                await asyncio.sleep(wait_s)
                await asyncio.to_thread(ends.find_anew, ending)
        finally:
            self._is_over()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended is not None:
            return
        if error is None and not self._failed:
            await self._end(commit=True)
            return
        try:
            await self._end(commit=False)
        except CometError as late:
            log.warning("%s", late)
        if error is None:
            raise self._incomplete()


async def _send_all(ends: Ends, broker: str) -> None:
    """Commands to a broker, one after the other, until nothing waits any more."""
    loop = asyncio.get_running_loop()
    while True:
        batch = ends.take(broker)
        answered = loop.create_future()

        def heard(_: Pending, answered: asyncio.Future[None] = answered) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake, answered)

        words: list[CometError | None]
        try:
            pending, channel = ends.send(batch, heard)
            try:
                await asyncio.wait_for(answered, ATTEMPT_S)
            except TimeoutError:
                raise channel.give_up(pending, "EndTransactions", ATTEMPT_S) from None
            words = words_of(pending, len(batch))
        except CometError as error:
            words = [error] * len(batch)
        for each, word in zip(batch, words, strict=True):
            each.tell(word)
        if not ends.rest(broker):
            return


def _wake(answered: asyncio.Future[None]) -> None:
    if not answered.done():
        answered.set_result(None)
