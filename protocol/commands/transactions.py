"""Transactions: messages that nobody sees until their producer says so, and what it is asked.

A message of a transaction is stored as a *half* message (Section.producer_group). Its end stores it
where it is meant for, or drops it. Where an end is missing, a producer of the same group is asked.
"""

from __future__ import annotations

from typing import Final

from cometmq.protocol.commands.root import Answer, Command, On, Part, by_clients, publish
from cometmq.protocol.integers import Int32, Int64

ENDS_MAX: Final = 1_024  # in one command
PARTS_MAX: Final = 256  # messages of one transaction
CHECK_WAIT_MS_MAX: Final = 30_000


class TransactionPart(Part, frozen=True):
    """A half message, and where it lies, as its receipt or a check says."""

    topic: str  # that it is meant for
    queue_offset: Int64
    physical_offset: Int64


class TransactionEnd(Part, frozen=True):
    transaction_id: str
    commit: bool  # False: roll back
    parts: list[TransactionPart]


class EndTransactions(Command, frozen=True, tag=140):
    """Producer to coordinator: commit these transactions, or roll them back. -> TransactionsEnded

    All messages of a transaction are stored, or none, once. An end that comes again is answered as
    the first one was.
    """

    access = by_clients(publish("group", On.GROUP), publish("ends.parts.topic"), later=True)
    new_in = "0.2.0"

    group: str  # of producers
    ends: list[TransactionEnd]


class TransactionsEnded(Answer, frozen=True, tag=141):
    """For each end 0, once it is as safe as a message that was sent; or an error's code, and its
    text: TransactionUnknown, TransactionFinished."""

    codes: list[Int32]
    texts: list[str]


class AwaitChecks(Command, frozen=True, tag=142):
    """Producer to coordinator: what has become of transactions without an end? -> TransactionChecks

    Answered as soon as there is something to be asked of this group, or with nothing after
    `wait_ms`. Of several producers that wait one is asked.
    """

    access = by_clients(publish("group", On.GROUP), later=True)
    new_in = "0.2.0"

    group: str
    wait_ms: Int64


class TransactionCheck(Part, frozen=True):
    transaction_id: str
    times: Int64  # that it was asked, this one included
    parts: list[TransactionPart]  # to be named in its end


class TransactionChecks(Answer, frozen=True, tag=143):
    """A payload frame for each: the record of its first message."""

    checks: list[TransactionCheck]
