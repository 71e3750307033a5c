"""Transactions, and what a producer needs for them."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from cometmq.client.sending.checks import Checks
from cometmq.client.sending.ends import Ending, Ends
from cometmq.client.sending.outgoing import Body, Outgoing, Target, compose
from cometmq.client.sending.pending import Checker
from cometmq.client.sending.receipt import Receipt
from cometmq.client.sending.sender import Sender
from cometmq.protocol.commands import PARTS_MAX, TransactionEnd, TransactionPart
from cometmq.protocol.errors import (
    ArgumentIllegal,
    CometError,
    MessageTooLarge,
    NotConfirmed,
    TransactionIncomplete,
)
from cometmq.protocol.names import check_usable_group
from cometmq.protocol.wire.uninterrupted import uninterrupted_class

if TYPE_CHECKING:
    from cometmq.client.options import TransactionOptions

log = logging.getLogger(__name__)

BYTES_MAX: Final = 2_097_152  # bodies of a transaction of several messages: they are stored at once
TRANSACTION_ID: Final = "__transactionId__"
OLDER: Final = "the broker is older, and knows of no transactions"


class Transactions:
    """Of one producer: its name, its checker, what is at work now.

    Args:
        name: the producer's; None: it has no transactions.
    """

    def __init__(
        self, name: str | None, checker: Checker | None, sender: Sender, timeout_s: float
    ) -> None:
        if name is not None:
            check_usable_group(name)
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


class Parts:
    """What both kinds of transaction know: the messages that are stored, and the end."""

    __slots__ = (
        "_broker", "_bytes", "_ended", "_failed", "_first", "_id", "_parts", "_transactions",
    )  # fmt: skip

    def __init__(
        self, transactions: Transactions, topic: str, body: Body, options: TransactionOptions
    ) -> None:
        self._transactions = transactions  # those of its producer
        self._parts: list[TransactionPart] = []
        self._bytes = 0
        self._broker = ""
        self._id = ""
        self._failed = False  # a message may be missing
        self._ended: bool | None = None  # how, or how it was to be
        # Until it is entered.
        self._first: tuple[Target, Outgoing] | None = self._compose(topic, body, options)

    @property
    def id(self) -> str:
        """The transaction's name, to be written down by whoever has to tell later how it ended:
        a checker is shown it."""
        return self._id

    def _compose(
        self, topic: str, body: Body, options: TransactionOptions
    ) -> tuple[Target, Outgoing]:
        if not self._transactions.name:
            raise ArgumentIllegal(
                "a producer with transactions has a name: Producer(..., name='billing'), by which "
                "the broker knows whom to ask when an end is missing"
            )
        properties = options.get("properties")
        if properties is not None and TRANSACTION_ID in properties:
            raise ArgumentIllegal(f"property {TRANSACTION_ID} is the transaction's own")
        target, message = compose(
            topic,
            body,
            options.get("tags"),
            options.get("keys"),
            properties,
            options.get("ordering_key"),
            options.get("queue_id"),
            options.get("flag", 0),
            True,
        )
        message.producer_group = self._transactions.name
        return target, message

    def _begin(self) -> tuple[Target, Outgoing]:
        """The first message. Raises RuntimeError where it was sent before."""
        if self._first is None:
            raise RuntimeError("a transaction is entered once")
        first, self._first = self._first, None
        return first

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
        place, index = receipt.answer()
        if len(place.physical_offsets) <= index:
            raise NotConfirmed(OLDER)
        queue_offset = place.queue_offset + index  # half messages lie one behind the other
        part = TransactionPart(receipt.topic, queue_offset, place.physical_offsets[index])
        self._parts.append(part)
        self._bytes += len(message.body)
        if not self._id:
            self._id, self._broker = receipt.msg_id, receipt.broker
            self._transactions.open.add(self._id)

    def _ending(self, commit: bool) -> Ending | None:
        """Its end so, if it is yet to be sent. Raises RuntimeError where it cannot be any more."""
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
        end = TransactionEnd(self._id, commit, self._parts)
        return Ending(self._broker, self._parts[0].topic, end, self._transactions.timeout_s)

    def _incomplete(self) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"a message of transaction {self._id} failed: it can be rolled back only, and at the "
            "block's end it is rolled back"
        )


@uninterrupted_class()
class Transaction(Parts):
    """Messages that nobody sees before the block ends well; see `Producer.transaction`.

    Its `id` is to be written down by whoever has to tell later how it ended: a checker is shown it.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        target, message = self._begin()
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
            self._transactions.open.discard(self._id)

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
