"""Transactions: messages that nobody sees until their producer says so, and what it is asked.

A message of a transaction is stored as a *half* message (Section.producer_group). Its end stores it
where it is meant for, or drops it. Where an end is missing, a producer of the same group is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Self

import msgspec

from cometmq.protocol.commands.root import (
    Answer,
    Command,
    On,
    Part,
    by_clients,
    by_family,
    publish,
)
from cometmq.protocol.integers import Int32, Int64

ENDS_MAX: Final = 1_024  # in one command
PARTS_MAX: Final = 256  # messages of one transaction
CHECK_WAIT_MS_MAX: Final = 30_000


class TransactionPart(Part, frozen=True):
    """A half message, and where it lies, as its receipt or a check says."""

    topic: str  # that it is meant for
    queue_offset: Int64
    physical_offset: Int64


class TransactionEnd(msgspec.Struct, frozen=True):
    """One end of a command."""

    transaction_id: str
    commit: bool  # False: roll back
    parts: list[TransactionPart]


class EndTransactions(Command, frozen=True, tag=140):
    """Producer to commitlog: commit these transactions, or roll them back. -> TransactionsEnded

    By columns: the first three have a place for each transaction. The last three have one for each
    half message, those of a transaction together, in the order of the transactions. All messages of
    a transaction are stored, or none, once. An end that comes again is answered as the first one
    was.
    """

    access = by_clients(publish("group", On.GROUP), publish("topics"), later=True)
    new_in = "0.2.0"

    group: str  # of producers
    transactions: list[str]
    commits: list[bool]  # False: roll back
    counts: list[Int32]  # of half messages
    topics: list[str]  # that they are meant for, each once
    topic_of: list[Int32]  # its place in `topics`
    queue_offsets: list[Int64]
    physical_offsets: list[Int64]

    @classmethod
    def of(cls, group: str, ends: Sequence[TransactionEnd]) -> Self:
        """The command that says so."""
        parts = [part for end in ends for part in end.parts]
        topics = dict.fromkeys([part.topic for part in parts])
        places = {topic: place for place, topic in enumerate(topics)}
        return cls(
            group,
            [end.transaction_id for end in ends],
            [end.commit for end in ends],
            [len(end.parts) for end in ends],
            list(topics),
            [places[part.topic] for part in parts],
            [part.queue_offset for part in parts],
            [part.physical_offset for part in parts],
        )

    def end_at(self, index: int, row: int) -> TransactionEnd:
        """The one at that place, whose half messages begin at `row`."""
        rows = range(row, row + self.counts[index])
        parts = [
            TransactionPart(
                self.topics[self.topic_of[at]], self.queue_offsets[at], self.physical_offsets[at]
            )
            for at in rows
        ]
        return TransactionEnd(self.transactions[index], self.commits[index], parts)

    @property
    def ends(self) -> list[TransactionEnd]:
        """All of them, of a command whose columns fit together."""
        rows = accumulate(self.counts, initial=0)
        return [self.end_at(index, row) for index, row in enumerate([*rows][:-1])]


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


# --- within the family ---


class BeginTransactions(Command, frozen=True, tag=144):
    """Commitlog or scheduler to coordinator: make the topics of transactions, unless they are
    there. -> GroupOffsets

    Answered with the offsets of RocketMQ's group: below the first no half message is pending,
    below the second no op is needed.
    """

    access = by_family(later=True)
    new_in = "0.2.0"


class PassedHalf(Part, frozen=True):
    """A half message that nobody has ended in time."""

    queue_offset: Int64
    physical_offset: Int64
    times: Int64  # that its producers were asked, with the copy
    give_up: bool  # it goes to TRANS_CHECK_MAX_TIME_TOPIC; else a copy goes on in its stead


class PassHalves(Command, frozen=True, tag=145):
    """Scheduler to commitlog: copy these, or give them up, unless they have ended. -> HalvesPassed

    All of it is one derived write. One that comes again changes nothing more. Fails with
    MessageIllegal where the log takes no copy of one of several: each is to be asked for alone.
    """

    access = by_family(later=True)
    new_in = "0.2.0"

    halves: list[PassedHalf]


class HalvesPassed(Answer, frozen=True, tag=146):
    """For each where its copy lies, or that it is given up; neither, where it has ended before. One
    of which the log takes no copy goes on itself, and is named as its own."""

    copies: list[tuple[Int64, Int64]]  # queue offset and physical offset; (-1, -1): there is none
    given_up: list[bool]
